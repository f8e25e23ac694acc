/* Rotated queries and keys, and attention to keys and values in pages or in a ring. */

#pragma once

#include "vectors.h"

/* Keys whose scores lie together, the largest head, and queries that are scored at a time. */
enum { KEYS = 64, MOST_DIM = 256, QUERIES = 4 };
/* Queries whose scores with all keys are kept at a time, and how many keys and values are asked for ahead. */
enum { MOST_QUERIES = 48, KEYS_AHEAD = 32, VALUES_AHEAD = 16 };

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
    int64_t num_first;   /* heads of all rows whose queries are cut into `first_parts` parts; */
    int64_t first_parts;
    int64_t parts;       /* those of the other heads are cut into so many */
} Attending;

/* Some queries of a row that share a KV head. */
typedef struct {
    const Attending *one;
    int64_t row, kv_head, count;
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

/* The score of a query with a key; those with the keys up to the next multiple of KEYS follow. */
static inline float *score_at(const Head *head, int64_t query, int64_t key) {
    return head->scores + (key / KEYS * head->count + query) * KEYS + key % KEYS;
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
        for (int64_t query = 0; query < head->count; query += QUERIES) {
            const float *queries = head->queries + query * D;
            float *out = score_at(head, query, first);
            if (tiles == TILES)
                EACH_COUNT(head->count - query, score(queries, count, turned, TILES, D, scale, out));
            else
                EACH_COUNT(head->count - query, score(queries, count, turned, 1, D, scale, out));
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
        if (!is_seen) *score_at(head, query, key) = -INFINITY;
    }
    /* What lies behind the last key takes part in no sum. */
    for (int64_t key = head->num_keys; key % LANES; key++) *score_at(head, query, key) = -INFINITY;
    for (int64_t first = 0; first < head->num_keys; first += LANES)
        peaks = larger(peaks, *(const Vector *)score_at(head, query, first));
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
            const float *scores = score_at(head, query, first);
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
    Head head = {one, row, kv_head, count, num_keys, scores, queries, peaks, peaks + count, outs};
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
        for (int64_t d = 0; d < D; d++) outs[query][d] = total == 0 ? 0 : outs[query][d] / total;
        one->lse[(row * to->num_queries + token) * to->num_heads + index] =
            total == 0 ? -INFINITY : peaks[query] + logf(total);
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
