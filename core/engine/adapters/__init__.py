"""Targets that wrap other models: transformers models, models of multi-codebook frames, classifier-free guidance."""
