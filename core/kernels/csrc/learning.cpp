// Fused operations of a transformer block in training, forward and backward, each in one pass over memory: norms,
// rotary positions, causal softmax, SwiGLU. Inputs and outputs are bfloat16; the residual stream and sums are in 32
// bits. Memory traffic of these operations takes most of a small model's training step on a CPU.

#include <omp.h>

#include "numbers.h"

namespace {

// This thread's range of `count` items.
inline void share(int64_t count, int64_t& from, int64_t& to) {
    const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
    from = count * me / team, to = count * (me + 1) / team;
}

}  // namespace

extern "C" {

// sum = x + o, or x if o is null; y = sum r w with r = 1 / rms(sum). If y is null, only the sum is computed.
void outrider_norm(const float* x, const bf16* o, const float* w, float* sum, bf16* y, float* r, int64_t rows,
                   int32_t width, float eps, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++) {
            const float* in = x + row * width;
            if (o) {
                float* out = sum + row * width;
                for (int i = 0; i < width; i += 16)
                    store(out + i, add(load(o + row * width + i), load(in + i)));
                in = out;
            }
            if (!y) continue;
            Sixteen squares = zero();
            for (int i = 0; i < width; i += 16) {
                const Sixteen some = load(in + i);
                squares = fma(some, some, squares);
            }
            const float scale = 1.f / std::sqrt(added(squares) / width + eps);
            r[row] = scale;
            for (int i = 0; i < width; i += 16)
                store(y + row * width + i,
                         mul(mul(load(in + i), same(scale)), load(w + i)));
        }
    }
}

// Backward of y = x r w: gx = more + r (gy w - x r^2 mean(gy w x)); gw holds each thread's sums [threads, width].
void outrider_norm_back(const bf16* gy, const float* x, const float* w, const float* r, const float* more, float* gx,
                        float* gw, int64_t rows, int32_t width, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        float* mine = gw + int64_t(omp_get_thread_num()) * width;
        std::memset(mine, 0, 4 * width);
        for (int64_t row = from; row < to; row++) {
            const int64_t at = row * width;
            Sixteen dot = zero();
            for (int i = 0; i < width; i += 16) {
                const Sixteen g = load(gy + at + i), in = load(x + at + i);
                dot = fma(mul(g, load(w + i)), in, dot);
                store(mine + i,
                                 fma(mul(g, in), same(r[row]), load(mine + i)));
            }
            const Sixteen less = same(added(dot) / width * r[row] * r[row]);
            for (int i = 0; i < width; i += 16) {
                const Sixteen g = mul(load(gy + at + i), load(w + i));
                const Sixteen back = fnma(load(x + at + i), less, g);
                store(gx + at + i, fma(back, same(r[row]), load(more + at + i)));
            }
        }
    }
}

struct Heads {
    int64_t rows;  // of the batch
    int32_t count, heads, kv, dim, threads;
    float eps;
    const float* norm;    // [heads + kv, dim], or null
    const float* cosine;  // [count, dim / 2]
    const float* sine;
};

// The offset of a token's head in queries [B, H, T, d], or in keys or values [B, K, T, d].
static inline int64_t head_offset(const Heads& p, int64_t token, int head, int many) {
    return ((token / p.count * many + head) * p.count + token % p.count) * p.dim;
}

// Splits queries, keys and values [B T, (H + 2 K) d] and applies norms and rotary embedding; r [B T, H + K] is 1 / rms
// of each head.
void outrider_heads(const Heads* shape, const bf16* all_, bf16* q, bf16* k, bf16* v, float* r) {
    const Heads& p = *shape;
    const int half = p.dim / 2, rotary = p.heads + p.kv;
#pragma omp parallel num_threads(p.threads)
    {
        int64_t from, to;
        share(p.rows * p.count, from, to);
        for (int64_t token = from; token < to; token++) {
            const bf16* in = all_ + token * (rotary + p.kv) * p.dim;
            const float *c = p.cosine + token % p.count * half, *s = p.sine + token % p.count * half;
            for (int head = 0; head < rotary; head++, in += p.dim) {
                float scale = 1.f;
                if (p.norm) {
                    Sixteen squares = zero();
                    for (int i = 0; i < p.dim; i += 16) {
                        const Sixteen some = load(in + i);
                        squares = fma(some, some, squares);
                    }
                    scale = r[token * rotary + head] = 1.f / std::sqrt(added(squares) / p.dim + p.eps);
                }
                bf16* out = head < p.heads ? q + head_offset(p, token, head, p.heads)
                                           : k + head_offset(p, token, head - p.heads, p.kv);
                for (int i = 0; i < half; i += 16) {
                    Sixteen low = mul(load(in + i), same(scale)),
                           high = mul(load(in + half + i), same(scale));
                    if (p.norm) {
                        low = mul(low, load(p.norm + head * p.dim + i));
                        high = mul(high, load(p.norm + head * p.dim + half + i));
                    }
                    const Sixteen cos = load(c + i), sin = load(s + i);
                    store(out + i, fms(low, cos, mul(high, sin)));
                    store(out + half + i, fma(high, cos, mul(low, sin)));
                }
            }
            for (int head = 0; head < p.kv; head++, in += p.dim)
                std::memcpy(v + head_offset(p, token, head, p.kv), in, 2 * p.dim);
        }
    }
}

// Backward of outrider_heads; gnorm holds each thread's sums [threads, heads + kv, dim].
void outrider_heads_back(const Heads* shape, const bf16* all_, const float* r, const bf16* gq, const bf16* gk,
                         const bf16* gv, bf16* back, float* gnorm) {
    const Heads& p = *shape;
    const int half = p.dim / 2, rotary = p.heads + p.kv;
#pragma omp parallel num_threads(p.threads)
    {
        int64_t from, to;
        share(p.rows * p.count, from, to);
        float* mine = p.norm ? gnorm + int64_t(omp_get_thread_num()) * rotary * p.dim : nullptr;
        if (mine) std::memset(mine, 0, 4 * int64_t(rotary) * p.dim);
        for (int64_t token = from; token < to; token++) {
            const int64_t at = token * (rotary + p.kv) * p.dim;
            const bf16* in = all_ + at;
            bf16* out = back + at;
            const float *c = p.cosine + token % p.count * half, *s = p.sine + token % p.count * half;
            for (int head = 0; head < rotary; head++, in += p.dim, out += p.dim) {
                const bf16* given = head < p.heads ? gq + head_offset(p, token, head, p.heads)
                                                   : gk + head_offset(p, token, head - p.heads, p.kv);
                const float* w = p.norm ? p.norm + head * p.dim : nullptr;
                float* gw = mine ? mine + head * p.dim : nullptr;
                const float scale = p.norm ? r[token * rotary + head] : 1.f;
                Sixteen dot = zero();
                for (int i = 0; p.norm && i < half; i += 16) {
                    const Sixteen cos = load(c + i), sin = load(s + i);
                    const Sixteen a = load(given + i), b = load(given + half + i);
                    const Sixteen low = fma(a, cos, mul(b, sin)),
                                 high = fms(b, cos, mul(a, sin));
                    const Sixteen x = load(in + i), y = load(in + half + i);
                    const Sixteen lx = mul(low, x), hy = mul(high, y);
                    dot = fma(lx, load(w + i), dot);
                    dot = fma(hy, load(w + half + i), dot);
                    store(gw + i, fma(lx, same(scale), load(gw + i)));
                    store(gw + half + i, fma(hy, same(scale), load(gw + half + i)));
                }
                const Sixteen less = same(p.norm ? added(dot) / p.dim * scale * scale : 0.f);
                for (int i = 0; i < half; i += 16) {
                    const Sixteen cos = load(c + i), sin = load(s + i);
                    const Sixteen a = load(given + i), b = load(given + half + i);
                    Sixteen low = fma(a, cos, mul(b, sin)),
                           high = fms(b, cos, mul(a, sin));
                    if (p.norm) {
                        low = fnma(load(in + i), less, mul(low, load(w + i)));
                        high = fnma(load(in + half + i), less,
                                                mul(high, load(w + half + i)));
                    }
                    store(out + i, mul(low, same(scale)));
                    store(out + half + i, mul(high, same(scale)));
                }
            }
            for (int head = 0; head < p.kv; head++, out += p.dim)
                std::memcpy(out, gv + head_offset(p, token, head, p.kv), 2 * p.dim);
        }
    }
}

// softmax(scale scores) under a causal mask, in place. scores [rows, columns]; row n is that of token n % columns,
// which attends to itself and the tokens before it.
void outrider_causal(bf16* scores, int64_t rows, int32_t columns, float scale, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++) {
            bf16* x = scores + row * columns;
            const int seen = row % columns + 1;
            Sixteen most = same(-INFINITY), total = zero();
            for (int i = 0; i < seen; i += 16) {
                most = larger(most, load(x + i, seen - i), seen - i);
            }
            const Sixteen top = same(largest(most));
            alignas(64) float kept[1024];
            float* e = columns <= 1008 ? kept : new float[columns + 16];
            for (int i = 0; i < seen; i += 16) {
                const Sixteen in = load(x + i, seen - i);
                const Sixteen e_i = leading(exponential(mul(sub(in, top), same(scale))), seen - i);
                total = add(total, e_i);
                store(e + i, e_i);
            }
            const Sixteen share_ = same(1.f / added(total));
            for (int i = 0; i < columns; i += 16) {
                const Sixteen p = i < seen ? mul(load(e + i), share_) : zero();
                store(x + i, p, columns - i);
            }
            if (e != kept) delete[] e;
        }
    }
}

// Turns g, the gradient of p, into the gradient of the scores: scale p (g - sum p g).
void outrider_causal_back(const bf16* p, bf16* g, int64_t rows, int32_t columns, float scale, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++) {
            const bf16* mine = p + row * columns;
            bf16* back = g + row * columns;
            const int seen = row % columns + 1;
            Sixteen dot = zero();
            for (int i = 0; i < seen; i += 16) {
                dot = fma(load(mine + i, seen - i), load(back + i, seen - i), dot);
            }
            const Sixteen less = same(added(dot));
            for (int i = 0; i < columns; i += 16) {
                Sixteen gradient = zero();
                if (i < seen) {
                    const Sixteen prob = load(mine + i, columns - i);  // 0 in masked columns
                    gradient = mul(mul(prob, same(scale)), sub(load(back + i, columns - i), less));
                }
                store(back + i, gradient, columns - i);
            }
        }
    }
}

// y = up silu(gate) of rows [up, gate].
void outrider_opened(const bf16* both, bf16* y, int64_t rows, int32_t hidden, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++)
            for (int i = 0; i < hidden; i += 16) {
                const bf16* at = both + 2 * row * hidden + i;
                const Sixteen gate = load(at + hidden);
                const Sixteen open = div(gate, add(same(1.f), exponential(sub(zero(), gate))));
                store(y + row * hidden + i, mul(open, load(at)));
            }
    }
}

// Backward of outrider_opened. Also recomputes y, which then need not be stored.
void outrider_opened_back(const bf16* gy, const bf16* both, bf16* back, bf16* y, int64_t rows, int32_t hidden,
                          int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++)
            for (int i = 0; i < hidden; i += 16) {
                const int64_t at = 2 * row * hidden + i;
                const Sixteen up = load(both + at), gate = load(both + at + hidden), g = load(gy + row * hidden + i);
                const Sixteen s = div(same(1.f), add(same(1.f), exponential(sub(zero(), gate))));
                const Sixteen open = mul(gate, s);
                store(y + row * hidden + i, mul(open, up));
                store(back + at, mul(g, open));
                // silu' = s (1 + gate (1 - s))
                const Sixteen slope = mul(s, fma(gate, sub(same(1.f), s), same(1.f)));
                store(back + at + hidden, mul(mul(g, up), slope));
            }
    }
}

}  // extern "C"
