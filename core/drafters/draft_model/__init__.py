"""Drafters that run a separate, smaller model: chains, trees, cascades, overlapped drafting."""
