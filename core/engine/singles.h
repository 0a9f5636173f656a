// Products of 16-bit numbers on a processor that multiplies 32-bit ones only (AVX2 and FMA): weights are widened on their
// way into the registers, which costs little beside the reading of them.

#pragma once

namespace {

constexpr int kTile = 2048;   // bytes of a tile of 32 numbers by 16, which are in 32 bits here
constexpr int kUnpacked = 1;  // tiles between unpacking and use
constexpr int kPrepared = 1;  // inputs of which one number is kept beside them
constexpr int kFew = 2;       // rows and columns that are summed together in 32 bits
constexpr int kChains = 4;    // sums of sixteen that fit into the registers beside what is added to them

struct Numbers {  // 32
    Sixteen low, high;
};

struct Configured {
    explicit Configured(int) {}
    void to(int) const {}
};

inline int readied(bool) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// Inputs of a product, in 32 bits.
inline void prepared(const Matrix& w, const bf16* a, int64_t stride, int count, float* to) {
    for (int m = 0; m < count; m++, to += w.in)
        for (int k = 0; k < w.in; k += 16) store(to + k, load(a + m * stride + k));
}

// Tiles; each takes the sixteen weights of input 2 i, and those of the one behind it.

struct Pairs {  // in 16 bits
    const uint8_t* at;
    explicit Pairs(const uint8_t* tile) : at(tile) {}
    void take(int i, Sixteen& even, Sixteen& odd) const {
        const __m256i low = _mm256_loadu_si256((const __m256i*)(at + 64 * i)),
                      high = _mm256_loadu_si256((const __m256i*)(at + 64 * i + 32)), upper = _mm256_set1_epi32(~0xffff);
        even = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
        odd = {_mm256_castsi256_ps(_mm256_and_si256(low, upper)), _mm256_castsi256_ps(_mm256_and_si256(high, upper))};
    }
};

struct Bytes {  // in 8 bits, not yet scaled
    const uint8_t* at;
    explicit Bytes(const uint8_t* tile) : at(tile) {}
    void take(int i, Sixteen& even, Sixteen& odd) const {
        const auto both = [&](int from) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)(at + from))); };
        const __m256i low = both(32 * i), high = both(32 * i + 16);
        const auto second = [](__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 8)); };
        const auto first = [&](__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24), 24)); };
        even = {first(low), first(high)};
        odd = {second(low), second(high)};
    }
};

struct Nibbles {  // in 4 bits, of four inputs in sixteen; where they stand there is made good by their scale
    const uint8_t* at;
    Sixteen scales[4], least;
    explicit Nibbles(const uint8_t* tile) : at(tile) {
        const Sixteen scale = load((const bf16*)(tile + 256));
        for (int i = 0; i < 4; i++) scales[i] = mul(scale, same(1.f / (1 << 4 * i)));
        least = fnma(scale, same(8), load((const bf16*)(tile + 288)));
    }
    void take(int i, Sixteen& even, Sixteen& odd) const {
        const auto four = [&](int from) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(at + from))); };
        const __m256i low = four(32 * (i / 2)), high = four(32 * (i / 2) + 16);
        const auto weights = [&](int which) {
            const __m256i mask = _mm256_set1_epi32(15 << 4 * which);
            const auto level = [&](__m256i x) { return _mm256_cvtepi32_ps(_mm256_and_si256(x, mask)); };
            return fma({level(low), level(high)}, scales[which], least);
        };
        even = weights(i % 2);
        odd = weights(i % 2 + 2);
    }
};

struct Singles {  // in 32 bits
    const float* at;
    explicit Singles(const void* tile) : at((const float*)tile) {}
    void take(int i, Sixteen& even, Sixteen& odd) const {
        even = load(at + 32 * i);
        odd = load(at + 32 * i + 16);
    }
};

// sums [rows][16] of each side += a [rows][32] times that side's tile. Each sum is one chain of additions in the order of
// inputs, however many there are.
template <int sides, int rows, typename Weights>
inline void chained(const Weights* tiles, const float* a, int64_t stride, float* const* sums) {
    Sixteen chains[sides][rows];
    for (int s = 0; s < sides; s++)
        for (int m = 0; m < rows; m++) chains[s][m] = load(sums[s] + 16 * m);
#pragma GCC unroll 2
    for (int i = 0; i < 16; i++) {
        Sixteen even[sides], odd[sides];
        for (int s = 0; s < sides; s++) tiles[s].take(i, even[s], odd[s]);
        for (int m = 0; m < rows; m++) {
            const Sixteen one = same(a[m * stride + 2 * i]), other = same(a[m * stride + 2 * i + 1]);
            for (int s = 0; s < sides; s++) chains[s][m] = fma(other, odd[s], fma(one, even[s], chains[s][m]));
        }
    }
    for (int s = 0; s < sides; s++)
        for (int m = 0; m < rows; m++) store(sums[s] + 16 * m, chains[s][m]);
}

template <int sides, typename Weights>
inline void multiplied(const Weights* tiles, const float* a, int64_t stride, int count, float* const* sums) {
    float* to[sides];
    for (int from = 0; from < count;) {
        const int left = count - from;
        for (int s = 0; s < sides; s++) to[s] = sums[s] + 16 * from;
        const float* here = a + from * stride;
        if (left >= 3)  // one side after the other: both would not fit
            for (int s = 0; s < sides; s++)
                left > 3 ? chained<1, 4>(tiles + s, here, stride, to + s) : chained<1, 3>(tiles + s, here, stride, to + s);
        else
            left == 2 ? chained<sides, 2>(tiles, here, stride, to) : chained<sides, 1>(tiles, here, stride, to);
        from += std::min(left, kChains);
    }
}

template <typename Weights>
inline void unpack(const Weights& tile, float* to) {
#pragma GCC unroll 2
    for (int i = 0; i < 16; i++) {
        Sixteen even, odd;
        tile.take(i, even, odd);
        store(to + 32 * i, even);
        store(to + 32 * i + 16, odd);
    }
}

template <typename Weights>
void rows_of_tiles(const Matrix& w, const int (&blocks)[2], int count, float* const (&sums)[2], Scratch& own) {
    const int depth = w.in / 32;
    const bool apart = count > 2 * kChains && w.bits < 16;  // what costs something to unpack is unpacked once for many
    float* const unpacked[2] = {(float*)own.unpacked, (float*)(own.unpacked + kTile)};
    for (float* sum : sums) std::memset(sum, 0, 64 * count);
    for (int k = 0; k < depth; k++) {
        const uint8_t* tiles[2];
        for (int side = 0; side < 2; side++) {
            tiles[side] = w.tiles + (int64_t(blocks[side]) * depth + k) * record(w.bits);
            for (int ahead = 0; ahead < record(w.bits); ahead += 64)
                _mm_prefetch((const char*)tiles[side] + kAhead + ahead, _MM_HINT_T0);
        }
        const Weights weights[2] = {Weights(tiles[0]), Weights(tiles[1])};
        const float* inputs = own.sums + 32 * k;
        if (apart) {
            for (int side = 0; side < 2; side++) unpack(weights[side], unpacked[side]);
            const Singles wide[2] = {Singles(unpacked[0]), Singles(unpacked[1])};
            multiplied<2>(wide, inputs, w.in, count, sums);
        } else
            multiplied<2>(weights, inputs, w.in, count, sums);
    }
    for (int side = 0; side < 2; side++) finished(w, blocks[side], count, sums[side]);
}

// Sums [count][16] of two rows of tiles, `blocks`, with `count` rows of inputs that were prepared, up to kRows of them.
template <int bits>
void rows_of_tiles(const Matrix& w, const int (&blocks)[2], const bf16*, int64_t, int count, float* const (&sums)[2],
                   Scratch& own) {
    if (bits == 16)
        rows_of_tiles<Pairs>(w, blocks, count, sums, own);
    else if (bits == 8)
        rows_of_tiles<Bytes>(w, blocks, count, sums, own);
    else
        rows_of_tiles<Nibbles>(w, blocks, count, sums, own);
}

inline bool by_fours(const Matrix&, int) { return false; }
inline void rows_of_tiles(const Matrix&, const int (&)[4], const bf16*, int64_t, int, float* const (&)[4]) {}

// 32 numbers of a slot from number d on; those of 8 bits without their scale.
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

// Eight numbers of eight rows, their columns as rows `stride` apart.
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

// 32 numbers of 16 rows, as the right side of a product: number by number, of each the 16 rows.
template <typename Row>
inline void turned_over(Row row, uint8_t* to) {
    for (int half = 0; half < 16; half += 8) {
        __m256 parts[4][8];
        for (int i = 0; i < 8; i++) {
            const Numbers one = row(half + i);
            parts[0][i] = one.low.low, parts[1][i] = one.low.high;
            parts[2][i] = one.high.low, parts[3][i] = one.high.high;
        }
        for (int part = 0; part < 4; part++) turned_over(parts[part], (float*)to + 128 * part + half, 16);
    }
}

// `width` (64 or 32) numbers of 32 rows, as right sides: row by row, in each 16 numbers; a tile for each 16.
template <typename Row>
inline void interleaved(Row row, int width, uint8_t* to) {
    for (int i = 0; i < 32; i++)
        for (int d = 0; d < width; d += 32) {
            const Numbers one = row(i, d);
            float* const at = (float*)(to + d / 16 * kTile) + 16 * i;
            store(at, one.low);
            store(at + kTile / 4, one.high);
        }
}

// to [16][stride] = a [16][depth] times `depth / 32` tiles, of rows `from` to `end`.
inline void scored(const uint8_t* tiles, const bf16* a, int depth, int from, int end, float* to, int64_t stride) {
    float inputs[16 * 32], sums[16 * 16] = {};
    float* const whole = sums;
    for (int d = 0; d < depth; d += 32) {
        for (int row = from; row < end; row++)
            for (int i = 0; i < 32; i += 16) store(inputs + 32 * (row - from) + i, load(a + row * depth + d + i));
        const Singles tile(tiles + kTile / 32 * d);
        multiplied<1>(&tile, inputs, 32, end - from, &whole);
    }
    for (int row = from; row < end; row++) store(to + row * stride, load(sums + 16 * (row - from)));
}

// sums [4][16][16] += a [16][32 blocks] times up to four tiles for each block, which `fill` makes; likewise.
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
            const Singles tile(tiles + kTile * part);
            float* const to = sums + 256 * part + 16 * from;
            multiplied<1>(&tile, inputs, 32, end - from, &to);
        }
    }
}

// Which slots from `from` on a token may look at; how many they are.
inline int looked(const uint8_t* mask, int from, int columns, int32_t* seen) {
    int count = 0;
    for (int j = from; j < columns; j++) {
        seen[count] = j;
        count += mask[j] != 0;
    }
    return count;
}

// How many slots a token sees before the first that it doesn't, and how many in all.
inline void counted(const uint8_t* mask, int columns, int32_t& run, int32_t& count) {
    const void* gap = std::memchr(mask, 0, columns);
    run = gap ? (const uint8_t*)gap - mask : columns;
    count = run;
    for (int j = run; j < columns; j++) count += mask[j] != 0;
}

}  // namespace
