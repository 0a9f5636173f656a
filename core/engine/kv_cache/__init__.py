"""The key/value cache: ragged rows, tree scratch and 8-bit storage."""
