// A level of a tree that a trained layer grows: what it makes of each node's token and of its parent's state, and which
// tokens it then finds likeliest.

#pragma once

extern "C" {

struct Level {
    const bf16* embedding;  // [tokens, width]
    const float *embedded_norm, *entered_norm, *norm;
    const Matrix* words;
    bf16* states;           // [nodes, width], normed: those of earlier levels, and from `first` on these
    const int64_t* tokens;  // [count], or null: the states are there already
    const int64_t* above;   // [count] whose states they grow from
    float* x;               // [count, width]
    bf16* read;             // [count, 2 width]
    float* logits;          // [count, words]
    uint8_t* work;
    float* values;  // [count, best] logits, and which they are
    int64_t* places;
    float* levels;  // [count] logarithms of the sums of all exponentials
    int32_t first, count, best, threads;
};

void outrider_level(const Shape* shape, const Layer* layers, const Pass* pass, const Level* level) {
    const Level& l = *level;
    const int width = shape->width;
    bf16* const found = l.states + int64_t(l.first) * width;
    if (l.tokens) {
        for (int m = 0; m < l.count; m++) {
            const bf16 *parent = l.states + l.above[m] * width, *token = l.embedding + l.tokens[m] * width;
            float* const x = l.x + int64_t(m) * width;
            bf16* const to = l.read + int64_t(m) * 2 * width;
            for (int i = 0; i < width; i += 16) store(x + i, load(token + i));
            normed(x, l.embedded_norm, width, shape->eps, to);
            for (int i = 0; i < width; i += 16) store(x + i, load(parent + i));
            normed(x, l.entered_norm, width, shape->eps, to + width);
        }
        outrider_run(shape, layers, pass);
        for (int m = 0; m < l.count; m++)
            normed(l.x + int64_t(m) * width, l.norm, width, shape->eps, found + int64_t(m) * width);
    }
    outrider_product(l.words, found, l.logits, l.count, 1, l.threads, l.work);
    const int size = l.words->out;
    outrider_largest(l.logits, size, 0, l.count, 1, size, l.best, l.values, l.places, l.threads);
    for (int m = 0; m < l.count; m++) {
        const float top = l.values[int64_t(m) * l.best];
        Sixteen total = zero();
        for (int i = 0; i < size; i += 16)
            total = add(total, exponential(sub(load(l.logits + int64_t(m) * size + i), same(top))));
        l.levels[m] = top + std::log(added(total));
    }
}

}  // extern "C"
