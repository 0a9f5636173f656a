// Acceptance of drafts, one batch row after another, in float and in double: the compiled forms of the rules of
// core/rules (rejection, block verification, greedy matching) and of the coupling of Jacobi windows. Uniforms are
// inputs, so that a caller may choose them. Built with OUTRIDER_FAULTS, the code can be made wrong in the ways below,
// for tests.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

enum Fault {
    kNone,
    kDrawFromTarget,       // after a rejection, the token is drawn from p
    kResidualNotScaled,    // the residual keeps its smaller sum when the next sibling is tried
    kSiblingNotStruck,     // q of a sibling ignores those drawn before it
    kRatioFlipped,         // accepts with min(1, q/p)
    kWrongRow,             // the bonus token is drawn from the distribution one row early
    kNumberReused,         // all siblings are tried with the first one's uniform
    kRejectedForgotten,    // only the last rejected sibling is subtracted
    kBlockWithoutWeight,   // block verification draws from norm((p - q)+)
    kBlockFirstFailure,    // block verification stops at the first node that fails
    kCoupleFromNew,        // a coupling that does not retain draws from the new distribution
    kMatchRowBefore,       // greedy matching emits the token of the row before
    kSupportIgnored,       // q is read on its own support as if that were p's
};
#ifdef OUTRIDER_FAULTS
int fault = kNone;
#else
constexpr int fault = kNone;
#endif

template <typename T>
struct Distribution {
    const T* probs;         // [width]
    const int64_t* tokens;  // [width] ids of the support; null: the vocabulary in order
    int64_t width;

    T at(int64_t token) const {
        if (!tokens) return token >= 0 && token < width ? probs[token] : T(0);
        T sum = 0;
        for (int64_t place = 0; place < width; place++)
            if (tokens[place] == token) sum += probs[place];
        return sum;
    }
    int64_t name(int64_t place) const { return tokens ? tokens[place] : place; }
};

template <typename T>
struct Distributions {  // [rows, count, width]
    const T* probs;
    const int64_t* tokens;
    int64_t count, width;

    Distribution<T> operator()(int64_t row, int64_t index) const {
        const int64_t start = (row * count + index) * width;
        return {probs + start, tokens ? tokens + start : nullptr, width};
    }
};

// min(1, p/q), and 0 where p is 0.
template <typename T>
T strict(T p, T q) {
    return std::min(p / std::max(q, std::numeric_limits<T>::min()), T(1));
}

template <typename T>
double total(const T* values, int64_t count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t place = 0; place < count; place++) sum += values[place];
    return sum;
}

// The index at which the running sum of values exceeds `uniform` times their total.
template <typename T>
int64_t drawn(const T* values, int64_t count, double uniform) {
    constexpr int64_t kBlock = 256;
    thread_local std::vector<double> sums;
    sums.clear();
    double whole = 0, below = 0;
    for (int64_t start = 0; start < count; start += kBlock) {
        sums.push_back(total(values + start, std::min(kBlock, count - start)));
        whole += sums.back();
    }
    const double mark = uniform * whole;
    int64_t place = 0;
    for (size_t block = 0; block + 1 < sums.size() && below + sums[block] <= mark; block++) {
        below += sums[block];
        place += kBlock;
    }
    int64_t last = count - 1;  // the last with a nonzero probability; returned only after rounding errors
    for (; place < count; place++) {
        if ((below += values[place]) > mark) return place;
        if (values[place] > 0) last = place;
    }
    return last;
}

template <typename T>
struct Scratch {
    std::vector<T> left, rest, guess, aligned, dense, weight, chances, emitted;
    std::vector<int64_t> first, next, struck;
};

// q on p's support; the result is q itself or in `scratch.aligned`.
template <typename T>
const T* aligned(const Distribution<T>& q, const Distribution<T>& p, int64_t vocabulary, Scratch<T>& scratch) {
    if (!p.tokens && !q.tokens) return q.probs;
    if (fault == kSupportIgnored && q.width >= p.width) return q.probs;
    scratch.aligned.assign(p.width, 0);
    T* const out = scratch.aligned.data();
    if (!p.tokens) {
        for (int64_t place = 0; place < q.width; place++) out[q.tokens[place]] += q.probs[place];
    } else if (!q.tokens) {
        for (int64_t place = 0; place < p.width; place++) out[place] = q.at(p.tokens[place]);
    } else {
        scratch.dense.resize(vocabulary, 0);  // all 0 between calls
        for (int64_t place = 0; place < q.width; place++) scratch.dense[q.tokens[place]] += q.probs[place];
        for (int64_t place = 0; place < p.width; place++) out[place] = scratch.dense[p.tokens[place]];
        for (int64_t place = 0; place < q.width; place++) scratch.dense[q.tokens[place]] = 0;
    }
    return out;
}

// Writes (share p - q f)+ to `out` and returns its sum. q null: all mass on `token`; f null: 1.
template <typename T>
double remainder(const Distribution<T>& p, const T* q, int64_t token, const T* f, T share, T* out) {
    if (q && f) {
#pragma omp simd
        for (int64_t place = 0; place < p.width; place++)
            out[place] = std::max(share * p.probs[place] - q[place] * f[place], T(0));
    } else if (q) {
#pragma omp simd
        for (int64_t place = 0; place < p.width; place++)
            out[place] = std::max(share * p.probs[place] - q[place], T(0));
    } else {
        for (int64_t place = 0; place < p.width; place++)
            out[place] = p.name(place) == token ? std::max(share * p.probs[place] - (f ? f[place] : T(1)), T(0))
                                                : share * p.probs[place];
    }
    return total(out, p.width);
}

template <typename T>
struct Walk {
    Distributions<T> target;   // after the root and each node; with count 1, after each row's current node
    Distributions<T> drafted;  // the nodes' draft distributions; probs null: all nodes are fixed guesses
    const int64_t *tokens, *source, *parents;  // [rows, size]; parents [shapes, size]
    const bool* able;                          // [rows, size] whether a node may be tried
    const T* chances;              // [rows, levels, width] acceptance probabilities, chains only; null: min(1, p/q)
    const double *accept, *next;   // [rows, numbers]
    int64_t* node;                 // [rows] the last accepted; -1: the root
    bool* open;                    // [rows] not yet ended
    bool* refused;                 // [rows] ended by a rejection
    int64_t *accepted, *token;     // [rows]
    int64_t* path;                 // [rows, depth]
    bool *tried, *relaxed;         // [rows, size], [rows, depth]: accepted, and a strict rule would have rejected
    T *chance, *p, *q;             // [rows, size]
    double* total_variation;       // [rows, depth + 1], or null
    const int64_t* ends;           // [end_count] tokens that a relaxed rule tries strictly
    const double* settings;        // of the formula
    int64_t rows, size, shapes, depth, vocabulary, numbers, replacement, levels, first, last, threads;
    int64_t formula, end_count;    // a relaxed rule's chances on trees; 0: strict, or `chances`
};

// q of a sibling, conditioned on the siblings drawn before it from the same distribution without replacement.
template <typename T>
Distribution<T> given(const Distribution<T>& q, Scratch<T>& scratch) {
    scratch.guess.assign(q.probs, q.probs + q.width);
    for (const int64_t token : scratch.struck)
        for (int64_t place = 0; place < q.width; place++)
            if (q.name(place) == token) scratch.guess[place] = 0;
    const T sum = std::max(T(total(scratch.guess.data(), q.width)), std::numeric_limits<T>::min());
    for (T& prob : scratch.guess) prob /= sum;
    return {scratch.guess.data(), q.tokens, q.width};
}

}  // namespace

#include "relaxed.h"

namespace {

template <typename T>
void walk_row(const Walk<T>& w, int64_t row, Scratch<T>& scratch) {
    const int64_t base = row * w.size, *const parents = w.parents + (w.shapes > 1 ? base : 0);
    scratch.first.assign(w.size + 1, -1);  // child of the root and of each node
    scratch.next.assign(w.size, -1);       // sibling
    for (int64_t node = w.size - 1; node >= 0; node--) {
        scratch.next[node] = scratch.first[parents[node] + 1];
        scratch.first[parents[node] + 1] = node;
    }
    for (int64_t level = w.first; level < w.last && w.open[row]; level++) {
        const int64_t parent = w.node[row];
        const Distribution<T> p = w.target(row, w.target.count == 1 ? 0 : parent + 1);
        if (w.formula) {
            relaxed_level(w, row, level, p, scratch);
            continue;
        }
        const T* const f = w.chances && level - w.first < w.levels
                               ? w.chances + (row * w.levels + level - w.first) * p.width
                               : nullptr;
        Distribution<T> left = p;
        int64_t hit = -1, number = -1;
        bool refused = false;
        for (int64_t kid = scratch.first[parent + 1]; kid >= 0 && hit < 0; kid = scratch.next[kid]) {
            const int64_t at = base + kid, token = w.tokens[at];
            if (!w.able[at]) continue;
            const int64_t source = w.drafted.probs ? w.source[at] : -1;
            Distribution<T> q{};
            if (source >= 0) {
                q = w.drafted(row, source);
                scratch.struck.clear();
                for (int64_t earlier = scratch.first[parent + 1]; earlier != kid; earlier = scratch.next[earlier])
                    if (w.able[base + earlier] && w.source[base + earlier] == source)
                        scratch.struck.push_back(w.tokens[base + earlier]);
                if (!w.replacement && !scratch.struck.empty() && fault != kSiblingNotStruck) q = given(q, scratch);
            }
            if (number < 0 || fault != kNumberReused) number = kid;
            const double uniform = w.accept[row * w.numbers + number];
            w.tried[at] = true;
            w.p[at] = left.at(token);
            w.q[at] = source >= 0 ? q.at(token) : T(1);
            const T usual = fault == kRatioFlipped ? strict(w.q[at], w.p[at]) : strict(w.p[at], w.q[at]);
            w.chance[at] = f ? Distribution<T>{f, p.tokens, p.width}.at(token) : usual;
            const bool passes = uniform < w.chance[at];
            if (passes) {
                hit = kid;
                w.relaxed[row * w.depth + level] = f && uniform >= usual;
            }
            refused |= !passes;
            if (passes && !f) continue;
            if (fault == kDrawFromTarget) continue;
            if (fault == kRejectedForgotten) left = p;
            const T* const guess = source >= 0 ? aligned(q, p, w.vocabulary, scratch) : nullptr;
            scratch.rest.resize(p.width);
            const double sum = remainder(left, guess, token, f, T(1), scratch.rest.data());
            if (f) {
                double accepted = 0;  // over all tokens that could have been drafted
                if (guess) {
#pragma omp simd reduction(+ : accepted)
                    for (int64_t place = 0; place < p.width; place++) accepted += guess[place] * f[place];
                } else {
                    accepted = w.chance[at];
                }
                w.total_variation[row * (w.depth + 1) + level] = std::max(sum - (1 - accepted), 0.);
            }
            if (passes || sum <= 0) continue;  // a sum of 0 is rounding: such a rejection changes nothing
            if (fault != kResidualNotScaled)
                for (T& prob : scratch.rest) prob /= T(sum);
            std::swap(scratch.left, scratch.rest);
            left.probs = scratch.left.data();
        }
        if (hit < 0) {
            const Distribution<T> from =
                fault == kWrongRow && !refused && w.target.count > 1 ? w.target(row, std::max<int64_t>(parent, 0)) : left;
            w.open[row] = false;
            w.refused[row] = refused;
            w.token[row] = from.name(drawn(from.probs, from.width, w.next[row * w.numbers + parent + 1]));
        } else {
            w.path[row * w.depth + level] = w.node[row] = hit;
            w.accepted[row]++;
        }
    }
}

template <typename T>
struct Block {
    Distributions<T> target, drafted;  // [rows, size + 1, ...]; [rows, origins, ...]
    const int64_t *tokens, *source;    // [rows, size]
    const bool* able;
    const double *accept, *next;       // [rows, numbers]
    bool* refused;                     // [rows]
    int64_t *accepted, *token;         // [rows]
    T *chance, *p, *q;                 // [rows, size]
    int64_t rows, size, vocabulary, numbers, threads;
};

// Block verification (arXiv 2403.10444) of one chain: the longest prefix that passes.
template <typename T>
void block_row(const Block<T>& b, int64_t row, Scratch<T>& scratch) {
    constexpr T tiny = std::numeric_limits<T>::min();
    const int64_t base = row * b.size;
    int64_t count = 0;
    while (count < b.size && b.able[base + count]) count++;
    const auto q = [&](int64_t level) { return b.drafted(row, std::max<int64_t>(b.source[base + level], 0)); };
    scratch.weight.assign(count + 1, 1);  // min(1, the product of p/q so far)
    for (int64_t level = 0; level < count; level++) {
        const int64_t at = base + level;
        b.p[at] = b.target(row, level).at(b.tokens[at]);
        b.q[at] = q(level).at(b.tokens[at]);
        scratch.weight[level + 1] = std::min(scratch.weight[level] * (b.p[at] / std::max(b.q[at], tiny)), T(1));
    }
    int64_t accepted = 0;
    for (int64_t level = 0; level < count; level++) {
        const T reach = scratch.weight[level + 1];
        T chance = reach;
        if (level + 1 < count) {
            const Distribution<T> p = b.target(row, level + 1);
            scratch.rest.resize(p.width);
            const T after =
                remainder(p, aligned(q(level + 1), p, b.vocabulary, scratch), -1, (T*)nullptr, reach, scratch.rest.data());
            // reach 1 and no residual: p equals q after this node, so the next token is always accepted, and so is this
            chance = reach >= 1 && after <= 0 ? T(1) : after / std::max(after + 1 - reach, tiny);
        }
        b.chance[base + level] = chance;
        if (b.accept[row * b.numbers + level] < chance)
            accepted = level + 1;
        else if (fault == kBlockFirstFailure)
            break;
    }
    const bool refused = accepted < count;
    const Distribution<T> p = b.target(row, accepted);
    Distribution<T> from = p;
    if (refused) {
        scratch.rest.resize(p.width);
        const T share = fault == kBlockWithoutWeight ? T(1) : scratch.weight[accepted];
        if (remainder(p, aligned(q(accepted), p, b.vocabulary, scratch), -1, (T*)nullptr, share, scratch.rest.data()) > 0)
            from.probs = scratch.rest.data();
    }
    b.accepted[row] = accepted;
    b.refused[row] = refused;
    b.token[row] = from.name(drawn(from.probs, from.width, b.next[row * b.numbers + accepted]));
}

template <typename T>
struct Couple {
    Distributions<T> fresh, old;      // [rows, slots, ...]; [rows, origins, ...]
    const int64_t *tokens, *after;    // [rows, nodes] old draws; [rows, slots] the node whose draw a slot may retain
    const bool *fixed, *known;        // [rows, nodes]; [rows, slots] slots not known are left to the caller
    const double *retain, *redraw;    // [rows, numbers]
    int64_t* result;                  // [rows, slots]
    int64_t rows, slots, nodes, vocabulary, numbers, threads;
};

// A maximal coupling (arXiv 2510.24211): an old draw x is retained with min(1, new(x) / old(x)), else the token is
// drawn from norm((new - old)+).
template <typename T>
void couple_row(const Couple<T>& c, int64_t row, Scratch<T>& scratch) {
    for (int64_t slot = 0; slot < c.slots; slot++) {
        const int64_t at = row * c.slots + slot, node = std::min(c.after[at], c.nodes - 1);
        const int64_t token = c.result[at] = c.tokens[row * c.nodes + node];
        if (!c.known[at]) continue;
        Distribution<T> p = c.fresh(row, slot);
        if (c.after[at] < c.nodes && !c.fixed[row * c.nodes + node]) {
            const Distribution<T> before = c.old(row, node);
            if (c.retain[row * c.numbers + slot] < strict(p.at(token), before.at(token))) continue;
            scratch.rest.resize(p.width);
            const T* const q = aligned(before, p, c.vocabulary, scratch);
            if (remainder(p, q, -1, (T*)nullptr, T(1), scratch.rest.data()) > 0 && fault != kCoupleFromNew)
                p.probs = scratch.rest.data();
        }
        c.result[at] = p.name(drawn(p.probs, p.width, c.redraw[row * c.numbers + slot]));
    }
}

// Finds the deepest node whose whole path consists of the target's own tokens.
struct Match {
    const int64_t *tokens, *parents, *own;  // [rows, size]; [shapes, size]; [rows, size + 1] after the root and each node
    const bool* able;
    int64_t *path, *accepted, *token;       // [rows, depth]; [rows]; [rows]
    bool *refused, *tried, *hit;            // [rows]; [rows, size]; [rows, size]
    int64_t rows, size, shapes, depth;
};

void match_row(const Match& m, int64_t row) {
    thread_local std::vector<int64_t> depths;
    depths.assign(m.size + 1, 0);
    const int64_t base = row * m.size, *const parents = m.parents + (m.shapes > 1 ? base : 0);
    const int64_t* const own = m.own + base + row;
    int64_t best = -1;
    for (int64_t node = 0; node < m.size; node++) {
        const int64_t parent = parents[node];
        m.tried[base + node] = m.able[base + node] && (parent < 0 || m.hit[base + parent]);
        m.hit[base + node] = m.tried[base + node] && m.tokens[base + node] == own[parent + 1];
        depths[node + 1] = depths[parent + 1] + 1;
        if (m.hit[base + node] && depths[node + 1] > depths[best + 1]) best = node;
    }
    m.accepted[row] = depths[best + 1];
    m.token[row] = own[fault == kMatchRowBefore && best >= 0 ? best : best + 1];
    for (int64_t node = 0; node < m.size; node++) m.refused[row] |= m.tried[base + node] && parents[node] == best;
    for (int64_t node = best; node >= 0; node = parents[node]) m.path[row * m.depth + depths[node + 1] - 1] = node;
}

constexpr int64_t kShared = 1 << 15;  // numbers from which a thread per row pays off

template <typename T, typename Task>
void each_row(const Task& task, int64_t numbers, void (*work)(const Task&, int64_t, Scratch<T>&)) {
#pragma omp parallel for schedule(dynamic) num_threads(task.threads) if (task.rows > 1 && numbers > kShared)
    for (int64_t row = 0; row < task.rows; row++) {
        thread_local Scratch<T> scratch;
        work(task, row, scratch);
    }
}

}  // namespace

extern "C" {

void walk_float(const Walk<float>* w) { each_row(*w, w->rows * w->target.width, walk_row<float>); }
void walk_double(const Walk<double>* w) { each_row(*w, w->rows * w->target.width, walk_row<double>); }
void block_float(const Block<float>* b) { each_row(*b, b->rows * b->size * b->target.width, block_row<float>); }
void block_double(const Block<double>* b) { each_row(*b, b->rows * b->size * b->target.width, block_row<double>); }
void couple_float(const Couple<float>* c) { each_row(*c, c->rows * c->slots * c->fresh.width, couple_row<float>); }
void couple_double(const Couple<double>* c) { each_row(*c, c->rows * c->slots * c->fresh.width, couple_row<double>); }
#ifdef OUTRIDER_FAULTS
void set_fault(int32_t which) { fault = which; }
#endif
void match(const Match* m) {
    for (int64_t row = 0; row < m->rows; row++) match_row(*m, row);
}

}  // extern "C"
