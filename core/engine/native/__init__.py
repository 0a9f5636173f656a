"""Passes, draft chains, draft trees and training blocks that run in the compiled CPU kernels."""
