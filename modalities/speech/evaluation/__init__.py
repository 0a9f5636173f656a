"""Benchmarks and quality metrics of speech."""
