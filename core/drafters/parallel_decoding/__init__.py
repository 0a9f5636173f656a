"""Jacobi and Lookahead decoding: the target refines its own parallel guesses."""
