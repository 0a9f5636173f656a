"""Published image-token models of transformers and others, behind one interface."""
