"""Acceptance rules: pure functions of draft, scores and dice, one file a family. `walk` is the way down a tree."""
