/* Decoding on a CPU: products, attention, and the ends of rounds, for weights in fp32, bf16, fp16 or on grids, and keys and
   values in fp32.

   What is computed for a token depends on that token and on what it sees, never on what is computed beside
   it: integer sums have no order, all else is summed per token in a fixed order. So a node of a tree gets the
   bits of a plain step. */

#include "draft.h"
#include "rounds.h"

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
