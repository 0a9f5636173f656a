// Products of 16-bit numbers with AVX2 and FMA, which multiply 32-bit numbers only: weights are widened when loaded,
// which takes little time compared with reading them. Those with weights of 8 and 4 bits are in integers.h.

#pragma once

#include <type_traits>

namespace {

constexpr int kTile = 2048;   // bytes of a tile of 32 by 16 numbers, here in 32 bits
constexpr int kUnpacked = 1;  // tiles unpacked at a time
constexpr int kStretch = 4;   // tiles multiplied with all rows before the next ones are read
constexpr int kPrepared = 128;  // bytes stored per 32 inputs
constexpr int kFew = 2;       // rows and columns summed together in 32 bits
constexpr bool kInOrder = true;  // a sum is one chain of additions in order
constexpr int kQueries = 4;      // number of queries that take as long as transposing keys and values
constexpr int kChains = 6;    // sums that fit into the registers besides the operands
constexpr int kFar = 1 << 14;  // prefetch distance in bytes, to the second-level cache

struct Numbers {  // 32 numbers
    Sixteen low, high;
};

}  // namespace

#include "integers.h"

namespace {

// Keeps a value that is used six times in its registers: the processor has too few loads per cycle to reload it.
inline Sixteen in_registers(Sixteen x) {
    asm("" : "+x"(x.low), "+x"(x.high));
    return x;
}

struct Configured {
    explicit Configured(int) {}
    void to(int) const {}
};

inline int readied(bool) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// Widens the inputs of a product to 32 bits, or rounds them to integers: for each tile, 32 inputs of every row.
inline void prepared(const Matrix& w, const bf16* a, int64_t stride, int count, Scratch& own) {
    float* to = own.sums;
    Rounded* whole = (Rounded*)to;
    for (int k = 0; k < w.in; k += 32)
        for (int m = 0; m < count; m++) {
            const bf16* const from = a + m * stride + k;
            if (w.bits < 16)
                *whole++ = rounded(from, w.bits == 8 ? 16 : 8);
            else
                for (int i = 0; i < 32; i += 16, to += 16) store(to, load(from + i));
        }
}

// Formats of a tile. even(i): the sixteen weights of input 2 i; odd(i): those of input 2 i + 1.

struct Pairs {  // in 16 bits
    static constexpr int kBytes = 1024;
    const uint8_t* at;
    explicit Pairs(const uint8_t* tile) : at(tile) {}
    __m256i half(int i, int which) const { return _mm256_loadu_si256((const __m256i*)(at + 64 * i + 32 * which)); }
    Sixteen even(int i) const {
        const auto upper = [](__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); };
        return {upper(half(i, 0)), upper(half(i, 1))};
    }
    Sixteen odd(int i) const {
        const __m256i high = _mm256_set1_epi32(~0xffff);
        const auto upper = [&](__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, high)); };
        return {upper(half(i, 0)), upper(half(i, 1))};
    }
};

struct Floats {  // in 32 bits
    static constexpr int kBytes = 2048;
    const float* at;
    explicit Floats(const uint8_t* tile) : at((const float*)tile) {}
    Sixteen even(int i) const { return load(at + 32 * i); }
    Sixteen odd(int i) const { return load(at + 32 * i + 16); }
};

// The operands of one product: consecutive tiles of each side, and for each tile 32 inputs of every row.
template <int sides>
struct Stretch {
    const uint8_t* tiles[sides];
    int depth;
    const float* inputs;  // [depth][rows][32]
    int rows;
    bool fresh;  // first read of the tiles, so prefetch; unset for two sides, where the hardware prefetcher is faster
};

template <typename Weights>
inline void fetched(const uint8_t* tile) {
    for (int at = 0; at < Weights::kBytes; at += 64) _mm_prefetch((const char*)tile + kFar + at, _MM_HINT_T1);
}

// sums [rows][16] of each side += the inputs of rows from, from + 1, ... times that side's tiles. Each sum is one chain
// of additions in the order of inputs, whatever the number of rows.
template <int sides, int rows, typename Weights>
inline void chained(const Stretch<sides>& s, int from, float* const* sums) {
    Sixteen chains[sides][rows];
    for (int side = 0; side < sides; side++)
        for (int m = 0; m < rows; m++) chains[side][m] = load(sums[side] + 16 * (from + m));
    const float* a = s.inputs + 32 * from;
    for (int k = 0; k < s.depth; k++, a += 32 * s.rows) {
        const auto at = [&](int side) { return s.tiles[side] + k * Weights::kBytes; };
        if (s.fresh && !from) fetched<Weights>(at(0));
        const Weights first(at(0)), last(at(sides - 1));
        for (int i = 0; i < 16; i++)
            for (int odd = 0; odd < 2; odd++) {
                const Sixteen left = in_registers(odd ? first.odd(i) : first.even(i)),
                              right = sides == 1 ? left : in_registers(odd ? last.odd(i) : last.even(i));
#pragma GCC unroll 6
                for (int m = 0; m < rows; m++) {
                    const __m256 input = _mm256_broadcast_ss(a + 32 * m + 2 * i + odd);
                    chains[0][m] = fma({input, input}, left, chains[0][m]);
                    if (sides == 2) chains[1][m] = fma({input, input}, right, chains[1][m]);
                }
            }
    }
    for (int side = 0; side < sides; side++)
        for (int m = 0; m < rows; m++) store(sums[side] + 16 * (from + m), chains[side][m]);
}

// The same for all rows, in groups of about equal size.
template <typename Weights>
inline void multiplied(const Stretch<1>& s, float* const* sums) {
    for (int from = 0, groups = (s.rows + kChains - 1) / kChains; groups; groups--) {
        const int rows = (s.rows - from + groups - 1) / groups;
        (rows == 1   ? chained<1, 1, Weights>
         : rows == 2 ? chained<1, 2, Weights>
         : rows == 3 ? chained<1, 3, Weights>
         : rows == 4 ? chained<1, 4, Weights>
         : rows == 5 ? chained<1, 5, Weights>
                     : chained<1, 6, Weights>)(s, from, sums);
        from += rows;
    }
}

// Computes sums [count][16] of two rows of tiles, `blocks`, with count <= kRows rows of prepared inputs.
template <int bits>
void rows_of_tiles(const Matrix& w, const int (&blocks)[2], const bf16*, int64_t, int count, float* const (&sums)[2],
                   Scratch& own) {
    const int depth = w.in / 32;
    const uint8_t* tiles[2];
    for (int side = 0; side < 2; side++) tiles[side] = w.tiles + int64_t(blocks[side]) * depth * record(bits);
    if (bits < 16)
        for (int side = 0; side < 2; side++)
            multiplied<std::conditional_t<bits == 8, Eights, Fours>>(tiles[side], depth, (const Rounded*)own.sums,
                                                                      count, own.unpacked, sums[side]);
    else {
        for (float* const sum : sums) std::memset(sum, 0, 64 * count);
        if (count <= 2) {  // one side's sums would not fill the registers
            const Stretch<2> both{{tiles[0], tiles[1]}, depth, own.sums, count};
            (count == 1 ? chained<2, 1, Pairs> : chained<2, 2, Pairs>)(both, 0, sums);
        } else
            for (int side = 0; side < 2; side++)
                for (int k = 0; k < depth; k += kStretch) {
                    const int some = std::min(kStretch, depth - k);
                    multiplied<Pairs>({{tiles[side] + k * Pairs::kBytes}, some, own.sums + 32 * count * k, count, true},
                                      sums + side);
                }
    }
    for (int side = 0; side < 2; side++) finished(w, blocks[side], count, sums[side]);
}

inline bool by_fours(const Matrix&, int) { return false; }
inline void rows_of_tiles(const Matrix&, const int (&)[4], const bf16*, int64_t, int, float* const (&)[4]) {}

// Numbers d to d + 31 of a slot; 8-bit numbers are unscaled.
template <bool small>
inline Numbers numbers(const uint8_t* slot, int d) {
    if (!small) return {load((const bf16*)slot + d), load((const bf16*)slot + d + 16)};
    const auto wide = [](const uint8_t* at) -> Sixteen {
        const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
    };
    return {wide(slot + 4 + d), wide(slot + 4 + d + 16)};
}

// Transposes eight rows of eight numbers into rows `stride` apart.
inline void turned_over(const __m256 (&rows)[8], float* to, int stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(to + j * stride, _mm256_permute2f128_ps(b[j], b[j + 4], 0x20));
        _mm256_storeu_ps(to + (j + 4) * stride, _mm256_permute2f128_ps(b[j], b[j + 4], 0x31));
    }
}

// Transposes 32 numbers of 16 rows into the right operand of a product: for each number the 16 rows.
template <typename Row>
inline void turned_over(Row row, uint8_t* to) {
    for (int half = 0; half < 16; half += 8) {
        __m256 parts[4][8];
        for (int i = 0; i < 8; i++) {
            const Numbers numbers = row(half + i);
            parts[0][i] = numbers.low.low, parts[1][i] = numbers.low.high;
            parts[2][i] = numbers.high.low, parts[3][i] = numbers.high.high;
        }
        for (int part = 0; part < 4; part++) turned_over(parts[part], (float*)to + 128 * part + half, 16);
    }
}

// Copies `width` (64 or 32) numbers of 32 rows into right operands, a tile per 16 numbers, row by row.
template <typename Row>
inline void interleaved(Row row, int width, uint8_t* to) {
    for (int i = 0; i < 32; i++)
        for (int d = 0; d < width; d += 32) {
            const Numbers numbers = row(i, d);
            float* const at = (float*)(to + d / 16 * kTile) + 16 * i;
            store(at, numbers.low);
            store(at + kTile / 4, numbers.high);
        }
}

// to [16][stride] = a [16][depth] times `depth / 32` tiles, for rows `from` to `end` - 1.
inline void scored(const uint8_t* tiles, const bf16* a, int depth, int from, int end, float* to, int64_t stride) {
    float inputs[16 * 32], sums[16 * 16] = {};
    float* const whole = sums;
    for (int d = 0; d < depth; d += 32) {
        for (int row = from; row < end; row++)
            for (int i = 0; i < 32; i += 16) store(inputs + 32 * (row - from) + i, load(a + row * depth + d + i));
        multiplied<Floats>({{tiles + kTile / 32 * d}, 1, inputs, end - from, false}, &whole);
    }
    for (int row = from; row < end; row++) store(to + row * stride, load(sums + 16 * (row - from)));
}

// sums [4][16][16] += a [16][32 blocks] times up to four tiles per block, made by `fill`; for rows `from` to `end` - 1.
template <typename Fill>
inline void gathered(int blocks, int width, const bf16* a, int64_t stride, int from, int end, uint8_t* tiles,
                     float* sums, Fill fill) {
    float inputs[16 * 32];
    for (int block = 0; block < blocks; block++) {
        fill(block, tiles);
        for (int row = from; row < end; row++)
            for (int i = 0; i < 32; i += 16)
                store(inputs + 32 * (row - from) + i, load(a + row * stride + 32 * block + i));
        for (int part = 0; part < width / 16; part++) {
            float* const to = sums + 256 * part + 16 * from;
            multiplied<Floats>({{tiles + kTile * part}, 1, inputs, end - from, false}, &to);
        }
    }
}

// Writes the visible slots from `from` on to `seen`; returns their number.
inline int looked(const uint8_t* mask, int from, int columns, int32_t* seen) {
    int count = 0;
    for (int j = from; j < columns; j++) {
        seen[count] = j;
        count += mask[j] != 0;
    }
    return count;
}

// run: the number of slots before the first masked one; count: the number of visible slots.
inline void counted(const uint8_t* mask, int columns, int32_t& run, int32_t& count) {
    const void* gap = std::memchr(mask, 0, columns);
    run = gap ? (const uint8_t*)gap - mask : columns;
    count = run;
    for (int j = run; j < columns; j++) count += mask[j] != 0;
}

}  // namespace
