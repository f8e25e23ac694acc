/* Products of rows with a matrix, with what is around them: the norm, the gate and the residual. */

#pragma once

#include "inputs.h"

/* Rows that are computed before the next ones, so that they stay in the processor's cache, and inputs after which
   more weights are asked for. */
enum { MOST_ROWS = 512, PART = 32 };

/* Add the products of four levels of each lane, or of the two of this `turn`, with those numbers of a row. */
static inline __attribute__((always_inline)) Sums add_levels(Sums sums, Sums levels, Word numbers, const int turn) {
    Sums row = (Sums){0} + numbers;
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)levels, (__m512i)row);
#elif defined(__AVXVNNI__) && !defined(__AVX512BW__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)levels, (__m256i)row);
#else
    levels = (turn ? levels >> 8 : levels) & 0xff00ff;
#if defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)levels, (__m512i)row);
#elif defined(__AVX2__)
    return sums + (Sums)_mm256_madd_epi16((__m256i)levels, (__m256i)row);
#else
    for (int l = 0; l < LANES; l++)
        sums[l] += (levels[l] & 0xffff) * (int16_t)row[l] + (levels[l] >> 16) * (row[l] >> 16);
    return sums;
#endif
#endif
}

/* A product, cut into items of the same number of pairs of blocks. */
typedef struct {
    const Matrix *matrix;
    int form, adds;
    const float *x, *norm;
    float eps;
    int64_t num_rows, pairs_per_item;
    Word *inputs; /* the rows after `form`: the first words of ROWS rows side by side, then the second ones, ... */
    float *out;
} Product;

/* How many words a row has. */
static inline int64_t words_of(const Matrix *matrix) {
    if (!are_integers(matrix->kept_in)) return matrix->num_in;
    return runs_of(matrix) * words_per_run(matrix->run, row_bytes_of(matrix->kept_in));
}

/* How many rows' inputs lie side by side with those of a row, itself included. */
static inline int64_t rows_beside(const Product *one, int64_t row) {
    int64_t left = one->num_rows - row / ROWS * ROWS;
    return left < ROWS ? left : ROWS;
}

/* The first of a row's inputs. */
static inline Word *inputs_of(const Product *one, int64_t row) {
    return one->inputs + row / ROWS * ROWS * words_of(one->matrix) + row % ROWS;
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

/* While two blocks are multiplied, ask for the same inputs' weights of the next two, because a block ends before
   the processor has noticed that it is read in order. fp32 blocks are longer. Only the first rows ask: then the
   others find the weights near. */
static inline __attribute__((always_inline)) void fetch_next(const void *weight, int64_t n, int64_t input,
                                                             int64_t num_inputs, int64_t row, const int kept_in) {
    int64_t bytes = LANES * WEIGHT_BITS[kept_in] / 8, next = 2 * n * bytes;
    if (row || kept_in == FP32) return;
    if (WEIGHT_BITS[kept_in] == 4) {
        fetch((const uint8_t *)weight + next + input * LANES, num_inputs * LANES);
        return;
    }
    for (int b = 0; b < 2; b++) fetch((const uint8_t *)weight + next + (b * n + input) * bytes, num_inputs * bytes);
}

/* The levels of one or two blocks at four inputs; both blocks have `n` inputs. */
static inline __attribute__((always_inline)) void levels_of(const uint8_t *weight, int64_t n, int64_t input,
                                                            const int blocks, const int kept_in, Sums *both) {
    both[0] = *(const Sums *)(weight + input * LANES);
    if (WEIGHT_BITS[kept_in] == 8) {
        if (blocks == 2) both[1] = *(const Sums *)(weight + (n + input) * LANES);
        return;
    }
    if (blocks == 2) both[1] = both[0] >> 4 & 0x0f0f0f0f;
    both[0] &= 0x0f0f0f0f;
}

/* Two blocks of LANES outputs, or one, of `count` rows from `row` on, whose inputs lie side by side with those of
   `side` rows; `weight` is that of the first block. Integers are added within a run, which has no order. */
static inline __attribute__((always_inline)) void level_outputs(const Product *one, const uint8_t *weight,
                                                                int64_t block, const int blocks, int64_t row,
                                                                const int count, const int64_t side,
                                                                const int kept_in) {
    const int row_bytes = row_bytes_of(kept_in), turns = turns_of(row_bytes);
    int64_t run = one->matrix->run, n = runs_of(one->matrix) * run;
    const Word *x = inputs_of(one, row);
    Vector sums[ROWS][2] = {{{0}}};
    for (int64_t first = 0; first < n; first += run) {
        const float *facts = (const float *)(x + turns * (run / 4) * side) + (row_bytes - 1) * side;
        Grid grids[2] = {grid_of(one->matrix, block, first / run)};
        if (blocks == 2) grids[1] = grid_of(one->matrix, block + 1, first / run);
        fetch_next(weight, n, first, run, row, kept_in);
        if (!row) fetch_grids(one->matrix, block, first / run);
#pragma GCC unroll 2
        for (int half = 0; half < row_bytes - 1; half++) {
            Sums totals[ROWS][2] = {{{0}}};
            const float *units = facts - (row_bytes - 1 - half) * side;
#pragma GCC unroll 2
            for (int turn = 0; turn < 2 && 2 * half + turn < turns; turn++) {
#pragma GCC unroll 8
                for (int r = 0; r < count; r++)
                    for (int b = 0; b < blocks; b++) totals[r][b] <<= HAS_BYTES ? 8 : 0;
                for (int64_t input = first; input < first + run; input += 4, x += side) {
                    Sums both[2];
                    levels_of(weight, n, input, blocks, kept_in, both);
#pragma GCC unroll 8
                    for (int r = 0; r < count; r++)
                        for (int b = 0; b < blocks; b++) totals[r][b] = add_levels(totals[r][b], both[b], x[r], turn);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < count; r++)
                for (int b = 0; b < blocks; b++) {
                    Vector total = __builtin_convertvector(totals[r][b], Vector) * units[r];
                    sums[r][b] = multiply_add(total, grids[b].steps, sums[r][b]);
                    if (half == row_bytes - 2) sums[r][b] = add_scaled(sums[r][b], facts[r], grids[b].bases);
                }
        }
        x += row_bytes * side; /* the units and the sums */
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int b = 0; b < blocks; b++) put(one, row + r, block + b, sums[r][b]);
}

/* The same with rows and weights that are numbers: inputs are added one after the other. */
static inline __attribute__((always_inline)) void float_outputs(const Product *one, const void *weight, int64_t block,
                                                                const int blocks, int64_t row, const int count,
                                                                const int64_t side, const int kept_in) {
    const int has_grids = are_grids(kept_in);
    int64_t n = one->matrix->num_in, run = has_grids ? one->matrix->run : n;
    const float *x = (const float *)inputs_of(one, row);
    int64_t part = has_grids ? run : PART;
    Vector sums[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < n;) {
        int64_t end = i + part < n ? i + part : n;
        Grid grids[2];
        fetch_next(weight, n, i, end - i, row, kept_in);
        if (has_grids) {
            if (!row) fetch_grids(one->matrix, block, i / run);
            for (int b = 0; b < blocks; b++) grids[b] = grid_of(one->matrix, block + b, i / run);
        }
        for (; i < end; i++) {
            Vector both[2];
            weights_of(weight, n, i, blocks, kept_in, grids, both);
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
    if (are_integers(kept_in))
        level_outputs(one, weight, block, blocks, row, count, side, kept_in);
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
    const Matrix *matrix = one->matrix;
    int64_t n = matrix->num_in, run = matrix->run, words = words_of(matrix), first = group * ROWS;
    int64_t side = rows_beside(one, first), rounds = are_integers(matrix->kept_in);
    int64_t padded = rounds ? runs_of(matrix) * run : n, row_bytes = row_bytes_of(matrix->kept_in);
    float *changed = calloc(padded, sizeof *changed);
    Word *words_of_row = rounds ? malloc(words * sizeof *words_of_row) : (Word *)changed, *to = inputs_of(one, first);
    for (int64_t r = 0; r < side; r++) {
        change(one->form, one->x + (first + r) * (one->form == GATED ? 2 * n : n), one->norm, one->eps, n, changed);
        for (int64_t i = 0; rounds && i < n; i += run)
            if (row_bytes == 3)
                round_run(changed + i, run, 3, words_of_row + i / run * words_per_run(run, 3));
            else
                round_run(changed + i, run, 2, words_of_row + i / run * words_per_run(run, 2));
        for (int64_t i = 0; i < words; i++) to[i * side + r] = words_of_row[i];
    }
    if (rounds) free(words_of_row);
    free(changed);
}

static __attribute__((noinline)) void fp32_columns(const Product *one, const void *weight, int64_t block) {
    columns(one, weight, block, FP32);
}

/* Two blocks of weights on grids, for many rows: expanded once. */
static inline __attribute__((always_inline)) void grid_columns(const Product *one, const uint8_t *weight,
                                                               int64_t block, const int kept_in, Vector *expanded) {
    int64_t n = one->matrix->num_in, run = one->matrix->run;
    for (int64_t first = 0; first < n; first += run) {
        Grid grids[2] = {grid_of(one->matrix, block, first / run), grid_of(one->matrix, block + 1, first / run)};
        for (int64_t i = first; i < first + run; i++) {
            Vector both[2];
            weights_of(weight, n, i, 2, kept_in, grids, both);
            expanded[i] = both[0];
            expanded[n + i] = both[1];
        }
    }
    fp32_columns(one, expanded, block);
}

/* All blocks of an item. */
static inline __attribute__((always_inline)) void multiply(const Product *one, int64_t item, const int kept_in) {
    const int has_grids = are_grids(kept_in);
    int64_t n = are_integers(kept_in) ? runs_of(one->matrix) * one->matrix->run : one->matrix->num_in;
    int64_t bytes = n * LANES * WEIGHT_BITS[kept_in] / 8;
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
static void multiply_fp32(const void *job, int64_t item) { multiply(job, item, FP32); }
static void multiply_bf16(const void *job, int64_t item) { multiply(job, item, BF16); }
static void multiply_fp16(const void *job, int64_t item) { multiply(job, item, FP16); }
static void multiply_grid8(const void *job, int64_t item) { multiply(job, item, GRID8); }
static void multiply_grid4(const void *job, int64_t item) { multiply(job, item, GRID4); }
static void multiply_levels8(const void *job, int64_t item) { multiply(job, item, LEVELS8); }
static void multiply_levels4(const void *job, int64_t item) { multiply(job, item, LEVELS4); }
static void multiply_fine8(const void *job, int64_t item) { multiply(job, item, FINE8); }
static void multiply_fine4(const void *job, int64_t item) { multiply(job, item, FINE4); }
static Work *const multiplications[] = {multiply_fp32,    multiply_bf16,    multiply_fp16,  multiply_grid8, multiply_grid4,
                                        multiply_levels8, multiply_levels4, multiply_fine8, multiply_fine4};

/* out [rows, num_out] becomes, or grows by, the product of x [rows, num_in], or of gate and up
   [rows, 2 num_in]. */
void product(const Matrix *matrix, int form, const float *x, const float *norm, float eps, int64_t num_rows,
             int adds, float *out, int threads) {
    int64_t pairs = (matrix->num_out + 2 * LANES - 1) / (2 * LANES), items = pairs < 8 * threads ? pairs : 8 * threads;
    int64_t per_item = pairs / items, n = matrix->num_in, most = num_rows < MOST_ROWS ? num_rows : MOST_ROWS;
    Word *inputs = malloc(most * words_of(matrix) * sizeof *inputs);
    for (int64_t row = 0; row < num_rows; row += most) {
        int64_t count = num_rows - row < most ? num_rows - row : most;
        const float *from = x + row * (form == GATED ? 2 * n : n);
        float *to = out + row * matrix->num_out;
        Product job = {matrix, form, adds, from, norm, eps, count, per_item, inputs, to};
        share(prepare_rows, &job, (count + ROWS - 1) / ROWS, threads);
        share(multiplications[matrix->kept_in], &job, (pairs + per_item - 1) / per_item, threads);
    }
    free(inputs);
}
