// HiFi-GAN's generator in 16 bits, for processors with AMX tiles; mirrors speech/vocoder.py.
//
// A stage multiplies the number of steps and computes three residual blocks of six convolutions. Its threads take parts
// of the steps, so small that what a part needs stays in the second-level cache, and compute the steps around it once
// more. Rows of zeros before and after a stage's numbers, its margins, are read as well. The order in which a step's
// values are summed does not depend on where parts begin.

#include <omp.h>

#include <vector>

#include "layout.h"

#ifdef __AMX_BF16__
#include "halves.h"

namespace {

constexpr int kSteps = 32;            // computed together
constexpr int64_t kPart = 1 << 18;    // numbers of a part
constexpr int kSlack = kSteps + 32;   // rows that are computed or read after the last one that counts
constexpr float kSlope = 0.1f, kLastSlope = 0.01f;
constexpr int kBlocks = 3, kPairs = 3, kUpTaps = 3, kFirstTaps = 7, kLastTaps = 7;
constexpr int kKernels[kBlocks] = {3, 7, 11}, kDilations[kPairs] = {1, 3, 5};
constexpr int kReach = 12 * (11 / 2);  // steps on either side that a block's output depends on

struct Weights {
    const uint8_t* tiles;  // [outs / 32][taps][ins / 32][2]
    const float* bias;
};

struct Stage {
    Weights up, wide[kBlocks][kPairs], narrow[kBlocks][kPairs];
    const bf16* in;  // [steps, ins] between margins
    bf16* out;       // [steps stride, width] between margins
    int32_t ins, width, stride;
};

inline Sixteen leaky(Sixteen x, float slope) { return larger(x, mul(x, same(slope))); }
inline int64_t floored(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Sums [2][kSteps][16] of a convolution at kSteps rows from `in` on.
inline void summed(const bf16* in, int ins, int taps, int dilation, const uint8_t* tile, float* sums) {
    cleared();
    for (int tap = 0; tap < taps; tap++)
        for (int k = 0; k < ins; k += 32, tile += 2 * kTile)
            multiplied(tile, tile + kTile, in + (tap - taps / 2) * dilation * ins + k, ins, true);
    stored(sums, sums + 16 * kSteps, true);
}

// take(row, column, sixteen sums with their bias) for `count` rows, and for up to kSteps - 1 after them.
template <typename Take>
void convolved(const bf16* in, int ins, int taps, int dilation, const Weights& w, int outs, int64_t count, Take take) {
    alignas(64) float sums[2 * kSteps * 16];
    for (int64_t from = 0; from < count; from += kSteps)
        for (int column = 0; column < outs; column += 32) {
            summed(in + from * ins, ins, taps, dilation, w.tiles + int64_t(column / 32) * taps * (ins / 32) * 2 * kTile,
                   sums);
            for (int half = 0; half < 2; half++) {
                const Sixteen bias = load(w.bias + column + 16 * half);
                for (int m = 0; m < kSteps; m++)
                    take(from + m, column + 16 * half, add(load(sums + 16 * (half * kSteps + m)), bias));
            }
        }
}

// The rows of a part: its numbers, and what is computed of them. A row of `stage.out` is a step.
struct Part {
    bf16 *start, *started, *middle, *now, *active;  // the blocks' input, after leaky ReLU; within and after a pair
    float* total;
    Part(uint8_t* memory, int64_t numbers) {
        for (bf16** each : {&start, &started, &middle, &now, &active}) *each = (bf16*)memory, memory += 2 * numbers;
        total = (float*)memory;
    }
    static int64_t bytes(int64_t numbers) { return 14 * numbers; }
};

// The numbers of a part of `steps` steps, with what is computed around it.
inline int64_t numbers_of(const Stage& stage, int64_t steps) {
    return (steps + 2 * kReach + (kSteps + 2) * stage.stride + kSlack) * stage.width;
}

// The steps from `begin` to `end` of a stage's `steps`.
inline void part(const Stage& stage, int64_t begin, int64_t end, int64_t steps, float slope, uint8_t* memory) {
    const int width = stage.width;
    Part own(memory, numbers_of(stage, end - begin));
    const int64_t first = floored(begin - kReach, stage.stride), last = floored(end + kReach - 1, stage.stride) + 1;
    const int64_t base = first * stage.stride;  // the step of the part's first row
    const auto inside = [&](int64_t step) { return step >= 0 && step < steps; };
    convolved(stage.in + first * stage.ins, stage.ins, kUpTaps, 1, stage.up, stage.stride * width, last - first,
              [&](int64_t row, int column, Sixteen sum) {
                  const int64_t to = row * stage.stride * width + column;
                  const Sixteen x = inside(base + to / width) ? sum : zero();
                  store(own.start + to, x), store(own.started + to, leaky(x, kSlope));
              });
    for (int block = 0; block < kBlocks; block++) {
        const int taps = kKernels[block], half = taps / 2;
        int64_t around = kReach / 5 * half;  // steps on either side that are still needed
        for (int pair = 0; pair < kPairs; pair++) {
            const int dilation = kDilations[pair];
            const bool done = pair + 1 == kPairs;
            const bf16 *const in = pair ? own.active : own.started, *const rest = pair ? own.now : own.start;
            around -= half * dilation;
            int64_t from = begin - around;
            convolved(in + (from - base) * width, width, taps, dilation, stage.wide[block][pair], width,
                      end + around - from, [&](int64_t row, int column, Sixteen sum) {
                          store(own.middle + (from - base + row) * width + column,
                                inside(from + row) ? leaky(sum, kSlope) : zero());
                      });
            around -= half;
            from = begin - around;
            convolved(own.middle + (from - base) * width, width, taps, 1, stage.narrow[block][pair], width,
                      end + around - from, [&](int64_t row, int column, Sixteen sum) {
                          const int64_t at = (from - base + row) * width + column;
                          const Sixteen x = inside(from + row) ? add(sum, load(rest + at)) : zero();
                          if (!done) return store(own.now + at, x), store(own.active + at, leaky(x, kSlope));
                          float* const total = own.total + row * width + column;
                          if (block + 1 < kBlocks) return store(total, block ? add(load(total), x) : x);
                          if (from + row < end)
                              store(stage.out + (from + row) * width + column,
                                    leaky(mul(add(load(total), x), same(1.f / kBlocks)), slope));
                      });
        }
    }
}

// Samples from rows [steps, 32] on, which are between margins: a convolution with one output, and its tanh.
inline void samples(const bf16* in, const bf16* weights, float bias, int64_t begin, int64_t end, float* to) {
    for (int64_t step = begin; step < end; step++) {
        const bf16* window = in + (step - kLastTaps / 2) * 32;
        __m512 sum = _mm512_setzero_ps();
        for (int tap = 0; tap < kLastTaps; tap++)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(window + 32 * tap),
                                   (__m512bh)_mm512_loadu_si512(weights + 32 * tap));
        to[step] = std::tanh(added(sum) + bias);
    }
}

}  // namespace

extern "C" {

int32_t outrider_vocoder_ready() { return readied(true) == 2; }

// Samples of `frames` frames [frames, bins] between margins. The first convolution writes to the first stage's input;
// every stage reads what the one before it has written, the last has 32 channels.
void outrider_vocode(const bf16* mel, int32_t bins, const Weights* before, const Stage* stages, int32_t count,
                     const bf16* last, float bias, float* sound, int64_t frames, int32_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), team = omp_get_num_threads();
        const Configured configured(16);
        const int64_t groups = (frames + kSteps - 1) / kSteps;
        const int64_t begin = groups * me / team * kSteps, end = std::min(groups * (me + 1) / team * kSteps, frames);
        bf16* const rows = const_cast<bf16*>(stages[0].in);
        const int width = stages[0].ins;
        convolved(mel + begin * bins, bins, kFirstTaps, 1, *before, width, end - begin,
                  [&](int64_t row, int column, Sixteen sum) {
                      if (begin + row < end) store(rows + (begin + row) * width + column, leaky(sum, kSlope));
                  });
        int64_t steps = frames;
        for (int number = 0; number < count; number++) {
#pragma omp barrier
            const Stage& stage = stages[number];
            steps *= stage.stride;
            const int64_t wanted = std::max<int64_t>((steps * stage.width + kPart - 1) / kPart, 1);
            const int64_t parts = (wanted + team - 1) / team * team, size = (steps + parts - 1) / parts;
            static thread_local std::vector<uint8_t> room;
            room.resize(std::max<size_t>(room.size(), Part::bytes(numbers_of(stage, size)) + 63));
            uint8_t* const memory = room.data() + (-uintptr_t(room.data()) & 63);
            for (int64_t at = me; at < parts; at += team)
                if (at * size < steps)
                    part(stage, at * size, std::min((at + 1) * size, steps), steps,
                         number + 1 < count ? kSlope : kLastSlope, memory);
        }
#pragma omp barrier
        samples(stages[count - 1].out, last, bias, steps * me / team, steps * (me + 1) / team, sound);
    }
}

}  // extern "C"

#else

extern "C" int32_t outrider_vocoder_ready() { return 0; }

#endif
