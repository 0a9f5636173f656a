// How weights, a pass and the scratch space of a thread lie in memory; the structs mirror those of ctypes in Python.
//
// Weights [out, in] are tiles of 16 outputs by 32 inputs, all tiles of 16 outputs in a row. Within a tile come 16 pairs
// of inputs, and within each pair the 16 outputs. 8-bit weights have a scale for every output; in 4 bits, byte j of row
// i holds number j of pairs 2 i (low half) and 2 i + 1, and each tile is followed by 16 scales and 16 offsets in
// bfloat16.

#pragma once

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
    int32_t width, heads, kv, dim, hidden, into;  // into: what attention reads
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
    const bf16* read;  // [rows count, into] by attention, or null: x, normed
    bf16* const* taps;  // where x behind each layer goes [rows count, width], or null; null: nowhere
    int64_t position_stride, mask_stride, start;  // 0 where rows share
    int32_t rows, count, columns, reach, first, last, threads, small;  // small: a scale and 8 bits a number
};

}  // extern "C"

namespace {

constexpr int kRows = 256;    // rows of one product that are worked on together
constexpr int kAhead = 4096;  // bytes between asking memory and use

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t record(int bits) { return bits == 16 ? 1024 : bits == 8 ? 512 : 320; }

struct Scratch {        // of one thread
    uint8_t* unpacked;  // [kUnpacked][2][kTile]
    float* part;        // [2][2][32][16]
    float* sums;        // [kRows][inputs / 32] of kPrepared bytes each, and 1024 numbers at least
    float* first;       // [kRows][16]
    float* second;
    bf16* queries;   // [16][dim]
    uint8_t* right;  // [max(dim / 32, 4)][kTile]
    int32_t* seen;   // [columns]
    float* weights;  // [16][columns]
    bf16* shares;    // [16][columns]
    float* scales;   // [columns], of numbers in 8 bits
};

// Scales of 8 bits, and what is added to each output.
inline void finished(const Matrix& w, int block, int count, float* sums) {
    if (w.bits != 8 && !w.bias) return;
    const Sixteen scale = w.bits == 8 ? load(w.scales + 16 * block) : same(1.f);
    const Sixteen bias = w.bias ? load(w.bias + 16 * block) : zero();
    for (int m = 0; m < count; m++)
        store(sums + 16 * m, fma(load(sums + 16 * m), scale, bias));
}

}  // namespace
