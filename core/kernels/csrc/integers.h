// Products of 8- and 4-bit weights with AVX2, which multiplies twice or four times as many integers of 16 or 8 bits as
// numbers of 32. Every 32 inputs of a row are rounded to integers with a scale of their own: to 16 bits for weights of 8,
// to 8 bits for weights of 4. Sums within a tile are of integers, and exact.

#pragma once

namespace {

struct Rounded {  // 32 inputs of a row
    float scale, sum;
    int32_t pairs[16];  // two of 16 bits, or two of 8 bits twice: 32 bits are broadcast in one operation
};
static_assert(sizeof(Rounded) <= kPrepared, "inputs have more room than they need");

inline Rounded rounded(const bf16* a, int bits) {
    const Sixteen low = load(a), high = load(a + 16);
    const float most = largest(larger(size(low), size(high))), steps = bits == 8 ? 127 : 32767;
    const Sixteen inverse = same(most > 0 ? steps / most : 0);
    alignas(32) int16_t whole[32];
    for (int half = 0; half < 2; half++) {
        const Sixteen x = mul(half ? high : low, inverse);
        const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
        _mm256_store_si256((__m256i*)(whole + 16 * half), _mm256_permute4x64_epi64(both, 0xd8));
    }
    Rounded found;
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        const uint32_t left = uint16_t(whole[2 * i]), right = uint16_t(whole[2 * i + 1]);
        found.pairs[i] = bits == 16 ? left | right << 16 : ((left & 255) | (right & 255) << 8) * 0x10001;
        sum += whole[2 * i] + whole[2 * i + 1];
    }
    found.scale = most / steps;
    found.sum = found.scale * sum;
    return found;
}

// The weights of a tile as the products take them; two(i, use) is of vectors 2 i and 2 i + 1.
struct Unpacked {
    const __m256i* at;
    template <typename Use>
    void two(int i, Use use) const { use(at[2 * i], at[2 * i + 1]); }
};

// A tile of weights of 8 bits, which are taken in 16.
struct Eights {
    static constexpr int kBits = 8, kVectors = 32, kGroup = 3;  // kGroup: rows whose sums fit into the registers
    const uint8_t* at;
    template <typename Use>
    void two(int i, Use use) const {  // two inputs of eight outputs, and of the other eight
        const __m128i* const here = (const __m128i*)(at + 32 * i);
        use(_mm256_cvtepi8_epi16(_mm_loadu_si128(here)), _mm256_cvtepi8_epi16(_mm_loadu_si128(here + 1)));
    }
    static Sixteen ordered(Sixteen x) { return x; }
};

// sums [rows][16] += the inputs times one tile.
template <int rows, typename Weights>
inline void summed(const Eights&, const Weights& weights, const Rounded* inputs, float* sums) {
    __m256i left[rows], right[rows];
    for (int m = 0; m < rows; m++) left[m] = right[m] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 0; i < 16; i++)
        weights.two(i, [&](__m256i first, __m256i last) {
            asm("" : "+x"(first), "+x"(last));  // read once, not for each row
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i input = _mm256_set1_epi32(inputs[m].pairs[i]);
                left[m] = _mm256_add_epi32(left[m], _mm256_madd_epi16(first, input));
                right[m] = _mm256_add_epi32(right[m], _mm256_madd_epi16(last, input));
            }
        });
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        const Sixteen found = {_mm256_cvtepi32_ps(left[m]), _mm256_cvtepi32_ps(right[m])};
        store(sums + 16 * m, fma(found, same(inputs[m].scale), load(sums + 16 * m)));
    }
}

// A tile of weights of 4 bits, of 0 to 15, which are taken in 8.
struct Fours {
    static constexpr int kBits = 4, kVectors = 16, kGroup = 4;
    const uint8_t* at;
    Sixteen scale, least;  // least: what 0 stands for
    explicit Fours(const uint8_t* tile) : at(tile) {
        const Sixteen natural = load((const bf16*)(tile + 256));
        scale = ordered(natural);
        least = ordered(fnma(natural, same(8), load((const bf16*)(tile + 288))));
    }
    template <typename Use>
    void two(int i, Use use) const {  // pair 2 i of inputs of 16 outputs, and the next
        const __m256i both = _mm256_loadu_si256((const __m256i*)(at + 32 * i)), mask = _mm256_set1_epi8(15);
        use(_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask));
    }
    // Outputs 0-3 and 8-11, then 4-7 and 12-15: the order of sums. It is its own inverse.
    static Sixteen ordered(Sixteen x) {
        return {_mm256_permute2f128_ps(x.low, x.high, 0x20), _mm256_permute2f128_ps(x.low, x.high, 0x31)};
    }
};

// The products of eight pairs of inputs, each of at most 2 x 15 x 127: 16 outputs in 16 bits hold their sums.
template <int rows, typename Weights>
inline void half_summed(const Weights& weights, int half, const Rounded* inputs, __m256i (&sums)[rows]) {
    for (auto& sum : sums) sum = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int i = 4 * half; i < 4 * half + 4; i++)
        weights.two(i, [&](__m256i first, __m256i next) {
            asm("" : "+x"(first), "+x"(next));  // read once, not for each row
            const auto product = [&](__m256i numbers, int m, int pair) {
                return _mm256_maddubs_epi16(numbers, _mm256_set1_epi32(inputs[m].pairs[pair]));
            };
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i both = _mm256_add_epi16(product(first, m, 2 * i), product(next, m, 2 * i + 1));
                sums[m] = _mm256_add_epi16(sums[m], both);
            }
        });
}

template <int rows, typename Weights>
inline void summed(const Fours& tile, const Weights& weights, const Rounded* inputs, float* sums) {
    __m256i first[rows], second[rows];
    half_summed<rows>(weights, 0, inputs, first);
    half_summed<rows>(weights, 1, inputs, second);
    const __m256i one = _mm256_set1_epi16(1);
    const auto added = [&](__m256i pairs) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, one)); };
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        const Sixteen found = {added(_mm256_unpacklo_epi16(first[m], second[m])),
                               added(_mm256_unpackhi_epi16(first[m], second[m]))};
        const Sixteen sum = fma(tile.least, same(inputs[m].sum), load(sums + 16 * m));
        store(sums + 16 * m, fma(found, mul(tile.scale, same(inputs[m].scale)), sum));
    }
}

// The same for all rows, in groups of about equal size.
template <typename Tile, typename Weights>
inline void summed(const Tile& tile, const Weights& weights, const Rounded* inputs, int count, float* sums) {
    for (int from = 0, groups = (count + Tile::kGroup - 1) / Tile::kGroup; groups; groups--) {
        const int rows = (count - from + groups - 1) / groups;
        const Rounded* const here = inputs + from;
        float* const to = sums + 16 * from;
        if (rows == 1) summed<1>(tile, weights, here, to);
        if (rows == 2) summed<2>(tile, weights, here, to);
        if (rows == 3) summed<3>(tile, weights, here, to);
        if (rows == 4) summed<4>(tile, weights, here, to);
        from += rows;
    }
}

// sums [count][16] = the inputs [depth][count] times a row of tiles; `room` is for one unpacked.
template <typename Tile>
inline void multiplied(const uint8_t* at, int depth, const Rounded* inputs, int count, uint8_t* room, float* sums) {
    std::memset(sums, 0, 64 * count);
    for (int k = 0; k < depth; k++, at += record(Tile::kBits), inputs += count) {
        for (int i = 0; i < record(Tile::kBits); i += 64) _mm_prefetch((const char*)at + kFar + i, _MM_HINT_T1);
        const Tile tile{at};
        if (count <= Tile::kGroup) {
            summed(tile, tile, inputs, count, sums);
            continue;
        }
        __m256i* const to = (__m256i*)room;
        for (int i = 0; i < Tile::kVectors / 2; i++)
            tile.two(i, [&](__m256i first, __m256i next) { to[2 * i] = first, to[2 * i + 1] = next; });
        summed(tile, Unpacked{to}, inputs, count, sums);
    }
    for (int m = 0; m < count; m++) store(sums + 16 * m, Tile::ordered(load(sums + 16 * m)));
}

}  // namespace
