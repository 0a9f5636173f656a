"""Compiled CPU kernels (C++ in csrc) and the functions that call them."""
