// One forward pass of a small decoder on a CPU. Matrix products are in halves.h for processors with AVX-512 BF16, else
// in singles.h.
//
// With few tokens, reading the weights and dispatching operations take most of the time. Weights are therefore stored
// in the order in which they are read, in 16, 8 or 4 bits, and all layers run in one call. The order in which a token's
// values are computed depends only on the token, on the slots visible to it and on whether it is part of a prompt, not on
// how many tokens share the pass nor on which slots they use. Drafting therefore cannot change the output, in reduced
// precision either.

#include <omp.h>

#include <algorithm>

#include "layout.h"

#ifdef __AVX512BF16__
#include "halves.h"
#else
#include "singles.h"
#endif

namespace {

inline void rows_of_tiles(const Matrix& w, int left, int right, const bf16* a, int64_t stride, int count,
                          Scratch& own) {
    const int blocks[2] = {left, right};
    float* const sums[2] = {own.first, own.second};
    if (w.bits == 16)
        rows_of_tiles<16>(w, blocks, a, stride, count, sums, own);
    else if (w.bits == 8)
        rows_of_tiles<8>(w, blocks, a, stride, count, sums, own);
    else
        rows_of_tiles<4>(w, blocks, a, stride, count, sums, own);
}

// One thread's part of a product. `take(block, from, count, sums)` receives sums [count][16] of rows from, from + 1,
// ...
template <typename Take>
void product(const Matrix& w, const bf16* a, int64_t stride, int count, int thread, int threads, Scratch& own,
             Take take) {
    const int blocks = w.out / 16, begin = blocks * int64_t(thread) / threads,
              end = blocks * int64_t(thread + 1) / threads;
    for (int from = 0; from < count; from += kRows) {
        const int some = std::min(kRows, count - from);
        prepared(w, a + from * stride, stride, some, own);
        int block = begin;
        for (; by_fours(w, some) && block + 4 <= end; block += 4) {
            float* const sums[4] = {own.first, own.first + 256, own.second, own.second + 256};
            rows_of_tiles(w, {block, block + 1, block + 2, block + 3}, a + from * stride, stride, some, sums);
            for (int i = 0; i < 4; i++) take(block + i, from, some, sums[i]);
        }
        for (; block < end; block += 2) {
            const int next = std::min(block + 1, end - 1);
            rows_of_tiles(w, block, next, a + from * stride, stride, some, own);
            take(block, from, some, own.first);
            if (next > block) take(next, from, some, own.second);
        }
    }
}

void normed(const float* x, const float* weight, int width, float eps, bf16* to) {
    Sixteen squares = zero();
    for (int i = 0; i < width; i += 16) {
        const Sixteen some = load(x + i);
        squares = fma(some, some, squares);
    }
    const Sixteen scale = same(1.f / std::sqrt(added(squares) / width + eps));
    for (int i = 0; i < width; i += 16)
        store(to + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Quantizes 16-bit numbers to 8 bits, stored after their scale.
void quantized(const bf16* x, int dim, uint8_t* to) {
    Sixteen most = zero();
    for (int i = 0; i < dim; i += 16) most = larger(most, size(load(x + i)));
    const float scale = std::max(largest(most) / 127, 1e-30f);
    std::memcpy(to, &scale, 4);
    for (int i = 0; i < dim; i += 16) {
        store((int8_t*)to + 4 + i, div(load(x + i), same(scale)));
    }
}

inline float scale_of(const uint8_t* slot) {
    float found;
    std::memcpy(&found, slot, 4);
    return found;
}

// Applies the rotary embedding to one head, after its norm if there is one, and writes it in 16 bits.
void rotated(float* x, const float* norm, int dim, float eps, const float* cosine, const float* sine, bf16* to) {
    const int half = dim / 2;
    if (norm) {
        float squares = 0;
        for (int i = 0; i < dim; i++) squares += x[i] * x[i];
        const float scale = 1.f / std::sqrt(squares / dim + eps);
        for (int i = 0; i < dim; i++) x[i] *= scale * norm[i];
    }
    for (int i = 0; i < half; i += 16) {
        const Sixteen low = load(x + i), high = load(x + half + i);
        const Sixteen c = load(cosine + i), s = load(sine + i);
        store(to + i, fms(low, c, mul(high, s)));
        store(to + half + i, fma(high, c, mul(low, s)));
    }
}

}  // namespace

#include "attention.h"
#include "rows.h"

namespace {

// The number of parts of at most `together` tokens into which a row is divided to balance the threads.
int count_parts(int count, int together, int group, int heads, int threads) {
    const int fewest = (count + together - 1) / together;
    const auto longest = [&](int parts) {
        return (heads * parts + threads - 1) / threads * ((count + parts - 1) / parts * group + kQueries);
    };
    int best = fewest;
    for (int parts = fewest + 1; parts <= std::min(count, fewest + threads); parts++)
        if (longest(parts) < longest(best)) best = parts;
    return best;
}

struct Arena {
    uint8_t* at;
    template <typename T>
    T* take(int64_t count) {
        T* found = (T*)at;
        at += padded(count * sizeof(T), 64);
        return found;
    }
};

Scratch scratch(Arena& arena, int deepest, int64_t columns, int dim) {
    Scratch own;
    own.unpacked = arena.take<uint8_t>(4 * kTile * kUnpacked);
    own.part = arena.take<float>(1024);
    own.sums = arena.take<float>(std::max(int64_t(kRows) * (deepest / 32) * (kPrepared / 4), int64_t(1024)));
    own.first = arena.take<float>(kRows * 16);
    own.second = arena.take<float>(kRows * 16);
    own.queries = arena.take<bf16>(16 * dim);
    own.right = arena.take<uint8_t>(kTile * std::max(dim / 32, 4));
    own.seen = arena.take<int32_t>(columns + 16);
    own.weights = arena.take<float>(16 * padded(columns, 32) + 256);
    own.shares = arena.take<bf16>(16 * padded(columns, 32) + 256);
    own.scales = arena.take<float>(columns + 32);
    return own;
}

int64_t scratch_bytes(int deepest, int64_t columns, int dim) {
    Arena arena{nullptr};
    scratch(arena, deepest, columns, dim);
    return (int64_t)arena.at;
}

}  // namespace

extern "C" {

// 2: AMX tiles are used (`wanted`); 1: supported without tiles; 0: the processor is not supported.
int outrider_ready(int32_t wanted) { return readied(wanted); }

int64_t outrider_work(const Shape* s, int32_t tokens, int64_t columns, int32_t threads) {
    const int64_t rows = padded(tokens, 16), spread = int64_t(s->heads) * s->dim,
                  all = spread + 2 * int64_t(s->kv) * s->dim;
    const int64_t widest = std::max({int64_t(s->width), spread, int64_t(s->into)});
    return 2 * rows * (2 * widest + s->hidden) + 4 * rows * all + 1024 + 8 * rows +
           threads * scratch_bytes(std::max(widest, int64_t(s->hidden)), columns, s->dim);
}

void outrider_run(const Shape* shape, const Layer* layers, const Pass* pass) {
    const Shape& s = *shape;
    const Pass& p = *pass;
    const auto first_of = [&](int row) { return p.firsts ? p.firsts[row] : row * p.count; };
    const auto row_of = [&](int token) {
        return p.firsts ? int(std::upper_bound(p.firsts, p.firsts + p.rows, token) - p.firsts) - 1 : token / p.count;
    };
    const auto mask_of = [&](int row, int token) {
        return p.firsts ? p.mask + int64_t(token) * p.columns
                        : p.mask + row * p.mask_stride + int64_t(token % p.count) * p.columns;
    };
    const int tokens = first_of(p.rows), group = s.heads / s.kv, spread = s.heads * s.dim,
              all = spread + 2 * s.kv * s.dim;
    const int64_t rows = padded(tokens, 16), widest = std::max({s.width, spread, s.into});
    Arena arena{p.work};
    bf16* input = arena.take<bf16>(rows * widest);
    bf16* queries = arena.take<bf16>(rows * widest);
    bf16* middle = arena.take<bf16>(rows * s.hidden);
    float* qkv = arena.take<float>(rows * all);
    const int deepest = std::max(widest, int64_t(s.hidden));
    int32_t* runs = arena.take<int32_t>(rows);
    int32_t* counts = arena.take<int32_t>(rows);
    const int64_t each = scratch_bytes(deepest, p.columns, s.dim);
    const int together = std::max(1, 16 / group), most = std::min(16, group),
              parts = count_parts(p.count, together, group, p.rows * s.kv, p.threads);
#pragma omp parallel num_threads(p.threads)
    {
        const int me = omp_get_thread_num(), threads = omp_get_num_threads();
        Arena mine{arena.at + me * each};
        Scratch own = scratch(mine, deepest, p.columns, s.dim);
        own.reading = p.reading;
        const Configured configured(tokens);
        for (int m = me; m < tokens; m += threads) {
            runs[m] = counts[m] = p.columns;
            if (p.mask)
                counted(mask_of(row_of(m), m), p.columns, runs[m], counts[m]);
        }
        for (int index = p.first; index < p.last; index++) {
            const Layer& layer = layers[index];
            if (layer.use_attention) {
                for (int m = me; m < tokens; m += threads)
                    if (p.read)
                        std::memcpy(input + int64_t(m) * s.into, p.read + int64_t(m) * s.into, sizeof(bf16) * s.into);
                    else
                        normed(p.x + int64_t(m) * s.width, layer.attention_norm, s.width, s.eps,
                               input + int64_t(m) * s.width);
#pragma omp barrier
                product(layer.qkv, input, s.into, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++)
                                store(qkv + int64_t(from + m) * all + 16 * block, load(sums + 16 * m));
                        });
#pragma omp barrier
                uint8_t* const here = p.store + index * p.layer_stride;
                for (int task = me; task < tokens * s.kv;
                     task += threads) {  // a token's queries, key and value of one head
                    const int m = task / s.kv, kv = task % s.kv, row = row_of(m), q = m - first_of(row);
                    int64_t position = p.positions[p.firsts ? m : row * p.position_stride + q];
                    position = std::min<int64_t>(std::max<int64_t>(position, 0), p.reach - 1);
                    const float *c = p.cosine + position * (s.dim / 2), *sn = p.sine + position * (s.dim / 2);
                    float* token = qkv + int64_t(m) * all;
                    for (int g = kv * group; g < (kv + 1) * group; g++)
                        rotated(token + g * s.dim, layer.qk_norm ? layer.qk_norm + g * s.dim : nullptr, s.dim, s.eps, c,
                               sn, queries + int64_t(m) * spread + g * s.dim);
                    const int64_t slot = p.slots ? p.slots[m] : p.start + q;
                    uint8_t* const to = here + row * p.row_stride + kv * p.head_stride + slot * p.slot_stride;
                    uint8_t* const beside = to + s.kv * p.head_stride;
                    bf16* const key = p.small ? own.queries : (bf16*)to;
                    bf16* const value = p.small ? own.queries + s.dim : (bf16*)beside;
                    rotated(token + spread + kv * s.dim,
                           layer.qk_norm ? layer.qk_norm + (s.heads + kv) * s.dim : nullptr, s.dim, s.eps, c, sn, key);
                    const float* given = token + spread + (s.kv + kv) * s.dim;
                    for (int i = 0; i < s.dim; i += 16) store(value + i, load(given + i));
                    if (p.small) {
                        quantized(key, s.dim, to);
                        quantized(value, s.dim, beside);
                    }
                }
#pragma omp barrier
                configured.to(std::min((p.count + parts - 1) / parts, together) * group);
                for (int task = me; task < p.rows * s.kv * parts; task += threads) {
                    const int row = task / (s.kv * parts), kv = task / parts % s.kv, part = task % parts,
                              count = first_of(row + 1) - first_of(row), q = int64_t(part) * count / parts,
                              some = int64_t(part + 1) * count / parts - q, m = first_of(row) + q;
                    if (!some) continue;
                    for (int head = kv * group; head < (kv + 1) * group; head += most) {
                        const uint8_t* keys = here + row * p.row_stride + kv * p.head_stride;
                        const int64_t at = int64_t(m) * spread + head * s.dim;
                        const uint8_t* mask = p.mask ? mask_of(row, m) : nullptr;
                        const Group task_group{some, std::min(most, (kv + 1) * group - head), s.dim,
                                               queries + at, input + at, spread, keys, keys + s.kv * p.head_stride,
                                               p.slot_stride, mask, p.columns, runs + m, counts + m};
                        if (p.small)
                            attended<true>(task_group, own);
                        else
                            attended<false>(task_group, own);
                    }
                }
                configured.to(tokens);
#pragma omp barrier
                product(layer.out, input, spread, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++) {
                                float* x = p.x + int64_t(from + m) * s.width + 16 * block;
                                store(x, add(load(x), load(sums + 16 * m)));
                            }
                        });
#pragma omp barrier
            }
            if (layer.use_mlp) {
                for (int m = me; m < tokens; m += threads)
                    normed(p.x + int64_t(m) * s.width, layer.mlp_norm, s.width, s.eps, input + int64_t(m) * s.width);
#pragma omp barrier
                const int blocks = s.hidden / 16, begin = blocks * int64_t(me) / threads,
                          end = blocks * int64_t(me + 1) / threads;
                for (int from = 0; from < tokens; from += kRows) {
                    const int some = std::min(kRows, tokens - from);
                    const bf16* a = input + int64_t(from) * s.width;
                    prepared(layer.up_gate, a, s.width, some, own);
                    const auto gated = [&](int block, const float* up, const float* gates) {
                        for (int m = 0; m < some; m++) {
                            const Sixteen gate = load(gates + 16 * m), one = same(1.f);
                            const Sixteen open = div(gate, add(one, exponential(sub(zero(), gate))));
                            store(middle + int64_t(from + m) * s.hidden + 16 * block, mul(open, load(up + 16 * m)));
                        }
                    };
                    int block = begin;
                    for (; by_fours(layer.up_gate, some) && block + 2 <= end; block += 2) {
                        float* const sums[4] = {own.first, own.first + 256, own.second, own.second + 256};
                        rows_of_tiles(layer.up_gate, {block, block + 1, block + blocks, block + 1 + blocks}, a, s.width,
                                      some, sums);
                        for (int i = 0; i < 2; i++) gated(block + i, sums[i], sums[2 + i]);
                    }
                    for (; block < end; block++) {
                        rows_of_tiles(layer.up_gate, block, block + blocks, a, s.width, some, own);
                        gated(block, own.first, own.second);
                    }
                }
#pragma omp barrier
                product(layer.down, middle, s.hidden, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++) {
                                float* x = p.x + int64_t(from + m) * s.width + 16 * block;
                                store(x, add(load(x), load(sums + 16 * m)));
                            }
                        });
#pragma omp barrier
            }
            if (bf16* const tap = p.taps ? p.taps[index] : nullptr)
                for (int64_t m = me; m < tokens; m += threads)
                    for (int i = 0; i < s.width; i += 16) store(tap + m * s.width + i, load(p.x + m * s.width + i));
        }
    }
}

// RMS-normalizes the rows of x [count, width], into 16 bits.
void outrider_normed(const float* x, const float* weight, int32_t count, int32_t width, float eps, bf16* to) {
    for (int m = 0; m < count; m++) normed(x + int64_t(m) * width, weight, width, eps, to + int64_t(m) * width);
}

int64_t outrider_product_work(const Matrix* w, int32_t count, int32_t threads) {
    return 2 * padded(count, 16) * w->in + 64 + threads * scratch_bytes(w->in, 0, 32);
}

// y [count, out] = a [count, in] w', a and y in bfloat16, or y in 32 bits.
void outrider_product(const Matrix* matrix, const bf16* a, void* y, int32_t count, int32_t wide_out, int32_t threads,
                      uint8_t* work) {
    const Matrix& w = *matrix;
    Arena arena{work};
    if (count > 16 && count % 16) {  // tiles read 16 rows at a time
        bf16* copy = arena.take<bf16>(padded(count, 16) * w.in);
        std::memcpy(copy, a, 2 * int64_t(count) * w.in);
        a = copy;
    }
    const int64_t each = scratch_bytes(w.in, 0, 32);
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), team = omp_get_num_threads();
        Arena mine{arena.at + me * each};
        Scratch own = scratch(mine, w.in, 0, 32);
        const Configured configured(count);
        product(w, a, w.in, count, me, team, own, [&](int block, int from, int some, const float* sums) {
            for (int m = 0; m < some; m++) {
                const int64_t at = int64_t(from + m) * w.out + 16 * block;
                if (wide_out)
                    store((float*)y + at, load(sums + 16 * m));
                else
                    store((bf16*)y + at, load(sums + 16 * m));
            }
        });
    }
}

int64_t outrider_attend_work(int32_t tokens, int64_t columns, int32_t dim, int32_t threads) {
    return 8 * tokens + 128 + threads * scratch_bytes(0, columns, dim);
}

// Attention of queries [rows, kv, count, group, dim] to keys and values [rows, kv, columns, dim], whose rows and heads
// are `row_stride` and `head_stride` bytes apart; mask [rows or 1, count, columns], or null: everything is attended.
void outrider_attend(const bf16* queries, const uint8_t* keys, const uint8_t* values, const uint8_t* mask, bf16* found,
                     int64_t row_stride, int64_t head_stride, int64_t mask_stride, int32_t rows, int32_t kv,
                     int32_t count, int32_t group, int32_t columns, int32_t dim, int32_t threads, uint8_t* work) {
    Arena arena{work};
    int32_t* runs = arena.take<int32_t>(rows * count);
    int32_t* counts = arena.take<int32_t>(rows * count);
    for (int m = 0; m < rows * count; m++) {
        runs[m] = counts[m] = columns;
        if (mask) counted(mask + m / count * mask_stride + int64_t(m % count) * columns, columns, runs[m], counts[m]);
    }
    const int64_t each = scratch_bytes(0, columns, dim);
    const int together = std::max(1, 16 / group), most = std::min(16, group),
              parts = count_parts(count, together, group, rows * kv, threads);
#pragma omp parallel num_threads(threads)
    {
        Arena mine{arena.at + omp_get_thread_num() * each};
        Scratch own = scratch(mine, 0, columns, dim);
        const Configured configured(std::min((count + parts - 1) / parts, together) * group);
#pragma omp for schedule(static, 1)
        for (int task = 0; task < rows * kv * parts; task++) {
            const int head = task / parts, row = head / kv, part = task % parts, q = int64_t(part) * count / parts,
                      some = int64_t(part + 1) * count / parts - q, m = row * count + q;
            const int64_t behind = row * row_stride + head % kv * head_stride;
            const uint8_t* shown = mask ? mask + row * mask_stride + int64_t(q) * columns : nullptr;
            for (int first = 0; first < group && some; first += most) {
                const int64_t at = ((int64_t(head) * count + q) * group + first) * dim;
                const Group part_group{some, std::min(most, group - first), dim, queries + at, found + at,
                                       int64_t(group) * dim, keys + behind, values + behind, 2 * dim, shown, columns,
                                       runs + m, counts + m};
                attended<false>(part_group, own);
            }
        }
    }
}

}  // extern "C"

#include "chain.h"
#include "levels.h"
#include "heads.h"
#include "weights.h"
