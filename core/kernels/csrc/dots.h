// Products of 16-bit numbers without AMX tiles: dot products of pairs of inputs, sixteen outputs at a time.

#pragma once

namespace {

constexpr int kChains = 12;  // rows whose sums with two rows of tiles fill the registers

// A tile's pairs of inputs, each for sixteen outputs.
template <int bits>
struct Pairs;

template <>
struct Pairs<16> {
    const uint8_t* at;
    explicit Pairs(const uint8_t* tile) : at(tile) {}
    __m512i operator[](int i) const { return _mm512_loadu_si512(at + 64 * i); }
};

template <>
struct Pairs<8> {  // unscaled
    const uint8_t* at;
    explicit Pairs(const uint8_t* tile) : at(tile) {}
    __m512i operator[](int i) const {
        const auto wide = [&](int from) {
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(at + 32 * i + from))));
        };
        return (__m512i)_mm512_cvtne2ps_pbh(wide(16), wide(0));
    }
};

template <>
struct Pairs<4> {
    const uint8_t* at;
    Sixteen scales[2], least[2];  // of the outputs of a pair's first and last 16 numbers; least: what 0 stands for
    explicit Pairs(const uint8_t* tile) : at(tile) {
        const Sixteen scale = load((const bf16*)(tile + 256));
        const Sixteen offset = fnma(scale, same(8), load((const bf16*)(tile + 288)));
        const __m512i place = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        for (int half = 0; half < 2; half++) {
            const __m512i outputs = _mm512_add_epi32(place, _mm512_set1_epi32(8 * half));
            scales[half] = _mm512_permutexvar_ps(outputs, scale);
            least[half] = _mm512_permutexvar_ps(outputs, offset);
        }
    }
    __m512i operator[](int i) const {
        const __m256i both = _mm256_loadu_si256((const __m256i*)(at + 32 * (i / 2)));
        const __m256i all = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
        const auto wide = [&](int half) {
            const __m128i some = half ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all);
            return fma(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(some)), scales[half], least[half]);
        };
        return (__m512i)_mm512_cvtne2ps_pbh(wide(1), wide(0));
    }
};

inline Sixteen dotted(Sixteen sum, int32_t pair, __m512i weights) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
}

// Products [rows][16] of rows of `a` with one tile, added to `sums`, or stored there if `fresh`.
template <int rows>
inline void multiplied(const uint8_t* tile, const bf16* a, int64_t stride, float* sums, bool fresh) {
    const Pairs<16> pairs(tile);
    Sixteen even[rows], odd[rows];
    for (int m = 0; m < rows; m++) even[m] = fresh ? zero() : load(sums + 16 * m), odd[m] = zero();
    for (int i = 0; i < 16; i += 2)
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) {
            const int32_t* const here = (const int32_t*)(a + m * stride);
            even[m] = dotted(even[m], here[i], pairs[i]);
            odd[m] = dotted(odd[m], here[i + 1], pairs[i + 1]);
        }
    for (int m = 0; m < rows; m++) store(sums + 16 * m, add(even[m], odd[m]));
}

inline void multiplied(const uint8_t* tile, const bf16* a, int64_t stride, int count, float* sums, bool fresh) {
    int m = 0;
    for (; m + 6 <= count; m += 6) multiplied<6>(tile, a + m * stride, stride, sums + 16 * m, fresh);
    for (; m + 3 <= count; m += 3) multiplied<3>(tile, a + m * stride, stride, sums + 16 * m, fresh);
    for (; m < count; m++) multiplied<1>(tile, a + m * stride, stride, sums + 16 * m, fresh);
}

// The operands of one product: two rows of tiles, and rows of inputs, interleaved every 32 inputs.
struct Stretch {
    const uint8_t* tiles[2];
    int depth;
    const bf16* inputs;  // [depth][rows][32]
    int64_t ahead;       // prefetch distance at the start, in bytes
    int64_t pace;        // bytes prefetched per pair of inputs
};

// Computes sums [rows][16] of each side. Each sum is one chain of additions in the order of inputs, whatever the number
// of rows.
template <int bits, int rows>
void chained(const Stretch& s, float* const (&sums)[2]) {
    Sixteen chains[2][rows];
    for (auto& side : chains)
        for (auto& sum : side) sum = zero();
    const int32_t* a = (const int32_t*)s.inputs;
    const char *soon = (const char*)s.tiles[0] + s.ahead, *beside = (const char*)s.tiles[1] + s.ahead;
    for (int k = 0; k < s.depth; k++, a += 16 * rows) {
        const uint8_t* const here[2] = {s.tiles[0] + k * record(bits), s.tiles[1] + k * record(bits)};
        const Pairs<bits> left(here[0]), right(here[1]);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m512i first = left[i], last = right[i];
            _mm_prefetch(soon, _MM_HINT_T1);
            _mm_prefetch(beside, _MM_HINT_T1);
            soon += s.pace, beside += s.pace;
#pragma GCC unroll 12
            for (int m = 0; m < rows; m++) {
                chains[0][m] = dotted(chains[0][m], a[16 * m + i], first);
                chains[1][m] = dotted(chains[1][m], a[16 * m + i], last);
            }
        }
    }
    for (int side = 0; side < 2; side++)
        for (int m = 0; m < rows; m++) store(sums[side] + 16 * m, chains[side][m]);
}

// The prefetch distance, if the next two rows of tiles are `next` bytes further on: they have to come whole, as nothing
// else foresees where they begin, but must not drive out what is read now.
inline int64_t ahead(int64_t next) { return next <= kNear ? next : kAhead; }

// The size of the next group of the `left` remaining rows; groups have about equal sizes.
inline int together(int left) {
    const int groups = (left + kChains - 1) / kChains;
    return (left + groups - 1) / groups;
}

// Copies inputs to the layout of Stretch::inputs.
inline void laid_out(const bf16* a, int64_t stride, int depth, int count, bf16* to) {
    for (int from = 0, rows; from < count; from += rows) {
        rows = together(count - from);
        for (int k = 0; k < depth; k++)
            for (int m = from; m < from + rows; m++, to += 32)
                _mm512_storeu_si512(to, _mm512_loadu_si512(a + m * stride + 32 * k));
    }
}

// Computes sums [count][16] of two rows of tiles with inputs in that layout, and prefetches what follows: if the tiles
// are read several times, the next two rows of tiles, `next` bytes further on.
template <int bits>
void chained(Stretch s, int64_t next, int count, float* const (&sums)[2]) {
    static constexpr void (*kKernels[kChains])(const Stretch&, float* const (&)[2]) = {
        chained<bits, 1>, chained<bits, 2>, chained<bits, 3>, chained<bits, 4>,
        chained<bits, 5>, chained<bits, 6>, chained<bits, 7>, chained<bits, 8>,
        chained<bits, 9>, chained<bits, 10>, chained<bits, 11>, chained<bits, 12>};
    const int groups = (count + kChains - 1) / kChains;
    s.pace = record(bits) / 16 / groups;
    s.ahead = groups > 1 ? next : ahead(next);
    for (int from = 0, rows; from < count; from += rows, s.ahead += 16 * s.depth * s.pace) {
        rows = together(count - from);
        kKernels[rows - 1](s, {sums[0] + 16 * from, sums[1] + 16 * from});
        s.inputs += 32 * s.depth * rows;
    }
}

}  // namespace
