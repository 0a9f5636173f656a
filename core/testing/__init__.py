"""Tools for testing drafters, rules and caches, usable on methods of one's own."""
