// Products of 16-bit numbers with AVX-512 BF16 (dots.h), and with AMX tiles if available; of integers in vnni.h.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "dots.h"

namespace {

constexpr int kTile = 1024;    // bytes of a tile of 32 by 16 numbers
constexpr int kUnpacked = 4;   // tiles between unpacking and use
constexpr int kPrepared = 68;  // bytes stored per 32 inputs
constexpr int kFew = 4;        // rows and columns summed together in 32 bits
constexpr int kQueries = 48;   // number of queries that take as long as transposing keys and values
constexpr bool kInOrder = false;  // sums add pairs of products
bool tiles_ready = false;
typedef __m512i Numbers;  // 32 numbers in 16 bits

}  // namespace

#include "vnni.h"

namespace {

// Detects the processor: 0 unsupported, 1 AVX-512 BF16, 2 also AMX tiles (if `wanted`).
inline int readied(bool wanted) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    tiles_ready = false;
#ifdef __AMX_BF16__
    tiles_ready = wanted && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // each process must request the tile state
#endif
    return tiles_ready ? 2 : 1;
}

#ifdef __AMX_BF16__
struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    explicit Tiles(int count) {  // tiles 0 to 3: sums; 4: inputs; 5: inputs or weights; 6, 7: weights
        for (int i = 0; i < 8; i++) columns[i] = 64, rows[i] = i < 5 ? std::min(count, 16) : 16;
    }
};
// Configures the tiles and restores them at the end, because oneDNN expects its own configuration in this thread.
struct Configured {
    alignas(64) uint8_t before[64];
    explicit Configured(int count) {
        if (!tiles_ready) return;
        _tile_storeconfig(before);
        to(count);
    }
    void to(int count) const {
        if (!tiles_ready) return;
        const Tiles tiles(count);
        _tile_loadconfig(&tiles);
    }
    ~Configured() {
        if (!tiles_ready) return;
        if (before[0])
            _tile_loadconfig(before);
        else
            _tile_release();
    }
};
#else
struct Configured {
    explicit Configured(int) {}
    void to(int) const {}
};
#endif

template <int bits>
inline void unpacked(const uint8_t* tile, uint8_t* to) {
    const Pairs<bits> pairs(tile);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, pairs[i]);
}

// Multiplies a left and a right tile by up to 32 rows of inputs. Tiles 0 and 1 accumulate the first 16 rows, 2 and 3
// the others (`more`).
inline void multiplied(const uint8_t* left, const uint8_t* right, const bf16* a, int64_t stride, bool more) {
#ifdef __AMX_BF16__
    _tile_loadd(4, a, 2 * stride);
    _tile_loadd(6, left, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (!more) return;
    _tile_loadd(5, a + 16 * stride, 2 * stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
#else
    (void)left, (void)right, (void)a, (void)stride, (void)more;
#endif
}

inline void cleared() {
#ifdef __AMX_BF16__
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#endif
}

inline void loaded(const float* left, const float* right, bool more) {
#ifdef __AMX_BF16__
    _tile_loadd(0, left, 64);
    _tile_loadd(1, right, 64);
    if (!more) return;
    _tile_loadd(2, left + 256, 64);
    _tile_loadd(3, right + 256, 64);
#else
    (void)left, (void)right, (void)more;
#endif
}

inline void stored(float* left, float* right, bool more) {
#ifdef __AMX_BF16__
    _tile_stored(0, left, 64);
    _tile_stored(1, right, 64);
    if (!more) return;
    _tile_stored(2, left + 256, 64);
    _tile_stored(3, right + 256, 64);
#else
    (void)left, (void)right, (void)more;
#endif
}

// Are inputs of this product rounded to integers? Not a prompt's where there are tiles, which multiply many rows by
// numbers of 16 bits several times as fast.
inline bool in_integers(const Matrix& w, const Scratch& own) {
    return (w.bits == 4 || w.rounds) && !(own.reading && tiles_ready);
}

// Sums [count][16] of two rows of tiles, with tiles. All rows are multiplied by a few tiles, which stay in the first-level
// cache, before the next ones, which are unpacked meanwhile: tile loads wait until they have left the store buffer.
template <int bits>
void in_tiles(const uint8_t* const (&tiles)[2], int depth, const bf16* a, int64_t stride, int count, uint8_t* room,
              float* const (&sums)[2]) {
    const int few = bits == 16 && count <= 32 ? depth : kUnpacked;
    const auto place = [&](int side, int k) { return room + 1024 * (2 * (k % (2 * kUnpacked)) + side); };
    const auto unpack = [&](int k) {
        for (int side = 0; side < 2; side++) {
            const uint8_t* here = tiles[side] + k * record(bits);
            for (int ahead = 0; ahead < record(bits); ahead += 64)
                _mm_prefetch((const char*)here + kAhead + ahead, _MM_HINT_T1);
            if (bits < 16) unpacked<bits>(here, place(side, k));
        }
    };
    const auto ready = [&](int side, int k) { return bits == 16 ? tiles[side] + k * record(bits) : place(side, k); };
    for (int k = 0; k < std::min(few, depth) && bits < 16; k++) unpack(k);
    for (int first = 0; first < depth; first += few) {
        const int end = std::min(first + few, depth), next = bits < 16 ? few : 0;
        for (int from = 0; from < count; from += 32) {
            const bf16* rows = a + from * stride;
            const bool more = count - from > 16;
            first ? loaded(sums[0] + 16 * from, sums[1] + 16 * from, more) : cleared();
            for (int k = first; k < end; k++) {
                if (!from && k + next < depth) unpack(k + next);
                multiplied(ready(0, k), ready(1, k), rows + 32 * k, stride, more);
            }
            stored(sums[0] + 16 * from, sums[1] + 16 * from, more);
        }
    }
}

// Computes sums [count][16] of two rows of tiles, `blocks`, with count <= kRows rows of `a`.
template <int bits>
void rows_of_tiles(const Matrix& w, const int (&blocks)[2], const bf16* a, int64_t stride, int count,
                   float* const (&sums)[2], Scratch& own) {
    const int depth = w.in / 32;
    const uint8_t* const tiles[2] = {w.tiles + int64_t(blocks[0]) * depth * record(bits),
                                     w.tiles + int64_t(blocks[1]) * depth * record(bits)};
    const int64_t next = (blocks[1] - blocks[0] == 1 ? 2 : 1) * int64_t(depth) * record(bits);
    if (in_integers(w, own)) {
        constexpr int whole = bits == 4 ? 4 : 8;
        multiplied<whole>(tiles, depth, ahead(next), (const Rounded*)own.sums, count, own.unpacked, sums);
    } else if (tiles_ready) {
        in_tiles<bits>(tiles, depth, a, stride, count, own.unpacked, sums);
    } else if constexpr (bits != 4) {
        chained<bits>({{tiles[0], tiles[1]}, depth, (const bf16*)own.sums}, next, count, sums);
    }
    for (int side = 0; side < 2; side++) finished(w, blocks[side], count, sums[side]);
}

// The same for four rows of 16-bit tiles and up to 16 rows of `a`, which are loaded half as often.
inline void rows_of_tiles(const Matrix& w, const int (&blocks)[4], const bf16* a, int64_t stride, int count,
                          float* const (&sums)[4]) {
#ifdef __AMX_BF16__
    const uint8_t* tiles[4];
    for (int i = 0; i < 4; i++) tiles[i] = w.tiles + int64_t(blocks[i]) * (w.in / 32) * 1024;
    cleared();
    for (int k = 0; k < w.in / 32; k++) {
        const int64_t here = 1024 * k;
        for (const uint8_t* tile : tiles)
            for (int ahead = 0; ahead < 1024; ahead += 64)
                _mm_prefetch((const char*)tile + here + kAhead + ahead, _MM_HINT_T1);
        _tile_loadd(4, a + 32 * k, 2 * stride);
        _tile_loadd(5, tiles[0] + here, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, tiles[1] + here, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, tiles[2] + here, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, tiles[3] + here, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < 4; i++) finished(w, blocks[i], count, sums[i]);
#else
    (void)w, (void)blocks, (void)a, (void)stride, (void)count, (void)sums;
#endif
}

inline bool by_fours(const Matrix& w, int count) { return tiles_ready && w.bits == 16 && count <= 16; }

// Writes what products read, if not `a` itself, to own.sums: rounded inputs [depth][count], or without tiles
// Stretch::inputs.
void prepared(const Matrix& w, const bf16* a, int64_t stride, int count, Scratch& own) {
    const int depth = w.in / 32;
    if (!in_integers(w, own)) {
        if (!tiles_ready) laid_out(a, stride, depth, count, (bf16*)own.sums);
        return;
    }
    for (int k = 0; k < depth; k++)
        for (int m = 0; m < count; m++) ((Rounded*)own.sums)[k * count + m] = rounded(a + m * stride + 32 * k);
}

// Numbers d to d + 31 of a slot; 8-bit numbers are unscaled.
template <bool small>
inline Numbers numbers(const uint8_t* slot, int d) {
    if (!small) return _mm512_loadu_si512(slot + 2 * d);
    const __m256i ints = _mm256_loadu_si256((const __m256i*)(slot + 4 + d));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(ints)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(ints, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Transposes 32 numbers of 16 rows into the right operand of a product: pairs of numbers, each for the 16 rows.
template <typename Row>
inline void turned_over(Row row, uint8_t* to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = row(i);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_store_si512(to + 64 * j, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
        _mm512_store_si512(to + 64 * (j + 8), _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
    }
}

// Interleaves `width` (64 or 32) numbers of 32 rows into right operands, a tile per 16 numbers: pairs of rows, each
// with 16 numbers.
template <typename Row>
inline void interleaved(Row row, int width, uint8_t* to) {
    alignas(64) static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                   8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(order), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int pair = 0; pair < 16; pair++)
        for (int d = 0; d < width; d += 32) {
            const __m512i even = row(2 * pair, d), odd = row(2 * pair + 1, d);
            _mm512_store_si512(to + 64 * d + 64 * pair, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_store_si512(to + 64 * d + 1024 + 64 * pair, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// to [16][stride] = a [16][depth] times `depth / 32` tiles, at least for rows `from` to `end` - 1.
inline void scored(const uint8_t* tiles, const bf16* a, int depth, int from, int end, float* to, int64_t stride) {
#ifdef __AMX_BF16__
    if (tiles_ready) {
        _tile_zero(0);
        for (int d = 0; d < depth; d += 32) {
            _tile_loadd(4, a + d, 2 * depth);
            _tile_loadd(6, tiles + 32 * d, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, to, 4 * stride);
        return;
    }
#endif
    alignas(64) float sums[256];
    for (int d = 0; d < depth; d += 32)
        multiplied(tiles + 32 * d, a + from * depth + d, depth, end - from, sums, d == 0);
    for (int i = from; i < end; i++) store(to + i * stride, load(sums + 16 * (i - from)));
}

// sums [4][16][16] += a [16][32 blocks] times up to four tiles per block, made by `fill`; at least for rows `from` to
// `end` - 1.
template <typename Fill>
inline void gathered(int blocks, int width, const bf16* a, int64_t stride, int from, int end, uint8_t* tiles,
                     float* sums, Fill fill) {
    const int parts = width / 16;
#ifdef __AMX_BF16__
    if (tiles_ready) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
    }
#endif
    for (int block = 0; block < blocks; block++) {
        fill(block, tiles);
        const bf16* here = a + 32 * block;
#ifdef __AMX_BF16__
        if (tiles_ready) {
            _tile_loadd(4, here, 2 * stride);
            _tile_loadd(6, tiles, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, tiles + 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (parts == 2) continue;
            _tile_loadd(6, tiles + 2048, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, tiles + 3072, 64);
            _tile_dpbf16ps(3, 4, 7);
            continue;
        }
#endif
        for (int part = 0; part < parts; part++)
            multiplied(tiles + 1024 * part, here + from * stride, stride, end - from, sums + 256 * part + 16 * from,
                       false);
    }
#ifdef __AMX_BF16__
    if (tiles_ready) {
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
#endif
}

// Writes the visible slots from `from` on to `seen`; returns their number.
inline int looked(const uint8_t* mask, int from, int columns, int32_t* seen) {
    int count = 0;
    for (int j = from; j < columns; j += 16) {
        const __m128i bytes = _mm_maskz_loadu_epi8(first(columns - j), mask + j);
        const __mmask16 looks = _mm_test_epi8_mask(bytes, bytes);
        const __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        _mm512_mask_compressstoreu_epi32(seen + count, looks, _mm512_add_epi32(_mm512_set1_epi32(j), ids));
        count += __builtin_popcount(looks);
    }
    return count;
}

// run: the number of slots before the first masked one; count: the number of visible slots.
void counted(const uint8_t* mask, int columns, int32_t& run, int32_t& count) {
    run = count = 0;
    for (int j = 0; j < columns; j += 64) {
        const __mmask64 some = columns - j < 64 ? (1ull << (columns - j)) - 1 : ~0ull;
        const __m512i bytes = _mm512_maskz_loadu_epi8(some, mask + j);
        const uint64_t looks = _mm512_test_epi8_mask(bytes, bytes);
        if (run == j) run += ~looks ? __builtin_ctzll(~looks) : 64;
        count += __builtin_popcountll(looks);
    }
}

}  // namespace
