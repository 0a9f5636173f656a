// Memory layout of weights, of a pass and of a thread's scratch space. The structs mirror the ctypes structures in
// Python.
//
// Weights [out, in] are stored in tiles of 16 outputs by 32 inputs, all tiles of 16 outputs one after another. A tile
// holds 16 pairs of inputs, and for each pair the 16 outputs. 8-bit weights have a scale per output. In 4 bits, byte j
// of row i holds number j of pair 2 i (low half) and of pair 2 i + 1, and each tile is followed by 16 scales and 16
// offsets in bfloat16.

#pragma once

#include "numbers.h"

extern "C" {

struct Matrix {
    const uint8_t* tiles;
    const float* scales;  // for 8 bits
    const float* bias;    // or null
    int32_t out, in, bits, rounds;  // rounds: inputs of 8-bit weights may be rounded as those of 4-bit weights are
};

struct Layer {
    const float* attention_norm;
    const float* mlp_norm;
    const float* qk_norm;  // [heads + kv, dim] or null
    Matrix qkv, out, up_gate, down;
    int32_t use_attention, use_mlp;
};

struct Shape {
    int32_t width, heads, kv, dim, hidden, into;  // hidden: of the MLP; into: attention's input size
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
    const uint8_t* mask;       // [rows or 1, count, columns], or null: everything is attended
    uint8_t* work;
    const bf16* read;   // [rows count, into] attention's input, or null: x, normed
    bf16* const* taps;  // for each layer where to copy its output [rows count, width], or null
    // [rows + 1] the first token of each row, and the number of tokens; or null: each row has `count`. If given, x,
    // positions, slots and mask [tokens, ...] are those of the tokens, and no row has more than `count`.
    const int32_t* firsts;
    int64_t position_stride, mask_stride, start;  // the strides are 0 if rows share positions or mask
    int32_t rows, count, columns, reach, first, last, threads, small;  // small: the store holds 8-bit slots
    int32_t reading;  // whether the tokens are a prompt's: see Scratch
};

}  // extern "C"

namespace {

constexpr int kRows = 256;    // rows of a product computed together
constexpr int kAhead = 4096;  // prefetch distance in bytes
constexpr int kNear = 1 << 17;  // bytes up to which what is read next is prefetched to the second-level cache

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t record(int bits) { return bits == 16 ? 1024 : bits == 8 ? 512 : 320; }

struct Scratch {        // of one thread
    uint8_t* unpacked;  // [2 kUnpacked][2][kTile]
    float* part;        // [4][16][16]
    float* sums;        // [kRows][inputs / 32] of kPrepared bytes each, and at least 1024 numbers
    float* first;       // [kRows][16]
    float* second;
    bf16* queries;   // [16][dim]
    uint8_t* right;  // [max(dim / 32, 4)][kTile]
    int32_t* seen;   // [columns]
    float* weights;  // [16][columns]
    bf16* shares;    // [16][columns]
    float* scales;   // [columns], of numbers in 8 bits
    bool reading = false;  // whether inputs are a prompt's, which tiles multiply in 16 bits whatever the weights have
};

// Applies the scales of 8-bit weights and the bias.
inline void finished(const Matrix& w, int block, int count, float* sums) {
    if (w.bits != 8 && !w.bias) return;
    const Sixteen scale = w.bits == 8 ? load(w.scales + 16 * block) : same(1.f);
    const Sixteen bias = w.bias ? load(w.bias + 16 * block) : zero();
    for (int m = 0; m < count; m++)
        store(sums + 16 * m, fma(load(sums + 16 * m), scale, bias));
}

}  // namespace
