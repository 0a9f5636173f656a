"""Models that run: a small decoder of our own with a cache that can be cut back, and adapters for those of others."""
