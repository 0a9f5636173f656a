"""A CUDA device that computes on the CPU, so that the CUDA code path is tested where there is none."""
