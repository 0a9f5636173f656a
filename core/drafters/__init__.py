"""Drafters, one folder per family; they work on token ids and distributions, whatever a token means."""
