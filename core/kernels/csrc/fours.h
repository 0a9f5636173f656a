// Products of 4-bit weights with AVX-512 VNNI, which multiplies twice as many integers of 8 bits as numbers of 16. Every
// 32 inputs of a row are rounded to 8 bits with a scale of their own. Sums within a tile are of integers, and exact.

#pragma once

namespace {

struct Rounded {  // 32 inputs of a row
    float scale, sum;
    int32_t fours[8];
};
static_assert(sizeof(Rounded) <= kPrepared, "inputs have more room than they need");

inline Rounded rounded(const bf16* a) {
    const Sixteen low = load(a), high = load(a + 16);
    const float most = largest(larger(size(low), size(high)));
    const Sixteen inverse = same(most > 0 ? 127 / most : 0);
    const __m512i first = _mm512_cvtps_epi32(mul(low, inverse)), last = _mm512_cvtps_epi32(mul(high, inverse));
    Rounded found;
    _mm_storeu_si128((__m128i*)found.fours, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i*)(found.fours + 4), _mm512_cvtepi32_epi8(last));
    found.scale = most / 127 + 0 * added(add(low, high));  // NaN and infinity go on
    found.sum = found.scale * _mm512_reduce_add_epi32(_mm512_add_epi32(first, last));
    return found;
}

// Outputs 0-3 and 8-11, then 4-7 and 12-15: the order of sums. It is its own inverse.
inline Sixteen ordered(Sixteen x) { return _mm512_shuffle_f32x4(x, x, 0xd8); }

// A tile of weights of 0 to 15. two(i, use) is of vectors 2 i and 2 i + 1: four inputs of sixteen outputs each.
struct Fours {
    const uint8_t* at;
    Sixteen scale, least;  // of the outputs in the order of sums; least: what 0 stands for
    explicit Fours(const uint8_t* tile) : at(tile) {
        const Sixteen natural = load((const bf16*)(tile + 256));
        scale = ordered(natural);
        least = ordered(fnma(natural, same(8), load((const bf16*)(tile + 288))));
    }
    template <typename Use>
    void two(int i, Use use) const {
        const __m512i both = _mm512_loadu_si512(at + 64 * i), mask = _mm512_set1_epi8(15);
        const __m512i even = _mm512_and_si512(both, mask), odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        use(_mm512_shuffle_i64x2(low, high, 0x44), _mm512_shuffle_i64x2(low, high, 0xee));
    }
};

// The same, unpacked once for several groups of rows.
struct Unpacked : Fours {
    const uint8_t* room;
    Unpacked(const Fours& packed, uint8_t* to) : Fours(packed), room(to) {
        for (int i = 0; i < 4; i++)
            packed.two(i, [&](__m512i first, __m512i next) {
                _mm512_store_si512(to + 128 * i, first);
                _mm512_store_si512(to + 128 * i + 64, next);
            });
    }
    template <typename Use>
    void two(int i, Use use) const {
        use(_mm512_load_si512(room + 128 * i), _mm512_load_si512(room + 128 * i + 64));
    }
};

// sums [rows][16] of each side += the inputs times that side's tile.
template <int rows, typename Tile>
inline void summed(const Tile (&tiles)[2], const Rounded* inputs, float* const (&sums)[2], int from) {
    __m512i found[2][rows];
    for (auto& side : found)
        for (auto& sum : side) sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        tiles[0].two(i, [&](__m512i left, __m512i next_left) {
            tiles[1].two(i, [&](__m512i right, __m512i next_right) {
#pragma GCC unroll 12
                for (int m = 0; m < rows; m++) {
                    const __m512i now = _mm512_set1_epi32(inputs[m].fours[2 * i]);
                    found[0][m] = _mm512_dpbusd_epi32(found[0][m], left, now);
                    found[1][m] = _mm512_dpbusd_epi32(found[1][m], right, now);
                    const __m512i next = _mm512_set1_epi32(inputs[m].fours[2 * i + 1]);
                    found[0][m] = _mm512_dpbusd_epi32(found[0][m], next_left, next);
                    found[1][m] = _mm512_dpbusd_epi32(found[1][m], next_right, next);
                }
            });
        });
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
        for (int side = 0; side < 2; side++) {
            float* const to = sums[side] + 16 * (from + m);
            const Sixteen sum = fma(tiles[side].least, same(inputs[m].sum), load(to));
            store(to, fma(_mm512_cvtepi32_ps(found[side][m]), mul(tiles[side].scale, same(inputs[m].scale)), sum));
        }
}

// The same for all rows, in groups of about equal size.
template <typename Tile>
inline void summed(const Tile (&tiles)[2], const Rounded* inputs, int count, float* const (&sums)[2]) {
    static constexpr void (*kKernels[kChains])(const Tile (&)[2], const Rounded*, float* const (&)[2], int) = {
        summed<1, Tile>, summed<2, Tile>, summed<3, Tile>, summed<4, Tile>,  summed<5, Tile>,  summed<6, Tile>,
        summed<7, Tile>, summed<8, Tile>, summed<9, Tile>, summed<10, Tile>, summed<11, Tile>, summed<12, Tile>};
    for (int from = 0, rows; from < count; from += rows) {
        rows = together(count - from);
        kKernels[rows - 1](tiles, inputs + from, sums, from);
    }
}

// sums [count][16] of each side = the inputs [depth][count] times that side's row of tiles; `room` is for two unpacked.
inline void multiplied(const uint8_t* const (&tiles)[2], int depth, const Rounded* inputs, int count, uint8_t* room,
                       float* const (&sums)[2]) {
    for (float* const sum : sums) std::memset(sum, 0, 64 * count);
    for (int k = 0; k < depth; k++, inputs += count) {
        const uint8_t* const here[2] = {tiles[0] + k * record(4), tiles[1] + k * record(4)};
        for (const uint8_t* tile : here)
            for (int i = 0; i < record(4); i += 64) _mm_prefetch((const char*)tile + kAhead + i, _MM_HINT_T0);
        const Fours packed[2] = {Fours(here[0]), Fours(here[1])};
        if (count <= kChains)
            summed(packed, inputs, count, sums);
        else
            summed({Unpacked(packed[0], room), Unpacked(packed[1], room + kTile)}, inputs, count, sums);
    }
    for (float* const side : sums)
        for (int m = 0; m < count; m++) store(side + 16 * m, ordered(load(side + 16 * m)));
}

}  // namespace
