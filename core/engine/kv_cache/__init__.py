"""The KV cache: rows of different lengths, scratch slots for draft trees, 8-bit storage."""
