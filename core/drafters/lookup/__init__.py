"""Drafters without a model: prompt lookup, n-grams, suffix automata, retrieval, token recycling."""
