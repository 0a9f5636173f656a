"""Target models: our own decoder with its KV cache, CUDA graphs, offload and quantization, and adapters for others."""
