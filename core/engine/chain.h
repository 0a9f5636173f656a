// A chain that a small decoder draws by itself: each token is read, and the next one drawn from the law behind it.

#pragma once

#include <cmath>

extern "C" {

struct Drawing {
    const bf16* embedding;  // [entries, width]
    const float* told;      // [places, width] what is added to the token at each position, or null
    const float* norm;
    const Matrix* head;     // its rows from `vocabulary` on say nothing
    const double* numbers;  // [steps] from 0 to 1, by which to draw; null: the likeliest
    int64_t* tokens;        // [1 + steps]: the first is given, those behind it are drawn
    float* laws;            // [steps, vocabulary] they were drawn from; nothing without numbers
    float* logits;          // [head's rows]
    bf16* state;            // [width]
    uint8_t* work;
    int64_t entries, places, position;  // the position of the first token
    int32_t steps, vocabulary;
    float temperature;
};

// softmax(logits / temperature) [size] into `law`, and the token at which its running sum passes `number` of all.
static int64_t drawn(const float* logits, int size, float temperature, double number, float* law) {
    const float largest = *std::max_element(logits, logits + size), colder = 1 / temperature;
    const int even = size / 16 * 16;
    Sixteen sum = zero();
    for (int i = 0; i < even; i += 16) {
        const Sixteen one = exponential(mul(sub(load(logits + i), same(largest)), same(colder)));
        store(law + i, one);
        sum = add(sum, one);
    }
    float total = added(sum);
    for (int i = even; i < size; i++) total += law[i] = std::exp((logits[i] - largest) * colder);
    double running = 0, whole = 0;
    for (int i = 0; i < size; i++) whole += law[i] /= total;
    for (int i = 0; i < size; i++)
        if ((running += law[i]) > number * whole) return i;
    return size - 1;
}

// The pass is one of the first token; its columns are those up to that token.
void outrider_draw(const Shape* shape, const Layer* layers, const Pass* pass, const Drawing* drawing) {
    const Drawing& d = *drawing;
    const int width = shape->width;
    Pass p = *pass;
    for (int step = 0; step < d.steps; step++) {
        const int64_t token = std::min(std::max<int64_t>(d.tokens[step], 0), d.entries - 1),
                      position = d.position + step;
        const float* const told = d.told ? d.told + std::min(position, d.places - 1) * width : nullptr;
        for (int i = 0; i < width; i += 16) {
            const Sixteen read = load(d.embedding + token * width + i);
            store(p.x + i, told ? add(read, load(told + i)) : read);
        }
        p.positions = &position, p.start = pass->start + step, p.columns = pass->columns + step;
        outrider_run(shape, layers, &p);
        normed(p.x, d.norm, width, shape->eps, d.state);
        outrider_product(d.head, d.state, d.logits, 1, 1, p.threads, d.work);
        d.tokens[step + 1] = d.numbers ? drawn(d.logits, d.vocabulary, d.temperature, d.numbers[step],
                                               d.laws + int64_t(step) * d.vocabulary)
                                       : std::max_element(d.logits, d.logits + d.vocabulary) - d.logits;
    }
}

}  // extern "C"
