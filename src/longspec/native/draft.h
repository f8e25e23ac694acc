/* The draft: a level of nodes, and whole chains. */

#pragma once

#include "attention.h"
#include "choose.h"
#include "product.h"
#include "rounds.h"

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
    if (draft->final_norm) norm(stream, draft->final_norm, draft->eps, size, queries, stream);
    free(gate_up);
    free(lse);
    free(out);
    free(crossing);
    free(qkv);
}

/* A chain that the draft proposes for each row. Its nodes stand in the ring itself, each in the entry of the position
   that has just left its window. What they replace is put back at the end. */
typedef struct {
    const Draft *draft;
    const Matrix *parent; /* reads the hidden states of the level above; or NULL */
    const float *parent_norm;
    const Matrix *head;
    const float *more; /* further rows of the head, [num_more, hidden size] */
    int64_t num_more;
    const int64_t *token_ids; /* of the head's rows */
    const float *temperature; /* NULL: all rows are greedy */
    const int64_t *seeds;
    const Rows *rows;
    Writing to;
    Context ring, pages;
    int64_t window, ring_size;
    int64_t *ring_positions; /* [rows, ring_size] */
    float *replaced;         /* [levels, rows, KV heads, 2, head_dim] */
    float *hidden;           /* of the newest level's nodes, [rows, hidden size] */
    int64_t *tokens;         /* of the newest nodes, [rows], */
    float *scores;           /* and the log-probabilities that the draft gives them */
} DraftedChain;

/* Reserve entries for the tokens of each row's text that the ring lacks, the newest first. Returns how many the row has
   that lacks most; `tokens`, `positions` and `entries` become [rows, that many], and there is room for `window`. A row
   that lacks fewer writes the others to the last entry, which nobody reads. */
int64_t claim(const DraftedChain *chain, int64_t *tokens, int64_t *positions, int64_t *entries) {
    const Rows *rows = chain->rows;
    int64_t num_rows = chain->ring.num_rows, most = 1, dump = chain->ring_size - 1;
    int64_t *counts = malloc(num_rows * sizeof *counts);
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t *held = chain->ring_positions + row * chain->ring_size;
        int64_t newest = -1;
        for (int64_t entry = 0; entry < chain->window; entry++) newest = held[entry] > newest ? held[entry] : newest;
        int64_t lacking = rows->lengths[row] - newest;
        counts[row] = lacking < 1 ? 1 : lacking > chain->window ? chain->window : lacking;
        /* A resting row reads nothing: after its root were read, the unread tokens before it would be lost. */
        if (!rows->running[row] || !rows->active[row]) counts[row] = 0;
        most = counts[row] > most ? counts[row] : most;
    }
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t back = 0; back < most; back++) {
            int64_t at = row * most + back, position = rows->lengths[row] - back, wanted = back < counts[row];
            positions[at] = position < 0 ? 0 : position;
            tokens[at] = rows->text[row * rows->text_stride + positions[at]];
            entries[at] = wanted ? positions[at] % chain->window : dump;
            chain->ring_positions[row * chain->ring_size + entries[at]] = wanted ? positions[at] : -1;
        }
    free(counts);
    return most;
}

/* Copy the KV of a level's entry of the ring to `replaced`, or back. */
static void keep_entry(const DraftedChain *chain, int64_t row, int64_t level, int is_end) {
    const Writing *to = &chain->to;
    int64_t heads = to->num_kv_heads, dim = to->head_dim, size = dim * sizeof(float);
    int64_t place = row * chain->ring_size + (chain->rows->lengths[row] + level) % chain->window;
    float *kept = chain->replaced + (level * chain->ring.num_rows + row) * 2 * heads * dim;
    for (int64_t head = 0; head < heads; head++)
        for (int part = 0; part < 2; part++) {
            float *there = (part ? to->values : to->keys) + (head * to->num_entries + place) * dim;
            float *here = kept + (head * 2 + part) * dim;
            memcpy(is_end ? there : here, is_end ? here : there, size);
        }
}

/* Put back what the nodes of these levels replaced, the last first: in a small window a level may have replaced
   another's node. */
void end_chain(const DraftedChain *chain, int64_t num_levels) {
    for (int64_t level = num_levels - 1; level > 0; level--)
        for (int64_t row = 0; row < chain->ring.num_rows; row++) keep_entry(chain, row, level, 1);
}

/* The further rows of the head: as many at a time as one item has. */
enum { MORE_ROWS = 64 };
typedef struct {
    const DraftedChain *chain;
    float *logits; /* [rows, num_scores] */
    int64_t num_scores, level;
} Scoring;

static void score_more(const void *job, int64_t item) {
    const Scoring *one = job;
    const DraftedChain *chain = one->chain;
    int64_t size = chain->draft->qkv->num_in, first = item * MORE_ROWS, base = one->num_scores - chain->num_more;
    int64_t end = first + MORE_ROWS < chain->num_more ? first + MORE_ROWS : chain->num_more;
    for (int64_t row = 0; row < chain->ring.num_rows; row++)
        for (int64_t i = first; i < end; i++) {
            const float *x = chain->hidden + row * size, *y = chain->more + i * size;
            Vector sums = {0};
            int64_t d = 0;
            for (; d + LANES <= size; d += LANES)
                sums = multiply_add(*(const Vector *)(x + d), *(const Vector *)(y + d), sums);
            float score = 0;
            for (; d < size; d++) score += x[d] * y[d];
            for (int l = 0; l < LANES; l++) score += sums[l];
            one->logits[row * one->num_scores + base + i] = score;
        }
}

/* The best token of each row, and its log-probability after the noise of the target's choice. */
static void pick_token(const void *job, int64_t row) {
    const Scoring *one = job;
    const DraftedChain *chain = one->chain;
    int64_t size = one->num_scores, i = 0;
    float *logits = one->logits + row * size, warm = chain->temperature ? chain->temperature[row] : 0, total = 0;
    if (warm > 0) {
        float *noises = malloc(size * sizeof *noises);
        noise(chain->seeds[row], chain->rows->lengths[row] + 1 + one->level, chain->token_ids, size, noises);
        for (int64_t n = 0; n < size; n++) logits[n] = logits[n] / warm + noises[n];
        free(noises);
    }
    int64_t best = best_of(logits, size);
    Vector totals = {0};
    for (; i + LANES <= size; i += LANES) totals += exponentials(*(const Vector *)(logits + i) - logits[best]);
    for (; i < size; i++) total += expf(logits[i] - logits[best]);
    for (int l = 0; l < LANES; l++) total += totals[l];
    chain->tokens[row] = chain->token_ids[best];
    /* A draft that computes nan may propose anything, but its scores must have an order. */
    chain->scores[row] = total >= 1 && total <= FLT_MAX ? -logf(total) : -INFINITY;
}

/* Draft a node for each row below those of `level`. x [tokens, hidden size] are the embedded tokens that get keys and
   values: at level 0 those that were claimed, then the newest nodes. `feature` [rows, hidden size] is what the
   target's hidden state adds, or NULL. */
void chain_level(const DraftedChain *chain, int64_t level, const float *x, const float *feature, int64_t num_tokens,
                 const int64_t *positions, const int64_t *entries, int threads) {
    int64_t rows = chain->ring.num_rows, size = chain->draft->qkv->num_in, head_size = chain->head->num_out;
    Writing to = chain->to;
    Context ring = chain->ring;
    int64_t *asked = malloc(3 * rows * sizeof *asked), *own = asked + rows, *counts = own + rows;
    int64_t *places = malloc(rows * num_tokens * sizeof *places);
    float *stream = malloc(rows * size * sizeof *stream);
    for (int64_t row = 0; row < rows; row++) {
        int64_t position = asked[row] = chain->rows->lengths[row] + level;
        counts[row] = position + 1 < chain->window ? position + 1 : chain->window;
        own[row] = position % chain->window;
        if (level) keep_entry(chain, row, level, 0);
        for (int64_t token = 0; token < num_tokens; token++)
            places[row * num_tokens + token] =
                row * chain->ring_size + (level ? own[row] : entries[row * num_tokens + token]);
        const float *in = x + row * num_tokens * size;
        for (int64_t i = 0; i < size; i++) stream[row * size + i] = in[i] + (feature ? feature[row * size + i] : 0);
    }
    if (level && chain->parent)
        product(chain->parent, NORM, chain->hidden, chain->parent_norm, chain->draft->eps, rows, 1, stream, threads);
    to.num_tokens = rows * num_tokens;
    to.places = places;
    to.positions = level ? asked : positions;
    ring.lengths = counts;
    ring.query_row_stride = num_tokens * ring.query_stride;
    draft_level(chain->draft, &to, &ring, &chain->pages, asked, x, stream, threads);
    memcpy(chain->hidden, stream, rows * size * sizeof *stream);
    Scoring job = {chain, NULL, head_size + chain->num_more, level};
    job.logits = malloc(rows * job.num_scores * sizeof *job.logits);
    float *scores = chain->num_more ? malloc(rows * head_size * sizeof *scores) : job.logits;
    product(chain->head, PLAIN, stream, NULL, 0, rows, 0, scores, threads);
    if (chain->num_more) {
        for (int64_t row = 0; row < rows; row++)
            memcpy(job.logits + row * job.num_scores, scores + row * head_size, head_size * sizeof *scores);
        share(score_more, &job, (chain->num_more + MORE_ROWS - 1) / MORE_ROWS, threads);
        free(scores);
    }
    share(pick_token, &job, rows, threads);
    free(job.logits);
    free(stream);
    free(places);
    free(asked);
}
