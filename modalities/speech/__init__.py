"""Speech as a sequence of codes: `load` a voice and `generate` speech."""

import outrider.core  # noqa: F401, before torch is imported
from outrider.speech.audio import Sound
from outrider.speech.hub.model import PublishedResult, PublishedSpeech
from outrider.speech.loading import load
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.resolve_drafter import drafters, rules
from outrider.speech.stream import Piece, Result, Stream, Timing

__all__ = [
    "Options",
    "Piece",
    "PublishedResult",
    "PublishedSpeech",
    "Result",
    "Sound",
    "SpeechModel",
    "Stream",
    "Timing",
    "drafters",
    "load",
    "rules",
]
