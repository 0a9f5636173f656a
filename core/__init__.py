"""One draft/verify core for every modality: it knows token ids and distributions, never what a token means."""

__version__ = "0.1.0"
