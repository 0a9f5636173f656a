// A chain that a small decoder draws by itself: what waits is read, the next token is drawn from the law behind it, read
// in its turn, and so on.

#pragma once

#include <cmath>
#include <vector>

extern "C" {

struct Drawing {
    const bf16* embedding;  // [entries, width]
    const float* told;      // [places, width] what is added to the token at each position, or null
    const float* norm;
    const Matrix* head;     // its rows from `vocabulary` on say nothing
    const double* numbers;  // [steps] from 0 to 1, by which to draw; null: the likeliest
    const int64_t* waiting;
    int64_t* tokens;        // [steps] that are drawn
    float* laws;            // [steps, vocabulary] they were drawn from; nothing without numbers
    float* logits;          // [head's rows]
    bf16* state;            // [width]
    uint8_t* mask;          // [wait, behind + wait]
    uint8_t* work;
    int64_t entries, places;
    int32_t wait, behind, steps, vocabulary;  // behind: how many tokens there are before those that wait
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

// The pass has room for the states of all that waits.
void outrider_draw(const Shape* shape, const Layer* layers, const Pass* pass, const Drawing* drawing) {
    const Drawing& d = *drawing;
    const int width = shape->width;
    Pass p = *pass;
    std::vector<int64_t> positions(d.wait);
    p.positions = positions.data(), p.start = d.behind, p.count = d.wait, p.mask = d.wait > 1 ? d.mask : nullptr;
    for (int step = 0; step < d.steps; step++) {
        for (int m = 0; m < p.count; m++) {
            const int64_t token = std::min(std::max<int64_t>(step ? d.tokens[step - 1] : d.waiting[m], 0), d.entries - 1);
            const int64_t position = positions[m] = p.start + m;
            const float* const told = d.told ? d.told + std::min(position, d.places - 1) * width : nullptr;
            for (int i = 0; i < width; i += 16) {
                const Sixteen read = load(d.embedding + token * width + i);
                store(p.x + int64_t(m) * width + i, told ? add(read, load(told + i)) : read);
            }
        }
        p.columns = p.start + p.count;
        if (p.count > 1)
            for (int m = 0; m < p.count; m++)
                for (int column = 0; column < p.columns; column++)
                    d.mask[int64_t(m) * p.columns + column] = column <= p.start + m;
        outrider_run(shape, layers, &p);
        normed(p.x + int64_t(p.count - 1) * width, d.norm, width, shape->eps, d.state);
        outrider_product(d.head, d.state, d.logits, 1, 1, p.threads, d.work);
        d.tokens[step] = d.numbers ? drawn(d.logits, d.vocabulary, d.temperature, d.numbers[step],
                                           d.laws + int64_t(step) * d.vocabulary)
                                   : std::max_element(d.logits, d.logits + d.vocabulary) - d.logits;
        p.start += p.count, p.count = 1, p.mask = nullptr;
    }
}

}  // extern "C"
