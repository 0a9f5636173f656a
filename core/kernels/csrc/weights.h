// Weights as the products read them: rounded to 4 bits, and brought into tiles (layout.h).

#pragma once

namespace {

inline float in_16_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline Sixteen at_most(Sixteen x, float bound) { return sub(same(bound), larger(sub(same(bound), x), zero())); }

// A tile of numbers of 8 or 16 bits, of which Pair holds two, from rows of `stride` pairs.
template <typename Pair>
inline void tiled(const Pair* rows, int64_t stride, Pair* to) {
    for (int pair = 0; pair < 16; pair++)
        for (int output = 0; output < 16; output++) to[16 * pair + output] = rows[output * stride + pair];
}

}  // namespace

extern "C" {

// Rounds groups of 32 weights to integers 0 to 15, of which n stands for (n - 8) scale + offset: in the range that has
// the smallest error, of `tries` ranges that are parts `shrinks` of the group's. As Int4 in quantize.py.
void outrider_round(const bf16* weights, int64_t groups, const float* shrinks, int32_t tries, uint8_t* integers,
                    bf16* scales, bf16* offsets, int32_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t group = 0; group < groups; group++) {
        const Sixteen x[2] = {load(weights + 32 * group), load(weights + 32 * group + 16)};
        const float high = largest(larger(x[0], x[1])), low = -largest(larger(sub(zero(), x[0]), sub(zero(), x[1])));
        float best = INFINITY;
        for (int i = 0; i < tries; i++) {
            const float scale = in_16_bits(std::max((high - low) * shrinks[i] / 15, 1e-12f));
            const float offset = in_16_bits((high + low) / 2 + scale / 2);
            Sixteen levels[2], squares = zero();
            for (int half = 0; half < 2; half++) {
                const Sixteen level = add(div(sub(x[half], same(offset)), same(scale)), same(8));
                levels[half] = at_most(larger(whole(level), zero()), 15);
                const Sixteen off = sub(fma(sub(levels[half], same(8)), same(scale), same(offset)), x[half]);
                squares = fma(off, off, squares);
            }
            const float error = added(squares);
            if (!(error < best) && i) continue;
            best = error;
            for (int half = 0; half < 2; half++) store((int8_t*)integers + 32 * group + 16 * half, levels[half]);
            const float both[2] = {scale, offset};
            for (int part = 0; part < 2; part++) {
                uint32_t bits;
                std::memcpy(&bits, both + part, 4);
                (part ? offsets : scales)[group] = bits >> 16;
            }
        }
    }
}

// Brings numbers [blocks 16, columns] of 16, 8 or 4 bits, the latter a byte each, into tiles; scales and offsets
// [blocks 16, columns / 32] are of 4 bits.
void outrider_tile(const void* numbers, const bf16* scales, const bf16* offsets, uint8_t* tiles, int64_t blocks,
                   int64_t columns, int32_t bits, int32_t threads) {
    const int64_t depth = columns / 32;
#pragma omp parallel for num_threads(threads)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t k = 0; k < depth; k++) {
            uint8_t* const to = tiles + (block * depth + k) * record(bits);
            const int64_t first = 16 * block * columns + 32 * k;
            if (bits == 16) {
                tiled((const uint32_t*)((const bf16*)numbers + first), columns / 2, (uint32_t*)to);
                continue;
            }
            uint16_t whole[256];
            tiled((const uint16_t*)((const uint8_t*)numbers + first), columns / 2, bits == 8 ? (uint16_t*)to : whole);
            if (bits == 8) continue;
            for (int two = 0; two < 8; two++)
                for (int i = 0; i < 16; i++)
                    ((uint16_t*)to)[16 * two + i] = whole[32 * two + i] | whole[32 * two + 16 + i] << 4;
            for (int output = 0; output < 16; output++) {
                const int64_t group = (16 * block + output) * depth + k;
                ((bf16*)(to + 256))[output] = scales[group], ((bf16*)(to + 288))[output] = offsets[group];
            }
        }
}

}  // extern "C"
