"""Advice from measurements: which drafter, how long a draft, and from which batch size on plain decoding is faster."""
