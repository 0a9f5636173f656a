"""Published speech and audio models of transformers, behind one interface."""
