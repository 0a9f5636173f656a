"""Training of the codec, the voice and its draft heads, and the data they learn from."""
