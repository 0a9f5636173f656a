"""Decoder parts as trainable torch modules."""
