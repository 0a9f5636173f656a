// The mass of codes' neighbours in some laws at once: what a rule for codes that look alike is worked out from.

#include <cstdint>

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

}  // extern "C"
