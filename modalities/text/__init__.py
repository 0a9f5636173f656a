"""Text: language models, their drafters and their data."""

from outrider.text.inside import custom_generate
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.stream import Piece, Result, Stream

__all__ = ["Piece", "Result", "Stream", "TextModel", "custom_generate", "load"]
