"""Text: language models, their drafters and their data."""

import outrider.core  # noqa: F401, before torch is imported
from outrider.text.loading import load
from outrider.text.model import TextModel
from outrider.text.stream import Piece, Result, Stream
from outrider.text.transformers_generate import custom_generate

__all__ = ["Piece", "Result", "Stream", "TextModel", "custom_generate", "load"]
