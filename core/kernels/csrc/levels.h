// A tree that a trained layer grows beside its target: what waits is read with the target's states, then, level by
// level, the tokens that are found likeliest, each with its parent's state.

#pragma once

#include <vector>

extern "C" {

struct Growth {
    const bf16* embedding;  // [tokens, width]
    const float *embedded_norm, *entered_norm, *norm;
    const Matrix* words;
    const int64_t* ids;     // [words] of which tokens they are, or null: their own
    const float* tap_norms;  // [taps, width]
    const Matrix* fuse;      // of taps, side by side and normed
    const bf16* features;    // [waiting, taps, width]
    const int64_t* waiting;
    int64_t *tokens, *parents;  // [most] what is found: all children of what is expanded; parents, -1: the root
    double* logs;               // [most] of the probabilities of their paths
    bf16* states;               // [1 + depth width, width] the root's, and of what is expanded, normed
    float *x, *logits;          // [widest, width], [breadth, words]
    bf16 *taken, *read;         // [waiting, taps, width], [widest, 2 width]
    float* values;              // [breadth, breadth] logits, and which they are
    int64_t *places, *positions;
    uint8_t* mask;  // [widest, columns]
    uint8_t* work;
    double floor;  // what is less likely is left out
    int32_t taps, wait, behind, depth, breadth, threads;
};

int32_t outrider_grow(const Shape* shape, const Layer* layers, const Pass* pass, const Growth* growth) {
    const Growth& g = *growth;
    const int width = shape->width, size = g.words->out, breadth = std::min(g.breadth, size);
    Pass p = *pass;
    p.x = g.x, p.read = g.read, p.positions = g.positions, p.rows = 1, p.position_stride = p.mask_stride = 0;

    const auto put = [&](const bf16* from, float* to) {
        for (int i = 0; i < width; i += 16) store(to + i, load(from + i));
    };
    // x holds what comes from a state; the layer reads it beside its token
    const auto run = [&](int count, int start, const int64_t* tokens, bf16* found) {
        std::vector<float> token(width);
        for (int m = 0; m < count; m++) {
            bf16* const to = g.read + int64_t(m) * 2 * width;
            put(g.embedding + tokens[m] * width, token.data());
            normed(token.data(), g.embedded_norm, width, shape->eps, to);
            normed(g.x + int64_t(m) * width, g.entered_norm, width, shape->eps, to + width);
        }
        p.start = start, p.count = count, p.columns = start + count, p.mask = g.mask;
        outrider_run(shape, layers, &p);
        for (int m = 0; m < count; m++)
            normed(g.x + int64_t(m) * width, g.norm, width, shape->eps, found + int64_t(m) * width);
    };

    for (int m = 0; m < g.wait * g.taps; m++) {
        put(g.features + int64_t(m) * width, g.logits);
        normed(g.logits, g.tap_norms + m % g.taps * width, width, shape->eps, g.taken + int64_t(m) * width);
    }
    outrider_product(g.fuse, g.taken, g.x, g.wait, 1, g.threads, g.work);
    const int first = g.behind + g.wait;  // the columns of what is committed
    for (int m = 0; m < g.wait; m++) {
        g.positions[m] = g.behind + m;
        for (int c = 0; c < first; c++) g.mask[int64_t(m) * first + c] = c <= g.behind + m;
    }
    run(g.wait, g.behind, g.waiting, g.read);
    std::memcpy(g.states, g.read + int64_t(g.wait - 1) * width, 2 * width);

    std::vector<int> latest{-1}, expanded;  // candidates
    std::vector<std::vector<int>> paths;    // of what is expanded: places in that order, from the top
    std::vector<int> place;                 // of each candidate in that order
    int found = 0;
    for (int level = 0;; level++) {
        const int count = latest.size(), start = expanded.size() - (level ? count : 0), begun = found;
        const bf16* const states = g.states + int64_t(level ? 1 + start : 0) * width;
        outrider_product(g.words, states, g.logits, count, 1, g.threads, g.work);
        outrider_largest(g.logits, size, 0, count, 1, size, breadth, g.values, g.places, g.threads);
        for (int m = 0; m < count; m++) {
            const float* const best = g.values + int64_t(m) * breadth;
            Sixteen total = zero();
            for (int i = 0; i < size; i += 16)
                total = add(total, exponential(sub(load(g.logits + int64_t(m) * size + i), same(best[0]))));
            const double sum = best[0] + std::log(added(total)), above = latest[m] < 0 ? 0 : g.logs[latest[m]];
            for (int j = 0; j < breadth; j++) {
                const double log = best[j] - sum + above;
                if (!(log >= g.floor) || std::isinf(log)) continue;
                const int64_t word = g.places[int64_t(m) * breadth + j];
                g.tokens[found] = g.ids ? g.ids[word] : word, g.parents[found] = latest[m], g.logs[found++] = log;
            }
        }
        if (level + 1 == g.depth || found == begun) return found;
        latest.resize(found - begun);
        for (int m = begun; m < found; m++) latest[m - begun] = m;
        std::stable_sort(latest.begin(), latest.end(), [&](int a, int b) { return g.logs[a] > g.logs[b]; });
        if (int(latest.size()) > breadth) latest.resize(breadth);

        const int many = latest.size(), before = expanded.size(), columns = first + before + many;
        place.resize(found, -1);
        std::memset(g.mask, 0, int64_t(many) * columns);
        std::vector<int64_t> tokens(many);
        for (int m = 0; m < many; m++) {
            const int node = latest[m], parent = g.parents[node];
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
}

}  // extern "C"
