// Attention over a cache. The result for a token does not depend on which other tokens share the pass.

#pragma once

namespace {

// Some tokens of one row and some query heads of each that share a key/value head: at most 16 queries in total.
struct Group {
    int tokens, heads, dim;
    const bf16* queries;  // of the first token and head; `spread` is the stride between tokens
    bf16* found;          // the output, likewise
    int64_t spread;
    const uint8_t *keys, *values;
    int64_t stride;         // bytes from slot to slot
    const uint8_t* mask;    // of the first token, or null
    int columns;            // stride of the mask between tokens
    const int32_t* runs;    // for each token the number of slots before the first masked one
    const int32_t* counts;  // for each token the number of visible slots
};

// The index after the last slot that any of the tokens attends to.
inline int reached(const Group& g) {
    int last = 0;
    for (int t = 0; t < g.tokens; t++) {
        const uint8_t* mask = g.mask + int64_t(t) * g.columns;
        int j = g.columns;
        while (j > last && !mask[j - 1]) j--;
        last = j;
    }
    return last;
}

// Attention of the queries over their visible slots. A token's visible slots are processed in order, in blocks of 32.
// Which of them other tokens share decides how a block is assembled, but not what is computed with it. Where a sum is
// one chain of additions (kInOrder), masked slots with weight 0 do not change it, so all slots are processed for all
// tokens.
template <bool small>
void attended(const Group& g, Scratch& own) {
    const int rows = g.tokens * g.heads;
    int shortest = g.runs[0], longest = 0;
    bool plain = true;
    for (int t = 0; t < g.tokens; t++) {
        shortest = std::min(shortest, g.runs[t]);
        longest = std::max(longest, g.counts[t]);
        plain = plain && g.runs[t] == g.counts[t];
        for (int h = 0; h < g.heads; h++)
            std::memcpy(own.queries + (t * g.heads + h) * g.dim, g.queries + t * g.spread + h * g.dim, 2 * g.dim);
    }
    const bool apart = !plain && !kInOrder, mixed = !plain && kInOrder;
    const int shared = plain ? longest : mixed ? reached(g) : shortest / 32 * 32;
    const int64_t width = padded(std::max(longest, shared), 32);
    const auto scales = [&](const uint8_t* of, int t) {  // of the shared slots (t: -1), or of a token's other slots
        const int first = t < 0 ? 0 : shared, count = t < 0 ? shared : g.counts[t] - shared;
        for (int i = 0; small && i < count; i++)
            own.scales[first + i] = scale_of(of + (t < 0 ? i : own.seen[i]) * g.stride);
    };
    scales(g.keys, -1);
    for (int j = 0; j < shared; j += 16) {
        for (int d = 0; d < g.dim; d += 32)
            turned_over([&](int i) { return numbers<small>(g.keys + std::min(j + i, shared - 1) * g.stride, d); },
                        own.right + kTile / 32 * d);
        scored(own.right, own.queries, g.dim, 0, rows, own.weights + j, width);
        for (int row = 0; small && row < rows; row++) {
            float* mine = own.weights + row * width + j;
            store(mine, mul(load(mine), load(own.scales + j)));
        }
    }
    const auto rest = [&](int t) {  // a token's visible slots after the shared ones
        return looked(g.mask + int64_t(t) * g.columns, shared, g.columns, own.seen);
    };
    for (int t = 0; t < g.tokens && mixed; t++) {  // compact each token's visible scores, for their maximum and sum
        const int count = looked(g.mask + int64_t(t) * g.columns, shortest, shared, own.seen);
        for (int h = t * g.heads; h < (t + 1) * g.heads; h++)
            for (int i = 0; i < count; i++) own.weights[h * width + shortest + i] = own.weights[h * width + own.seen[i]];
    }
    for (int t = 0; t < g.tokens && apart; t++) {
        const int count = rest(t);
        scales(g.keys, t);
        for (int j = 0; j < count; j += 16) {
            for (int d = 0; d < g.dim; d += 32)
                turned_over(
                    [&](int i) { return numbers<small>(g.keys + own.seen[std::min(j + i, count - 1)] * g.stride, d); },
                    own.right + kTile / 32 * d);
            scored(own.right, own.queries, g.dim, t * g.heads, (t + 1) * g.heads, own.part, 16);
            for (int h = t * g.heads; h < (t + 1) * g.heads; h++) {
                Sixteen found = load(own.part + 16 * h);
                if (small) found = mul(found, load(own.scales + shared + j));
                store(own.weights + h * width + shared + j, found);
            }
        }
    }
    const Sixteen scale = same(1.f / std::sqrt(float(g.dim)));
    float shares[16];
    scales(g.values, -1);
    for (int row = 0; row < rows; row++) {
        const int t = row / g.heads, count = g.counts[t];
        if (small && apart && row % g.heads == 0) {
            rest(t);
            scales(g.values, t);
        }
        float* mine = own.weights + row * width;
        Sixteen most = same(-INFINITY), total = zero();
        for (int j = 0; j < count; j += 16) {
            most = larger(most, load(mine + j), count - j);
        }
        const Sixteen top = same(largest(most));
        for (int j = 0; j < width; j += 16) {
            const Sixteen e = leading(exponential(mul(sub(load(mine + j, count - j), top), scale)), count - j);
            total = add(total, e);
            store(mine + j, e);
        }
        shares[row] = 1.f / added(total);
        if (mixed) {  // back to the slots' own columns
            const uint8_t* mask = g.mask + int64_t(t) * g.columns;
            for (int j = shared - 1, from = count; j >= shortest; j--) mine[j] = mask[j] ? mine[--from] : 0.f;
        }
        for (int j = 0; j < width; j += 16) {
            const Sixteen e = load(mine + j);
            store(own.shares + row * width + j,
                  small ? leading(mul(e, load(own.scales + j)), (apart ? count : shared) - j) : e);
        }
    }
    for (int d = 0; d < g.dim; d += 64) {
        const int wide = std::min(64, g.dim - d);
        const auto hand_over = [&](const float* sums, int from, int to) {
            for (int row = from; row < to; row++)
                for (int i = 0; i < wide; i += 16)
                    store(g.found + row / g.heads * g.spread + row % g.heads * g.dim + d + i,
                             mul(load(sums + 16 * i + 16 * row), same(shares[row])));
        };
        std::memset(own.sums, 0, 4096);
        gathered(int(padded(shared, 32) / 32), wide, own.shares, width, 0, rows, own.right, own.sums,
                 [&](int block, uint8_t* to) {
                     interleaved(
                         [&](int i, int e) {
                             return numbers<small>(g.values + std::min(32 * block + i, shared - 1) * g.stride, d + e);
                         },
                         wide, to);
                 });
        if (!apart) hand_over(own.sums, 0, rows);
        for (int t = 0; t < g.tokens && apart; t++) {
            const int count = rest(t);
            std::memcpy(own.part, own.sums, 4096);
            gathered(
                int(padded(count, 32) / 32), wide, own.shares + shared, width, t * g.heads, (t + 1) * g.heads, own.right,
                own.part,
                [&](int block, uint8_t* to) {
                    interleaved(
                        [&](int i, int e) {
                            const int slot = own.seen[std::min(32 * block + i, count - 1)];
                            return numbers<small>(g.values + slot * g.stride, d + e);
                        },
                        wide, to);
                });
            hand_over(own.part, t * g.heads, (t + 1) * g.heads);
        }
    }
}

}  // namespace
