"""Acceptance rules: pure functions of draft, scores and random generator, one file a family. `walk` is the way down a
tree."""
