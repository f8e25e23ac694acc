/* The choice of a token, as `longspec/decoding/choose.py` defines it, and the noise of choices.

   Noise is a hash of (seed, position, token), so that nothing else can change a choice. */

#pragma once

#include "vectors.h"

typedef uint64_t Bits __attribute__((vector_size(4 * LANES), aligned(8), may_alias));
/* Half of a vector: as many numbers of 32 bits as Bits has. */
typedef int32_t HalfSums __attribute__((vector_size(2 * LANES), aligned(4), may_alias));

/* Constants of SplitMix64. */
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15, FIRST = 0xBF58476D1CE4E5B9, SECOND = 0x94D049BB133111EB;

/* The finaliser of SplitMix64, for a number or a vector of them. */
#define MIX(x)                        \
    do {                              \
        x = (x ^ (x >> 30)) * FIRST;  \
        x = (x ^ (x >> 27)) * SECOND; \
        x ^= x >> 31;                 \
    } while (0)

static uint64_t key_of(int64_t seed, int64_t position) {
    uint64_t key = (uint64_t)seed + GOLDEN;
    MIX(key);
    key ^= (uint64_t)position * GOLDEN;
    MIX(key);
    return key;
}

/* The numbers from 0 on. */
#if defined(__AVX512BW__)
static const Bits COUNT = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const Bits COUNT = {0, 1, 2, 3};
#endif

/* The highest 24 bits of the hashes of LANES tokens, as whole numbers: of those given, or those from `first` on. */
static inline Vector high_bits(uint64_t key, const int64_t *tokens, int64_t first) {
    HalfSums halves[2];
    for (int h = 0; h < 2; h++) {
        Bits x = COUNT + (uint64_t)(first + h * LANES / 2);
        if (tokens) x = ((const Bits *)tokens)[h];
        x = x * GOLDEN + key;
        MIX(x);
        halves[h] = __builtin_convertvector(x >> 40, HalfSums);
    }
    return __builtin_convertvector(*(const Sums *)halves, Vector);
}

static double gumbel(uint64_t key, int64_t token) {
    uint64_t bits = key + (uint64_t)token * GOLDEN;
    MIX(bits);
    return -log(-log1p(-((double)(bits >> 12) + 0.5) * 0x1p-52));
}

static inline int any_of(Sums lanes) {
#if defined(__AVX512BW__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int any = 0;
    for (int l = 0; l < LANES; l++) any |= lanes[l];
    return any;
#endif
}

/* Settings of sequences, and the tokens that occurred in each; see `SamplingRows`. */
typedef struct {
    const float *temperature, *top_p, *min_p, *penalty;
    const int64_t *top_k;
    const uint8_t *seen; /* [sequences, size] */
} SamplingOfRows;

/* Choices at the nodes of trees: row r is a node of sequence r / num_nodes. */
typedef struct {
    const SamplingOfRows *sampling; /* NULL: all rows are greedy without a penalty */
    const float *logits;      /* [rows, size] */
    int64_t size, num_nodes;
    const int64_t *seeds;             /* of the sequences */
    const int64_t *positions;         /* of the chosen tokens, [rows] */
    const int64_t *tokens, *parents;  /* of the nodes, [rows]; NULL: what came before a row is in `seen` */
    int64_t *out;
} Choosing;

/* The first of the highest scores. */
static int64_t best_of(const float *scores, int64_t size) {
    Vector peaks = all_of(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) peaks = larger(*(const Vector *)(scores + i), peaks);
    float peak = -INFINITY;
    for (; i < size; i++) peak = scores[i] > peak ? scores[i] : peak;
    for (int l = 0; l < LANES; l++) peak = peaks[l] > peak ? peaks[l] : peak;
    for (i = 0; i + LANES <= size && !any_of(*(const Vector *)(scores + i) == peak); i += LANES)
        ;
    for (; i < size; i++)
        if (scores[i] == peak) return i;
    return 0; /* all of them are nan */
}

static void penalise(float *score, float penalty) { *score = *score > 0 ? *score / penalty : *score * penalty; }

/* Put a row's scores, penalised, into `scores`. */
static void read_scores(const Choosing *one, int64_t row, float *scores) {
    int64_t sequence = row / one->num_nodes, first = sequence * one->num_nodes, size = one->size;
    const uint8_t *seen = one->sampling->seen + sequence * size;
    float penalty = one->sampling->penalty[sequence];
    memcpy(scores, one->logits + row * size, size * sizeof *scores);
    if (penalty == 1) return;
    for (int64_t i = 0; i < size; i++)
        if (seen[i]) penalise(scores + i, penalty);
    if (!one->tokens) return;
    /* The tokens of the node and of its ancestors; the root is marked as seen. */
    for (int64_t node = row; node > first; node = first + one->parents[node]) {
        int64_t token = one->tokens[node], again = 0;
        for (int64_t above = first + one->parents[node]; above > first; above = first + one->parents[above])
            again |= one->tokens[above] == token;
        if (!again && !seen[token]) penalise(scores + token, penalty);
    }
}

/* The k-th largest of numbers that are not positive. Found digit by digit of their bits, which have the opposite
   order. */
static float kth_largest(const float *scores, int64_t size, int64_t k) {
    uint32_t found = 0;
    const uint32_t *bits = (const uint32_t *)scores;
    for (int shift = 20; shift >= 0; shift -= 10) {
        int64_t counts[2048] = {0};
        uint32_t digits = shift == 20 ? 2048 : 1024, digit = 0;
        for (int64_t i = 0; i < size; i++) {
            uint32_t number = bits[i] & 0x7fffffff;
            if (shift == 20 || number >> (shift + 10) == found >> (shift + 10)) counts[number >> shift & (digits - 1)]++;
        }
        while (counts[digit] < k) k -= counts[digit++];
        found |= digit << shift;
    }
    float score;
    memcpy(&score, &found, sizeof score);
    return -score;
}

/* The lowest score that is kept if the likeliest tokens with a probability of top_p are; those below `least` have
   none. The threshold is found bit by bit; numbers above 0 have the order of their bits. */
static float top_p_edge(const float *scores, int64_t size, float top_p, float least, float *masses) {
    Vector total = {0};
    int64_t padded = (size + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < padded; i += LANES) {
        Vector score = *(const Vector *)(scores + i);
        Vector mass = (Vector)((Sums)exponentials(score) & (Sums)(score >= least));
        *(Vector *)(masses + i) = mass;
        total += mass;
    }
    float whole = 0, edge = 0;
    for (int l = 0; l < LANES; l++) whole += total[l];
    uint32_t enough = 0;
    for (int bit = 29; bit >= 0; bit--) {
        uint32_t candidate = enough | 1u << bit;
        Vector above = {0}, border;
        float kept = 0, lowest;
        memcpy(&lowest, &candidate, sizeof lowest);
        border = all_of(lowest);
        for (int64_t i = 0; i < padded; i += LANES) {
            Vector mass = *(const Vector *)(masses + i);
            above += (Vector)((Sums)mass & (Sums)(mass >= border));
        }
        for (int l = 0; l < LANES; l++) kept += above[l];
        if (kept >= top_p * whole) enough = candidate;
    }
    if (!enough) return least;
    memcpy(&edge, &enough, sizeof edge);
    float lowest = 0;
    for (int64_t i = 0; i < size; i++)
        if (masses[i] >= edge && scores[i] < lowest) lowest = scores[i];
    return lowest;
}

/* The token with the highest sum of score and noise, of those from `least` on. */
static int64_t drawn(const float *scores, int64_t size, float least, uint64_t key, int64_t likeliest) {
    int64_t winner = likeliest;
    double best = gumbel(key, likeliest);
    for (int64_t i = 0; i < size; i += LANES) {
        Vector score = *(const Vector *)(scores + i);
        /* The noise of u is less than -log(u), so a token wins only if u < exp(score - best). */
        Vector most = exponentials(score - (float)best) * 0x1.01p24f;
        if (!any_of((Sums)(high_bits(key, NULL, i) <= most) & (Sums)(score >= least))) continue;
        for (int64_t token = i; token < i + LANES && token < size; token++) {
            if (!(scores[token] >= least)) continue;
            double sum = scores[token] + gumbel(key, token);
            if (sum <= best) continue;
            best = sum;
            winner = token;
        }
    }
    return winner;
}

static void choose_row(const void *job, int64_t row) {
    const Choosing *one = job;
    const SamplingOfRows *sampling = one->sampling;
    int64_t size = one->size, padded = (size + LANES - 1) / LANES * LANES, sequence = row / one->num_nodes;
    if (!sampling || (sampling->temperature[sequence] == 0 && sampling->penalty[sequence] == 1)) {
        one->out[row] = best_of(one->logits + row * size, size);
        return;
    }
    float *scores = malloc(2 * padded * sizeof *scores);
    read_scores(one, row, scores);
    int64_t likeliest = best_of(scores, size), top_k = sampling->top_k[sequence];
    float temperature = sampling->temperature[sequence], top_p = sampling->top_p[sequence];
    one->out[row] = likeliest;
    if (temperature > 0) {
        /* Relative to the best score, so that a tiny temperature cannot cause an overflow. */
        float peak = scores[likeliest], least = logf(sampling->min_p[sequence]), warm = fmaxf(temperature, FLT_MIN);
        for (int64_t i = 0; i < size; i++) scores[i] = (scores[i] - peak) / warm;
        for (int64_t i = size; i < padded; i++) scores[i] = -INFINITY;
        float edge = top_k > 0 && top_k < size ? kth_largest(scores, size, top_k) : -INFINITY;
        if (top_p < 1) edge = top_p_edge(scores, size, top_p, edge, scores + padded);
        uint64_t key = key_of(one->seeds[sequence], one->positions[row]);
        one->out[row] = drawn(scores, size, fmaxf(edge, least), key, likeliest);
    }
    free(scores);
}

/* `out` becomes the token of each row. */
void choose(const Choosing *job, int64_t num_rows, int threads) { share(choose_row, job, num_rows, threads); }

/* log x for x > 0: of the exponent, and of a fraction between 0.7 and 1.4 by a polynomial. */
static inline Vector logarithms(Vector x) {
    Sums bits = (Sums)x, shifted = bits - 0x3f3504f3;
    Vector exponent = __builtin_convertvector(shifted >> 23, Vector);
    Vector y = (Vector)((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f, z = y * y;
    Vector p = multiply_add(all_of(7.0376836292e-2f), y, all_of(-1.1514610310e-1f));
    p = multiply_add(p, y, all_of(1.1676998740e-1f));
    p = multiply_add(p, y, all_of(-1.2420140846e-1f));
    p = multiply_add(p, y, all_of(1.4249322787e-1f));
    p = multiply_add(p, y, all_of(-1.6668057665e-1f));
    p = multiply_add(p, y, all_of(2.0000714765e-1f));
    p = multiply_add(p, y, all_of(-2.4999993993e-1f));
    p = multiply_add(p, y, all_of(3.3333331174e-1f));
    p = p * y * z + exponent * -2.12194440e-4f - z * 0.5f;
    return y + p + exponent * 0.693359375f;
}

/* The noise of `count` tokens for a drafted token: of 24 bits, because it changes no choice of the target. */
void noise(int64_t seed, int64_t position, const int64_t *tokens, int64_t count, float *out) {
    uint64_t key = key_of(seed, position);
    int64_t last[LANES] = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t left = count - i < LANES ? count - i : LANES;
        if (left < LANES) memcpy(last, tokens + i, left * sizeof *last);
        Vector u = (high_bits(key, left < LANES ? last : tokens + i, 0) + 0.5f) * 0x1p-24f, rest = 1.0f - u;
        /* -log1p(-u), exact also where 1 - u is rounded. */
        Vector waits = -logarithms(rest) * u / (1.0f - rest), noises = -logarithms(waits);
        memcpy(out + i, &noises, left * sizeof *out);
    }
}
