"""Text benchmarks: methods, batches, devices, other engines."""
