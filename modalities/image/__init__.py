"""Images as tokens on a grid: a text-to-emoji model, and everything that decodes it."""

import outrider.core  # noqa: F401, before torch is imported
from outrider.image.hub.model import PublishedModel
from outrider.image.loading import load
from outrider.image.model import ImageModel
from outrider.image.stream import Piece, Result, Stream

__all__ = ["ImageModel", "Piece", "PublishedModel", "Result", "Stream", "load"]
