"""Drafters: whatever guesses ahead, one file a family. They know token ids and distributions, never what a token
means."""
