// The probability mass of image codes together with similar codes, for relaxed rules; mirrors neighbour_mass.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {
constexpr int kTogether = 8;  // distributions per call
constexpr int kStretch = 4;   // neighbours between two looks at what is enough
}

extern "C" {

// masses[c]: the largest mass of a prefix of code c's neighbours, nearest first, that is within bounds[c], or any such
// mass above enough[c], for eight distributions. probs, bounds, enough and masses are [codes, 8], near is [codes, count].
void outrider_pooled(const float* probs, const float* bounds, const float* enough, const int32_t* near, float* masses,
                     int64_t codes, int64_t count) {
    for (int64_t code = 0; code < codes; code++) {
        const float *const bound = bounds + code * kTogether, *const most = enough + code * kTogether;
        float total[kTogether] = {}, mass[kTogether] = {};
        int32_t open = 0;
        for (int row = 0; row < kTogether; row++) open |= !(most[row] < 0);
        for (int64_t rank = 0; open && rank < count;) {
            for (const int64_t end = std::min(rank + kStretch, count); rank < end; rank++) {
                const float* neighbour = probs + int64_t(near[code * count + rank]) * kTogether;
                for (int row = 0; row < kTogether; row++) {
                    total[row] += neighbour[row];
                    mass[row] = total[row] <= bound[row] ? total[row] : mass[row];
                }
            }
            open = 0;
            for (int row = 0; row < kTogether; row++) open |= !(total[row] > bound[row] || mass[row] > most[row]);
        }
        for (int row = 0; row < kTogether; row++) masses[code * kTogether + row] = mass[row];
    }
}

// The mass of each code's group in `probs` (masses) and in `guesses` (shares), all [rows, codes]. A group is the code
// itself and, of the `span` codes ranked next above and below it in `probs`, those with a probability within `gap` of
// its own that are `alike` [codes, codes].
void outrider_grouped(const float* probs, const float* guesses, const bool* alike, float* masses, float* shares,
                      int64_t rows, int64_t codes, int64_t span, float gap, int32_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const float *const p = probs + row * codes, *const q = guesses + row * codes;
        float *const mass = masses + row * codes, *const guessed = shares + row * codes;
        std::vector<uint64_t> ranked(codes);
        std::vector<int32_t> order(codes);
        std::vector<float> sorted(codes);
        for (int64_t code = 0; code < codes; code++) {  // bit patterns of non-negative floats sort like their values
            uint32_t bits;
            std::memcpy(&bits, p + code, sizeof bits);
            ranked[code] = uint64_t(~bits) << 32 | uint64_t(code);
        }
        std::sort(ranked.begin(), ranked.end());
        for (int64_t rank = 0; rank < codes; rank++) {
            const int32_t code = order[rank] = int32_t(ranked[rank]);
            sorted[rank] = mass[code] = p[code], guessed[code] = q[code];
        }
        for (int64_t step = 1; step <= span; step++)
            for (int64_t above = 0; above + step < codes; above++) {
                const int64_t below = above + step;
                const int32_t code = order[above], other = order[below];
                if (!(sorted[above] - sorted[below] < gap) || !alike[int64_t(code) * codes + other]) continue;
                mass[code] += sorted[below], mass[other] += sorted[above];
                guessed[code] += q[other], guessed[other] += q[code];
            }
    }
}

}  // extern "C"
