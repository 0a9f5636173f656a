"""Weights in 8 or 4 bits: our own formats and torchao's."""
