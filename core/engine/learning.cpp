// What a transformer block does between its products while it learns, forward and backward, each in one reading of its
// numbers: norms, rotary positions, softmax under a causal mask, SwiGLU. In and out are bfloat16, the residual stream and
// sums are in 32 bits. A training step of a small model on a CPU is mostly these readings.

#include <omp.h>

#include "numbers.h"

namespace {

inline __m512 zero() { return _mm512_setzero_ps(); }
inline __m512 all(float x) { return _mm512_set1_ps(x); }

// The share of `count` that is a thread's.
inline void share(int64_t count, int64_t& from, int64_t& to) {
    const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
    from = count * me / team, to = count * (me + 1) / team;
}

}  // namespace

extern "C" {

// sum = x + o, or x where o is null; y = sum r w, r = 1 / rms(sum). Without y it is the sum alone.
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
                    _mm512_storeu_ps(out + i, _mm512_add_ps(loaded(o + row * width + i), _mm512_loadu_ps(in + i)));
                in = out;
            }
            if (!y) continue;
            __m512 squares = zero();
            for (int i = 0; i < width; i += 16) {
                const __m512 some = _mm512_loadu_ps(in + i);
                squares = _mm512_fmadd_ps(some, some, squares);
            }
            const float scale = 1.f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps);
            r[row] = scale;
            for (int i = 0; i < width; i += 16)
                narrowed(y + row * width + i,
                         _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(in + i), all(scale)), _mm512_loadu_ps(w + i)));
        }
    }
}

// Back through y = x r w: gx = more + r (gy w - x r^2 mean(gy w x)); of w the sums of each thread [threads, width].
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
            __m512 dot = zero();
            for (int i = 0; i < width; i += 16) {
                const __m512 g = loaded(gy + at + i), in = _mm512_loadu_ps(x + at + i);
                dot = _mm512_fmadd_ps(_mm512_mul_ps(g, _mm512_loadu_ps(w + i)), in, dot);
                _mm512_storeu_ps(mine + i,
                                 _mm512_fmadd_ps(_mm512_mul_ps(g, in), all(r[row]), _mm512_loadu_ps(mine + i)));
            }
            const __m512 less = all(_mm512_reduce_add_ps(dot) / width * r[row] * r[row]);
            for (int i = 0; i < width; i += 16) {
                const __m512 g = _mm512_mul_ps(loaded(gy + at + i), _mm512_loadu_ps(w + i));
                const __m512 back = _mm512_fnmadd_ps(_mm512_loadu_ps(x + at + i), less, g);
                _mm512_storeu_ps(gx + at + i, _mm512_fmadd_ps(back, all(r[row]), _mm512_loadu_ps(more + at + i)));
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

// Where a head's numbers of a token stand among queries [B, H, T, d], or keys or values [B, K, T, d].
static inline int64_t headed(const Heads& p, int64_t token, int head, int many) {
    return ((token / p.count * many + head) * p.count + token % p.count) * p.dim;
}

// Queries, keys and values [B T, (H + 2 K) d], apart and turned; r [B T, H + K] is 1 / rms of each head.
void outrider_heads(const Heads* shape, const bf16* all_, bf16* q, bf16* k, bf16* v, float* r) {
    const Heads& p = *shape;
    const int half = p.dim / 2, turning = p.heads + p.kv;
#pragma omp parallel num_threads(p.threads)
    {
        int64_t from, to;
        share(p.rows * p.count, from, to);
        for (int64_t token = from; token < to; token++) {
            const bf16* in = all_ + token * (turning + p.kv) * p.dim;
            const float *c = p.cosine + token % p.count * half, *s = p.sine + token % p.count * half;
            for (int head = 0; head < turning; head++, in += p.dim) {
                float scale = 1.f;
                if (p.norm) {
                    __m512 squares = zero();
                    for (int i = 0; i < p.dim; i += 16) {
                        const __m512 some = loaded(in + i);
                        squares = _mm512_fmadd_ps(some, some, squares);
                    }
                    scale = r[token * turning + head] = 1.f / std::sqrt(_mm512_reduce_add_ps(squares) / p.dim + p.eps);
                }
                bf16* out = head < p.heads ? q + headed(p, token, head, p.heads)
                                           : k + headed(p, token, head - p.heads, p.kv);
                for (int i = 0; i < half; i += 16) {
                    __m512 low = _mm512_mul_ps(loaded(in + i), all(scale)),
                           high = _mm512_mul_ps(loaded(in + half + i), all(scale));
                    if (p.norm) {
                        low = _mm512_mul_ps(low, _mm512_loadu_ps(p.norm + head * p.dim + i));
                        high = _mm512_mul_ps(high, _mm512_loadu_ps(p.norm + head * p.dim + half + i));
                    }
                    const __m512 cos = _mm512_loadu_ps(c + i), sin = _mm512_loadu_ps(s + i);
                    narrowed(out + i, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)));
                    narrowed(out + half + i, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)));
                }
            }
            for (int head = 0; head < p.kv; head++, in += p.dim)
                std::memcpy(v + headed(p, token, head, p.kv), in, 2 * p.dim);
        }
    }
}

// The way back; of the norm the sums of each thread [threads, heads + kv, dim].
void outrider_heads_back(const Heads* shape, const bf16* all_, const float* r, const bf16* gq, const bf16* gk,
                         const bf16* gv, bf16* back, float* gnorm) {
    const Heads& p = *shape;
    const int half = p.dim / 2, turning = p.heads + p.kv;
#pragma omp parallel num_threads(p.threads)
    {
        int64_t from, to;
        share(p.rows * p.count, from, to);
        float* mine = p.norm ? gnorm + int64_t(omp_get_thread_num()) * turning * p.dim : nullptr;
        if (mine) std::memset(mine, 0, 4 * int64_t(turning) * p.dim);
        for (int64_t token = from; token < to; token++) {
            const int64_t at = token * (turning + p.kv) * p.dim;
            const bf16* in = all_ + at;
            bf16* out = back + at;
            const float *c = p.cosine + token % p.count * half, *s = p.sine + token % p.count * half;
            for (int head = 0; head < turning; head++, in += p.dim, out += p.dim) {
                const bf16* given = head < p.heads ? gq + headed(p, token, head, p.heads)
                                                   : gk + headed(p, token, head - p.heads, p.kv);
                const float* w = p.norm ? p.norm + head * p.dim : nullptr;
                float* gw = mine ? mine + head * p.dim : nullptr;
                const float scale = p.norm ? r[token * turning + head] : 1.f;
                __m512 dot = zero();
                for (int i = 0; p.norm && i < half; i += 16) {
                    const __m512 cos = _mm512_loadu_ps(c + i), sin = _mm512_loadu_ps(s + i);
                    const __m512 a = loaded(given + i), b = loaded(given + half + i);
                    const __m512 low = _mm512_fmadd_ps(a, cos, _mm512_mul_ps(b, sin)),
                                 high = _mm512_fmsub_ps(b, cos, _mm512_mul_ps(a, sin));
                    const __m512 x = loaded(in + i), y = loaded(in + half + i);
                    const __m512 lx = _mm512_mul_ps(low, x), hy = _mm512_mul_ps(high, y);
                    dot = _mm512_fmadd_ps(lx, _mm512_loadu_ps(w + i), dot);
                    dot = _mm512_fmadd_ps(hy, _mm512_loadu_ps(w + half + i), dot);
                    _mm512_storeu_ps(gw + i, _mm512_fmadd_ps(lx, all(scale), _mm512_loadu_ps(gw + i)));
                    _mm512_storeu_ps(gw + half + i, _mm512_fmadd_ps(hy, all(scale), _mm512_loadu_ps(gw + half + i)));
                }
                const __m512 less = all(p.norm ? _mm512_reduce_add_ps(dot) / p.dim * scale * scale : 0.f);
                for (int i = 0; i < half; i += 16) {
                    const __m512 cos = _mm512_loadu_ps(c + i), sin = _mm512_loadu_ps(s + i);
                    const __m512 a = loaded(given + i), b = loaded(given + half + i);
                    __m512 low = _mm512_fmadd_ps(a, cos, _mm512_mul_ps(b, sin)),
                           high = _mm512_fmsub_ps(b, cos, _mm512_mul_ps(a, sin));
                    if (p.norm) {
                        low = _mm512_fnmadd_ps(loaded(in + i), less, _mm512_mul_ps(low, _mm512_loadu_ps(w + i)));
                        high = _mm512_fnmadd_ps(loaded(in + half + i), less,
                                                _mm512_mul_ps(high, _mm512_loadu_ps(w + half + i)));
                    }
                    narrowed(out + i, _mm512_mul_ps(low, all(scale)));
                    narrowed(out + half + i, _mm512_mul_ps(high, all(scale)));
                }
            }
            for (int head = 0; head < p.kv; head++, out += p.dim)
                std::memcpy(out, gv + headed(p, token, head, p.kv), 2 * p.dim);
        }
    }
}

// Rows of scores [rows, columns], row n being that of token n % columns, which sees as many tokens as stand before it,
// and itself: softmax of scale times them, in place.
void outrider_causal(bf16* scores, int64_t rows, int32_t columns, float scale, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++) {
            bf16* x = scores + row * columns;
            const int seen = row % columns + 1;
            __m512 most = all(-INFINITY), total = zero();
            for (int i = 0; i < seen; i += 16) {
                const __mmask16 some = seen - i < 16 ? (1 << (seen - i)) - 1 : 0xffff;
                most = _mm512_mask_max_ps(most, some, most, widened(_mm256_maskz_loadu_epi16(some, x + i)));
            }
            const __m512 top = all(_mm512_reduce_max_ps(most));
            alignas(64) float kept[1024];
            float* e = columns <= 1008 ? kept : new float[columns + 16];
            for (int i = 0; i < seen; i += 16) {
                const __mmask16 some = seen - i < 16 ? (1 << (seen - i)) - 1 : 0xffff;
                const __m512 in = widened(_mm256_maskz_loadu_epi16(some, x + i));
                const __m512 one =
                    _mm512_maskz_mov_ps(some, exponential(_mm512_mul_ps(_mm512_sub_ps(in, top), all(scale))));
                total = _mm512_add_ps(total, one);
                _mm512_storeu_ps(e + i, one);
            }
            const __m512 share_ = all(1.f / _mm512_reduce_add_ps(total));
            for (int i = 0; i < columns; i += 16) {
                const __mmask16 some = columns - i < 16 ? (1 << (columns - i)) - 1 : 0xffff;
                const __m512 p = i < seen ? _mm512_mul_ps(_mm512_loadu_ps(e + i), share_) : zero();
                _mm256_mask_storeu_epi16(x + i, some, (__m256i)_mm512_cvtneps_pbh(p));
            }
            if (e != kept) delete[] e;
        }
    }
}

// g, the gradient of p, becomes that of the scores: scale p (g - sum p g).
void outrider_causal_back(const bf16* p, bf16* g, int64_t rows, int32_t columns, float scale, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++) {
            const bf16* mine = p + row * columns;
            bf16* back = g + row * columns;
            const int seen = row % columns + 1;
            __m512 dot = zero();
            for (int i = 0; i < seen; i += 16) {
                const __mmask16 some = seen - i < 16 ? (1 << (seen - i)) - 1 : 0xffff;
                dot = _mm512_fmadd_ps(widened(_mm256_maskz_loadu_epi16(some, mine + i)),
                                      widened(_mm256_maskz_loadu_epi16(some, back + i)), dot);
            }
            const __m512 less = all(_mm512_reduce_add_ps(dot));
            for (int i = 0; i < columns; i += 16) {
                const __mmask16 some = columns - i < 16 ? (1 << (columns - i)) - 1 : 0xffff;
                __m512 found = zero();
                if (i < seen) {
                    const __m512 one = widened(_mm256_maskz_loadu_epi16(some, mine + i));  // 0 where it doesn't look
                    found = _mm512_mul_ps(
                        _mm512_mul_ps(one, all(scale)),
                        _mm512_sub_ps(widened(_mm256_maskz_loadu_epi16(some, back + i)), less));
                }
                _mm256_mask_storeu_epi16(back + i, some, (__m256i)_mm512_cvtneps_pbh(found));
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
                const __m512 gate = loaded(at + hidden);
                const __m512 open = _mm512_div_ps(gate, _mm512_add_ps(all(1.f), exponential(_mm512_sub_ps(zero(), gate))));
                narrowed(y + row * hidden + i, _mm512_mul_ps(open, loaded(at)));
            }
    }
}

// The way back, and y once more, which need not be kept so.
void outrider_opened_back(const bf16* gy, const bf16* both, bf16* back, bf16* y, int64_t rows, int32_t hidden,
                          int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        share(rows, from, to);
        for (int64_t row = from; row < to; row++)
            for (int i = 0; i < hidden; i += 16) {
                const int64_t at = 2 * row * hidden + i;
                const __m512 up = loaded(both + at), gate = loaded(both + at + hidden), g = loaded(gy + row * hidden + i);
                const __m512 s = _mm512_div_ps(all(1.f), _mm512_add_ps(all(1.f), exponential(_mm512_sub_ps(zero(), gate))));
                const __m512 open = _mm512_mul_ps(gate, s);
                narrowed(y + row * hidden + i, _mm512_mul_ps(open, up));
                narrowed(back + at, _mm512_mul_ps(g, open));
                // silu' = s (1 + gate (1 - s))
                const __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(gate, _mm512_sub_ps(all(1.f), s), all(1.f)));
                narrowed(back + at + hidden, _mm512_mul_ps(_mm512_mul_ps(g, up), slope));
            }
    }
}

}  // extern "C"
