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

/* Numbers in a vector. What is computed at a time, as much as registers hold sums of: rows of a product; vectors of
   keys, for the scores of QUERIES queries; and queries for which values are weighed. */
#if defined(__AVX512BW__)
enum { LANES = 16, ROWS = 8, TILES = 4, WEIGHED = 4 };
#else
enum { LANES = 8, ROWS = 4, TILES = 2, WEIGHED = 2 };
#endif
enum { QUERIES = 4, KEYS = 64, MOST_DIM = 256 };
/* Rows of a product that are computed before the next ones, so that they stay in the processor's cache, and queries
   whose scores with all keys are kept at a time. */
enum { MOST_ROWS = 512, MOST_QUERIES = 48 };
/* Inputs of a product after which it asks for more weights, and how many keys and values attention asks for ahead. */
enum { PART = 32, KEYS_AHEAD = 32, VALUES_AHEAD = 16 };

/* Vectors need not be aligned in memory. */
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Sums __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Pairs __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
/* A float, or a pair of numbers of 16 bits. */
typedef int32_t Word __attribute__((may_alias));

/* What weights are kept in, and how many bits each of them takes: on grids, a level of 8 or of 4. */
enum { INT8, FP32, BF16, FP16, GRID8, GRID4 };
static const int64_t WEIGHT_BITS[] = {8, 32, 16, 16, 8, 4};
enum { MOST_LEVEL = 255 };

/* A matrix [num_out, num_in]. In int8, `weight` is padded to [outputs / LANES, inputs / 2, LANES, 2], `scales` and
   `bias` to as many outputs. Otherwise it is padded to [outputs / LANES, inputs, LANES], and there are no scales,
   except on grids: there a weight is a level, and for every `run` inputs of an output `scales`, padded to
   [outputs / LANES, inputs / run, 2, LANES], has the step and the base of its grid. Levels of 4 bits lie in the lower
   and upper halves of bytes [outputs / LANES / 2, inputs, LANES]: two blocks of outputs. */
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

/* A vector that stays in a register: compilers like to load it again for each use, but a processor that multiplies as
   fast as it loads has no time for that. */
static inline Vector loaded(const float *place) {
    Vector vector = *(const Vector *)place;
#if defined(__AVX512BW__)
    __asm__("" : "+v"(vector));
#elif defined(__AVX2__)
    __asm__("" : "+x"(vector));
#endif
    return vector;
}

static inline Vector all_of(float x) {
#if defined(__AVX512BW__)
    return (Vector)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Vector)_mm256_set1_ps(x);
#else
    Vector all;
    for (int l = 0; l < LANES; l++) all[l] = x;
    return all;
#endif
}

/* x * y + sums with one rounding, where the processor has that. Written out, because a compiler that may choose
   chooses differently in different loops, and then a tree's node gets other bits than a plain step. */
static inline Vector multiply_add(Vector x, Vector y, Vector sums) {
#if defined(__AVX512BW__)
    return (Vector)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sums);
#else
    return sums + x * y;
#endif
}

static inline Vector add_scaled(Vector sums, float x, Vector y) { return multiply_add(all_of(x), y, sums); }

static inline Vector larger(Vector x, Vector y) {
#if defined(__AVX512BW__)
    return (Vector)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (Vector)_mm256_max_ps((__m256)x, (__m256)y);
#else
    for (int l = 0; l < LANES; l++) x[l] = x[l] > y[l] ? x[l] : y[l];
    return x;
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

/* LANES levels, which are bytes, as numbers of 32 bits. */
static inline Sums widened_levels(const uint8_t *levels) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)levels));
#elif defined(__AVX2__)
    return (Sums)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)levels));
#else
    Sums wide;
    for (int l = 0; l < LANES; l++) wide[l] = levels[l];
    return wide;
#endif
}

/* `on_grid` for LANES levels. `grid` has their steps, then their bases. */
static inline Vector all_on_grid(Sums levels, const float *grid) {
    Vector wide = __builtin_convertvector(levels, Vector);
    return multiply_add(*(const Vector *)grid, wide, *(const Vector *)(grid + LANES));
}

/* LANES weights from `index` on, in fp32, which has all numbers of bf16 and fp16; `grid` is that of their run. */
static inline __attribute__((always_inline)) Vector weights_at(const void *weight, int64_t index, const int kept_in,
                                                               const float *grid) {
    if (kept_in == FP32) return loaded((const float *)weight + index);
    if (kept_in == GRID8) return all_on_grid(widened_levels((const uint8_t *)weight + index), grid);
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

static inline Vector exponentials(Vector x) {
    /* e^x = 2^n e^r with |r| <= ln 2 / 2. To add and subtract 1.5 * 2^23 rounds to whole numbers. */
    Vector y = larger(x, all_of(-87.0f)), n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
    Vector r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vector p = multiply_add(all_of(1.9875691500e-4f), r, all_of(1.3981999507e-3f));
    p = multiply_add(p, r, all_of(8.3334519073e-3f));
    p = multiply_add(p, r, all_of(4.1665795894e-2f));
    p = multiply_add(p, r, all_of(1.6666665459e-1f));
    p = multiply_add(p, r, all_of(5.0000001201e-1f));
    p = multiply_add(p * r, r, r + 1.0f);
    Sums powers = (__builtin_convertvector(n, Sums) + 127) << 23;
    return (Vector)((Sums)(p * (Vector)powers) & (Sums)(x >= -87.0f));
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

static inline Vector gated(Vector gate, Vector up) { return gate / (exponentials(-gate) + 1.0f) * up; }

static void gate_row(const float *x, int64_t n, float *out) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        *(Vector *)(out + i) = gated(*(const Vector *)(x + i), *(const Vector *)(x + n + i));
    if (i == n) return;
    Vector gate = {0}, up = {0};
    memcpy(&gate, x + i, (n - i) * sizeof *x);
    memcpy(&up, x + n + i, (n - i) * sizeof *x);
    gate = gated(gate, up);
    memcpy(out + i, &gate, (n - i) * sizeof *x);
}

/* What a product reads: x, its norm, or the gated half of it. */
static void change(int form, const float *x, const float *norm, float eps, int64_t n, float *out) {
    if (form == PLAIN)
        memcpy(out, x, n * sizeof *out);
    else if (form == NORM)
        normalise(x, norm, eps, n, out);
    else
        gate_row(x, n, out);
}

/* A product, cut into items of the same number of pairs of blocks. */
typedef struct {
    const Matrix *matrix;
    int form, adds;
    const float *x, *norm;
    float eps;
    int64_t num_rows, pairs_per_item;
    Word *inputs; /* the rows after `form`: the first words of ROWS rows side by side, then the second ones, ... */
    float *units; /* of the rows for int8; else NULL */
    float *out;
} Product;

/* How many words a row has. */
static inline int64_t words_of(const Product *one) {
    int64_t n = one->matrix->num_in;
    return one->matrix->kept_in == INT8 ? (n + 1) / 2 : n;
}

/* How many rows' inputs lie side by side with those of a row, itself included. */
static inline int64_t rows_beside(const Product *one, int64_t row) {
    int64_t left = one->num_rows - row / ROWS * ROWS;
    return left < ROWS ? left : ROWS;
}

/* The first of a row's inputs. */
static inline Word *inputs_of(const Product *one, int64_t row) {
    return one->inputs + row / ROWS * ROWS * words_of(one) + row % ROWS;
}

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
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)place + at);
}

/* The weights of one or two blocks at an input; `grids` is the distance between the grids of two blocks. */
static inline __attribute__((always_inline)) void weights_of(const void *weight, int64_t n, int64_t input,
                                                             const int blocks, const int kept_in, const float *grid,
                                                             int64_t grids, Vector *both) {
    if (kept_in == GRID4) {
        Sums levels = widened_levels((const uint8_t *)weight + input * LANES);
        both[0] = all_on_grid(levels & 15, grid);
        if (blocks == 2) both[1] = all_on_grid(levels >> 4, grid + grids);
        return;
    }
    both[0] = weights_at(weight, input * LANES, kept_in, grid);
    if (blocks == 2) both[1] = weights_at(weight, (n + input) * LANES, kept_in, grid + grids);
}

/* While two blocks are multiplied, ask for the same inputs' weights of the next two, because a block ends before
   the processor has noticed that it is read in order. fp32 blocks are longer. Only the first rows ask: then the
   others find the weights near. */
static inline __attribute__((always_inline)) void fetch_next(const void *weight, int64_t n, int64_t input,
                                                             int64_t num_inputs, int64_t row, const int kept_in) {
    int64_t bytes = LANES * WEIGHT_BITS[kept_in] / 8, next = 2 * n * bytes;
    if (row || kept_in == FP32) return;
    if (kept_in == GRID4) {
        fetch((const uint8_t *)weight + next + input * LANES, num_inputs * LANES);
        return;
    }
    for (int b = 0; b < 2; b++) fetch((const uint8_t *)weight + next + (b * n + input) * bytes, num_inputs * bytes);
}

/* Two blocks of LANES outputs, or one, of `count` rows from `row` on, whose inputs lie side by side with those of
   `side` rows; `weight` is that of the first block. */
static inline __attribute__((always_inline)) void int8_outputs(const Product *one, const int8_t *weight, int64_t block,
                                                               const int blocks, int64_t row, const int count,
                                                               const int64_t side) {
    int64_t pairs = words_of(one);
    const Word *x = inputs_of(one, row);
    Sums sums[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < pairs; i++) {
        if (i % (PART / 2) == 0) fetch_next(weight, 2 * pairs, 2 * i, PART, row, INT8);
        Pairs first = widened(weight + i * 2 * LANES);
        Pairs second = blocks == 2 ? widened(weight + (pairs + i) * 2 * LANES) : first;
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            Pairs both = (Pairs)((Sums){0} + x[i * side + r]);
            sums[r][0] = add_products(sums[r][0], first, both);
            if (blocks == 2) sums[r][1] = add_products(sums[r][1], second, both);
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
                                                                const int64_t side, const int kept_in) {
    const int has_grids = kept_in == GRID8 || kept_in == GRID4;
    int64_t n = one->matrix->num_in, run = has_grids ? one->matrix->run : n;
    const float *x = (const float *)inputs_of(one, row);
    const float *grid = has_grids ? grid_of(one->matrix, block) : NULL;
    int64_t part = has_grids ? run : PART, grids = n / run * 2 * LANES; /* of a block */
    Vector sums[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < n; grid += 2 * LANES) {
        int64_t end = i + part < n ? i + part : n;
        fetch_next(weight, n, i, end - i, row, kept_in);
        if (has_grids && !row)
            for (int b = 2; b < 4; b++) fetch(grid + b * grids, 2 * LANES * sizeof *grid);
        for (; i < end; i++) {
            Vector both[2];
            weights_of(weight, n, i, blocks, kept_in, grid, grids, both);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                sums[r][0] = add_scaled(sums[r][0], x[i * side + r], both[0]);
                if (blocks == 2) sums[r][1] = add_scaled(sums[r][1], x[i * side + r], both[1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int b = 0; b < blocks; b++) put(one, row + r, block + b, sums[r][b]);
}

static inline __attribute__((always_inline)) void outputs(const Product *one, const void *weight, int64_t block,
                                                          const int blocks, int64_t row, const int count,
                                                          const int64_t side, const int kept_in) {
    if (kept_in == INT8)
        int8_outputs(one, weight, block, blocks, row, count, side);
    else
        float_outputs(one, weight, block, blocks, row, count, side, kept_in);
}

/* All rows of two blocks. */
static inline __attribute__((always_inline)) void columns(const Product *one, const void *weight, int64_t block,
                                                          const int kept_in) {
    int64_t row = 0;
    for (; row + ROWS <= one->num_rows; row += ROWS) outputs(one, weight, block, 2, row, ROWS, ROWS, kept_in);
    switch (one->num_rows - row) {
#if defined(__AVX512BW__)
    case 7: outputs(one, weight, block, 2, row, 7, 7, kept_in); break;
    case 6: outputs(one, weight, block, 2, row, 6, 6, kept_in); break;
    case 5: outputs(one, weight, block, 2, row, 5, 5, kept_in); break;
    case 4: outputs(one, weight, block, 2, row, 4, 4, kept_in); break;
#endif
    case 3: outputs(one, weight, block, 2, row, 3, 3, kept_in); break;
    case 2: outputs(one, weight, block, 2, row, 2, 2, kept_in); break;
    case 1: outputs(one, weight, block, 2, row, 1, 1, kept_in); break;
    }
}

/* Up to ROWS rows, because what lies side by side is written by one thread. */
static void prepare_rows(const void *job, int64_t group) {
    const Product *one = job;
    int64_t n = one->matrix->num_in, words = words_of(one), first = group * ROWS, side = rows_beside(one, first);
    float *changed = malloc(n * sizeof *changed);
    Word *rounded = one->units ? malloc(words * sizeof *rounded) : NULL, *inputs = inputs_of(one, first);
    for (int64_t r = 0; r < side; r++) {
        change(one->form, one->x + (first + r) * (one->form == GATED ? 2 * n : n), one->norm, one->eps, n, changed);
        if (rounded) {
            rounded[words - 1] = 0; /* the second number of the last pair may not be there */
            one->units[first + r] = round_row(changed, n, one->matrix->largest, (int16_t *)rounded);
        }
        const Word *row = rounded ? rounded : (const Word *)changed;
        for (int64_t i = 0; i < words; i++) inputs[i * side + r] = row[i];
    }
    free(rounded);
    free(changed);
}

static __attribute__((noinline)) void fp32_columns(const Product *one, const void *weight, int64_t block) {
    columns(one, weight, block, FP32);
}

/* Two blocks of weights on grids, for many rows: expanded once. */
static inline __attribute__((always_inline)) void grid_columns(const Product *one, const uint8_t *weight,
                                                               int64_t block, const int kept_in, Vector *expanded) {
    int64_t n = one->matrix->num_in, run = one->matrix->run, grids = n / run * 2 * LANES;
    const float *grid = grid_of(one->matrix, block);
    for (int64_t i = 0; i < n; i++) {
        Vector both[2];
        weights_of(weight, n, i, 2, kept_in, grid + i / run * 2 * LANES, grids, both);
        expanded[i] = both[0];
        expanded[n + i] = both[1];
    }
    fp32_columns(one, expanded, block);
}

/* All blocks of an item. */
static inline __attribute__((always_inline)) void multiply(const Product *one, int64_t item, const int kept_in) {
    const int has_grids = kept_in == GRID8 || kept_in == GRID4;
    int64_t n = one->matrix->num_in, bytes = (kept_in == INT8 ? (n + 1) / 2 * 2 : n) * LANES * WEIGHT_BITS[kept_in] / 8;
    int64_t blocks = (one->matrix->num_out + LANES - 1) / LANES, last = (item + 1) * one->pairs_per_item * 2;
    Vector *expanded = has_grids && one->num_rows >= 8 * ROWS ? malloc(2 * n * sizeof *expanded) : NULL;
    for (int64_t block = item * one->pairs_per_item * 2; block < last && block < blocks; block += 2) {
        const uint8_t *weight = (const uint8_t *)one->matrix->weight + block * bytes;
        if (block + 1 == blocks)
            /* A last block is rarely alone, so several rows at a time are not worth the time to compile them. */
            for (int64_t row = 0; row < one->num_rows; row++)
                outputs(one, weight, block, 1, row, 1, rows_beside(one, row), kept_in);
        else if (kept_in == FP32)
            fp32_columns(one, weight, block);
        else if (expanded)
            grid_columns(one, weight, block, kept_in, expanded);
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
static void multiply_grid8(const void *job, int64_t item) { multiply(job, item, GRID8); }
static void multiply_grid4(const void *job, int64_t item) { multiply(job, item, GRID4); }
static Work *const multiplications[] = {multiply_int8, multiply_fp32,  multiply_bf16,
                                        multiply_fp16, multiply_grid8, multiply_grid4};

/* out [rows, num_out] becomes, or grows by, the product of x [rows, num_in], or of gate and up
   [rows, 2 num_in]. */
void product(const Matrix *matrix, int form, const float *x, const float *norm, float eps, int64_t num_rows,
             int adds, float *out, int threads) {
    int64_t pairs = (matrix->num_out + 2 * LANES - 1) / (2 * LANES), items = pairs < 8 * threads ? pairs : 8 * threads;
    int64_t per_item = pairs / items, n = matrix->num_in, most = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    Word *inputs = malloc(most * n * sizeof *inputs);
    float *units = matrix->kept_in == INT8 ? malloc(most * sizeof *units) : NULL;
    for (int64_t row = 0; row < num_rows; row += most) {
        int64_t count = num_rows - row < most ? num_rows - row : most;
        const float *from = x + row * (form == GATED ? 2 * n : n);
        float *to = out + row * matrix->num_out;
        Product job = {matrix, form, adds, from, norm, eps, count, per_item, inputs, units, to};
        share(prepare_rows, &job, (count + ROWS - 1) / ROWS, threads);
        share(multiplications[matrix->kept_in], &job, (pairs + per_item - 1) / per_item, threads);
    }
    free(units);
    free(inputs);
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

/* What the queries of a row see: entries of the prefix, then own keys. It is the same in all layers. */
typedef struct {
    int64_t before, num_keys; /* keys of the prefix, and all of them */
    int64_t *entries;         /* [num_keys] */
    int64_t *own;             /* which of the own keys the last ones are, [num_keys - before] */
} Keys;

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

static Keys keys_of(const Context *to, int64_t row) {
    int64_t length = to->lengths ? to->lengths[row] : 0, skip_from = 0, skip_to = 0; /* entries that nobody sees */
    if (to->window >= 0 && to->sinks < length - to->window) {
        skip_from = to->sinks;
        skip_to = length - to->window;
    }
    int64_t before = length - (skip_to - skip_from), most = before + to->num_own;
    int64_t *entries = malloc((most + to->num_own + 1) * sizeof *entries), *own = entries + most;
    int64_t num_keys = before + seen_keys(to, row, own);
    for (int64_t i = 0; i < num_keys; i++) {
        int64_t entry = i < skip_from ? i : i < before ? i + (skip_to - skip_from) : length + own[i - before];
        if (to->tables)
            entry = to->tables[row * to->num_pages + entry / to->page_size] * to->page_size + entry % to->page_size;
        entries[i] = entry;
    }
    return (Keys){before, num_keys, entries, own};
}

static Keys *keys_of_rows(const Context *to) {
    Keys *rows = malloc(to->num_rows * sizeof *rows);
    for (int64_t row = 0; row < to->num_rows; row++) rows[row] = keys_of(to, row);
    return rows;
}

static void free_keys(const Context *to, Keys *rows) {
    for (int64_t row = 0; row < to->num_rows; row++) free(rows[row].entries);
    free(rows);
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

/* Transpose LANES keys of `dim` numbers to [dim, LANES], as tile `t` of those side by side. */
static inline void turn(const float **keys, int64_t dim, Vector (*turned)[TILES], int64_t t) {
    for (int64_t d = 0; d < dim; d += 4) {
#if defined(__AVX512BW__)
        __m512 four[4], low[2], high[2];
        for (int j = 0; j < 4; j++) {
            four[j] = _mm512_castps128_ps512(_mm_loadu_ps(keys[j] + d));
            four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(keys[j + 4] + d), 1);
            four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(keys[j + 8] + d), 2);
            four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(keys[j + 12] + d), 3);
        }
        for (int j = 0; j < 2; j++) {
            low[j] = _mm512_unpacklo_ps(four[2 * j], four[2 * j + 1]);
            high[j] = _mm512_unpackhi_ps(four[2 * j], four[2 * j + 1]);
        }
        turned[d][t] = (Vector)_mm512_unpacklo_pd((__m512d)low[0], (__m512d)low[1]);
        turned[d + 1][t] = (Vector)_mm512_unpackhi_pd((__m512d)low[0], (__m512d)low[1]);
        turned[d + 2][t] = (Vector)_mm512_unpacklo_pd((__m512d)high[0], (__m512d)high[1]);
        turned[d + 3][t] = (Vector)_mm512_unpackhi_pd((__m512d)high[0], (__m512d)high[1]);
#elif defined(__AVX2__)
        __m256 four[4], low[2], high[2];
        for (int j = 0; j < 4; j++) {
            four[j] = _mm256_castps128_ps256(_mm_loadu_ps(keys[j] + d));
            four[j] = _mm256_insertf128_ps(four[j], _mm_loadu_ps(keys[j + 4] + d), 1);
        }
        for (int j = 0; j < 2; j++) {
            low[j] = _mm256_unpacklo_ps(four[2 * j], four[2 * j + 1]);
            high[j] = _mm256_unpackhi_ps(four[2 * j], four[2 * j + 1]);
        }
        turned[d][t] = (Vector)_mm256_unpacklo_pd((__m256d)low[0], (__m256d)low[1]);
        turned[d + 1][t] = (Vector)_mm256_unpackhi_pd((__m256d)low[0], (__m256d)low[1]);
        turned[d + 2][t] = (Vector)_mm256_unpacklo_pd((__m256d)high[0], (__m256d)high[1]);
        turned[d + 3][t] = (Vector)_mm256_unpackhi_pd((__m256d)high[0], (__m256d)high[1]);
#else
        for (int j = 0; j < 4; j++)
            for (int l = 0; l < LANES; l++) turned[d + j][t][l] = keys[l][d + j];
#endif
    }
}

/* Scores, KEYS apart, of `count` queries, whose numbers lie side by side, with `tiles` times LANES turned keys. */
static inline __attribute__((always_inline)) void score(const float *queries, const int count, Vector (*keys)[TILES],
                                                        const int tiles, int64_t dim, float scale, float *out) {
    Vector sums[QUERIES][TILES] = {{{0}}};
    for (int64_t d = 0; d < dim; d++) {
        Vector mine[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) mine[t] = loaded((const float *)(keys[d] + t));
#pragma GCC unroll 4
        for (int q = 0; q < count; q++)
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) sums[q][t] = add_scaled(sums[q][t], queries[d * count + q], mine[t]);
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++)
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) ((Vector *)(out + q * KEYS))[t] = sums[q][t] * scale;
}

/* Add weighted values to the sums of `count` queries, `parts` vectors of each, and the weights to `totals`, one after
   the other: entries that a query does not see lie between those that it sees. Only the first queries ask for values
   ahead. */
static inline __attribute__((always_inline)) void add_values(const float *weights, const float *values, int64_t dim,
                                                             const int64_t *entries, int num_values, int is_first,
                                                             const int count, const int parts, float **outs,
                                                             float *totals) {
    Vector sums[QUERIES][4], all[QUERIES]; /* WEIGHED of them are used */
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) {
        all[q] = all_of(totals[q]);
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) sums[q][p] = ((const Vector *)outs[q])[p];
    }
    for (int i = 0; i < num_values; i++) {
        Vector mine[4];
        if (is_first && i + VALUES_AHEAD < num_values)
            fetch(values + entries[i + VALUES_AHEAD] * dim, parts * sizeof *mine);
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) mine[p] = loaded(values + entries[i] * dim + p * LANES);
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            Vector weight = all_of(weights[q * KEYS + i]);
            all[q] += weight;
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) sums[q][p] = multiply_add(weight, mine[p], sums[q][p]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) {
        totals[q] = all[q][0];
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) ((Vector *)outs[q])[p] = sums[q][p];
    }
}

/* A pass of attention. The queries of a row that share a KV head are numbered by token, then by head. */
typedef struct {
    const Context *to;
    const Keys *rows;
    const float *q;
    float *out, *lse;
    int64_t heads;       /* of keys and values, in all layers */
    int64_t queries;     /* that share one */
    int64_t num_first;   /* So many heads of all rows */
    int64_t first_parts; /* have their queries cut into so many parts, */
    int64_t parts;       /* and the other ones into so many. */
} Attending;

/* Some queries of a row that share a KV head. */
typedef struct {
    const Attending *one;
    int64_t row, kv_head, first, count;
    int64_t num_keys; /* that they see */
    float *scores;    /* [keys / KEYS, count, KEYS] */
    float *queries;   /* [count / QUERIES, D, QUERIES]; the last ones may be fewer */
    float *peaks, *totals, **outs;
} Head;

/* Where the keys of a head begin, or its values. */
static const float *of_head(const Head *head, const float *all) {
    const Context *to = head->one->to;
    return all + head->row * to->row_stride + head->kv_head / to->num_kv_heads * to->layer_stride +
           head->kv_head % to->num_kv_heads * to->head_stride;
}

static void score_keys(const Head *head) {
    const Keys *keys = head->one->rows + head->row;
    int64_t D = head->one->to->head_dim, last = head->num_keys - 1;
    const float *all = of_head(head, head->one->to->keys), *lanes[LANES];
    float scale = 1.0f / sqrtf((float)D);
    Vector turned[MOST_DIM][TILES];
    for (int64_t first = 0, tiles; first <= last; first += tiles * LANES) {
        tiles = first + (TILES - 1) * LANES <= last ? TILES : 1;
        for (int64_t t = 0; t < tiles; t++) {
            for (int l = 0; l < LANES; l++) {
                int64_t key = first + t * LANES + l;
                lanes[l] = all + keys->entries[key < last ? key : last] * D;
                if (key + KEYS_AHEAD <= last) fetch(all + keys->entries[key + KEYS_AHEAD] * D, D * sizeof *all);
            }
            turn(lanes, D, turned, t);
        }
        float *out = head->scores + first / KEYS * KEYS * head->count + first % KEYS;
        for (int64_t query = 0; query < head->count; query += QUERIES) {
            const float *queries = head->queries + query * D;
            if (tiles == TILES)
                EACH_COUNT(head->count - query, score(queries, count, turned, TILES, D, scale, out + query * KEYS));
            else
                EACH_COUNT(head->count - query, score(queries, count, turned, 1, D, scale, out + query * KEYS));
        }
    }
}

/* Take out the own keys that a query does not see, and find its largest score. */
static void mask_scores(const Head *head, int64_t query, int64_t token) {
    const Context *to = head->one->to;
    const Keys *keys = head->one->rows + head->row;
    const uint8_t *sees = to->sees ? to->sees + head->row * to->sees_stride + token * to->num_own : NULL;
    Vector peaks = all_of(-FLT_MAX);
    for (int64_t i = 0; i < head->num_keys - keys->before; i++) {
        int64_t key = keys->before + i, is_seen = sees ? sees[keys->own[i]] : keys->own[i] <= token;
        if (!is_seen) head->scores[(key / KEYS * head->count + query) * KEYS + key % KEYS] = -INFINITY;
    }
    /* What lies behind the last key takes part in no sum. */
    for (int64_t key = head->num_keys; key % LANES; key++)
        head->scores[(key / KEYS * head->count + query) * KEYS + key % KEYS] = -INFINITY;
    for (int64_t first = 0; first < head->num_keys; first += LANES)
        peaks = larger(peaks, *(Vector *)(head->scores + (first / KEYS * head->count + query) * KEYS + first % KEYS));
    head->peaks[query] = peaks[0];
    for (int l = 1; l < LANES; l++) head->peaks[query] = peaks[l] > head->peaks[query] ? peaks[l] : head->peaks[query];
}

static void weigh_values(const Head *head) {
    const Keys *keys = head->one->rows + head->row;
    int64_t D = head->one->to->head_dim;
    const float *all = of_head(head, head->one->to->values);
    for (int64_t first = 0; first < head->num_keys; first += KEYS) {
        const int64_t *entries = keys->entries + first;
        int num_values = head->num_keys - first < KEYS ? (int)(head->num_keys - first) : KEYS;
        for (int64_t query = 0; query < head->count; query += WEIGHED) {
            const float *scores = head->scores + first * head->count + query * KEYS;
            float weights[WEIGHED * KEYS], *outs[WEIGHED], again[WEIGHED] = {0}, *totals = head->totals + query;
            int64_t left = head->count - query < WEIGHED ? head->count - query : WEIGHED;
            for (int64_t q = 0; q < left; q++)
                for (int64_t i = q * KEYS; i < q * KEYS + num_values; i += LANES)
                    *(Vector *)(weights + i) = exponentials(*(const Vector *)(scores + i) - head->peaks[query + q]);
            for (int64_t d = 0, parts; d < D; d += parts * LANES, totals = again) {
                const float *values = all + d;
                int is_first = query == 0;
                for (int64_t q = 0; q < left; q++) outs[q] = head->outs[query + q] + d;
                parts = d + 4 * LANES <= D ? 4 : 1;
                if (parts == 4)
                    EACH_COUNT(left,
                               add_values(weights, values, D, entries, num_values, is_first, count, 4, outs, totals));
                else
                    EACH_COUNT(left,
                               add_values(weights, values, D, entries, num_values, is_first, count, 1, outs, totals));
            }
        }
    }
}

static void attend_head(const Attending *one, int64_t row, int64_t kv_head, int64_t first, int64_t end) {
    const Context *to = one->to;
    int64_t D = to->head_dim, group = to->num_heads / one->heads, count = end - first;
    int64_t num_keys = one->rows[row].num_keys, last_seen = one->rows[row].before + (end - 1) / group;
    /* A chain's queries see no own keys after their own. */
    if (to->num_own && !to->sees && last_seen < num_keys) num_keys = last_seen + 1;
    int64_t padded = (num_keys + KEYS - 1) / KEYS * KEYS;
    float *scores = malloc(count * (padded + D + 2) * sizeof *scores), *queries = scores + count * padded;
    float *peaks = queries + count * D, *outs[count];
    Head head = {one, row, kv_head, first, count, num_keys, scores, queries, peaks, peaks + count, outs};
    for (int64_t query = 0; query < count; query++) {
        int64_t token = (first + query) / group, index = kv_head * group + (first + query) % group;
        int64_t beside = query / QUERIES * QUERIES, side = count - beside < QUERIES ? count - beside : QUERIES;
        const float *q = one->q + row * to->query_row_stride + token * to->query_stride + index * D;
        for (int64_t d = 0; d < D; d++) queries[beside * D + d * side + query - beside] = q[d];
        outs[query] = one->out + ((row * to->num_queries + token) * to->num_heads + index) * D;
        memset(outs[query], 0, D * sizeof *q);
        head.totals[query] = 0;
    }
    score_keys(&head);
    for (int64_t query = 0; query < count; query++) mask_scores(&head, query, (first + query) / group);
    weigh_values(&head);
    for (int64_t query = 0; query < count; query++) {
        int64_t token = (first + query) / group, index = kv_head * group + (first + query) % group;
        float total = head.totals[query];
        for (int64_t d = 0; d < D; d++) outs[query][d] = total > 0 ? outs[query][d] / total : 0;
        one->lse[(row * to->num_queries + token) * to->num_heads + index] =
            total > 0 ? peaks[query] + logf(total) : -INFINITY;
    }
    free(scores);
}

static void attend_part(const void *job, int64_t item) {
    const Attending *one = job;
    int64_t rest = item - one->num_first * one->first_parts, parts = rest < 0 ? one->first_parts : one->parts;
    int64_t place = rest < 0 ? item / parts : one->num_first + rest / parts, part = (rest < 0 ? item : rest) % parts;
    attend_head(one, place / one->heads, place % one->heads, one->queries * part / parts,
                one->queries * (part + 1) / parts);
}

static void attend_keys(const Context *to, const Keys *rows, const float *q, float *out, float *lse, int threads) {
    int64_t heads = to->num_layers * to->num_kv_heads, queries = to->num_queries * (to->num_heads / heads);
    /* If the heads do not divide by the threads, the last ones are cut into as few parts as make up for that,
       because each part reads all keys. */
    int64_t places = to->num_rows * heads, last = places % threads;
    int64_t first_parts = (queries + MOST_QUERIES - 1) / MOST_QUERIES, parts = first_parts;
    while (last * parts % threads && parts < queries) parts++;
    Attending job = {to, rows, q, out, lse, heads, queries, places - last, first_parts, parts};
    share(attend_part, &job, (places - last) * first_parts + last * parts, threads);
}

/* Attend with queries q; out is [rows, queries, H, D], lse [rows, queries, H]. */
void attend(const Context *to, const float *q, float *out, float *lse, int threads) {
    Keys *rows = keys_of_rows(to);
    attend_keys(to, rows, q, out, lse, threads);
    free_keys(to, rows);
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
    Keys *rows = keys_of_rows(context);
    for (int64_t index = 0; index < num_layers; index++) {
        const Layer *layer = layers + index;
        product(layer->qkv, NORM, stream, layer->attention_norm, layer->attention_eps, tokens, 0, qkv, threads);
        writing.q_norm = layer->q_norm;
        writing.k_norm = layer->k_norm;
        writing.eps = layer->head_eps;
        attended.keys = writing.keys = to->keys + index * stride;
        attended.values = writing.values = to->values + index * stride;
        rope_write(&writing, qkv);
        attend_keys(&attended, rows, qkv, out, lse, threads);
        product(layer->output, PLAIN, out, NULL, 0, tokens, 1, stream, threads);
        product(layer->gate_up, NORM, stream, layer->ffn_norm, layer->ffn_eps, tokens, 0, gate_up, threads);
        product(layer->down, GATED, gate_up, NULL, 0, tokens, 1, stream, threads);
    }
    free_keys(context, rows);
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
