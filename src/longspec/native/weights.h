/* Matrices in the forms in which their weights are kept, and the search for the grids on which weights lie. */

#pragma once

#include "vectors.h"

/* What weights are kept in, and how many bits each of them takes: numbers; or levels of 8 or 4 bits on grids, which
   are multiplied as the numbers that they stand for (GRID), or as integers, by rows that are rounded to two bytes
   (LEVELS) or to three, which is as fine as fp32 (FINE). */
enum { FP32, BF16, FP16, GRID8, GRID4, LEVELS8, LEVELS4, FINE8, FINE4 };
static const int64_t WEIGHT_BITS[] = {32, 16, 16, 8, 4, 8, 4, 8, 4};

static inline int are_grids(int64_t kept_in) { return kept_in == GRID8 || kept_in == GRID4; }
static inline int are_integers(int64_t kept_in) { return kept_in >= LEVELS8; }
static inline int row_bytes_of(int64_t kept_in) { return kept_in >= FINE8 ? 3 : 2; }

/* A matrix [num_out, num_in]. `weight` is padded to [outputs / LANES, inputs, LANES], `bias` to as many outputs. For
   every `run` inputs of an output `grids`, padded to [outputs / LANES, inputs / run, 2, LANES], has the step and the
   base of the grid on which its weights lie, in fp32 or, with `has_half_grids`, in fp16. Levels of 4 bits lie in the lower and upper halves of bytes
   [outputs / LANES / 2, inputs, LANES]: two blocks of outputs. Integers are padded to whole runs of inputs, and four
   inputs of an output lie side by side: [..., inputs / 4, LANES, 4]. */
typedef struct {
    const void *weight;
    const void *grids; /* or NULL */
    const float *bias; /* or NULL */
    int64_t num_in, num_out, kept_in, run, has_half_grids;
} Matrix;

/* How weights must be laid out. */
int lanes(void) { return LANES; }

/* The weight at a level: base + step * level, with one rounding where the processor has that. */
static inline float on_grid(float base, float step, float level) {
#if defined(__AVX2__) && defined(__FMA__)
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

/* The grids of a run of LANES outputs. */
typedef struct {
    Vector steps, bases;
} Grid;

/* `on_grid` for LANES levels. */
static inline Vector all_on_grid(Sums levels, Grid grid) {
    return multiply_add(grid.steps, __builtin_convertvector(levels, Vector), grid.bases);
}

/* LANES numbers from `index` on, in fp32, which has all numbers of bf16 and fp16. */
static inline __attribute__((always_inline)) Vector numbers_at(const void *weight, int64_t index, const int kept_in) {
    if (kept_in == FP32) return loaded((const float *)weight + index);
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

/* Of an output; the last one of integers may be shorter. */
static inline int64_t runs_of(const Matrix *matrix) { return (matrix->num_in + matrix->run - 1) / matrix->run; }

/* The grids of a block's run. */
static inline __attribute__((always_inline)) Grid grid_of(const Matrix *matrix, int64_t block, int64_t run) {
    int64_t index = (block * runs_of(matrix) + run) * 2 * LANES;
    if (matrix->has_half_grids)
        return (Grid){numbers_at(matrix->grids, index, FP16), numbers_at(matrix->grids, index + LANES, FP16)};
    const Vector *place = (const Vector *)((const float *)matrix->grids + index);
    return (Grid){place[0], place[1]};
}

/* Ask for the grids of the same run of the next two blocks. */
static inline void fetch_grids(const Matrix *matrix, int64_t block, int64_t run) {
    int64_t size = matrix->has_half_grids ? 2 : 4;
    for (int64_t b = block + 2; b < block + 4; b++)
        fetch((const char *)matrix->grids + (b * runs_of(matrix) + run) * 2 * LANES * size, 2 * LANES * size);
}

/* The weights of one or two blocks at an input; `grids` are those of its run. */
static inline __attribute__((always_inline)) void weights_of(const void *weight, int64_t n, int64_t input,
                                                             const int blocks, const int kept_in, const Grid *grids,
                                                             Vector *both) {
    const uint8_t *levels = (const uint8_t *)weight + input * LANES;
    if (kept_in == GRID4) {
        Sums two = widened_levels(levels);
        both[0] = all_on_grid(two & 15, grids[0]);
        if (blocks == 2) both[1] = all_on_grid(two >> 4, grids[1]);
    } else if (kept_in == GRID8) {
        both[0] = all_on_grid(widened_levels(levels), grids[0]);
        if (blocks == 2) both[1] = all_on_grid(widened_levels(levels + n * LANES), grids[1]);
    } else {
        both[0] = numbers_at(weight, input * LANES, kept_in);
        if (blocks == 2) both[1] = numbers_at(weight, (n + input) * LANES, kept_in);
    }
}

enum { MOST_LEVEL = 255 };

/* Find the levels of `run` weights; returns whether all are exactly on the grid, by `on_grid` and, which is the
   same on most processors, with a single rounding. */
static int are_on_grid(const float *weights, int64_t run, float base, float step, uint8_t *levels) {
    for (int64_t i = 0; i < run; i++) {
        float level = step ? rintf((weights[i] - base) / step) : 0;
        if (!(level >= 0 && level <= MOST_LEVEL) || on_grid(base, step, level) != weights[i]) return 0;
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

/* The nearest number of fp16; nan if the compiler does not know fp16. */
static float in_half(float x) {
#if defined(__FLT16_MAX__)
    return (float)(_Float16)x;
#else
    return NAN;
#endif
}

/* Whether fp16 has the step and the base of a run's grid: if the base may move away from the weights as far as there
   are levels left, or the grid is turned around. A GGUF's older types keep a scale in fp16, and the weight of level 0
   is a power of two of it, or in fp16 too. */
static int fit_halves(const float *weights, int64_t run, uint8_t *levels, float *grid) {
    int highest = 0, most;
    float high = weights[0];
    for (int64_t i = 0; i < run; i++) {
        highest = levels[i] > highest ? levels[i] : highest;
        high = weights[i] > high ? weights[i] : high;
    }
    most = highest < 16 ? 15 : MOST_LEVEL;
    for (int turned = 0; turned < 2; turned++)
        for (int below = 0; below <= most - highest; below++) {
            float step = in_half(turned ? -grid[0] : grid[0]), end = turned ? high : grid[1];
            float base = in_half(end - below * step);
            if (fabsf(base - (end - below * step)) > 1e-6f * fabsf(base)) continue;
            uint8_t moved[run], top = 0;
            if (!are_on_grid(weights, run, base, step, moved)) continue;
            for (int64_t i = 0; i < run; i++) top = moved[i] > top ? moved[i] : top;
            if (top > most) continue;
            memcpy(levels, moved, run);
            grid[0] = step;
            grid[1] = base;
            return 1;
        }
    return 0;
}

/* A matrix [rows, n] for whose runs grids are looked for. */
typedef struct {
    const float *weight;
    int64_t n, run;
    uint8_t *levels;     /* [rows, n] */
    float *grids;        /* [rows, n / run, 2]: steps and bases */
    uint8_t *fits;       /* [rows] */
    uint8_t *has_halves; /* [rows] */
} Fitting;

static void fit_row(const void *job, int64_t row) {
    const Fitting *one = job;
    int64_t first = row * one->n, last = first + one->n, count = 15; /* of the most frequent kind */
    one->has_halves[row] = 1;
    for (; first < last && count; first += one->run) {
        float *grid = one->grids + 2 * first / one->run;
        count = fit_run(one->weight + first, one->run, count, one->levels + first, grid);
        if (count && one->has_halves[row])
            one->has_halves[row] = fit_halves(one->weight + first, one->run, one->levels + first, grid) != 0;
    }
    one->fits[row] = count > 0;
}

/* Look for grids on which all weights of a matrix lie exactly; returns 0 if there are none, 2 if fp16 has all steps
   and bases, and otherwise 1. */
int fit_grids(const float *weight, int64_t num_rows, int64_t n, int64_t run, uint8_t *levels, float *grids,
              int threads) {
    uint8_t *fits = malloc(2 * num_rows), *has_halves = fits + num_rows, all = 1, halves = 1;
    Fitting job = {weight, n, run, levels, grids, fits, has_halves};
    share(fit_row, &job, num_rows, threads);
    for (int64_t row = 0; row < num_rows; row++) {
        all &= fits[row];
        halves &= has_halves[row];
    }
    free(fits);
    return all + (all & halves);
}
