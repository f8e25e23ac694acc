/* The products and the attention of decoding on a CPU, for weights in int8, fp32, bf16, fp16 or on grids, and keys
   and values in fp32.

   What is computed for a token depends on that token and on what it sees, never on what is computed beside
   it: integer sums have no order, all else is summed per token in a fixed order. So a node of a tree gets the
   bits of a plain step. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Numbers in a vector, and rows that a product computes at a time: as many as registers hold sums of. */
#if defined(__AVX512BW__)
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 8, ROWS = 4 };
#endif
enum { QUERIES = 4, KEYS = 64, MOST_DIM = 256 };
/* Inputs of a product after which it asks for more weights. */
enum { PART = 32 };

/* Vectors need not be aligned in memory. */
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Sums __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Pairs __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

/* What weights are kept in, and how many bytes each of them takes. */
enum { INT8, FP32, BF16, FP16, GRID };
static const int64_t WEIGHT_BYTES[] = {1, 4, 2, 2, 1};
enum { MOST_LEVEL = 255 };

/* A matrix [num_out, num_in]. In int8, `weight` is padded to [outputs / LANES, inputs / 2, LANES, 2], `scales` and
   `bias` to as many outputs. Otherwise it is padded to [outputs / LANES, inputs, LANES], and there are no scales,
   except on grids: there a weight is a level of 8 bits, and for every `run` inputs of an output `scales`, padded to
   [outputs / LANES, inputs / run, 2, LANES], has the step and the base of its grid. */
typedef struct {
    const void *weight;
    const float *scales; /* or NULL */
    const float *bias; /* or NULL */
    int64_t num_in, num_out, largest, kept_in, run;
} Matrix;

/* Do the items of a job with so many threads: those of OpenMP, which torch has too, because threads of another
   kind would wait for the processors on which torch's spin. Each thread takes the items of its own part one after
   the other, so that it can fetch the next one early, and then those that are left of other parts, because the
   system may hold up a thread. */
typedef void Work(const void *job, int64_t item);
static void share(Work *work, const void *job, int64_t items, int threads) {
    if (items == 1 || threads == 1) {
        for (int64_t item = 0; item < items; item++) work(job, item);
        return;
    }
    struct { _Alignas(64) int64_t next; } parts[threads]; /* each in a line of the cache */
    for (int part = 0; part < threads; part++) parts[part].next = items * part / threads;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int own = 0; own < threads; own++)
        for (int turn = 0; turn < threads; turn++) {
            int part = (own + turn) % threads;
            int64_t item, end = items * (part + 1) / threads;
            while ((item = __atomic_fetch_add(&parts[part].next, 1, __ATOMIC_RELAXED)) < end) work(job, item);
        }
}

/* What a product does with its input first. */
enum { PLAIN, NORM, GATED };

/* How weights must be laid out. */
int lanes(void) { return LANES; }

/* LANES pairs of weights in 16 bits. */
static inline Pairs widened(const int8_t *weights) {
#if defined(__AVX512BW__)
    return (Pairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)weights));
#elif defined(__AVX2__)
    return (Pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)weights));
#else
    Pairs wide;
    for (int l = 0; l < 2 * LANES; l++) wide[l] = weights[l];
    return wide;
#endif
}

/* Two numbers of a row, for each of LANES outputs. */
static inline Pairs repeated(const int16_t *row) {
    int32_t both;
    memcpy(&both, row, sizeof both);
    return (Pairs)((Sums){0} + both);
}

static inline Sums add_products(Sums sums, Pairs weights, Pairs row) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)row);
#elif defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)weights, (__m512i)row);
#elif defined(__AVX2__)
    return sums + (Sums)_mm256_madd_epi16((__m256i)weights, (__m256i)row);
#else
    for (int l = 0; l < LANES; l++)
        sums[l] += (int32_t)weights[2 * l] * row[2 * l] + (int32_t)weights[2 * l + 1] * row[2 * l + 1];
    return sums;
#endif
}

/* sums + x * y with one rounding, where the processor has that. Written out, because a compiler that may choose
   chooses differently in different loops, and then a tree's node gets other bits than a plain step. */
static inline Vector add_scaled(Vector sums, float x, Vector y) {
#if defined(__AVX512BW__)
    return (Vector)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)y, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)y, (__m256)sums);
#else
    return sums + x * y;
#endif
}

/* The weight at a level: base + step * level, with one rounding where the processor has that. */
static inline float on_grid(float base, float step, float level) {
#if defined(__FMA__)
    return __builtin_fmaf(step, level, base);
#else
    return base + step * level;
#endif
}

/* The same for LANES levels. `grid` has their steps, then their bases. */
static inline Vector all_on_grid(const uint8_t *levels, const float *grid) {
    Vector steps = *(const Vector *)grid, bases = *(const Vector *)(grid + LANES);
#if defined(__AVX512BW__)
    __m512 wide = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)levels)));
    return (Vector)_mm512_fmadd_ps((__m512)steps, wide, (__m512)bases);
#elif defined(__AVX2__) && defined(__FMA__)
    __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)levels)));
    return (Vector)_mm256_fmadd_ps((__m256)steps, wide, (__m256)bases);
#else
    for (int l = 0; l < LANES; l++) bases[l] = on_grid(bases[l], steps[l], levels[l]);
    return bases;
#endif
}

/* LANES weights from `index` on, in fp32, which has all numbers of bf16 and fp16; `grid` is that of their run. */
static inline __attribute__((always_inline)) Vector weights_at(const void *weight, int64_t index, const int kept_in,
                                                               const float *grid) {
    if (kept_in == FP32) return *(const Vector *)((const float *)weight + index);
    if (kept_in == GRID) return all_on_grid((const uint8_t *)weight + index, grid);
    const uint16_t *halves = (const uint16_t *)weight + index;
#if defined(__AVX512BW__)
    __m256i bits = _mm256_loadu_si256((const void *)halves);
    if (kept_in == FP16) return (Vector)_mm512_cvtph_ps(bits);
    return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i bits = _mm_loadu_si128((const void *)halves);
    if (kept_in == FP16) return (Vector)_mm256_cvtph_ps(bits);
    return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
    Vector values;
    for (int l = 0; l < LANES; l++) {
        uint32_t bits = (uint32_t)halves[l] << 16;
        float value;
        if (kept_in == FP16) {
            /* Sign, then exponent and fraction 13 bits lower; the factor moves the exponent's bias. */
            bits = (bits & 0x80000000u) | (bits & 0x7fff0000u) >> 3;
            memcpy(&value, &bits, 4);
            value *= 0x1p112f;
        } else
            memcpy(&value, &bits, 4);
        values[l] = value;
    }
    return values;
#endif
}

static inline float exponential(float x) {
    /* e^x = 2^n e^r with |r| <= ln 2 / 2 */
    float y = x < -87.0f ? -87.0f : x;
    float n = rintf(y * 1.44269504f);
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

static float sum_of_squares(const float *x, int64_t n) {
    float parts[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) parts[l] += x[i + l] * x[i + l];
    for (; i < n; i++) sum += x[i] * x[i];
    for (int l = 0; l < LANES; l++) sum += parts[l];
    return sum;
}

static void normalise(const float *x, const float *weight, float eps, int64_t n, float *out) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

/* Round a row to integers of at most `largest`; returns their unit, which is nan if the row is not finite. */
static float round_row(const float *x, int64_t n, int64_t largest, int16_t *rounded) {
    float peak = 0;
    int32_t bad = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        bad |= !(size <= FLT_MAX);
        peak = size > peak ? size : peak;
    }
    if (bad || peak < 1e-30f) {
        memset(rounded, 0, n * sizeof *rounded);
        return bad ? NAN : 0.0f;
    }
    float steps = largest / peak;
    for (int64_t i = 0; i < n; i++) rounded[i] = (int16_t)(int32_t)rintf(x[i] * steps);
    return peak / largest;
}

/* What a product reads: x, its norm, or the gated half of it. */
static void change(int form, const float *x, const float *norm, float eps, int64_t n, float *out) {
    if (form == PLAIN)
        memcpy(out, x, n * sizeof *out);
    else if (form == NORM)
        normalise(x, norm, eps, n, out);
    else
        for (int64_t i = 0; i < n; i++) out[i] = x[i] / (1.0f + exponential(-x[i])) * x[n + i];
}

/* A product, cut into items of the same number of pairs of blocks. */
typedef struct {
    const Matrix *matrix;
    int form, adds;
    const float *x, *norm;
    float eps;
    int64_t num_rows, pairs_per_item;
    int16_t *rounded; /* the rows for int8, */
    float *units;     /* their units, */
    float *changed;   /* and the rows for other weights */
    float *out;
} Product;

/* Put sums, or add them, to LANES outputs of a row; the last block of a matrix may have fewer. */
static inline __attribute__((always_inline)) void put(const Product *one, int64_t row, int64_t block, Vector value) {
    int64_t first = block * LANES, m = one->matrix->num_out, left = m - first < LANES ? m - first : LANES;
    float *place = one->out + row * m + first;
    if (one->matrix->bias) value += *(const Vector *)(one->matrix->bias + first);
    if (left == LANES && one->adds)
        *(Vector *)place += value;
    else if (left == LANES)
        *(Vector *)place = value;
    else
        for (int64_t o = 0; o < left; o++) place[o] = one->adds ? place[o] + value[o] : value[o];
}

/* The steps and bases of a block's runs. */
static const float *grid_of(const Matrix *matrix, int64_t block) {
    return matrix->scales + block * (matrix->num_in / matrix->run) * 2 * LANES;
}

/* Ask for memory that is needed soon. */
static inline void fetch(const void *place, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)place + at, 0, 2);
}

/* While two blocks are multiplied, ask for the same inputs' weights of the next two, because a block ends before
   the processor has noticed that it is read in order. fp32 blocks are longer. Only the first rows ask: then the
   others find the weights near. */
static inline __attribute__((always_inline)) void fetch_next(const void *weight, int64_t n, int64_t input,
                                                             int64_t num_inputs, int64_t row, const int kept_in) {
    int64_t bytes = WEIGHT_BYTES[kept_in];
    if (row || kept_in == FP32) return;
    for (int b = 2; b < 4; b++)
        fetch((const uint8_t *)weight + (b * n + input) * LANES * bytes, num_inputs * LANES * bytes);
}

/* Two blocks of LANES outputs, or one, of `count` rows from `row` on; `weight` is that of the first block. */
static inline __attribute__((always_inline)) void int8_outputs(const Product *one, const int8_t *weight, int64_t block,
                                                               const int blocks, int64_t row, const int count) {
    int64_t pairs = (one->matrix->num_in + 1) / 2;
    Sums sums[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < pairs; i++) {
        if (i % (PART / 2) == 0) fetch_next(weight, 2 * pairs, 2 * i, PART, row, INT8);
        Pairs first = widened(weight + i * 2 * LANES);
        Pairs second = blocks == 2 ? widened(weight + (pairs + i) * 2 * LANES) : first;
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            Pairs x = repeated(one->rounded + ((row + r) * pairs + i) * 2);
            sums[r][0] = add_products(sums[r][0], first, x);
            if (blocks == 2) sums[r][1] = add_products(sums[r][1], second, x);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int b = 0; b < blocks; b++) {
            Vector scales = *(const Vector *)(one->matrix->scales + (block + b) * LANES);
            put(one, row + r, block + b, __builtin_convertvector(sums[r][b], Vector) * (scales * one->units[row + r]));
        }
}

/* The same with weights that are no integers: inputs are added one after the other. */
static inline __attribute__((always_inline)) void float_outputs(const Product *one, const void *weight, int64_t block,
                                                                const int blocks, int64_t row, const int count,
                                                                const int kept_in) {
    int64_t n = one->matrix->num_in, run = kept_in == GRID ? one->matrix->run : n;
    const float *x = one->changed + row * n, *grid = kept_in == GRID ? grid_of(one->matrix, block) : NULL;
    int64_t part = kept_in == GRID ? run : PART, grids = n / run * 2 * LANES; /* of a block */
    Vector sums[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < n; grid += 2 * LANES) {
        int64_t end = i + part < n ? i + part : n;
        fetch_next(weight, n, i, end - i, row, kept_in);
        if (kept_in == GRID && !row)
            for (int b = 2; b < 4; b++) fetch(grid + b * grids, 2 * LANES * sizeof *grid);
        for (; i < end; i++) {
            Vector first = weights_at(weight, i * LANES, kept_in, grid), second = first;
            if (blocks == 2) second = weights_at(weight, (n + i) * LANES, kept_in, grid + grids);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                sums[r][0] = add_scaled(sums[r][0], x[r * n + i], first);
                if (blocks == 2) sums[r][1] = add_scaled(sums[r][1], x[r * n + i], second);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int b = 0; b < blocks; b++) put(one, row + r, block + b, sums[r][b]);
}

static inline __attribute__((always_inline)) void outputs(const Product *one, const void *weight, int64_t block,
                                                          const int blocks, int64_t row, const int count,
                                                          const int kept_in) {
    if (kept_in == INT8)
        int8_outputs(one, weight, block, blocks, row, count);
    else
        float_outputs(one, weight, block, blocks, row, count, kept_in);
}

/* All rows of two blocks. */
static inline __attribute__((always_inline)) void columns(const Product *one, const void *weight, int64_t block,
                                                          const int kept_in) {
    int64_t row = 0;
    for (; row + ROWS <= one->num_rows; row += ROWS) outputs(one, weight, block, 2, row, ROWS, kept_in);
    switch (one->num_rows - row) {
#if defined(__AVX512BW__)
    case 7: outputs(one, weight, block, 2, row, 7, kept_in); break;
    case 6: outputs(one, weight, block, 2, row, 6, kept_in); break;
    case 5: outputs(one, weight, block, 2, row, 5, kept_in); break;
    case 4: outputs(one, weight, block, 2, row, 4, kept_in); break;
#endif
    case 3: outputs(one, weight, block, 2, row, 3, kept_in); break;
    case 2: outputs(one, weight, block, 2, row, 2, kept_in); break;
    case 1: outputs(one, weight, block, 2, row, 1, kept_in); break;
    }
}

static void prepare_row(const void *job, int64_t row) {
    const Product *one = job;
    int64_t n = one->matrix->num_in, even = (n + 1) / 2 * 2;
    const float *x = one->x + row * (one->form == GATED ? 2 * n : n);
    float *changed = one->changed + row * n;
    change(one->form, x, one->norm, one->eps, n, changed);
    if (one->matrix->kept_in != INT8) return;
    int16_t *rounded = one->rounded + row * even;
    rounded[even - 1] = 0;
    one->units[row] = round_row(changed, n, one->matrix->largest, rounded);
}

static __attribute__((noinline)) void fp32_columns(const Product *one, const void *weight, int64_t block) {
    columns(one, weight, block, FP32);
}

/* Two blocks of weights on grids, for many rows: expanded once. */
static void grid_columns(const Product *one, const uint8_t *weight, int64_t block, Vector *expanded) {
    int64_t n = one->matrix->num_in, run = one->matrix->run;
    const float *grid = grid_of(one->matrix, block);
    for (int64_t i = 0; i < 2 * n; i++) expanded[i] = all_on_grid(weight + i * LANES, grid + i / run * 2 * LANES);
    fp32_columns(one, expanded, block);
}

/* All blocks of an item. */
static inline __attribute__((always_inline)) void multiply(const Product *one, int64_t item, const int kept_in) {
    int64_t n = one->matrix->num_in, size = (kept_in == INT8 ? (n + 1) / 2 * 2 : n) * WEIGHT_BYTES[kept_in];
    int64_t blocks = (one->matrix->num_out + LANES - 1) / LANES, last = (item + 1) * one->pairs_per_item * 2;
    Vector *expanded = kept_in == GRID && one->num_rows >= 8 * ROWS ? malloc(2 * n * sizeof *expanded) : NULL;
    for (int64_t block = item * one->pairs_per_item * 2; block < last && block < blocks; block += 2) {
        const uint8_t *weight = (const uint8_t *)one->matrix->weight + block * size * LANES;
        if (block + 1 == blocks)
            /* A last block is rarely alone, so several rows at a time are not worth the time to compile them. */
            for (int64_t row = 0; row < one->num_rows; row++) outputs(one, weight, block, 1, row, 1, kept_in);
        else if (kept_in == FP32)
            fp32_columns(one, weight, block);
        else if (kept_in == GRID && expanded)
            grid_columns(one, weight, block, expanded);
        else
            columns(one, weight, block, kept_in);
    }
    free(expanded);
}

/* One function for each kind of weights, because to compile all kinds in one function takes twice as long. */
static void multiply_int8(const void *job, int64_t item) { multiply(job, item, INT8); }
static void multiply_fp32(const void *job, int64_t item) { multiply(job, item, FP32); }
static void multiply_bf16(const void *job, int64_t item) { multiply(job, item, BF16); }
static void multiply_fp16(const void *job, int64_t item) { multiply(job, item, FP16); }
static void multiply_grid(const void *job, int64_t item) { multiply(job, item, GRID); }
static Work *const multiplications[] = {multiply_int8, multiply_fp32, multiply_bf16, multiply_fp16, multiply_grid};

/* out [rows, num_out] becomes, or grows by, the product of x [rows, num_in], or of gate and up
   [rows, 2 num_in]. */
void product(const Matrix *matrix, int form, const float *x, const float *norm, float eps, int64_t num_rows,
             int adds, float *out, int threads) {
    int64_t pairs = (matrix->num_out + 2 * LANES - 1) / (2 * LANES), items = pairs < 8 * threads ? pairs : 8 * threads;
    int64_t per_item = (pairs + items - 1) / items, n = matrix->num_in;
    float *changed = malloc(num_rows * n * sizeof *changed), *units = malloc(num_rows * sizeof *units);
    int16_t *rounded = matrix->kept_in == INT8 ? malloc(num_rows * (n + 1) * sizeof *rounded) : NULL;
    Product job = {matrix, form, adds, x, norm, eps, num_rows, per_item, rounded, units, changed, out};
    share(prepare_row, &job, num_rows, num_rows < 8 ? 1 : threads);
    share(multiplications[matrix->kept_in], &job, (pairs + per_item - 1) / per_item, threads);
    free(rounded);
    free(units);
    free(changed);
}

/* Find the levels of `run` weights; returns whether all are exactly on the grid, by `on_grid` and, which is the
   same on most processors, with a single rounding. */
static int are_on_grid(const float *weights, int64_t run, float base, float step, uint8_t *levels) {
    for (int64_t i = 0; i < run; i++) {
        float level = step > 0 ? rintf((weights[i] - base) / step) : 0;
        if (!(level <= MOST_LEVEL) || on_grid(base, step, level) != weights[i]) return 0;
        if ((float)((double)step * level + base) != weights[i]) return 0;
        levels[i] = (uint8_t)level;
    }
    return 1;
}

/* The grid of a run, from its lowest weight to its highest: with `likely` steps, or else with as few as possible.
   Returns how many, or 0 if it has none. */
static int64_t fit_run(const float *weights, int64_t run, int64_t likely, uint8_t *levels, float *grid) {
    float low = weights[0], high = weights[0];
    for (int64_t i = 1; i < run; i++) {
        low = weights[i] < low ? weights[i] : low;
        high = weights[i] > high ? weights[i] : high;
    }
    grid[1] = low;
    for (int64_t tried = 0; tried <= MOST_LEVEL; tried++) {
        int64_t count = tried ? tried : likely;
        grid[0] = (high - low) / count;
        if (are_on_grid(weights, run, low, grid[0], levels)) return count;
    }
    return 0;
}

/* A matrix [rows, n] for whose runs grids are looked for. */
typedef struct {
    const float *weight;
    int64_t n, run;
    uint8_t *levels; /* [rows, n] */
    float *grids;    /* [rows, n / run, 2]: steps and bases */
    uint8_t *fits;   /* [rows] */
} Fitting;

static void fit_row(const void *job, int64_t row) {
    const Fitting *one = job;
    int64_t first = row * one->n, last = first + one->n, count = 15; /* of the most frequent kind */
    for (; first < last && count; first += one->run)
        count = fit_run(one->weight + first, one->run, count, one->levels + first, one->grids + 2 * first / one->run);
    one->fits[row] = count > 0;
}

/* Look for grids on which all weights of a matrix lie exactly; returns whether there are any. */
int fit_grids(const float *weight, int64_t num_rows, int64_t n, int64_t run, uint8_t *levels, float *grids,
              int threads) {
    uint8_t *fits = malloc(num_rows), all = 1;
    Fitting job = {weight, n, run, levels, grids, fits};
    share(fit_row, &job, num_rows, threads);
    for (int64_t row = 0; row < num_rows; row++) all &= fits[row];
    free(fits);
    return all;
}

/* Rotate a head in place, after its norm if there is one. */
static void rotate(float *x, const float *cos, const float *sin, const float *norm, float eps, int64_t dim) {
    float before[MOST_DIM];
    int64_t half = dim / 2;
    if (norm)
        normalise(x, norm, eps, dim, before);
    else
        memcpy(before, x, dim * sizeof *x);
    for (int64_t i = 0; i < dim; i++) x[i] = before[i] * cos[i] + before[i < half ? i + half : i - half] * sin[i];
}

/* Where the keys and values of new tokens go. */
typedef struct {
    float *keys, *values; /* of a layer, [num_kv_heads, num_entries, head_dim] */
    int64_t num_entries, num_heads, num_kv_heads, head_dim, num_tokens;
    const int64_t *places, *positions; /* of each token: its entry, and its position in its text */
    const float *angles;               /* [2, num_angles, D]: cosines, then sines with the rotation's sign */
    int64_t num_angles;
    const float *q_norm, *k_norm; /* or NULL */
    float eps;
} Writing;

/* Rotate the queries and keys of qkv [tokens, (H + 2 K) D] in place, and write keys and values. */
void rope_write(const Writing *to, float *qkv) {
    int64_t H = to->num_heads, K = to->num_kv_heads, D = to->head_dim;
    for (int64_t token = 0; token < to->num_tokens; token++) {
        float *heads = qkv + token * (H + 2 * K) * D;
        const float *cos = to->angles + to->positions[token] * D, *sin = cos + to->num_angles * D;
        for (int64_t head = 0; head < H + K; head++)
            rotate(heads + head * D, cos, sin, head < H ? to->q_norm : to->k_norm, to->eps, D);
        for (int64_t head = 0; head < K; head++) {
            int64_t at = (head * to->num_entries + to->places[token]) * D;
            memcpy(to->keys + at, heads + (H + head) * D, D * sizeof(float));
            memcpy(to->values + at, heads + (H + K + head) * D, D * sizeof(float));
        }
    }
}

/* What queries attend to: a prefix that all of a row's queries see, then `num_own` keys of which each sees
   some. Strides count numbers. */
typedef struct {
    const float *keys, *values;
    int64_t row_stride, layer_stride, head_stride;
    int64_t num_rows, num_queries, num_heads, head_dim;
    int64_t num_layers, num_kv_heads; /* the first heads attend to the first layer, and so on */
    int64_t query_stride;             /* between the queries of two tokens, */
    int64_t query_row_stride;         /* and of two rows */
    const int64_t *lengths;           /* of the prefixes; NULL: none has one */
    int64_t num_own;
    const uint8_t *sees; /* [queries, num_own] of each row; NULL: own key i is seen by queries from i on */
    int64_t sees_stride; /* between rows; 0: one for all */
    const int32_t *tables; /* of pages, [rows, num_pages]; NULL: entries lie in order */
    int64_t page_size, num_pages;
    int64_t sinks, window; /* of the prefix, only the first and the last entries are seen; -1: all */
} Context;

/* Scores of `count` queries with LANES keys that are transposed to [D, LANES]. */
static inline __attribute__((always_inline)) void score(const float **queries, const int count, const Vector *keys,
                                                        int64_t dim, float scale, float *out, int64_t stride) {
    Vector sums[QUERIES] = {{0}};
    for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) sums[q] = add_scaled(sums[q], queries[q][d], keys[d]);
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) *(Vector *)(out + q * stride) = sums[q] * scale;
}

static float largest(const float *x, int64_t n) {
    float parts[LANES], peak = -FLT_MAX;
    int64_t i = 0;
    for (int l = 0; l < LANES; l++) parts[l] = -FLT_MAX;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) parts[l] = x[i + l] > parts[l] ? x[i + l] : parts[l];
    for (; i < n; i++) peak = x[i] > peak ? x[i] : peak;
    for (int l = 0; l < LANES; l++) peak = parts[l] > peak ? parts[l] : peak;
    return peak;
}

/* Turn the scores of `queries` queries into weights, in place; lse becomes the log of the sums of the
   exponentiated scores. */
static inline __attribute__((always_inline)) void weigh(float *scores, int64_t stride, const int queries,
                                                        int64_t count, float *lse) {
    float sums[QUERIES] = {0};
    for (int q = 0; q < queries; q++) {
        float *mine = scores + q * stride, peak = largest(mine, count);
        for (int64_t i = 0; i < count; i++) mine[i] = exponential(mine[i] - peak);
        lse[q] = peak;
    }
    /* One after the other: entries that a query does not see lie between those that it sees. Several queries at
       a time, because an addition waits for the one before it. */
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 4
        for (int q = 0; q < queries; q++) sums[q] += scores[q * stride + i];
    for (int q = 0; q < queries; q++) {
        float *mine = scores + q * stride;
        for (int64_t i = 0; i < count; i++) mine[i] /= sums[q];
        lse[q] = count ? lse[q] + logf(sums[q]) : -INFINITY;
    }
}

/* Add `count` weighted values to out, one after the other; `parts` is the head's size in vectors. */
static inline __attribute__((always_inline)) void add_values(const float *weights, const float **values, int count,
                                                             const int parts, float *out) {
    Vector sums[MOST_DIM / LANES] = {{0}};
#pragma GCC unroll 16
    for (int p = 0; p < parts; p++) sums[p] = ((Vector *)out)[p];
    for (int i = 0; i < count; i++)
#pragma GCC unroll 16
        for (int p = 0; p < parts; p++) sums[p] = add_scaled(sums[p], weights[i], ((const Vector *)values[i])[p]);
#pragma GCC unroll 16
    for (int p = 0; p < parts; p++) ((Vector *)out)[p] = sums[p];
}

/* Collect those of a row's own keys that any of its queries sees; returns how many. To leave out the others
   changes no bit, because their weights would be 0. */
static int64_t seen_keys(const Context *to, int64_t row, int64_t *own) {
    const uint8_t *sees = to->sees ? to->sees + row * to->sees_stride : NULL;
    int64_t count = 0;
    for (int64_t key = 0; key < to->num_own; key++) {
        int is_seen = !sees;
        for (int64_t token = 0; token < to->num_queries && !is_seen; token++) is_seen = sees[token * to->num_own + key];
        if (is_seen) own[count++] = key;
    }
    return count;
}

/* Do `work` with `count`, at most QUERIES, as a constant: an addition waits for the one before it, so the loops
   over the queries must be unrolled. */
#define EACH_COUNT(most, work)                                     \
    do {                                                           \
        if ((most) >= QUERIES) { enum { count = QUERIES }; work; } \
        else if ((most) == 3) { enum { count = 3 }; work; }        \
        else if ((most) == 2) { enum { count = 2 }; work; }        \
        else { enum { count = 1 }; work; }                         \
    } while (0)

/* Queries first..last-1 of a row that share a KV head. Numbered by token, then by head. */
static void attend_head(const Context *to, int64_t row, int64_t kv_head, int64_t first_query, int64_t last_query,
                        const float *q, float *out, float *lse) {
    int64_t D = to->head_dim, H = to->num_heads, group = H / (to->num_layers * to->num_kv_heads);
    int64_t length = to->lengths ? to->lengths[row] : 0, queries = last_query - first_query;
    int64_t skip_from = 0, skip_to = 0; /* entries that nobody sees */
    if (to->window >= 0 && to->sinks < length - to->window) {
        skip_from = to->sinks;
        skip_to = length - to->window;
    }
    int64_t *own = malloc((to->num_own + 1) * sizeof *own), num_own = seen_keys(to, row, own);
    int64_t before = length - (skip_to - skip_from), num_keys = before + num_own;
    int64_t stride = (num_keys + LANES - 1) / LANES * LANES;
    const float **keys = malloc((2 * num_keys + queries) * sizeof *keys);
    const float **values = keys + num_keys, **heads = values + num_keys;
    float *scores = malloc((queries * (stride + 1) + 1) * sizeof *scores), *logs = scores + queries * stride;
    int64_t base = row * to->row_stride + kv_head / to->num_kv_heads * to->layer_stride +
                   kv_head % to->num_kv_heads * to->head_stride;
    for (int64_t i = 0; i < num_keys; i++) {
        int64_t entry = i < skip_from ? i : i < before ? i + (skip_to - skip_from) : length + own[i - before];
        if (to->tables)
            entry = to->tables[row * to->num_pages + entry / to->page_size] * to->page_size + entry % to->page_size;
        keys[i] = to->keys + base + entry * D;
        values[i] = to->values + base + entry * D;
    }
    for (int64_t query = 0; query < queries; query++) {
        int64_t token = (first_query + query) / group, head = kv_head * group + (first_query + query) % group;
        heads[query] = q + row * to->query_row_stride + token * to->query_stride + head * D;
    }
    float scale = 1.0f / sqrtf((float)D);
    for (int64_t first = 0; first < num_keys; first += LANES) {
        Vector turned[MOST_DIM];
        for (int l = 0; l < LANES; l++) {
            const float *key = keys[first + l < num_keys ? first + l : num_keys - 1];
            for (int64_t d = 0; d < D; d++) turned[d][l] = key[d];
        }
        for (int64_t query = 0; query < queries; query += QUERIES)
            EACH_COUNT(queries - query,
                       score(heads + query, count, turned, D, scale, scores + query * stride + first, stride));
    }
    for (int64_t query = 0; query < queries; query++) {
        float *mine = scores + query * stride;
        int64_t token = (first_query + query) / group, head = kv_head * group + (first_query + query) % group;
        const uint8_t *sees = to->sees ? to->sees + row * to->sees_stride + token * to->num_own : NULL;
        for (int64_t i = 0; i < num_own; i++)
            if (sees ? !sees[own[i]] : own[i] > token) mine[before + i] = -INFINITY;
        memset(out + ((row * to->num_queries + token) * H + head) * D, 0, D * sizeof *out);
    }
    for (int64_t query = 0; query < queries; query += QUERIES)
        EACH_COUNT(queries - query, weigh(scores + query * stride, stride, count, num_keys, logs + query));
    for (int64_t query = 0; query < queries; query++) {
        int64_t token = (first_query + query) / group, head = kv_head * group + (first_query + query) % group;
        lse[(row * to->num_queries + token) * H + head] = logs[query];
    }
    for (int64_t first = 0; first < num_keys; first += KEYS) {
        int tile = first + KEYS <= num_keys ? KEYS : (int)(num_keys - first);
        for (int64_t query = 0; query < queries; query++) {
            int64_t token = (first_query + query) / group, head = kv_head * group + (first_query + query) % group;
            const float *weights = scores + query * stride + first;
            float *sum = out + ((row * to->num_queries + token) * H + head) * D;
            if (D == 64)
                add_values(weights, values + first, tile, 64 / LANES, sum);
            else if (D == 128)
                add_values(weights, values + first, tile, 128 / LANES, sum);
            else
                add_values(weights, values + first, tile, (int)(D / LANES), sum);
        }
    }
    free(scores);
    free(keys);
    free(own);
}

typedef struct {
    const Context *to;
    const float *q;
    float *out, *lse;
    int64_t num_whole; /* heads of all rows whose queries stay together; */
    int64_t parts;     /* into so many parts, those of the others are cut */
} Attending;

static void attend_part(const void *job, int64_t item) {
    const Attending *one = job;
    const Context *to = one->to;
    int64_t heads = to->num_layers * to->num_kv_heads, queries = to->num_queries * (to->num_heads / heads);
    int64_t is_whole = item < one->num_whole, rest = item - one->num_whole, parts = is_whole ? 1 : one->parts;
    int64_t place = is_whole ? item : one->num_whole + rest / parts, part = is_whole ? 0 : rest % parts;
    attend_head(to, place / heads, place % heads, queries * part / parts, queries * (part + 1) / parts, one->q,
                one->out, one->lse);
}

/* Attend with queries q; out is [rows, queries, H, D], lse [rows, queries, H]. */
void attend(const Context *to, const float *q, float *out, float *lse, int threads) {
    int64_t heads = to->num_layers * to->num_kv_heads, queries = to->num_queries * (to->num_heads / heads);
    /* If the heads do not divide by the threads, the last ones are cut into as few parts as make up for that,
       because each part reads all keys. */
    int64_t places = to->num_rows * heads, cut = places % threads, parts = 1;
    while (cut * parts % threads && parts < queries) parts++;
    Attending job = {to, q, out, lse, places - cut, parts};
    share(attend_part, &job, places - cut + cut * parts, threads);
}

/* A decoder layer. */
typedef struct {
    const Matrix *qkv, *output, *gate_up, *down;
    const float *attention_norm, *ffn_norm, *q_norm, *k_norm; /* the last two may be NULL */
    float attention_eps, ffn_eps, head_eps;
} Layer;

/* Take the stream [tokens, hidden size] through all layers. `to` and `context` are those of the first one; the
   others' keys and values follow in steps of `stride`. */
void forward(const Layer *layers, int64_t num_layers, const Writing *to, const Context *context, int64_t stride,
             float *stream, int threads) {
    Writing writing = *to;
    Context attended = *context;
    int64_t tokens = to->num_tokens, heads = to->num_heads;
    float *qkv = malloc(tokens * layers->qkv->num_out * sizeof *qkv);
    float *out = malloc(tokens * heads * to->head_dim * sizeof *out), *lse = malloc(tokens * heads * sizeof *lse);
    float *gate_up = malloc(tokens * layers->gate_up->num_out * sizeof *gate_up);
    for (int64_t index = 0; index < num_layers; index++) {
        const Layer *layer = layers + index;
        product(layer->qkv, NORM, stream, layer->attention_norm, layer->attention_eps, tokens, 0, qkv, threads);
        writing.q_norm = layer->q_norm;
        writing.k_norm = layer->k_norm;
        writing.eps = layer->head_eps;
        attended.keys = writing.keys = to->keys + index * stride;
        attended.values = writing.values = to->values + index * stride;
        rope_write(&writing, qkv);
        attend(&attended, qkv, out, lse, threads);
        product(layer->output, PLAIN, out, NULL, 0, tokens, 1, stream, threads);
        product(layer->gate_up, NORM, stream, layer->ffn_norm, layer->ffn_eps, tokens, 0, gate_up, threads);
        product(layer->down, GATED, gate_up, NULL, 0, tokens, 1, stream, threads);
    }
    free(gate_up);
    free(lse);
    free(out);
    free(qkv);
}

/* The draft's one layer. */
typedef struct {
    const Matrix *qkv, *self_output, *cross_q, *cross_output, *gate_up, *down;
    const float *self_norm, *cross_norm, *ffn_norm, *final_norm; /* the last may be NULL */
    float eps;
} Draft;

/* Turn the stream [queries, hidden size] of a level's nodes into their hidden states. x [tokens, hidden size] are
   the tokens that get keys and values in the ring; of each row, the first ones are the nodes. They attend to the
   ring, then to the pages. */
void draft_level(const Draft *draft, const Writing *to, const Context *ring, const Context *pages,
                 const int64_t *positions, const float *x, float *stream, int threads) {
    int64_t tokens = to->num_tokens, queries = ring->num_rows * ring->num_queries, size = draft->qkv->num_in;
    int64_t heads = pages->num_heads, width = heads * to->head_dim;
    float *qkv = malloc(tokens * draft->qkv->num_out * sizeof *qkv);
    float *crossing = malloc(queries * width * sizeof *crossing), *out = malloc(queries * width * sizeof *out);
    float *lse = malloc(queries * heads * sizeof *lse);
    float *gate_up = malloc(queries * draft->gate_up->num_out * sizeof *gate_up);
    product(draft->qkv, NORM, x, draft->self_norm, draft->eps, tokens, 0, qkv, threads);
    rope_write(to, qkv);
    attend(ring, qkv, out, lse, threads);
    product(draft->self_output, PLAIN, out, NULL, 0, queries, 1, stream, threads);
    product(draft->cross_q, NORM, stream, draft->cross_norm, draft->eps, queries, 0, crossing, threads);
    /* Only queries are rotated: there are no keys and values. */
    Writing none = *to;
    none.num_heads = heads;
    none.num_kv_heads = 0;
    none.num_tokens = queries;
    none.positions = positions;
    rope_write(&none, crossing);
    attend(pages, crossing, out, lse, threads);
    product(draft->cross_output, PLAIN, out, NULL, 0, queries, 1, stream, threads);
    product(draft->gate_up, NORM, stream, draft->ffn_norm, draft->eps, queries, 0, gate_up, threads);
    product(draft->down, GATED, gate_up, NULL, 0, queries, 1, stream, threads);
    for (int64_t query = 0; query < queries && draft->final_norm; query++)
        normalise(stream + query * size, draft->final_norm, draft->eps, size, stream + query * size);
    free(gate_up);
    free(lse);
    free(out);
    free(crossing);
    free(qkv);
}
