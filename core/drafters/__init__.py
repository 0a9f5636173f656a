"""Drafters: whatever guesses ahead, one file a family. They know token ids and laws, never what a token means."""
