// The meeting of a team's threads within a pass, instead of OpenMP's barrier.
//
// OpenMP spins for milliseconds. Where other programs need the processor too, a thread that spins takes the time that
// the thread it waits for needs, and a pass with its hundreds of barriers collapses. Here a thread spins for about as
// long as threads differ on an idle machine, and then sleeps until it is woken.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

class Barrier {
   public:
    void wait(int team) {
        if (team < 2) return;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1);
            if (asleep_.load()) syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, team, nullptr, nullptr, 0);
            return;
        }
        for (const uint64_t end = __rdtsc() + kCycles; __rdtsc() < end; _mm_pause())
            if (phase_.load(std::memory_order_acquire) != phase) return;
        asleep_.fetch_add(1);
        while (phase_.load() == phase) syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
        asleep_.fetch_sub(1);
    }

   private:
    static constexpr uint64_t kCycles = 150'000;  // some 50 microseconds
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> asleep_{0};
};
