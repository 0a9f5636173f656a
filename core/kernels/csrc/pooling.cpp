// The mass of codes' neighbours in some laws at once: what a rule for codes that look alike is worked out from.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {
constexpr int kLaws = 8;  // side by side
}

extern "C" {

// masses[c] of the most neighbours, nearest first, that together stay within bounds[c], in each of eight laws:
// probs, bounds and masses are [codes, 8], near is [codes, count].
void outrider_pooled(const float* probs, const float* bounds, const int32_t* near, float* masses, int64_t codes,
                     int64_t count) {
    for (int64_t code = 0; code < codes; code++) {
        const float* bound = bounds + code * kLaws;
        float total[kLaws] = {}, mass[kLaws] = {};
        for (int64_t one = 0; one < count; one++) {
            const float* its = probs + int64_t(near[code * count + one]) * kLaws;
            for (int law = 0; law < kLaws; law++) {
                total[law] += its[law];
                mass[law] = total[law] <= bound[law] ? total[law] : mass[law];
            }
        }
        for (int law = 0; law < kLaws; law++) masses[code * kLaws + law] = mass[law];
    }
}

// The mass that each code's group has in `probs`, and its share in `guesses`, all [laws, codes]: of the `span` codes
// ranked next above and below it in `probs` those whose probability is within `gap` of its own and which it is `alike`,
// [codes, codes].
void outrider_grouped(const float* probs, const float* guesses, const bool* alike, float* masses, float* shares,
                      int64_t laws, int64_t codes, int64_t span, float gap, int32_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t law = 0; law < laws; law++) {
        const float *const p = probs + law * codes, *const q = guesses + law * codes;
        float *const mass = masses + law * codes, *const guessed = shares + law * codes;
        std::vector<uint64_t> ranked(codes);
        std::vector<int32_t> order(codes);
        std::vector<float> sorted(codes);
        for (int64_t code = 0; code < codes; code++) {  // of numbers from 0 on, bits are ordered as they are
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
                const int32_t one = order[above], other = order[below];
                if (!(sorted[above] - sorted[below] < gap) || !alike[int64_t(one) * codes + other]) continue;
                mass[one] += sorted[below], mass[other] += sorted[above];
                guessed[one] += q[other], guessed[other] += q[one];
            }
    }
}

}  // extern "C"
