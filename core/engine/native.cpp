// One pass of a small decoder on a CPU that multiplies 16-bit numbers (AVX-512 BF16, and AMX tiles where there are
// any).
//
// What a pass costs with few tokens is the reading of the weights and the calling of operations; so here weights lie in
// the order in which they are read, in 16, 8 or 4 bits, and all layers are one call. Every token's numbers are computed
// in an order that depends on nothing but the token and what it may look at: not on how many tokens share the pass, nor
// on which slots they stand in. Hence drafting cannot change what comes out, in these precisions either.
//
// Weights [out, in] are tiles of 16 outputs by 32 inputs, all tiles of 16 outputs in a row. Within a tile come 16 pairs
// of inputs, and within each pair the 16 outputs. 8 bits have a scale for every output; in 4 bits, byte j of row i
// holds number j of pairs 2 i (low half) and 2 i + 1, and behind each tile stand 16 scales and 16 offsets in bfloat16.

#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "numbers.h"

extern "C" {

struct Matrix {
    const uint8_t* tiles;
    const float* scales;  // of 8 bits
    const float* bias;    // or null
    int32_t out, in, bits, unused;
};

struct Layer {
    const float* attention_norm;
    const float* mlp_norm;
    const float* qk_norm;  // [heads + kv, dim] or null
    Matrix qkv, out, up_gate, down;
    int32_t attends, thinks;
};

struct Shape {
    int32_t width, heads, kv, dim, hidden;
    float eps;
};

struct Pass {
    float* x;  // [rows count, width], changed in place
    uint8_t* store;
    int64_t layer_stride, row_stride, head_stride, slot_stride;  // bytes
    const float* cosine;  // [positions, dim / 2]
    const float* sine;
    const int64_t* positions;  // [rows or 1, count]
    const int64_t* slots;      // [rows, count], or null: start, start + 1, ...
    const uint8_t* mask;       // [rows or 1, count, columns], or null: all may look at all
    uint8_t* work;
    int64_t position_stride, mask_stride, start;  // 0 where rows share
    int32_t rows, count, columns, reach, first, last, threads, small;  // small: a scale and 8 bits a number
};

}  // extern "C"

namespace {

constexpr int kRows = 256;    // rows of one product that are worked on together
constexpr int kUnpacked = 4;  // tiles in 16 bits between unpacking and use
constexpr int kAhead = 4096;  // bytes between asking memory and use
bool tiles_ready = false;

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t record(int bits) { return bits == 16 ? 1024 : bits == 8 ? 512 : 320; }
inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

#ifdef __AMX_BF16__
struct alignas(64) Tiles {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    explicit Tiles(int count) {  // 0 to 3 sums, 4 inputs, 5 more of them or weights, 6 and 7 weights
        for (int i = 0; i < 8; i++) columns[i] = 64, rows[i] = i < 5 ? std::min(count, 16) : 16;
    }
};
// oneDNN's products in the same thread find the tiles as they left them.
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

struct Scratch {        // of one thread
    uint8_t* unpacked;  // [kUnpacked][2][1024]
    float* part;        // [2][2][32][16]
    float* sums;        // [kRows][inputs / 32], and 1024 at least
    float* first;       // [kRows][16]
    float* second;
    bf16* queries;   // [16][dim]
    uint8_t* right;  // [max(dim / 32, 4)][1024]
    int32_t* seen;   // [columns]
    float* weights;  // [16][columns]
    bf16* shares;    // [16][columns]
    float* scales;   // [columns], of numbers in 8 bits
};

inline void unpack8(const uint8_t* tile, uint8_t* to) {
    for (int i = 0; i < 16; i++) {
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(tile + 32 * i))));
        const __m512 high =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(tile + 32 * i + 16))));
        _mm512_store_si512(to + 64 * i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

inline void unpack4(const uint8_t* tile, uint8_t* to, __m512i levels) {
    for (int i = 0; i < 8; i++) {
        const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(tile + 32 * i)));
        _mm512_store_si512(to + 128 * i, _mm512_permutexvar_epi16(both, levels));  // bit 4 of an index changes nothing
        _mm512_store_si512(to + 128 * i + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), levels));
    }
}

inline __m512i sixteen_levels() {  // -8 to 7 in bfloat16, twice
    alignas(64) bf16 table[32];
    for (int i = 0; i < 32; i++) {
        const float value = float(i % 16 - 8);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        table[i] = bits >> 16;
    }
    return _mm512_load_si512(table);
}

// Sums [count][16] of `count` rows with one tile, without tile registers.
inline void multiplied(const uint8_t* tile, const bf16* a, int64_t stride, int count, float* sums, bool fresh) {
    for (int m = 0; m < count; m++) {
        __m512 even = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + 16 * m), odd = _mm512_setzero_ps();
        const int32_t* pairs = (const int32_t*)(a + m * stride);
        for (int i = 0; i < 16; i += 2) {
            const __m512bh first = (__m512bh)_mm512_set1_epi32(pairs[i]),
                           second = (__m512bh)_mm512_set1_epi32(pairs[i + 1]);
            even = _mm512_dpbf16_ps(even, first, (__m512bh)_mm512_load_si512(tile + 64 * i));
            odd = _mm512_dpbf16_ps(odd, second, (__m512bh)_mm512_load_si512(tile + 64 * i + 64));
        }
        _mm512_store_ps(sums + 16 * m, _mm512_add_ps(even, odd));
    }
}

// One tile of two rows of tiles each, times up to 32 rows of inputs, added to sums 0 and 1 of the first 16, 2 and 3 of
// the others.
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

// Scales of 8 bits, and what is added to each output.
inline void finished(const Matrix& w, int block, int count, float* sums) {
    if (w.bits != 8 && !w.bias) return;
    const __m512 scale = w.bits == 8 ? _mm512_loadu_ps(w.scales + 16 * block) : _mm512_set1_ps(1.f);
    const __m512 bias = w.bias ? _mm512_loadu_ps(w.bias + 16 * block) : _mm512_setzero_ps();
    for (int m = 0; m < count; m++)
        _mm512_store_ps(sums + 16 * m, _mm512_fmadd_ps(_mm512_load_ps(sums + 16 * m), scale, bias));
}

// Sums [count][16] of two rows of tiles, `blocks`, with `count` rows of `a`, up to kRows of them.
template <int bits>
void rows_of_tiles(const Matrix& w, const int (&blocks)[2], const bf16* a, int64_t stride, int count,
                   float* const (&sums)[2], Scratch& own) {
    const int depth = w.in / 32;
    const uint8_t* const tiles[2] = {w.tiles + int64_t(blocks[0]) * depth * record(bits),
                                     w.tiles + int64_t(blocks[1]) * depth * record(bits)};
    const __m512i levels = bits == 4 ? sixteen_levels() : _mm512_setzero_si512();
    // what is unpacked is read by the tile unit only once it has left the store buffer: so some tiles ahead
    const auto place = [&](int side, int k) { return own.unpacked + 1024 * (2 * (k % kUnpacked) + side); };
    const auto unpack = [&](int k) {
        for (int side = 0; side < 2; side++) {
            const uint8_t* here = tiles[side] + k * record(bits);
            for (int ahead = 0; ahead < record(bits); ahead += 64)
                _mm_prefetch((const char*)here + kAhead + ahead, _MM_HINT_T0);
            if (bits == 8) unpack8(here, place(side, k));
            if (bits == 4) unpack4(here, place(side, k), levels);
        }
    };
    const auto ready = [&](int side, int k) { return bits == 16 ? tiles[side] + k * record(bits) : place(side, k); };
    if (bits == 4) {  // sums of a tile are scaled before they are added
        std::memset(sums[0], 0, 64 * count);
        std::memset(sums[1], 0, 64 * count);
        for (int k = 0; k < std::min(kUnpacked - 1, depth); k++) unpack(k);
        for (int k = 0; k < depth; k++) {
            if (k + kUnpacked - 1 < depth) unpack(k + kUnpacked - 1);
            for (int m = 0; m < count; m += 32) {
                const bf16* here = a + m * stride + 32 * k;
                const int some = std::min(32, count - m);
                float* const parts[2] = {own.part + 1024 * (k & 1), own.part + 1024 * (k & 1) + 512};
                if (tiles_ready) {
                    cleared();
                    multiplied(ready(0, k), ready(1, k), here, stride, some > 16);
                    stored(parts[0], parts[1], some > 16);
                } else {
                    for (int side = 0; side < 2; side++)
                        multiplied(ready(side, k), here, stride, some, parts[side], true);
                }
                for (int side = 0; side < 2; side++) {
                    const bf16* numbers = (const bf16*)(tiles[side] + k * record(bits) + 256);
                    const __m512 scale = loaded(numbers), offset = loaded(numbers + 16);
                    for (int i = 0; i < some; i++) {
                        float* sum = sums[side] + 16 * (m + i);
                        const __m512 total = _mm512_set1_ps(own.sums[(m + i) * depth + k]);
                        const __m512 with =
                            _mm512_fmadd_ps(_mm512_load_ps(parts[side] + 16 * i), scale, _mm512_load_ps(sum));
                        _mm512_store_ps(sum, _mm512_fmadd_ps(offset, total, with));
                    }
                }
            }
        }
    } else {
        for (int from = 0; from < count; from += 32) {
            const bf16* rows = a + from * stride;
            const int some = std::min(32, count - from);
            if (tiles_ready) cleared();
            for (int k = 0; k < std::min(kUnpacked - 1, depth); k++) unpack(k);
            for (int k = 0; k < depth; k++) {
                if (k + kUnpacked - 1 < depth) unpack(k + kUnpacked - 1);
                if (tiles_ready)
                    multiplied(ready(0, k), ready(1, k), rows + 32 * k, stride, some > 16);
                else
                    for (int side = 0; side < 2; side++)
                        multiplied(ready(side, k), rows + 32 * k, stride, some, sums[side] + 16 * from, k == 0);
            }
            if (tiles_ready) stored(sums[0] + 16 * from, sums[1] + 16 * from, some > 16);
        }
    }
    for (int side = 0; side < 2; side++) finished(w, blocks[side], count, sums[side]);
}

// The same of four rows of tiles in 16 bits with up to 16 rows of `a`, which are loaded half as often.
inline void rows_of_tiles(const Matrix& w, const int (&blocks)[4], const bf16* a, int64_t stride, int count,
                          float* const (&sums)[4]) {
#ifdef __AMX_BF16__
    const uint8_t* tiles[4];
    for (int i = 0; i < 4; i++) tiles[i] = w.tiles + int64_t(blocks[i]) * (w.in / 32) * 1024;
    cleared();
    for (int k = 0; k < w.in / 32; k++) {
        const int64_t here = 1024 * k;
        for (const uint8_t* one : tiles)
            for (int ahead = 0; ahead < 1024; ahead += 64)
                _mm_prefetch((const char*)one + here + kAhead + ahead, _MM_HINT_T0);
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

inline void rows_of_tiles(const Matrix& w, int left, int right, const bf16* a, int64_t stride, int count,
                          Scratch& own) {
    const int blocks[2] = {left, right};
    float* const sums[2] = {own.first, own.second};
    if (w.bits == 16)
        rows_of_tiles<16>(w, blocks, a, stride, count, sums, own);
    else if (w.bits == 8)
        rows_of_tiles<8>(w, blocks, a, stride, count, sums, own);
    else
        rows_of_tiles<4>(w, blocks, a, stride, count, sums, own);
}

// What offsets are multiplied with: the sum of every 32 inputs.
void summed(const Matrix& w, const bf16* a, int64_t stride, int count, float* to) {
    if (w.bits != 4) return;
    for (int m = 0; m < count; m++)
        for (int k = 0; k < w.in / 32; k++) {
            const bf16* here = a + m * stride + 32 * k;
            *to++ = _mm512_reduce_add_ps(_mm512_add_ps(loaded(here), loaded(here + 16)));
        }
}

// A thread's share of a product: `take(block, from, count, sums)` gets sums [count][16] of rows `from` on.
template <typename Take>
void product(const Matrix& w, const bf16* a, int64_t stride, int count, int thread, int threads, Scratch& own,
             Take take) {
    const int blocks = w.out / 16, begin = blocks * int64_t(thread) / threads,
              end = blocks * int64_t(thread + 1) / threads;
    for (int from = 0; from < count; from += kRows) {
        const int some = std::min(kRows, count - from);
        summed(w, a + from * stride, stride, some, own.sums);
        int block = begin;
        for (; by_fours(w, some) && block + 4 <= end; block += 4) {
            float* const sums[4] = {own.first, own.first + 256, own.second, own.second + 256};
            rows_of_tiles(w, {block, block + 1, block + 2, block + 3}, a + from * stride, stride, some, sums);
            for (int i = 0; i < 4; i++) take(block + i, from, some, sums[i]);
        }
        for (; block < end; block += 2) {
            const int next = std::min(block + 1, end - 1);
            rows_of_tiles(w, block, next, a + from * stride, stride, some, own);
            take(block, from, some, own.first);
            if (next > block) take(next, from, some, own.second);
        }
    }
}

void normed(const float* x, const float* weight, int width, float eps, bf16* to) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < width; i += 16) {
        const __m512 some = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(some, some, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(_mm512_reduce_add_ps(squares) / width + eps));
    for (int i = 0; i < width; i += 16)
        narrowed(to + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
}

// Numbers in 16 bits as 8 bits behind their scale.
void rounded(const bf16* x, int dim, uint8_t* to) {
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < dim; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(loaded(x + i)));
    const float scale = std::max(_mm512_reduce_max_ps(most) / 127, 1e-30f);
    std::memcpy(to, &scale, 4);
    for (int i = 0; i < dim; i += 16) {
        const __m512i ints = _mm512_cvtps_epi32(_mm512_div_ps(loaded(x + i), _mm512_set1_ps(scale)));
        _mm_storeu_si128((__m128i*)(to + 4 + i), _mm512_cvtsepi32_epi8(ints));
    }
}

inline float scale_of(const uint8_t* slot) {
    float found;
    std::memcpy(&found, slot, 4);
    return found;
}

// 32 numbers of a slot from number d on; those of 8 bits without their scale.
template <bool small>
inline __m512i numbers(const uint8_t* slot, int d) {
    if (!small) return _mm512_loadu_si512(slot + 2 * d);
    const __m256i ints = _mm256_loadu_si256((const __m256i*)(slot + 4 + d));
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(ints)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(ints, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Turn one head by its position (after its own norm, if it has one), into 16 bits.
void turned(float* x, const float* norm, int dim, float eps, const float* cosine, const float* sine, bf16* to) {
    const int half = dim / 2;
    if (norm) {
        float squares = 0;
        for (int i = 0; i < dim; i++) squares += x[i] * x[i];
        const float scale = 1.f / std::sqrt(squares / dim + eps);
        for (int i = 0; i < dim; i++) x[i] *= scale * norm[i];
    }
    for (int i = 0; i < half; i += 16) {
        const __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + half + i);
        const __m512 c = _mm512_loadu_ps(cosine + i), s = _mm512_loadu_ps(sine + i);
        narrowed(to + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)));
        narrowed(to + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)));
    }
}

// 32 numbers of 16 rows, as the right side of a product: pairs of numbers in order, in each the 16 rows.
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

// `width` (64 or 32) numbers of 32 rows, as right sides: pairs of rows in order, in each 16 numbers; a tile for
// each 16.
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

// to [16][stride] = a [16][depth] times `depth / 32` tiles.
inline void scored(const uint8_t* tiles, const bf16* a, int depth, float* to, int64_t stride) {
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
    for (int d = 0; d < depth; d += 32) multiplied(tiles + 32 * d, a + d, depth, 16, sums, d == 0);
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(to + i * stride, _mm512_load_ps(sums + 16 * i));
}

// sums [4][16][16] += a [16][32 blocks] times up to four tiles for each block, which `fill` makes.
template <typename Fill>
inline void gathered(int blocks, int width, const bf16* a, int64_t stride, uint8_t* tiles, float* sums, Fill fill) {
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
            multiplied(tiles + 1024 * part, here, stride, 16, sums + 256 * part, false);
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

// Some tokens of one row, and some of the queries of each that share a head of keys: at most 16 queries together.
struct Group {
    int tokens, heads, dim;
    const bf16* queries;  // of the first token and head; the tokens' lie `spread` apart
    bf16* found;          // likewise
    int64_t spread;
    const uint8_t *keys, *values;
    int64_t stride;         // bytes from slot to slot
    const uint8_t* mask;    // of the first token, or null
    int columns;            // from token to token of the mask
    const int32_t* runs;    // of each token: how many slots it sees before the first that it doesn't
    const int32_t* counts;  // ... and how many in all
};

// What the queries find in the slots that they may look at. A token's slots count in their order, in blocks of 32:
// which of them are those of others too decides how a block is put together, not what is computed with it.
template <bool small>
void attended(const Group& g, Scratch& own) {
    const int rows = g.tokens * g.heads;
    int shortest = g.runs[0], longest = 0;
    bool plain = true;
    for (int t = 0; t < g.tokens; t++) {
        shortest = std::min(shortest, g.runs[t]);
        longest = std::max(longest, g.counts[t]);
        plain = plain && g.runs[t] == g.counts[t];
        for (int h = 0; h < g.heads; h++)
            std::memcpy(own.queries + (t * g.heads + h) * g.dim, g.queries + t * g.spread + h * g.dim, 2 * g.dim);
    }
    const int shared = plain ? longest : shortest / 32 * 32;
    const int64_t width = padded(longest, 32);
    const auto scales = [&](const uint8_t* of, int t) {  // of what all see (t: -1), or of the rest of a token's
        const int first = t < 0 ? 0 : shared, count = t < 0 ? shared : g.counts[t] - shared;
        for (int i = 0; small && i < count; i++)
            own.scales[first + i] = scale_of(of + (t < 0 ? i : own.seen[i]) * g.stride);
    };
    scales(g.keys, -1);
    for (int j = 0; j < shared; j += 16) {
        for (int d = 0; d < g.dim; d += 32)
            turned_over([&](int i) { return numbers<small>(g.keys + std::min(j + i, shared - 1) * g.stride, d); },
                        own.right + 32 * d);
        scored(own.right, own.queries, g.dim, own.weights + j, width);
        for (int row = 0; small && row < rows; row++) {
            float* mine = own.weights + row * width + j;
            _mm512_storeu_ps(mine, _mm512_mul_ps(_mm512_loadu_ps(mine), _mm512_loadu_ps(own.scales + j)));
        }
    }
    const auto rest = [&](int t) {  // the slots of a token behind those of all
        int count = 0;
        for (int j = shared; j < g.columns; j += 16) {
            const __mmask16 some = g.columns - j < 16 ? (1 << (g.columns - j)) - 1 : 0xffff;
            const __m128i bytes = _mm_maskz_loadu_epi8(some, g.mask + int64_t(t) * g.columns + j);
            const __mmask16 looks = _mm_test_epi8_mask(bytes, bytes);
            const __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            _mm512_mask_compressstoreu_epi32(own.seen + count, looks, _mm512_add_epi32(_mm512_set1_epi32(j), ids));
            count += __builtin_popcount(looks);
        }
        return count;
    };
    for (int t = 0; t < g.tokens && !plain; t++) {
        const int count = rest(t);
        scales(g.keys, t);
        for (int j = 0; j < count; j += 16) {
            for (int d = 0; d < g.dim; d += 32)
                turned_over(
                    [&](int i) { return numbers<small>(g.keys + own.seen[std::min(j + i, count - 1)] * g.stride, d); },
                    own.right + 32 * d);
            scored(own.right, own.queries, g.dim, own.part, 16);
            for (int h = t * g.heads; h < (t + 1) * g.heads; h++) {
                __m512 found = _mm512_load_ps(own.part + 16 * h);
                if (small) found = _mm512_mul_ps(found, _mm512_loadu_ps(own.scales + shared + j));
                _mm512_storeu_ps(own.weights + h * width + shared + j, found);
            }
        }
    }
    const __m512 scale = _mm512_set1_ps(1.f / std::sqrt(float(g.dim)));
    float shares[16];
    scales(g.values, -1);
    for (int row = 0; row < rows; row++) {
        if (small && !plain && row % g.heads == 0) {
            rest(row / g.heads);
            scales(g.values, row / g.heads);
        }
        const int count = g.counts[row / g.heads];
        const float* mine = own.weights + row * width;
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int j = 0; j < count; j += 16) {
            const __mmask16 some = count - j < 16 ? (1 << (count - j)) - 1 : 0xffff;
            most = _mm512_mask_max_ps(most, some, most, _mm512_loadu_ps(mine + j));
        }
        const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        for (int j = 0; j < width; j += 16) {
            const int left = count - j;
            const __mmask16 some = left < 16 ? left > 0 ? (1 << left) - 1 : 0 : 0xffff;
            const __m512 e =
                exponential(_mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(some, mine + j), top), scale));
            total = _mm512_mask_add_ps(total, some, total, e);
            const __m512 share = small ? _mm512_mul_ps(e, _mm512_loadu_ps(own.scales + j)) : e;
            narrowed(own.shares + row * width + j, _mm512_maskz_mov_ps(some, share));
        }
        shares[row] = 1.f / _mm512_reduce_add_ps(total);
    }
    for (int d = 0; d < g.dim; d += 64) {
        const int wide = std::min(64, g.dim - d);
        const auto hand_over = [&](const float* sums, int from, int to) {
            for (int row = from; row < to; row++)
                for (int i = 0; i < wide; i += 16)
                    narrowed(g.found + row / g.heads * g.spread + row % g.heads * g.dim + d + i,
                             _mm512_mul_ps(_mm512_load_ps(sums + 16 * i + 16 * row), _mm512_set1_ps(shares[row])));
        };
        std::memset(own.sums, 0, 4096);
        gathered(int(padded(shared, 32) / 32), wide, own.shares, width, own.right, own.sums,
                 [&](int block, uint8_t* to) {
                     interleaved(
                         [&](int i, int e) {
                             return numbers<small>(g.values + std::min(32 * block + i, shared - 1) * g.stride, d + e);
                         },
                         wide, to);
                 });
        if (plain) hand_over(own.sums, 0, rows);
        for (int t = 0; t < g.tokens && !plain; t++) {
            const int count = rest(t);
            std::memcpy(own.part, own.sums, 4096);
            gathered(
                int(padded(count, 32) / 32), wide, own.shares + shared, width, own.right, own.part,
                [&](int block, uint8_t* to) {
                    interleaved(
                        [&](int i, int e) {
                            const int slot = own.seen[std::min(32 * block + i, count - 1)];
                            return numbers<small>(g.values + slot * g.stride, d + e);
                        },
                        wide, to);
                });
            hand_over(own.part, t * g.heads, (t + 1) * g.heads);
        }
    }
}

// How many slots a token sees before the first that it doesn't, and how many in all.
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

struct Arena {
    uint8_t* at;
    template <typename T>
    T* take(int64_t count) {
        T* found = (T*)at;
        at += padded(count * sizeof(T), 64);
        return found;
    }
};

Scratch scratch(Arena& arena, int deepest, int64_t columns, int dim) {
    Scratch own;
    own.unpacked = arena.take<uint8_t>(2048 * kUnpacked);
    own.part = arena.take<float>(2048);
    own.sums = arena.take<float>(std::max(int64_t(kRows) * (deepest / 32), int64_t(1024)));
    own.first = arena.take<float>(kRows * 16);
    own.second = arena.take<float>(kRows * 16);
    own.queries = arena.take<bf16>(16 * dim);
    own.right = arena.take<uint8_t>(1024 * std::max(dim / 32, 4));
    own.seen = arena.take<int32_t>(columns + 16);
    own.weights = arena.take<float>(16 * padded(columns, 32) + 256);
    own.shares = arena.take<bf16>(16 * padded(columns, 32) + 256);
    own.scales = arena.take<float>(columns + 32);
    return own;
}

int64_t scratch_bytes(int deepest, int64_t columns, int dim) {
    Arena arena{nullptr};
    scratch(arena, deepest, columns, dim);
    return (int64_t)arena.at;
}

}  // namespace

extern "C" {

// 2: with tiles, where they are wanted; 1: without; 0: this machine can't.
int outrider_ready(int32_t wanted) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bf16")) return 0;
    tiles_ready = false;
#ifdef __AMX_BF16__
    tiles_ready = wanted && syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ask for their state, as every process must
#endif
    return tiles_ready ? 2 : 1;
}

int64_t outrider_work(const Shape* s, int32_t tokens, int64_t columns, int32_t threads) {
    const int64_t rows = padded(tokens, 16), spread = int64_t(s->heads) * s->dim,
                  all = spread + 2 * int64_t(s->kv) * s->dim;
    return 2 * rows * (2 * std::max<int64_t>(s->width, spread) + s->hidden) + 4 * rows * all + 1024 + 8 * rows +
           threads * scratch_bytes(std::max({int64_t(s->width), spread, int64_t(s->hidden)}), columns, s->dim);
}

void outrider_run(const Shape* shape, const Layer* layers, const Pass* pass) {
    const Shape& s = *shape;
    const Pass& p = *pass;
    const int tokens = p.rows * p.count, group = s.heads / s.kv, spread = s.heads * s.dim,
              all = spread + 2 * s.kv * s.dim;
    const int64_t rows = padded(tokens, 16), widest = std::max(s.width, spread);
    Arena arena{p.work};
    bf16* input = arena.take<bf16>(rows * widest);
    bf16* queries = arena.take<bf16>(rows * widest);
    bf16* middle = arena.take<bf16>(rows * s.hidden);
    float* qkv = arena.take<float>(rows * all);
    const int deepest = std::max({int64_t(s.width), int64_t(spread), int64_t(s.hidden)});
    int32_t* runs = arena.take<int32_t>(rows);
    int32_t* counts = arena.take<int32_t>(rows);
    const int64_t each = scratch_bytes(deepest, p.columns, s.dim);
    const int together = std::max(1, 16 / group), most = std::min(16, group),
              parts = (p.count + together - 1) / together;
#pragma omp parallel num_threads(p.threads)
    {
        const int me = omp_get_thread_num(), threads = omp_get_num_threads();
        Arena mine{arena.at + me * each};
        Scratch own = scratch(mine, deepest, p.columns, s.dim);
        const Configured configured(tokens);
        for (int m = me; m < tokens; m += threads) {
            runs[m] = counts[m] = p.columns;
            if (p.mask)
                counted(p.mask + m / p.count * p.mask_stride + int64_t(m % p.count) * p.columns, p.columns, runs[m],
                        counts[m]);
        }
        for (int index = p.first; index < p.last; index++) {
            const Layer& layer = layers[index];
            if (layer.attends) {
                for (int m = me; m < tokens; m += threads)
                    normed(p.x + int64_t(m) * s.width, layer.attention_norm, s.width, s.eps,
                           input + int64_t(m) * s.width);
#pragma omp barrier
                product(layer.qkv, input, s.width, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++)
                                _mm512_storeu_ps(qkv + int64_t(from + m) * all + 16 * block,
                                                 _mm512_load_ps(sums + 16 * m));
                        });
#pragma omp barrier
                uint8_t* const here = p.store + index * p.layer_stride;
                for (int task = me; task < tokens * s.kv;
                     task += threads) {  // a token's queries, key and value of one head
                    const int m = task / s.kv, kv = task % s.kv, row = m / p.count, q = m % p.count;
                    int64_t position = p.positions[row * p.position_stride + q];
                    position = std::min<int64_t>(std::max<int64_t>(position, 0), p.reach - 1);
                    const float *c = p.cosine + position * (s.dim / 2), *sn = p.sine + position * (s.dim / 2);
                    float* token = qkv + int64_t(m) * all;
                    for (int g = kv * group; g < (kv + 1) * group; g++)
                        turned(token + g * s.dim, layer.qk_norm ? layer.qk_norm + g * s.dim : nullptr, s.dim, s.eps, c,
                               sn, queries + int64_t(m) * spread + g * s.dim);
                    const int64_t slot = p.slots ? p.slots[int64_t(row) * p.count + q] : p.start + q;
                    uint8_t* const to = here + row * p.row_stride + kv * p.head_stride + slot * p.slot_stride;
                    uint8_t* const beside = to + s.kv * p.head_stride;
                    bf16* const key = p.small ? own.queries : (bf16*)to;
                    bf16* const value = p.small ? own.queries + s.dim : (bf16*)beside;
                    turned(token + spread + kv * s.dim,
                           layer.qk_norm ? layer.qk_norm + (s.heads + kv) * s.dim : nullptr, s.dim, s.eps, c, sn, key);
                    const float* given = token + spread + (s.kv + kv) * s.dim;
                    for (int i = 0; i < s.dim; i += 16) narrowed(value + i, _mm512_loadu_ps(given + i));
                    if (p.small) {
                        rounded(key, s.dim, to);
                        rounded(value, s.dim, beside);
                    }
                }
#pragma omp barrier
                configured.to(std::min(p.count, together) * group);
                for (int task = me; task < p.rows * s.kv * parts; task += threads) {
                    const int row = task / (s.kv * parts), kv = task / parts % s.kv, q = task % parts * together,
                              m = row * p.count + q;
                    for (int head = kv * group; head < (kv + 1) * group; head += most) {
                        const uint8_t* keys = here + row * p.row_stride + kv * p.head_stride;
                        const int64_t at = int64_t(m) * spread + head * s.dim;
                        const uint8_t* mask = p.mask ? p.mask + row * p.mask_stride + int64_t(q) * p.columns : nullptr;
                        const Group some{std::min(together, p.count - q), std::min(most, (kv + 1) * group - head), s.dim,
                                         queries + at, input + at, spread, keys, keys + s.kv * p.head_stride,
                                         p.slot_stride, mask, p.columns, runs + m, counts + m};
                        if (p.small)
                            attended<true>(some, own);
                        else
                            attended<false>(some, own);
                    }
                }
                configured.to(tokens);
#pragma omp barrier
                product(layer.out, input, spread, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++) {
                                float* x = p.x + int64_t(from + m) * s.width + 16 * block;
                                _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), _mm512_load_ps(sums + 16 * m)));
                            }
                        });
#pragma omp barrier
            }
            if (layer.thinks) {
                for (int m = me; m < tokens; m += threads)
                    normed(p.x + int64_t(m) * s.width, layer.mlp_norm, s.width, s.eps, input + int64_t(m) * s.width);
#pragma omp barrier
                const int blocks = s.hidden / 16, begin = blocks * int64_t(me) / threads,
                          end = blocks * int64_t(me + 1) / threads;
                for (int from = 0; from < tokens; from += kRows) {
                    const int some = std::min(kRows, tokens - from);
                    const bf16* a = input + int64_t(from) * s.width;
                    summed(layer.up_gate, a, s.width, some, own.sums);
                    const auto opened = [&](int block, const float* up, const float* gates) {
                        for (int m = 0; m < some; m++) {
                            const __m512 gate = _mm512_load_ps(gates + 16 * m), one = _mm512_set1_ps(1.f);
                            const __m512 open = _mm512_div_ps(
                                gate, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate))));
                            narrowed(middle + int64_t(from + m) * s.hidden + 16 * block,
                                     _mm512_mul_ps(open, _mm512_load_ps(up + 16 * m)));
                        }
                    };
                    int block = begin;
                    for (; by_fours(layer.up_gate, some) && block + 2 <= end; block += 2) {
                        float* const sums[4] = {own.first, own.first + 256, own.second, own.second + 256};
                        rows_of_tiles(layer.up_gate, {block, block + 1, block + blocks, block + 1 + blocks}, a, s.width,
                                      some, sums);
                        for (int i = 0; i < 2; i++) opened(block + i, sums[i], sums[2 + i]);
                    }
                    for (; block < end; block++) {
                        rows_of_tiles(layer.up_gate, block, block + blocks, a, s.width, some, own);
                        opened(block, own.first, own.second);
                    }
                }
#pragma omp barrier
                product(layer.down, middle, s.hidden, tokens, me, threads, own,
                        [&](int block, int from, int some, const float* sums) {
                            for (int m = 0; m < some; m++) {
                                float* x = p.x + int64_t(from + m) * s.width + 16 * block;
                                _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), _mm512_load_ps(sums + 16 * m)));
                            }
                        });
#pragma omp barrier
            }
        }
    }
}

int64_t outrider_product_work(const Matrix* w, int32_t count, int32_t threads) {
    return 2 * padded(count, 16) * w->in + 64 + threads * scratch_bytes(w->in, 0, 32);
}

// y [count, out] = a [count, in] w', a and y in bfloat16, or y in 32 bits.
void outrider_product(const Matrix* matrix, const bf16* a, void* y, int32_t count, int32_t wide_out, int32_t threads,
                      uint8_t* work) {
    const Matrix& w = *matrix;
    Arena arena{work};
    if (count > 16 && count % 16) {  // tiles read 16 rows at a time
        bf16* copy = arena.take<bf16>(padded(count, 16) * w.in);
        std::memcpy(copy, a, 2 * int64_t(count) * w.in);
        a = copy;
    }
    const int64_t each = scratch_bytes(w.in, 0, 32);
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), team = omp_get_num_threads();
        Arena mine{arena.at + me * each};
        Scratch own = scratch(mine, w.in, 0, 32);
        const Configured configured(count);
        product(w, a, w.in, count, me, team, own, [&](int block, int from, int some, const float* sums) {
            for (int m = 0; m < some; m++) {
                const int64_t at = int64_t(from + m) * w.out + 16 * block;
                if (wide_out)
                    _mm512_storeu_ps((float*)y + at, _mm512_load_ps(sums + 16 * m));
                else
                    narrowed((bf16*)y + at, _mm512_load_ps(sums + 16 * m));
            }
        });
    }
}

// y [count, out] = a [count, in] w' + bias in 32 bits, w as it is: for so few rows that reading w is what takes time.
// Each number is summed in the same order whatever `count` is.
void outrider_few(const float* w, const float* bias, const float* a, float* y, int32_t count, int32_t out, int32_t in,
                  int32_t threads) {
    constexpr int kOutputs = 4, kTogether = 4;
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), team = omp_get_num_threads();
        const int blocks = (out + kOutputs - 1) / kOutputs, end = blocks * int64_t(me + 1) / team;
        for (int block = blocks * int64_t(me) / team; block < end; block++) {
            const float* rows[kOutputs];
            for (int n = 0; n < kOutputs; n++) rows[n] = w + int64_t(std::min(block * kOutputs + n, out - 1)) * in;
            for (int from = 0; from < count; from += kTogether) {
                const float* tokens[kTogether];
                for (int m = 0; m < kTogether; m++) tokens[m] = a + int64_t(std::min(from + m, count - 1)) * in;
                __m512 sums[kTogether][kOutputs];
                for (auto& row : sums)
                    for (auto& sum : row) sum = _mm512_setzero_ps();
                for (int k = 0; k < in; k += 16) {
                    const __mmask16 some = in - k < 16 ? (1 << (in - k)) - 1 : 0xffff;
                    __m512 weights[kOutputs];
                    for (int n = 0; n < kOutputs; n++) {
                        weights[n] = _mm512_maskz_loadu_ps(some, rows[n] + k);
                        if (!from) _mm_prefetch((const char*)(rows[n] + k + kOutputs * in), _MM_HINT_T0);
                    }
                    for (int m = 0; m < kTogether; m++) {
                        const __m512 token = _mm512_maskz_loadu_ps(some, tokens[m] + k);
                        for (int n = 0; n < kOutputs; n++) sums[m][n] = _mm512_fmadd_ps(token, weights[n], sums[m][n]);
                    }
                }
                for (int m = 0; m < std::min(kTogether, count - from); m++)
                    for (int n = 0; n < std::min(kOutputs, out - block * kOutputs); n++) {
                        const int64_t column = block * kOutputs + n;
                        y[int64_t(from + m) * out + column] =
                            _mm512_reduce_add_ps(sums[m][n]) + (bias ? bias[column] : 0.f);
                    }
            }
        }
    }
}

// The `count` largest of every row [size] of x [outer, inner, size], the largest first and of equals the earlier.
void outrider_largest(const float* x, int64_t outer_stride, int64_t inner_stride, int32_t outer, int32_t inner,
                      int32_t size, int32_t count, float* values, int64_t* places, int32_t threads) {
#pragma omp parallel for num_threads(std::min(threads, outer * inner)) schedule(static)
    for (int row = 0; row < outer * inner; row++) {
        const float* here = x + row / inner * outer_stride + row % inner * inner_stride;
        float* best = values + int64_t(row) * count;
        int64_t* place = places + int64_t(row) * count;
        int filled = 0;
        const auto take = [&](int at) {
            int to = filled < count ? filled++ : count - 1;
            for (; to > 0 && here[at] > best[to - 1]; to--) best[to] = best[to - 1], place[to] = place[to - 1];
            best[to] = here[at], place[to] = at;
        };
        int at = 0;
        for (; at < count; at++) take(at);
        for (; at < size; at += 64) {
            const __m512 least = _mm512_set1_ps(best[count - 1]);
            uint64_t larger = 0;
            for (int part = 0; part < 64; part += 16) {
                const int left = size - at - part;
                const __mmask16 some = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
                const __m512 numbers = _mm512_maskz_loadu_ps(some, here + at + part);
                larger |= uint64_t(_mm512_mask_cmp_ps_mask(some, numbers, least, _CMP_GT_OQ)) << part;
            }
            for (; larger; larger &= larger - 1) {
                const int found = at + __builtin_ctzll(larger);
                if (here[found] > best[count - 1]) take(found);
            }
        }
    }
}

// For every row of 16-bit logits z and of logarithms log_p [size]: sum p (log_p - log softmax(z)) and softmax(z) - p.
void outrider_divergence(const bf16* z, const float* log_p, float* each, bf16* back, int32_t rows, int32_t size,
                         int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const bf16* mine = z + int64_t(row) * size;
        const float* known = log_p + int64_t(row) * size;
        bf16* to = back + int64_t(row) * size;
        __m512 most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
        for (int i = 0; i < size; i += 16) most = _mm512_max_ps(most, loaded(mine + i));
        const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        for (int i = 0; i < size; i += 16)
            total = _mm512_add_ps(total, exponential(_mm512_sub_ps(loaded(mine + i), top)));
        const __m512 level = _mm512_add_ps(top, _mm512_set1_ps(std::log(_mm512_reduce_add_ps(total))));
        for (int i = 0; i < size; i += 16) {
            const __m512 log_q = _mm512_sub_ps(loaded(mine + i), level), log = _mm512_loadu_ps(known + i);
            const __m512 p = exponential(log);
            sum = _mm512_fmadd_ps(p, _mm512_sub_ps(log, log_q), sum);
            narrowed(to + i, _mm512_sub_ps(exponential(log_q), p));
        }
        each[row] = _mm512_reduce_add_ps(sum);
    }
}

}  // extern "C"
