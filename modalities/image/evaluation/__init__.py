"""Benchmarks and quality metrics of images."""
