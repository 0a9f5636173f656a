// Siblings of draft trees of a given shape: the likeliest tokens of a distribution, or tokens drawn from it without
// replacement.

#pragma once

#include <cmath>
#include <vector>

extern "C" {

struct Family {  // mirrors _Family in engine/native/sampled_tree.py
    const int64_t* parents;   // [nodes] level by level, children of one parent side by side; -1: the root
    const double* uniforms;   // [nodes] in [0, 1), to draw with; null: the r-th child is the r-th likeliest token
    const int64_t* ids;       // [vocabulary] the token of each output, or null: the output's index
    int64_t* tokens;          // [nodes]
    bool* live;               // [nodes] false where nothing is left to draw
    float* probs;             // [nodes] of each under its parent's distribution
    float* distributions;     // [origins, vocabulary] one for each parent, or for each level
    int32_t nodes, vocabulary;
    float temperature;

    // The first node of the level below the one that begins at `node`.
    int64_t level_after(int64_t node) const {
        int64_t stop = node;
        while (stop < nodes && parents[stop] < node) stop++;
        return stop;
    }
};

}  // extern "C"

namespace {

// Writes softmax(logits / temperature) [size] to `to`.
void softmax(const float* logits, int size, float temperature, float* to) {
    const float most = *std::max_element(logits, logits + size), scale = 1 / temperature;
    const int even = size / 16 * 16;
    Sixteen sum = zero();
    for (int i = 0; i < even; i += 16) {
        const Sixteen e = exponential(mul(sub(load(logits + i), same(most)), same(scale)));
        store(to + i, e);
        sum = add(sum, e);
    }
    float total = added(sum);
    for (int i = even; i < size; i++) total += to[i] = std::exp((logits[i] - most) * scale);
    for (int i = 0; i < size; i++) to[i] /= total;
}

// Probabilities from which entries are drawn and struck out, with the sums of blocks of them.
class Urn {
public:
    void refill(const float* probs, int size) {
        left.assign(probs, probs + size);
        sums.resize((size + kBlock - 1) / kBlock);
        for (size_t block = 0; block < sums.size(); block++) sum(block);
    }

    // The index at which the running sum exceeds `uniform` times the total, which is struck out; -1: nothing is left.
    int draw(double uniform) {
        double whole = 0, below = 0;
        for (const double part : sums) whole += part;
        if (!(whole > 0)) return -1;
        const double mark = uniform * whole;
        size_t block = 0;
        for (; block + 1 < sums.size() && below + sums[block] <= mark; block++) below += sums[block];
        int last = -1;  // returned only after rounding errors
        const int size = left.size();
        for (int at = block * kBlock; at < size; at++) {
            if (left[at] > 0) last = at;
            if ((below += left[at]) > mark) break;
        }
        if (last < 0) last = std::max_element(left.begin(), left.end()) - left.begin();
        left[last] = 0;
        sum(last / kBlock);
        return last;
    }

private:
    static constexpr int kBlock = 128;
    std::vector<float> left;
    std::vector<double> sums;

    void sum(size_t block) {
        const int end = std::min<int>(left.size(), (block + 1) * kBlock);
        double total = 0;
        for (int at = block * kBlock; at < end; at++) total += left[at];
        sums[block] = total;
    }
};

// Fills the children of one node from a distribution. Children of a node that is not live aren't either.
void fill(const Family& f, const std::vector<int>& kids, int origin) {
    const float* const probs = f.distributions + int64_t(origin) * f.vocabulary;
    thread_local Urn urn;
    thread_local std::vector<float> values;
    thread_local std::vector<int64_t> places;
    const int64_t parent = kids.empty() ? -1 : f.parents[kids[0]];
    const bool alive = parent < 0 || f.live[parent];
    const int count = std::min<int>(kids.size(), f.vocabulary);
    if (f.uniforms) {
        urn.refill(probs, f.vocabulary);
    } else {
        values.resize(count), places.resize(count);
        outrider_largest(probs, 0, 0, 1, 1, f.vocabulary, count, values.data(), places.data(), 1);
    }
    for (size_t rank = 0; rank < kids.size(); rank++) {
        const int node = kids[rank];
        const int64_t place = int(rank) >= count ? -1 : f.uniforms ? urn.draw(f.uniforms[node]) : places[rank];
        f.live[node] = alive && place >= 0 && probs[place] > 0;
        f.tokens[node] = place < 0 ? 0 : f.ids ? f.ids[place] : place;
        f.probs[node] = place < 0 ? 0 : probs[place];
    }
}

}  // namespace
