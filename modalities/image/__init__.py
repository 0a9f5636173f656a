"""Images as tokens on a grid: a text-to-emoji model, and everything that decodes it."""

from outrider.image.model import ImageModel, load
from outrider.image.stream import Piece, Result, Stream

__all__ = ["ImageModel", "Piece", "Result", "Stream", "load"]
