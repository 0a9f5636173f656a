// A draft chain of a small decoder: the pending tokens are read, the next token is drawn from the distribution after
// them, read in its turn, and so on.

#pragma once

#include <cmath>
#include <vector>

extern "C" {

struct Drawing {  // mirrors _Chain in engine/native/draft_chain.py
    const bf16* embedding;      // [embedding_rows, width]
    const float* conditioning;  // [conditioning_rows, width] added to the embedding by position, or null
    const float* norm;
    const Matrix* head;         // rows from `outputs` on are padding
    const double* uniforms;     // [steps] in [0, 1), to draw with; null: take the most probable token
    const int64_t* pending;
    const int64_t* kept;        // [outputs] the token of each output, or null: its index
    int64_t* tokens;            // [steps] the drawn tokens
    float* distributions;       // [steps, outputs] they were drawn from; unused without uniforms
    float* logits;              // [head rows]
    bf16* state;                // [width]
    uint8_t* mask;              // [pending_count, entries + pending_count]
    uint8_t* workspace;
    int64_t embedding_rows, conditioning_rows;
    int32_t pending_count, entries, steps, outputs;  // entries: cached tokens before the pending ones
    int32_t last;   // whether a token is drawn from the first distribution that does not reach the floor
    int32_t joint;  // whether the highest probabilities of the chain so far, multiplied, have to reach it
    float temperature, floor;  // of a distribution's highest probability at temperature 1; 0: any
};

// The highest probability of softmax(logits) [size].
static float highest(const float* logits, int size) {
    const float largest = *std::max_element(logits, logits + size);
    Sixteen sum = zero();
    const int even = size / 16 * 16;
    for (int i = 0; i < even; i += 16) sum = add(sum, exponential(sub(load(logits + i), same(largest))));
    float total = added(sum);
    for (int i = even; i < size; i++) total += std::exp(logits[i] - largest);
    return 1 / total;
}

// The same for rows of logits [rows, size].
void outrider_highest(const float* logits, float* to, int32_t rows, int32_t size) {
    for (int64_t row = 0; row < rows; row++) to[row] = highest(logits + row * size, size);
}

// Writes softmax(logits / temperature) [size] to `distribution`; returns the token at which its running sum exceeds
// `uniform` times its total.
static int64_t drawn(const float* logits, int size, float temperature, double uniform, float* distribution) {
    const float largest = *std::max_element(logits, logits + size), scale = 1 / temperature;
    const int even = size / 16 * 16;
    Sixteen sum = zero();
    for (int i = 0; i < even; i += 16) {
        const Sixteen e = exponential(mul(sub(load(logits + i), same(largest)), same(scale)));
        store(distribution + i, e);
        sum = add(sum, e);
    }
    float total = added(sum);
    for (int i = even; i < size; i++) total += distribution[i] = std::exp((logits[i] - largest) * scale);
    double running = 0, whole = 0;
    for (int i = 0; i < size; i++) whole += distribution[i] /= total;
    for (int i = 0; i < size; i++)
        if ((running += distribution[i]) > uniform * whole) return i;
    return size - 1;
}

// The same for rows of logits [rows, size], each with its own uniform.
void outrider_drawn(const float* logits, const double* uniforms, float* distributions, int64_t* tokens, int32_t rows,
                    int32_t size, float temperature) {
    for (int64_t row = 0; row < rows; row++)
        tokens[row] =
            drawn(logits + row * size, size, temperature, uniforms[row], distributions + row * size);
}

// Returns the number of drawn tokens. The pass must have room for the states of all pending tokens.
int32_t outrider_draw(const Shape* shape, const Layer* layers, const Pass* pass, const Drawing* drawing) {
    const Drawing& d = *drawing;
    const int width = shape->width;
    Pass p = *pass;
    float sure = 1;
    std::vector<int64_t> positions(d.pending_count);
    p.positions = positions.data(), p.start = d.entries, p.count = d.pending_count;
    p.mask = p.count > 1 ? d.mask : nullptr;
    for (int step = 0; step < d.steps; step++) {
        for (int m = 0; m < p.count; m++) {
            const int64_t last = d.embedding_rows - 1;
            const int64_t token = std::min(std::max<int64_t>(step ? d.tokens[step - 1] : d.pending[m], 0), last);
            const int64_t position = positions[m] = p.start + m;
            const float* const condition =
                d.conditioning ? d.conditioning + std::min(position, d.conditioning_rows - 1) * width : nullptr;
            for (int i = 0; i < width; i += 16) {
                const Sixteen read = load(d.embedding + token * width + i);
                store(p.x + int64_t(m) * width + i, condition ? add(read, load(condition + i)) : read);
            }
        }
        p.columns = p.start + p.count;
        if (p.count > 1)
            for (int m = 0; m < p.count; m++)
                for (int column = 0; column < p.columns; column++)
                    d.mask[int64_t(m) * p.columns + column] = column <= p.start + m;
        outrider_run(shape, layers, &p);
        normed(p.x + int64_t(p.count - 1) * width, d.norm, width, shape->eps, d.state);
        outrider_product(d.head, d.state, d.logits, 1, 1, p.threads, d.workspace);
        if (d.floor > 0) sure = (d.joint ? sure : 1) * highest(d.logits, d.outputs);
        const bool ends = d.floor > 0 && sure < d.floor;
        if (ends && !d.last) return step;
        const int64_t found = d.uniforms ? drawn(d.logits, d.outputs, d.temperature, d.uniforms[step],
                                                 d.distributions + int64_t(step) * d.outputs)
                                         : std::max_element(d.logits, d.logits + d.outputs) - d.logits;
        d.tokens[step] = d.kept ? d.kept[found] : found;
        if (ends) return step + 1;
        p.start += p.count, p.count = 1, p.mask = nullptr;
    }
    return d.steps;
}

}  // extern "C"
