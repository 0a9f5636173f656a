"""Speech as tokens in time: `load` a voice, have it say something."""

from outrider.speech.model import SpeechModel, drafters, load, rules
from outrider.speech.options import Options
from outrider.speech.sound import Sound
from outrider.speech.stream import Piece, Result, Spent, Stream

__all__ = ["Options", "Piece", "Result", "Sound", "SpeechModel", "Spent", "Stream", "drafters", "load", "rules"]
