"""Benchmark harness: interleaved runs, paired comparisons, timers, the overhead of the loop itself."""
