"""Targets of weights that others saved: a folder, or a model object of transformers."""
