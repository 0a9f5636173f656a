// Products of 8- and 4-bit weights with AVX-512 VNNI, which multiplies twice as many integers of 8 bits as numbers of
// 16. Every 32 inputs of a row are rounded to 8 bits with a scale of their own. Sums within a tile are of integers, and
// exact.

#pragma once

namespace {

struct Rounded {  // 32 inputs of a row
    float scale, sum;
    int32_t total, fours[8];
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
    found.total = _mm512_reduce_add_epi32(_mm512_add_epi32(first, last));
    found.scale = most / 127 + 0 * added(add(low, high));  // NaN and infinity go on
    found.sum = found.scale * found.total;
    return found;
}

// A tile of weights, without a sign. two(i, use) is of vectors 2 i and 2 i + 1: four inputs of sixteen outputs each.
template <int bits>
struct Whole;

template <>
struct Whole<4> {
    const uint8_t* at;
    Sixteen scale, least;  // of the outputs in the order of sums; least: what 0 stands for
    explicit Whole(const uint8_t* tile) : at(tile) {
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
    Sixteen added_to(Sixteen sum, __m512i found, const Rounded& inputs) const {
        const Sixteen with = fma(least, same(inputs.sum), sum);
        return fma(_mm512_cvtepi32_ps(found), mul(scale, same(inputs.scale)), with);
    }
    // Outputs 0-3 and 8-11, then 4-7 and 12-15: the order of sums. It is its own inverse.
    static Sixteen ordered(Sixteen x) { return _mm512_shuffle_f32x4(x, x, 0xd8); }
};

template <>
struct Whole<8> {  // 128 more than they are, and unscaled
    const uint8_t* at;
    explicit Whole(const uint8_t* tile) : at(tile) {}
    __m512i one(int i) const {  // the first pairs of inputs beside the next ones, for each output
        const __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i next = _mm512_slli_epi32(_mm512_add_epi32(place, _mm512_set1_epi32(16)), 16);
        const __m512i words = _mm512_or_si512(place, next);
        const __m512i fours = _mm512_permutexvar_epi16(words, _mm512_loadu_si512(at + 64 * i));
        return _mm512_xor_si512(fours, _mm512_set1_epi8(-128));
    }
    template <typename Use>
    void two(int i, Use use) const {
        use(one(2 * i), one(2 * i + 1));
    }
    Sixteen added_to(Sixteen sum, __m512i found, const Rounded& inputs) const {
        const __m512i own = _mm512_sub_epi32(found, _mm512_set1_epi32(128 * inputs.total));
        return fma(_mm512_cvtepi32_ps(own), same(inputs.scale), sum);
    }
    static Sixteen ordered(Sixteen x) { return x; }
};

// The same, unpacked once for several groups of rows.
template <typename Packed>
struct Unpacked : Packed {
    const uint8_t* room;
    Unpacked(const uint8_t* tile, uint8_t* to) : Packed(tile), room(to) {
        for (int i = 0; i < 4; i++)
            Packed::two(i, [&](__m512i first, __m512i next) {
                _mm512_store_si512(to + 128 * i, first);
                _mm512_store_si512(to + 128 * i + 64, next);
            });
    }
    template <typename Use>
    void two(int i, Use use) const {
        use(_mm512_load_si512(room + 128 * i), _mm512_load_si512(room + 128 * i + 64));
    }
};

// sums of each side += the inputs times that side's tile.
template <int rows, int sides, typename Weights>
inline void summed(const Weights (&tiles)[sides], const Rounded* inputs, Sixteen (&sums)[sides][rows]) {
    __m512i found[sides][rows], now[sides], next[sides];
    for (auto& side : found)
        for (auto& sum : side) sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
#pragma GCC unroll 2
        for (int side = 0; side < sides; side++)
            tiles[side].two(i, [&](__m512i first, __m512i last) { now[side] = first, next[side] = last; });
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) {
            const __m512i first = _mm512_set1_epi32(inputs[m].fours[2 * i]);
            for (int side = 0; side < sides; side++)
                found[side][m] = _mm512_dpbusd_epi32(found[side][m], now[side], first);
            const __m512i last = _mm512_set1_epi32(inputs[m].fours[2 * i + 1]);
            for (int side = 0; side < sides; side++)
                found[side][m] = _mm512_dpbusd_epi32(found[side][m], next[side], last);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++)
        for (int side = 0; side < sides; side++)
            sums[side][m] = tiles[side].added_to(sums[side][m], found[side][m], inputs[m]);
}

// The next tile of each side, of which what follows `ahead` bytes later is prefetched.
template <int bits>
struct Beside {
    const uint8_t* at[2];
    Beside(const uint8_t* const (&tiles)[2], int k, int64_t ahead)
        : at{tiles[0] + k * record(bits), tiles[1] + k * record(bits)} {
        for (const uint8_t* tile : at)
            for (int i = 0; i < record(bits); i += 64) _mm_prefetch((const char*)tile + ahead + i, _MM_HINT_T1);
    }
};

// sums [rows][16] = the inputs [depth][rows] times one row of tiles. Where there is little to multiply, reading in the
// order of memory is faster: the processor then foresees more than can be prefetched.
template <int bits, int rows>
void streamed(const uint8_t* tile, int depth, const Rounded* inputs, float* to) {
    Sixteen sums[1][rows];
    for (auto& sum : sums[0]) sum = zero();
    for (int k = 0; k < depth; k++, inputs += rows, tile += record(bits))
        summed<rows, 1, Whole<bits>>({Whole<bits>(tile)}, inputs, sums);
    for (int m = 0; m < rows; m++) store(to + 16 * m, Whole<bits>::ordered(sums[0][m]));
}

// sums [rows][16] of each side = the inputs [depth][rows] times that side's row of tiles.
template <int bits, int rows>
void multiplied(const uint8_t* const (&tiles)[2], int depth, int64_t ahead, const Rounded* inputs,
                float* const (&to)[2]) {
    Sixteen sums[2][rows];
    for (auto& side : sums)
        for (auto& sum : side) sum = zero();
    for (int k = 0; k < depth; k++, inputs += rows) {
        const Beside<bits> here(tiles, k, ahead);
        summed<rows, 2, Whole<bits>>({Whole<bits>(here.at[0]), Whole<bits>(here.at[1])}, inputs, sums);
    }
    for (int side = 0; side < 2; side++)
        for (int m = 0; m < rows; m++) store(to[side] + 16 * m, Whole<bits>::ordered(sums[side][m]));
}

// The same for a tile and a group of rows, added to `to`.
template <int rows, typename Weights>
void summed(const Weights (&tiles)[2], const Rounded* inputs, float* const (&to)[2], int from) {
    Sixteen sums[2][rows];
    for (int side = 0; side < 2; side++)
        for (int m = 0; m < rows; m++) sums[side][m] = load(to[side] + 16 * (from + m));
    summed<rows, 2>(tiles, inputs, sums);
    for (int side = 0; side < 2; side++)
        for (int m = 0; m < rows; m++) store(to[side] + 16 * (from + m), sums[side][m]);
}

// sums [count][16] of each side = the inputs [depth][count] times that side's row of tiles; `room` is for two unpacked.
template <int bits>
inline void multiplied(const uint8_t* const (&tiles)[2], int depth, int64_t ahead, const Rounded* inputs, int count,
                       uint8_t* room, float* const (&sums)[2]) {
    typedef Unpacked<Whole<bits>> Weights;
    typedef void (*Few)(const uint8_t* const (&)[2], int, int64_t, const Rounded*, float* const (&)[2]);
    static constexpr Few kFew[kChains] = {
        multiplied<bits, 1>, multiplied<bits, 2>,  multiplied<bits, 3>,  multiplied<bits, 4>,
        multiplied<bits, 5>, multiplied<bits, 6>,  multiplied<bits, 7>,  multiplied<bits, 8>,
        multiplied<bits, 9>, multiplied<bits, 10>, multiplied<bits, 11>, multiplied<bits, 12>};
    static constexpr void (*kGroups[kChains])(const Weights (&)[2], const Rounded*, float* const (&)[2], int) = {
        summed<1, Weights>, summed<2, Weights>,  summed<3, Weights>,  summed<4, Weights>,
        summed<5, Weights>, summed<6, Weights>,  summed<7, Weights>,  summed<8, Weights>,
        summed<9, Weights>, summed<10, Weights>, summed<11, Weights>, summed<12, Weights>};
    if constexpr (bits == 8) {
        static constexpr void (*kStreamed[])(const uint8_t*, int, const Rounded*, float*) = {
            streamed<8, 1>, streamed<8, 2>, streamed<8, 3>, streamed<8, 4>};
        if (count <= 4 && !tiles_ready) {  // processors with tiles foresee two rows of them as well
            for (int side = 0; side < 2; side++) kStreamed[count - 1](tiles[side], depth, inputs, sums[side]);
            return;
        }
    }
    if (count <= kChains) return kFew[count - 1](tiles, depth, ahead, inputs, sums);
    for (float* const sum : sums) std::memset(sum, 0, 64 * count);
    for (int k = 0; k < depth; k++, inputs += count) {
        const Beside<bits> here(tiles, k, ahead);
        const Weights unpacked[2] = {Weights(here.at[0], room), Weights(here.at[1], room + kTile)};
        for (int from = 0, rows; from < count; from += rows) {
            rows = together(count - from);
            kGroups[rows - 1](unpacked, inputs + from, sums, from);
        }
    }
    for (float* const side : sums)
        for (int m = 0; m < count; m++) store(side + 16 * m, Whole<bits>::ordered(load(side + 16 * m)));
}

}  // namespace
