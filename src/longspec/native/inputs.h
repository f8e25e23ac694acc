/* The rows that a product reads: after a norm or a gate, as numbers or rounded to integers. */

#pragma once

#include "weights.h"

/* What a product does with its input first. */
enum { PLAIN, NORM, GATED };

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))
/* The processor multiplies four bytes at a time: first the high bytes of a row's numbers, then the lower ones. A number
   of three bytes is FACTOR * (256 * high + middle) + low. */
enum { HAS_BYTES = 1, FACTOR = 256 };
#else
/* Pairs of 16 bits are multiplied: first those of even inputs, then those of odd ones. A number of three bytes is
   FACTOR * high + low. */
enum { HAS_BYTES = 0, FACTOR = 4096 };
#endif

/* Whether weights as integers are faster than as numbers. */
int multiplies_bytes(void) { return HAS_BYTES; }

/* How often a row's numbers of two or three bytes are gone through, each time with `run` / 4 words. */
static inline int turns_of(const int row_bytes) { return HAS_BYTES ? row_bytes : 2 * (row_bytes - 1); }

/* After its words a run of a row has the units of its totals, one for two bytes and two for three, and its sum. */
static inline int64_t words_per_run(int64_t run, const int row_bytes) {
    return turns_of(row_bytes) * (run / 4) + row_bytes;
}

static inline Sums rounded(Vector x) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (Sums)_mm256_cvtps_epi32((__m256)x);
#else
    Sums numbers;
    for (int l = 0; l < LANES; l++) numbers[l] = (int32_t)rintf(x[l]);
    return numbers;
#endif
}

/* Put numbers of a run, from `first` on, into its words. */
static inline void put_numbers(Sums numbers, int64_t first, int64_t run, const int row_bytes, Word *words) {
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    if (HAS_BYTES) {
        for (int turn = row_bytes - 1; turn >= 0; turn--) {
            Sums higher = (numbers + 128) >> 8;
            *(Bytes *)((int8_t *)(words + turn * (run / 4)) + first) =
                __builtin_convertvector(numbers - (higher << 8), Bytes);
            numbers = higher;
        }
        return;
    }
    for (int half = row_bytes - 2; half >= 0; half--) {
        Sums higher = (numbers + FACTOR / 2) >> 12, rest = numbers;
        if (half) rest -= higher << 12;
        for (int l = 0; l < LANES; l++) {
            int16_t *turn = (int16_t *)(words + (2 * half + l % 2) * (run / 4));
            turn[(first + l) / 2] = (int16_t)rest[l];
        }
        numbers = higher;
    }
}

/* Round the numbers of a row's run by the largest of them. The units are nan if one of them is not finite. */
static inline __attribute__((always_inline)) void round_run(const float *x, int64_t run, const int row_bytes,
                                                            Word *words) {
    float peak, *facts = (float *)(words + turns_of(row_bytes) * (run / 4));
    /* Three bytes leave room for a product that fp32 has rounded up. */
    const float largest = row_bytes == 3 ? 127 * 65536 : 127 * 256 + 127;
    Sums sizes = {0}, totals = {0};
    for (int64_t i = 0; i < run; i += LANES) {
        /* Numbers above 0 have the order of their bits; infinity and nan are the highest. */
        Sums size = *(const Sums *)(x + i) & 0x7fffffff, is_larger = size > sizes;
        sizes = (size & is_larger) | (sizes & ~is_larger);
    }
    int32_t size = 0, total = 0;
    for (int l = 0; l < LANES; l++) size = sizes[l] > size ? sizes[l] : size;
    memcpy(&peak, &size, sizeof peak);
    int is_bad = size >= 0x7f800000, is_small = peak < 1e-30f;
    float steps = is_bad || is_small ? 0 : largest / peak, unit = is_bad ? NAN : is_small ? 0 : peak / largest;
    for (int64_t i = 0; i < run; i += LANES) {
        Sums numbers = is_bad ? (Sums){0} : rounded(*(const Vector *)(x + i) * steps);
        put_numbers(numbers, i, run, row_bytes, words);
        totals += numbers;
    }
    for (int l = 0; l < LANES; l++) total += totals[l];
    if (row_bytes == 3) *facts++ = unit * FACTOR;
    facts[0] = unit;
    facts[1] = unit * (float)total;
}

/* Below -88 the exponential would overflow; there the gate is 0 but for 1e-36. nan stays nan. */
static inline Vector gated(Vector gate, Vector up) {
    return gate / (exponentials(-larger(all_of(-88.0f), gate)) + 1.0f) * up;
}

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
