"""Draft heads that fill in a block of positions in one pass."""
