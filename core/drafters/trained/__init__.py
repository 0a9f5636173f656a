"""Drafters trained on their target: heads, EAGLE, block diffusion, MTP, early exits."""
