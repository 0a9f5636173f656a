// Draft trees of a one-layer draft head: the pending tokens are read with the target's states, then, level by level,
// tokens of the tree, each with its parent's state. The tree grows where it is most probable, or has a given shape.

#pragma once

#include <vector>

#include "siblings.h"

extern "C" {

struct Growth {  // mirrors _Growth in engine/native/draft_tree.py
    const bf16* embedding;  // [vocabulary, width]
    const float *token_norm, *state_norm, *norm;
    const Matrix* head;        // the output layer
    const int64_t* head_ids;   // [head rows] the token of each row, or null: the row's index
    const float* tap_norms;    // [taps, width]
    const Matrix* fuse;        // [taps width] -> width, of the normed tap states side by side
    const bf16* features;      // [pending, taps, width] the target's states before the pending tokens
    const int64_t* pending;
    int64_t *tokens, *parents;  // [nodes] all nodes, level by level; parents, -1: the root
    double* log_probs;          // [nodes] of the nodes' paths
    bf16* states;               // [1 + depth breadth, width] normed, of the root and of expanded nodes
    float *x, *logits;          // [widest, width], [breadth, head rows]
    bf16 *tap_states, *read;    // [pending, taps, width], [widest, 2 width]
    float* top_values;          // [breadth, breadth] logits
    int64_t *top_tokens, *positions;  // rows of the head with these logits
    uint8_t* mask;              // [widest, columns]
    uint8_t* workspace;
    double floor;               // nodes with a smaller log probability are left out
    int32_t taps, pending_count, entries, depth, breadth, threads, vocabulary;  // head rows from `vocabulary` on: padding
};

}  // extern "C"

namespace {

// Reads tokens in the tree, and keeps the states after them.
struct TreeReader {
    const Shape* shape;
    const Layer* layers;
    const Growth& g;
    Pass p;
    const int width, first;                // first: columns of committed tokens
    std::vector<int> expanded, place;      // the nodes that were read; each node's index among them
    std::vector<std::vector<int>> paths;   // for each of them, the indices in `expanded` from the top to it

    TreeReader(const Shape* shape, const Layer* layers, const Pass& pass, const Growth& growth)
        : shape(shape), layers(layers), g(growth), p(pass), width(shape->width),
          first(growth.entries + growth.pending_count) {
        p.x = g.x, p.read = g.read, p.positions = g.positions, p.rows = 1, p.position_stride = p.mask_stride = 0;
    }

    void put(const bf16* from, float* to) const {
        for (int i = 0; i < width; i += 16) store(to + i, load(from + i));
    }

    // x holds states; the layer reads each state next to its token's embedding
    void run(int count, int start, const int64_t* tokens, bf16* found) {
        std::vector<float> token(width);
        for (int m = 0; m < count; m++) {
            bf16* const to = g.read + int64_t(m) * 2 * width;
            put(g.embedding + tokens[m] * width, token.data());
            normed(token.data(), g.token_norm, width, shape->eps, to);
            normed(g.x + int64_t(m) * width, g.state_norm, width, shape->eps, to + width);
        }
        p.start = start, p.count = count, p.columns = start + count, p.mask = g.mask;
        outrider_run(shape, layers, &p);
        for (int m = 0; m < count; m++)
            normed(g.x + int64_t(m) * width, g.norm, width, shape->eps, found + int64_t(m) * width);
    }

    // Reads the pending tokens; the root's state is the first.
    void open() {
        for (int m = 0; m < g.pending_count * g.taps; m++) {
            put(g.features + int64_t(m) * width, g.logits);
            normed(g.logits, g.tap_norms + m % g.taps * width, width, shape->eps, g.tap_states + int64_t(m) * width);
        }
        outrider_product(g.fuse, g.tap_states, g.x, g.pending_count, 1, g.threads, g.workspace);
        for (int m = 0; m < g.pending_count; m++) {
            g.positions[m] = g.entries + m;
            for (int c = 0; c < first; c++) g.mask[int64_t(m) * first + c] = c <= g.entries + m;
        }
        run(g.pending_count, g.entries, g.pending, g.read);
        std::memcpy(g.states, g.read + int64_t(g.pending_count - 1) * width, 2 * width);
    }

    // Reads nodes below nodes that were read; `nodes`: how many there are so far.
    void read(const std::vector<int>& chosen, const int64_t* parents, int nodes) {
        const int many = chosen.size(), before = expanded.size(), columns = first + before + many;
        place.resize(nodes, -1);
        std::memset(g.mask, 0, int64_t(many) * columns);
        std::vector<int64_t> tokens(many);
        for (int m = 0; m < many; m++) {
            const int node = chosen[m], parent = parents[node];
            std::vector<int> path = parent < 0 ? std::vector<int>() : paths[place[parent]];
            const int above = parent < 0 ? 0 : place[parent] + 1;
            place[node] = before + m;
            path.push_back(place[node]);
            std::memset(g.mask + int64_t(m) * columns, 1, first);
            for (const int at : path) g.mask[int64_t(m) * columns + first + at] = 1;
            g.positions[m] = first - 1 + path.size();
            tokens[m] = g.tokens[node];
            put(g.states + int64_t(above) * width, g.x + int64_t(m) * width);
            paths.push_back(path), expanded.push_back(node);
        }
        run(many, first + before, tokens.data(), g.states + int64_t(1 + before) * width);
    }

    // The logits of the `count` nodes read last (of the root before any).
    void score(int count) {
        const int start = expanded.empty() ? 0 : 1 + int(expanded.size()) - count;
        outrider_product(g.head, g.states + int64_t(start) * width, g.logits, count, 1, g.threads, g.workspace);
    }
};

}  // namespace

extern "C" {

// Grows a tree where it is most probable; returns the number of its nodes.
int32_t outrider_grow(const Shape* shape, const Layer* layers, const Pass* pass, const Growth* growth) {
    const Growth& g = *growth;
    const int rows = g.head->out, size = g.vocabulary, breadth = std::min(g.breadth, size);
    TreeReader reader(shape, layers, *pass, g);
    reader.open();

    std::vector<int> latest{-1};  // nodes
    int found = 0;
    for (int level = 0;; level++) {
        const int count = latest.size(), begun = found;
        reader.score(count);
        outrider_largest(g.logits, rows, 0, count, 1, size, breadth, g.top_values, g.top_tokens, g.threads);
        for (int m = 0; m < count; m++) {
            const float *const best = g.top_values + int64_t(m) * breadth, *const logits = g.logits + int64_t(m) * rows;
            Sixteen total = zero();
            for (int i = 0; i < size / 16 * 16; i += 16)
                total = add(total, exponential(sub(load(logits + i), same(best[0]))));
            float mass = added(total);
            for (int i = size / 16 * 16; i < size; i++) mass += std::exp(logits[i] - best[0]);
            const double sum = best[0] + std::log(mass), above = latest[m] < 0 ? 0 : g.log_probs[latest[m]];
            for (int j = 0; j < breadth; j++) {
                const double log = best[j] - sum + above;
                if (!(log >= g.floor) || std::isinf(log)) continue;
                const int64_t row = g.top_tokens[int64_t(m) * breadth + j];
                g.tokens[found] = g.head_ids ? g.head_ids[row] : row;
                g.parents[found] = latest[m], g.log_probs[found++] = log;
            }
        }
        if (level + 1 == g.depth || found == begun) return found;
        latest.resize(found - begun);
        for (int m = begun; m < found; m++) latest[m - begun] = m;
        std::stable_sort(latest.begin(), latest.end(), [&](int a, int b) { return g.log_probs[a] > g.log_probs[b]; });
        if (int(latest.size()) > breadth) latest.resize(breadth);
        reader.read(latest, g.parents, found);
    }
}

// Draws a tree of a given shape; the growth's tokens are the family's.
void outrider_draw_tree(const Shape* shape, const Layer* layers, const Pass* pass, const Growth* growth,
                        const Family* family) {
    TreeReader reader(shape, layers, *pass, *growth);
    reader.open();
    std::vector<int> parents{-1}, kids, inner;  // nodes
    int64_t node = 0;
    for (int origin = 0;; origin += parents.size(), std::swap(parents, inner), inner.clear()) {
        reader.score(parents.size());
        for (size_t m = 0; m < parents.size(); m++)
            softmax(growth->logits + int64_t(m) * growth->head->out, family->vocabulary, family->temperature,
                    family->distributions + int64_t(origin + m) * family->vocabulary);
        const int64_t stop = family->level_after(node);
        for (size_t m = 0; m < parents.size(); m++) {
            kids.clear();
            for (int64_t at = node; at < stop; at++)
                if (family->parents[at] == parents[m]) kids.push_back(at);
            fill(*family, kids, origin + m);
        }
        if ((node = stop) == family->nodes) return;
        const int64_t next = family->level_after(node);
        for (int64_t at = node; at < next; at++)
            if (inner.empty() || inner.back() != family->parents[at]) inner.push_back(family->parents[at]);
        reader.read(inner, family->parents, node);
    }
}

}  // extern "C"
