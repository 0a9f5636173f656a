// What a few rows decide, law by law, where calling an operation for each step takes longer than the step does: which
// guesses of a chain pass, what follows them, and which old draws of a window stay.

#pragma once

#include <cfloat>
#include <vector>

namespace {

// min(1, p/q), and 0 where p is 0.
inline float strict(float p, float q) { return std::min(p / std::max(q, FLT_MIN), 1.f); }

// One word, by inverting the cumulative sum of a law, or of what another leaves of it: (p - q)+.
int64_t drawn(const float* law, const float* without, int64_t words, double uniform) {
    std::vector<float> left(law, law + words);
    for (int64_t word = 0; without && word < words; word++) left[word] = std::max(law[word] - without[word], 0.f);
    const auto sum = [&] {
        double total = 0;
        for (const float one : left) total += one;
        return total;
    };
    double total = sum();
    if (without && total <= 0) {  // by rounding alone
        left.assign(law, law + words);
        total = sum();
    }
    const double mark = uniform * total;
    double below = 0;
    for (int64_t word = 0; word < words; word++)
        if ((below += left[word]) > mark) return word;
    return words - 1;
}

}  // namespace

extern "C" {

struct Walk {
    const float* laws;      // [rows, size + 1, words]
    const float* guesses;   // [rows, origins, words] what guesses were drawn from, or null
    const int64_t* tokens;  // [rows, size]
    const int64_t* source;  // [rows, size] which of those laws, -1: none; or null: none is of any
    const bool* able;       // [rows, size] to be tried
    float* bent;            // [rows, last - first, words] the chance of accepting each word; null: strictly
    const int64_t* ends;    // [ending] words that are tried strictly all the same
    const double *accept, *next;  // [rows, numbers]
    bool *open, *refused;         // [rows] goes on; ended by a refusal
    int64_t *accepted, *token;    // [rows] once a row has ended
    bool *tried, *relaxed;        // [rows, size]; accepted, and a strict rule would not have
    float *chance, *p, *q;        // [rows, size]
    double* price;                // [rows, size + 1]
    int64_t rows, size, words, origins, numbers, ending, first, last;

    const float* guess(int64_t row, int64_t level) const {
        const int64_t at = source ? source[row * size + level] : -1;
        return at < 0 ? nullptr : guesses + (row * origins + at) * words;
    }
};

// What guesses of levels `first` to `last` were drawn from: found [rows, last - first, words]; all of it on the guess
// where it is of no law.
void outrider_spread(const Walk* walk, float* found) {
    const Walk& w = *walk;
    for (int64_t row = 0; row < w.rows; row++)
        for (int64_t level = w.first; level < w.last; level++, found += w.words) {
            const int64_t at = row * w.size + level, token = w.tokens[at];
            const float* const guess = w.guess(row, level);
            if (guess) {
                std::copy(guess, guess + w.words, found);
                continue;
            }
            std::fill(found, found + w.words, 0.f);
            if (token >= 0 && token < w.words) found[token] = 1;
        }
}

// Levels `first` to `last` of chains. A price is the total variation between a level's law and what is emitted there,
// the guess averaged over what it could have been.
void outrider_walk(const Walk* walk) {
    const Walk& w = *walk;
    std::vector<float> taken(w.words);  // of the law, by accepting
    for (int64_t row = 0; row < w.rows; row++) {
        if (!w.open[row]) continue;
        const float* const laws = w.laws + row * (w.size + 1) * w.words;
        const float* without = nullptr;
        int64_t level = w.first;
        bool ends = w.last == w.size;
        for (; level < w.last; level++) {
            const int64_t at = row * w.size + level, token = w.tokens[at];
            if (!w.able[at]) {
                ends = true;
                break;
            }
            const bool inside = token >= 0 && token < w.words;
            const float* const law = laws + level * w.words;
            const float* const guess = w.guess(row, level);
            float* const bent = w.bent ? w.bent + (row * (w.last - w.first) + level - w.first) * w.words : nullptr;
            for (int64_t end = 0; bent && end < w.ending; end++) {
                const int64_t word = w.ends[end];
                if (word < w.words) bent[word] = strict(law[word], guess ? guess[word] : word == token);
            }
            const double number = w.accept[row * w.numbers + level];
            w.tried[at] = true;
            w.p[at] = inside ? law[token] : 0;
            w.q[at] = !guess ? 1 : inside ? guess[token] : 0;
            const float usual = strict(w.p[at], w.q[at]);
            w.chance[at] = !bent ? usual : inside ? bent[token] : 0;
            const bool passes = number < w.chance[at];
            if (bent || !passes) {
                without = guess;
                if (bent || !guess) {
                    without = taken.data();
                    for (int64_t word = 0; word < w.words; word++) taken[word] = guess ? guess[word] * bent[word] : 0;
                    if (!guess && inside) taken[token] = bent ? bent[token] : 1;
                }
            }
            if (bent) {
                double kept = 0, rest = 0;
#pragma omp simd reduction(+ : kept, rest)
                for (int64_t word = 0; word < w.words; word++) {
                    kept += taken[word];
                    rest += std::max(law[word] - taken[word], 0.f);
                }
                w.price[row * (w.size + 1) + level] = std::max(rest - (1 - kept), 0.);
                w.relaxed[at] = passes && number >= usual;
            }
            if (!passes) {
                ends = w.refused[row] = true;
                break;
            }
            without = nullptr;
        }
        if (!ends) continue;
        w.open[row] = false;
        w.accepted[row] = level;
        w.token[row] = drawn(laws + level * w.words, without, w.words, w.next[row * w.numbers + level]);
    }
}

// A window's guesses [rows, slots] by their new laws: the old draw `after[slot]` stays as often as any coupling allows,
// else one is drawn from what the old law leaves of the new one. What is not `known` is left to others.
void outrider_couple(const float* laws, const float* old, const int64_t* tokens, const bool* fixed,
                     const int64_t* after, const bool* known, const double* retain, const double* redraw,
                     int64_t* found, int64_t rows, int64_t slots, int64_t nodes, int64_t origins, int64_t words,
                     int64_t numbers) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t slot = 0; slot < slots; slot++) {
            const int64_t at = row * slots + slot, node = std::min(after[at], nodes - 1);
            const int64_t token = found[at] = tokens[row * nodes + node];
            if (!known[at]) continue;
            const bool had = after[at] < nodes && !fixed[row * nodes + node], inside = token >= 0 && token < words;
            const float *const law = laws + at * words, *const before = old + (row * origins + node) * words;
            const float chance = inside ? strict(law[token], before[token]) : 0;
            if (!had || retain[row * numbers + slot] >= chance)
                found[at] = drawn(law, had ? before : nullptr, words, redraw[row * numbers + slot]);
        }
}

}  // extern "C"
