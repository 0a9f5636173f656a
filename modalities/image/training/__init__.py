"""Training of the image tokenizer, the token model and its draft heads."""
