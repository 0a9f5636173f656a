"""The key/value cache: ragged rows, tree scratch, 8-bit storage, retrieval of chunks."""
