// Operations on rows outside of a pass: products of a few rows in 32 bits, top-k, KL divergence.

#pragma once

extern "C" {

// y [count, out] = a [count, in] w' + bias in 32 bits, for so few rows that reading w takes most of the time. The order
// of summation does not depend on `count`.
void outrider_few(const float* w, const float* bias, const float* a, float* y, int32_t count, int32_t out, int32_t in,
                  int32_t threads) {
    constexpr int kOutputs = kFew, kTogether = kFew;
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num(), team = omp_get_num_threads();
        const int blocks = (out + kOutputs - 1) / kOutputs, end = blocks * int64_t(me + 1) / team;
        for (int block = blocks * int64_t(me) / team; block < end; block++) {
            const float* rows[kOutputs];
            for (int n = 0; n < kOutputs; n++) rows[n] = w + int64_t(std::min(block * kOutputs + n, out - 1)) * in;
            for (int from = 0; from < count; from += kTogether) {
                const float* tokens[kTogether];
                for (int m = 0; m < kTogether; m++) tokens[m] = a + int64_t(std::min(from + m, count - 1)) * in;
                Sixteen sums[kTogether][kOutputs];
                for (auto& row : sums)
                    for (auto& sum : row) sum = zero();
                for (int k = 0; k < in; k += 16) {
                    Sixteen weights[kOutputs];
                    for (int n = 0; n < kOutputs; n++) {
                        weights[n] = load(rows[n] + k, in - k);
                        if (!from) _mm_prefetch((const char*)(rows[n] + k + kOutputs * in), _MM_HINT_T0);
                    }
                    for (int m = 0; m < kTogether; m++) {
                        const Sixteen token = load(tokens[m] + k, in - k);
                        for (int n = 0; n < kOutputs; n++) sums[m][n] = fma(token, weights[n], sums[m][n]);
                    }
                }
                for (int m = 0; m < std::min(kTogether, count - from); m++)
                    for (int n = 0; n < std::min(kOutputs, out - block * kOutputs); n++) {
                        const int64_t column = block * kOutputs + n;
                        y[int64_t(from + m) * out + column] =
                            added(sums[m][n]) + (bias ? bias[column] : 0.f);
                    }
            }
        }
    }
}

// The `count` largest values of every row [size] of x [outer, inner, size], largest first, ties by index.
void outrider_largest(const float* x, int64_t outer_stride, int64_t inner_stride, int32_t outer, int32_t inner,
                      int32_t size, int32_t count, float* values, int64_t* places, int32_t threads) {
#pragma omp parallel for num_threads(std::min(threads, outer * inner)) schedule(static)
    for (int row = 0; row < outer * inner; row++) {
        const float* here = x + row / inner * outer_stride + row % inner * inner_stride;
        float* best = values + int64_t(row) * count;
        int64_t* place = places + int64_t(row) * count;
        int filled = 0;
        const auto take = [&](int at) {
            int to = filled < count ? filled++ : count - 1;
            for (; to > 0 && here[at] > best[to - 1]; to--) best[to] = best[to - 1], place[to] = place[to - 1];
            best[to] = here[at], place[to] = at;
        };
        int at = 0;
        for (; at < count; at++) take(at);
        for (; at < size; at += 64) {
            const Sixteen least = same(best[count - 1]);
            uint64_t better = 0;
            for (int part = 0; part < 64; part += 16) {
                const int left = size - at - part;
                const uint64_t found = above(load(here + at + part, left), least) & first(left);
                better |= found << part;
            }
            for (; better; better &= better - 1) {
                const int found = at + __builtin_ctzll(better);
                if (here[found] > best[count - 1]) take(found);
            }
        }
    }
}

// For every row of 16-bit logits z and 32-bit log_p [size]: sum p (log_p - log softmax(z)), and softmax(z) - p.
void outrider_divergence(const bf16* z, const float* log_p, float* each, bf16* back, int32_t rows, int32_t size,
                         int32_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const bf16* mine = z + int64_t(row) * size;
        const float* known = log_p + int64_t(row) * size;
        bf16* to = back + int64_t(row) * size;
        Sixteen most = same(-INFINITY), total = zero(), sum = zero();
        for (int i = 0; i < size; i += 16) most = larger(most, load(mine + i));
        const Sixteen top = same(largest(most));
        for (int i = 0; i < size; i += 16)
            total = add(total, exponential(sub(load(mine + i), top)));
        const Sixteen level = add(top, same(std::log(added(total))));
        for (int i = 0; i < size; i += 16) {
            const Sixteen log_q = sub(load(mine + i), level), log = load(known + i);
            const Sixteen p = exponential(log);
            sum = fma(p, sub(log, log_q), sum);
            store(to + i, sub(exponential(log_q), p));
        }
        each[row] = added(sum);
    }
}

// to [rows, size] = logits where the bits [rows, ceil(size / 32)] are 1, else -infinity. A row of which nothing else would
// be left stays as it is.
void outrider_masked(const float* logits, const uint32_t* bits, float* to, int64_t rows, int32_t size) {
    const int words = (size + 31) / 32;
    const uint32_t none = 0xff800000;  // -infinity
    for (int64_t row = 0; row < rows; row++, logits += size, bits += words, to += size) {
        const uint32_t* const from = (const uint32_t*)logits;
        uint32_t* const into = (uint32_t*)to;
        uint32_t left = 0;
        for (int w = 0; w < words; w++) {
            const int begin = 32 * w, count = std::min(size - begin, 32);
            for (int i = 0; i < count; i++) {
                const uint32_t keep = -(bits[w] >> i & 1), value = (from[begin + i] & keep) | (none & ~keep);
                into[begin + i] = value;
                left |= value ^ none;
            }
        }
        if (!left) std::copy(logits, logits + size, to);
    }
}

}  // extern "C"
