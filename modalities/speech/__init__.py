"""Speech as tokens in time: `load` a voice, have it say something."""

from outrider.speech.audio import Sound
from outrider.speech.hub.model import PublishedSpeech, Said
from outrider.speech.loading import load
from outrider.speech.model import SpeechModel
from outrider.speech.options import Options
from outrider.speech.resolve_drafter import drafters, rules
from outrider.speech.stream import Piece, Result, Spent, Stream

__all__ = [
    "Options",
    "Piece",
    "PublishedSpeech",
    "Result",
    "Said",
    "Sound",
    "SpeechModel",
    "Spent",
    "Stream",
    "drafters",
    "load",
    "rules",
]
