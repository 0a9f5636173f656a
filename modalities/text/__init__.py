"""Text: language models, their drafters and their data."""
