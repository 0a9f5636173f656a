// Draft trees of Medusa's heads: all heads in one call, then the tree from their distributions.

#pragma once

#include "siblings.h"

extern "C" {

struct Heads {  // mirrors _Heads in engine/native/sampled_tree.py
    const bf16* state;      // [width] the target's last state
    const bf16* condition;  // [heads, width] what each head also reads, or null
    const Matrix *first, *about;  // width -> heads width, of the state and of the conditions (null without)
    const Matrix* more;     // [heads, steps] width -> width
    const Matrix* output;
    float *sums, *logits;   // [2 or 3, heads of `first`, width], [heads, output rows]
    bf16* states;           // [heads, width]
    uint8_t* workspace;
    int32_t heads, steps, width, threads;
};

// The rows of a matrix that belong to one head.
inline Matrix rows_of(const Matrix& w, int head, int width) {
    Matrix part = w;
    part.tiles += int64_t(head) * (width / 16) * (w.in / 32) * record(w.bits);
    if (w.scales) part.scales += int64_t(head) * width;
    if (w.bias) part.bias += int64_t(head) * width;
    part.out = width;
    return part;
}

// Head k's state is x + SiLU(W_k x + V_k c_k), then x + SiLU(W x) for each further step.
void outrider_draw_heads(const Heads* heads, const Family* family) {
    const Heads& h = *heads;
    const int width = h.width;
    float* const projected = h.sums;
    float* const conditioned = h.sums + h.first->out;
    outrider_product(h.first, h.state, projected, 1, 1, h.threads, h.workspace);
    const auto gated = [&](const float* x, const float* one, const float* other, float* to) {
        for (int i = 0; i < width; i += 16) {
            const Sixteen in = other ? add(load(one + i), load(other + i)) : load(one + i);
            store(to + i, add(load(x + i), div(in, add(same(1.f), exponential(sub(zero(), in))))));
        }
    };
    std::vector<float> x(width), state(width);
    for (int i = 0; i < width; i += 16) store(x.data() + i, load(h.state + i));
    for (int k = 0; k < h.heads; k++) {
        if (h.about) {
            const Matrix own = rows_of(*h.about, k, width);
            outrider_product(&own, h.condition + int64_t(k) * width, conditioned, 1, 1, h.threads, h.workspace);
        }
        gated(x.data(), projected + int64_t(k) * width, h.about ? conditioned : nullptr, state.data());
        bf16* const to = h.states + int64_t(k) * width;
        for (int i = 0; i < width; i += 16) store(to + i, load(state.data() + i));
        for (int step = 0; step < h.steps; step++) {
            outrider_product(h.more + int64_t(k) * h.steps + step, to, conditioned, 1, 1, h.threads, h.workspace);
            gated(state.data(), conditioned, nullptr, state.data());
            for (int i = 0; i < width; i += 16) store(to + i, load(state.data() + i));
        }
    }
    outrider_product(h.output, h.states, h.logits, h.heads, 1, h.threads, h.workspace);
    const Family& f = *family;
    int64_t node = 0;
    std::vector<int> kids;
    for (int level = 0; node < f.nodes; level++) {
        softmax(h.logits + int64_t(level) * h.output->out, f.vocabulary, f.temperature,
                f.distributions + int64_t(level) * f.vocabulary);
        const int64_t stop = f.level_after(node);
        while (node < stop) {
            kids.clear();
            for (const int64_t parent = f.parents[node]; node < stop && f.parents[node] == parent; node++)
                kids.push_back(node);
            fill(f, kids, level);
        }
    }
}

}  // extern "C"
