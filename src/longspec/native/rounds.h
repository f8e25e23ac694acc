/* The end of a round, and lookup. */

#pragma once

#include <stdint.h>
#include <string.h>
#include <math.h>

/* What a round changes of its rows; see `Slots`. */
typedef struct {
    int64_t *lengths, *num_unread, *report, *text;
    const int64_t *limits, *eos_ids;
    float *feature;
    uint8_t *running, *seen;
    const uint8_t *active;
    int64_t hidden_size, num_eos, report_stride, text_stride, num_tokens;
} Rows;

/* Where the nodes of trees stand behind each row's prefix: which nodes each one sees, itself and its ancestors, and its
   position and entry. Without `sees`, each node is the child of the one before it. `tables` are of pages, [rows,
   num_pages]; all else is [rows, num_nodes] or [rows, num_nodes, num_nodes]. */
void describe_nodes(const int64_t *parents, int64_t num_rows, int64_t num_nodes, const int64_t *lengths,
                    const int32_t *tables, int64_t num_pages, int64_t page_size, uint8_t *sees, int64_t *positions,
                    int64_t *places) {
    for (int64_t row = 0; row < num_rows; row++, tables += num_pages)
        for (int64_t node = 0; node < num_nodes; node++) {
            int64_t at = row * num_nodes + node, entry = lengths[row] + node, depth = node;
            if (sees) {
                uint8_t *own = sees + at * num_nodes;
                int64_t parent = parents[at];
                depth = node ? positions[row * num_nodes + parent] - lengths[row] + 1 : 0;
                memcpy(own, own - (node - parent) * num_nodes, num_nodes);
                if (!node) memset(own, 0, num_nodes);
                own[node] = 1;
            }
            positions[at] = lengths[row] + depth;
            places[at] = tables[entry / page_size] * page_size + entry % page_size;
        }
}

/* Walk from the root of each tree along the target's choices, and update the rows. A row that does not move keeps no
   node. `path` [rows, width] becomes the accepted nodes, the last one repeated, `num_kept` their number with the root,
   `before` the lengths until now. Returns whether a kept node is not in its final place. */
int settle(const Rows *rows, int64_t num_rows, const int64_t *tokens, const int64_t *parents, const int64_t *choices,
           const float *hidden, int64_t num_nodes, int64_t width, int accumulates, int64_t *path, int64_t *num_kept,
           int64_t *before) {
    int is_moved = 0;
    for (int64_t row = 0; row < num_rows; row++, tokens += num_nodes, parents += num_nodes, choices += num_nodes) {
        int64_t *report = rows->report + row * rows->report_stride, *text = rows->text + row * rows->text_stride;
        int64_t *nodes = path + row * width, here = 0, kept = 1, limit = rows->limits[row];
        uint8_t *seen = rows->seen + row * rows->num_tokens;
        before[row] = rows->lengths[row];
        memset(nodes, 0, width * sizeof *nodes);
        num_kept[row] = report[0] = 0;
        if (!rows->running[row] || !rows->active[row]) continue;
        while (kept < width) {
            int64_t child = 1;
            while (child < num_nodes && (parents[child] != here || tokens[child] != choices[here])) child++;
            if (child == num_nodes) break;
            here = nodes[kept] = child;
            is_moved |= child != kept;
            kept++;
        }
        for (int64_t step = kept; step < width; step++) nodes[step] = here;
        num_kept[row] = report[0] = kept;
        int ends = 0, is_finite = 1;
        for (int64_t step = 0; step < kept; step++) {
            int64_t token = choices[nodes[step]], place = before[row] + 1 + step;
            report[1 + step] = token;
            if (place < limit) text[place] = token;
            seen[token] = 1;
            for (int64_t i = 0; i < rows->num_eos; i++) ends |= rows->eos_ids[row * rows->num_eos + i] == token;
        }
        const float *state = hidden + (row * num_nodes + here) * rows->hidden_size;
        for (int64_t i = 0; i < rows->hidden_size; i++) is_finite &= isfinite(state[i]) != 0;
        if (!is_finite) report[1] = -1;
        memcpy(rows->feature + row * rows->hidden_size, state, rows->hidden_size * sizeof *state);
        rows->num_unread[row] = kept + (accumulates ? rows->num_unread[row] : 0);
        int64_t length = before[row] + kept;
        rows->running[row] = !ends && length + 1 < limit;
        /* A round may pass the row's limit. Clamp the length: only up to the limit is there room for a tree. */
        rows->lengths[row] = length < limit ? length : limit - 1;
    }
    return is_moved;
}

/* The longest run of tokens, at least `least` and at most `most`, that stands at the end of each text and occurs
   earlier, and of several places the newest: how long it is, or 0, and where it goes on there. */
void find(const int64_t *text, int64_t stride, const int64_t *ends, int64_t num_rows, int64_t least, int64_t most,
          int64_t *runs, int64_t *places) {
    for (int64_t row = 0; row < num_rows; row++, text += stride) {
        const int64_t *end = text + ends[row];
        runs[row] = places[row] = 0;
        for (int64_t place = ends[row] - 1; place >= least && runs[row] < most; place--) {
            int64_t run = 0;
            while (run < most && run < place && text[place - 1 - run] == end[-1 - run]) run++;
            if (run < least || run <= runs[row]) continue;
            runs[row] = run;
            places[row] = place;
        }
    }
}
