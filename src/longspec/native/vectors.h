/* Vectors of as many numbers as the processor's registers have, and work for several threads. */

#pragma once

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

/* Vectors need not be aligned in memory. */
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Sums __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
/* A float, or small numbers side by side: four of 8 bits, or two of 16. */
typedef int32_t Word __attribute__((may_alias));

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

/* y if one of them is nan. */
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

static inline Vector exponentials(Vector x) {
    /* e^x = 2^n e^r with |r| <= ln 2 / 2. To add and subtract 1.5 * 2^23 rounds to whole numbers. nan stays nan. */
    Vector y = larger(all_of(-87.0f), x), n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
    Vector r = y - n * 0.693359375f + n * 2.12194440e-4f;
    Vector p = multiply_add(all_of(1.9875691500e-4f), r, all_of(1.3981999507e-3f));
    p = multiply_add(p, r, all_of(8.3334519073e-3f));
    p = multiply_add(p, r, all_of(4.1665795894e-2f));
    p = multiply_add(p, r, all_of(1.6666665459e-1f));
    p = multiply_add(p, r, all_of(5.0000001201e-1f));
    p = multiply_add(p * r, r, r + 1.0f);
    Sums powers = (__builtin_convertvector(n, Sums) + 127) << 23;
    return (Vector)((Sums)(p * (Vector)powers) & ~(Sums)(x < -87.0f));
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

/* The norms of rows [num_rows, n]; `out` may be x. */
void norm(const float *x, const float *weight, float eps, int64_t n, int64_t num_rows, float *out) {
    for (int64_t row = 0; row < num_rows; row++) normalise(x + row * n, weight, eps, n, out + row * n);
}

/* Ask for memory that is needed soon. */
static inline void fetch(const void *place, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)place + at);
}

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
