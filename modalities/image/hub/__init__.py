"""Published image models that generate discrete tokens, behind one interface."""
