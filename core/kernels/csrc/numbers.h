// Vectors of sixteen 32-bit numbers with loads and stores in 16 bits: one register with AVX-512 BF16, else two (AVX2).

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

typedef uint16_t bf16;

namespace {

#ifdef __AVX512BF16__

typedef __m512 Sixteen;

inline __mmask16 first(int count) { return count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0; }
inline Sixteen zero() { return _mm512_setzero_ps(); }
inline Sixteen same(float x) { return _mm512_set1_ps(x); }
inline Sixteen load(const float* x) { return _mm512_loadu_ps(x); }
inline Sixteen load(const float* x, int count) { return _mm512_maskz_loadu_ps(first(count), x); }
inline void store(float* to, Sixteen x) { _mm512_storeu_ps(to, x); }
inline Sixteen widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline Sixteen load(const bf16* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }
inline Sixteen load(const bf16* x, int count) { return widened(_mm256_maskz_loadu_epi16(first(count), x)); }
inline void store(bf16* to, Sixteen x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }
inline void store(bf16* to, Sixteen x, int count) {
    _mm256_mask_storeu_epi16(to, first(count), (__m256i)_mm512_cvtneps_pbh(x));
}
inline void store(int8_t* to, Sixteen x) {
    _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline Sixteen add(Sixteen a, Sixteen b) { return _mm512_add_ps(a, b); }
inline Sixteen sub(Sixteen a, Sixteen b) { return _mm512_sub_ps(a, b); }
inline Sixteen mul(Sixteen a, Sixteen b) { return _mm512_mul_ps(a, b); }
inline Sixteen div(Sixteen a, Sixteen b) { return _mm512_div_ps(a, b); }
inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a, b, c); }    // ab + c
inline Sixteen fms(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmsub_ps(a, b, c); }    // ab - c
inline Sixteen fnma(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fnmadd_ps(a, b, c); }  // c - ab
inline Sixteen larger(Sixteen a, Sixteen b) { return _mm512_max_ps(a, b); }
inline Sixteen larger(Sixteen a, Sixteen b, int count) { return _mm512_mask_max_ps(a, first(count), a, b); }
inline Sixteen leading(Sixteen x, int count) { return _mm512_maskz_mov_ps(first(count), x); }  // 0 from `count` on
inline Sixteen size(Sixteen x) { return _mm512_abs_ps(x); }
inline Sixteen whole(Sixteen x) { return _mm512_roundscale_ps(x, 8); }
inline Sixteen scaled(Sixteen x, Sixteen n) { return _mm512_scalef_ps(x, n); }  // x 2^n
inline uint32_t above(Sixteen a, Sixteen b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline float added(Sixteen x) { return _mm512_reduce_add_ps(x); }
inline float largest(Sixteen x) { return _mm512_reduce_max_ps(x); }

#else

struct Sixteen {
    __m256 low, high;
};

inline __m256i first_of_eight(int count) {  // mask of the first `count` of eight
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline uint32_t first(int count) { return count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0; }
inline Sixteen zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Sixteen same(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Sixteen load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
inline Sixteen load(const float* x, int count) {
    return {_mm256_maskload_ps(x, first_of_eight(count)), _mm256_maskload_ps(x + 8, first_of_eight(count - 8))};
}
inline void store(float* to, Sixteen x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
inline __m256 widened(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Sixteen load(const bf16* x) {
    return {widened(_mm_loadu_si128((const __m128i*)x)), widened(_mm_loadu_si128((const __m128i*)(x + 8)))};
}
inline Sixteen load(const bf16* x, int count) {
    bf16 some[16] = {};
    std::memcpy(some, x, 2 * std::min(std::max(count, 0), 16));
    return load(some);
}
inline __m256i rounded(__m256 x) {  // to bfloat16: nearest, ties to even; NaN stays NaN
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(bf16* to, Sixteen x) {
    const __m256i both = _mm256_packus_epi32(rounded(x.low), rounded(x.high));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store(bf16* to, Sixteen x, int count) {
    bf16 some[16];
    store(some, x);
    std::memcpy(to, some, 2 * std::min(std::max(count, 0), 16));
}
inline void store(int8_t* to, Sixteen x) {
    const __m256i ints = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
    const __m256i order = _mm256_permute4x64_epi64(ints, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
    _mm_storeu_si128((__m128i*)to, bytes);
}
inline Sixteen add(Sixteen a, Sixteen b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Sixteen sub(Sixteen a, Sixteen b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Sixteen mul(Sixteen a, Sixteen b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Sixteen div(Sixteen a, Sixteen b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Sixteen fms(Sixteen a, Sixteen b, Sixteen c) {
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
inline Sixteen fnma(Sixteen a, Sixteen b, Sixteen c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
inline Sixteen larger(Sixteen a, Sixteen b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Sixteen larger(Sixteen a, Sixteen b, int count) {
    const Sixteen most = larger(a, b);
    return {_mm256_blendv_ps(a.low, most.low, _mm256_castsi256_ps(first_of_eight(count))),
            _mm256_blendv_ps(a.high, most.high, _mm256_castsi256_ps(first_of_eight(count - 8)))};
}
inline Sixteen leading(Sixteen x, int count) {  // 0 from `count` on
    return {_mm256_and_ps(x.low, _mm256_castsi256_ps(first_of_eight(count))),
            _mm256_and_ps(x.high, _mm256_castsi256_ps(first_of_eight(count - 8)))};
}
inline Sixteen size(Sixteen x) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Sixteen whole(Sixteen x) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }
inline __m256 scaled_half(__m256 x, __m256 n) {  // x 2^n in two steps, because 2^n alone may overflow
    const __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-252)), _mm256_set1_ps(254)));
    const __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half), bias = _mm256_set1_epi32(127);
    const __m256 some = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(x, some), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline Sixteen scaled(Sixteen x, Sixteen n) { return {scaled_half(x.low, n.low), scaled_half(x.high, n.high)}; }
inline uint32_t above(Sixteen a, Sixteen b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GT_OQ)) |
           _mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GT_OQ)) << 8;
}
inline float added(Sixteen x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(Sixteen x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

// e^x to about 1e-7, for 16 numbers.
inline Sixteen exponential(Sixteen x) {
    const Sixteen n = whole(mul(x, same(1.44269504f)));
    Sixteen r = fnma(n, same(0.693359375f), x);
    r = fnma(n, same(-2.12194440e-4f), r);
    Sixteen p = same(1.f / 720);
    for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = fma(p, r, same(c));
    return scaled(p, n);
}

}  // namespace
