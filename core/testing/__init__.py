"""Tests of drafters, acceptance rules and caches, as functions to call on your own."""
