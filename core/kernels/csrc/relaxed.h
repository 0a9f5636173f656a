// One level of a relaxed rule's walk down a tree. Every sibling's chances depend on what earlier ones left of p; all are
// computed, accepted or not, since the total variation of what is emitted is an average over them.

#pragma once

namespace {

enum Formula { kTolerance = 1, kAdditive, kLenience, kAnnealed, kTrust, kEvery, kThreshold };

// x to a whole power.
template <typename T>
T power(T x, int64_t exponent) {
    T result = 1;
    for (; exponent; exponent >>= 1, x *= x)
        if (exponent & 1) result *= x;
    return result;
}

// The chances [width] of accepting each token as a guess drawn from q, where `left` is left of p.
template <typename T>
void relaxed_chances(const Walk<T>& w, int64_t level, const T* p, const T* left, const T* q, int64_t width, T* f) {
    const T a = T(w.settings[0]);
    const auto each = [&](auto&& chance) {
        for (int64_t i = 0; i < width; i++) f[i] = chance(i);
    };
    switch (w.formula) {
        case kTolerance: {
            const int64_t draws = int64_t(w.settings[0]) - 1;
            each([&](int64_t i) {
                const T missed = power(1 - left[i], draws);
                return (1 - missed) + strict(left[i], q[i]) * missed;
            });
            break;
        }
        case kAdditive:
            each([&](int64_t i) { return p[i] > 0 ? std::min(strict(left[i], q[i]) + a, T(1)) : T(0); });
            break;
        case kLenience:
            each([&](int64_t i) { return strict(left[i], a * q[i]); });
            break;
        case kAnnealed: {
            const T weight = T(w.settings[0] + w.settings[1] * std::exp(-w.settings[2] * level));
            each([&](int64_t i) { return strict(left[i] * weight, q[i]); });
            break;
        }
        case kThreshold:
            each([&](int64_t i) { return T(left[i] >= a * q[i] && left[i] > 0); });
            break;
        default: {
            const int64_t setting = int64_t(w.settings[0]);
            const bool all = w.formula == kTrust ? level < setting : (level + 1) % setting != 0;
            each([&](int64_t i) { return all ? T(1) : strict(left[i], q[i]); });
        }
    }
    for (int64_t end = 0; end < w.end_count; end++)
        if (const int64_t token = w.ends[end]; token >= 0 && token < width) f[token] = strict(left[token], q[token]);
    for (int64_t i = 0; i < width; i++) f[i] = std::min(std::max(f[i], T(0)), T(1));
}

template <typename T>
void relaxed_level(const Walk<T>& w, int64_t row, int64_t level, const Distribution<T>& p, Scratch<T>& scratch) {
    const int64_t base = row * w.size, parent = w.node[row], width = p.width;
    scratch.left.assign(p.probs, p.probs + width);
    scratch.emitted.assign(width, 0);
    scratch.chances.resize(width), scratch.rest.resize(width);
    T* const left = scratch.left.data();
    double weight = 1;  // the chance that no sibling so far was accepted
    int64_t hit = -1;
    bool refused = false;
    for (int64_t kid = scratch.first[parent + 1]; kid >= 0; kid = scratch.next[kid]) {
        const int64_t at = base + kid, token = w.tokens[at];
        if (!w.able[at]) continue;
        const int64_t source = w.drafted.probs ? w.source[at] : -1;
        const bool known = token >= 0 && token < width;  // else the target never emits it
        const T* q;
        T own = 1;
        if (source >= 0) {
            Distribution<T> drawn = w.drafted(row, source);
            scratch.struck.clear();
            for (int64_t earlier = scratch.first[parent + 1]; earlier != kid; earlier = scratch.next[earlier])
                if (w.able[base + earlier] && w.source[base + earlier] == source)
                    scratch.struck.push_back(w.tokens[base + earlier]);
            if (!w.replacement && !scratch.struck.empty()) drawn = given(drawn, scratch);
            own = drawn.at(token);
            q = aligned(drawn, p, w.vocabulary, scratch);
        } else {
            scratch.aligned.assign(width, 0);
            if (known) scratch.aligned[token] = 1;
            q = scratch.aligned.data();
        }
        T* const f = scratch.chances.data();
        relaxed_chances(w, level, p.probs, left, q, width, f);
        if (hit < 0) {
            const double uniform = w.accept[row * w.numbers + kid];
            w.tried[at] = true;
            w.p[at] = known ? left[token] : T(0);
            w.q[at] = own;
            w.chance[at] = known ? f[token] : T(0);
            if (uniform < w.chance[at]) {
                hit = kid;
                w.relaxed[row * w.depth + level] = uniform >= strict(w.p[at], own);
            } else {
                refused = true;
            }
        }
        double taken = 0, sum = 0;
#pragma omp simd reduction(+ : taken, sum)
        for (int64_t i = 0; i < width; i++) {
            const T mass = q[i] * f[i];
            taken += mass;
            scratch.emitted[i] += T(weight) * mass;
            scratch.rest[i] = std::max(left[i] - mass, T(0));
            sum += scratch.rest[i];
        }
        weight *= 1 - taken;
        if (sum > 0)
            for (int64_t i = 0; i < width; i++) left[i] = T(scratch.rest[i] / sum);
    }
    double apart = 0;
#pragma omp simd reduction(+ : apart)
    for (int64_t i = 0; i < width; i++) apart += std::max(p.probs[i] - scratch.emitted[i] - T(weight) * left[i], T(0));
    w.total_variation[row * (w.depth + 1) + level] = apart;
    if (hit < 0) {
        w.open[row] = false;
        w.refused[row] = refused;
        w.token[row] = p.name(drawn(left, width, w.next[row * w.numbers + parent + 1]));
    } else {
        w.path[row * w.depth + level] = w.node[row] = hit;
        w.accepted[row]++;
    }
}

}  // namespace
