"""The target drafts for itself: skipped layers, sparse caches, fewer bits."""
