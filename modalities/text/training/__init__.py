"""Training of text draft heads."""
