"""Text as what is spoken: pieces of a length that one utterance can have, and their phonemes as ids.

The phonemes are those of the Kokoro models, one character each, so that the teacher and our model read the same. They
come from hibari (the package hibari-tts of the extra `speech`: a dictionary, a tagger and a small network for words it
lacks); without it, words are read by a few rules of English spelling of our own, understandable at best. Knows nothing
of sound.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache

from outrider.core.errors import OutriderError

EDGE = 0  # the silence before and behind an utterance
SYMBOLS = ' .,!?;:—…"()“”' + "bdfhjklmnpstvwzɡŋɹʃʒðθʤʧ" + "əiuɑɔɛɜɪʊʌæɐɾᵊᵻʔ" + "TAIWYOQaoeɒː" + "ˈˌ"
IDS = {symbol: place + 1 for place, symbol in enumerate(SYMBOLS)}
PAUSES = frozenset(IDS[symbol] for symbol in ' .,!?;:—…"()“”')
COUNT = len(SYMBOLS) + 1
LONGEST = 220  # characters of an utterance at most
_MOST = 20_000  # characters of a text
_ALIKE = {"’": "'", "‘": "'", "–": "—", "«": "“", "»": "”", "\u00a0": " "}


class TextError(OutriderError):
    """Text that can't be spoken."""


def pieces(text: str, longest: int = LONGEST) -> list[str]:
    """A text in utterances: its sentences, short ones together, long ones parted at commas or between words."""
    if not isinstance(text, str):
        raise TextError(f"what is to be spoken is a {type(text).__name__}; give a string")
    if len(text) > _MOST:
        raise TextError(f"the text has {len(text):,} characters; at most {_MOST:,} are spoken in one go, so part it")
    text = "".join(_ALIKE.get(sign, sign) for sign in unicodedata.normalize("NFKC", text))
    if not text.strip():
        raise TextError("there is no text to speak; give at least one word")
    if not any(sign.isalnum() for sign in text):
        raise TextError(f"{text.strip()[:30]!r} holds nothing that can be spoken; give letters or digits")
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        waiting = ""
        for sentence in re.findall(r".+?(?:[.!?…]+[\"”')]*(?=\s|$)|$)", " ".join(paragraph.split())):
            for part in _parted(sentence.strip(), longest):
                if waiting and len(waiting) + len(part) < longest // 2:
                    waiting += " " + part
                    continue
                found.append(waiting)
                waiting = part
        found.append(waiting)
    return [one for one in found if any(sign.isalnum() for sign in one)]


def _parted(sentence: str, longest: int) -> list[str]:
    """A sentence, in parts if it is too long."""
    found = []
    while len(sentence) > longest:
        head = sentence[:longest]
        at = max(head.rfind(sign) for sign in (", ", "; ", ": ", " — "))
        if at < longest // 4:
            at = head.rfind(" ")
        at = at + 1 if at > 0 else longest
        found.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*found, sentence] if sentence else found


def phonemes(text: str) -> str:
    """What is spoken, one character a phoneme."""
    found = " ".join("".join(sign for sign in _read(text) if sign in IDS).split())
    if not any(IDS[sign] not in PAUSES and sign not in "ˈˌ" for sign in found):
        raise TextError(f"{text.strip()[:30]!r} holds nothing that can be spoken in English")
    return found


def _read(text: str) -> str:
    if (read := reader()) is None:
        return spelled_out(text)
    try:
        return read(text)
    except Exception:  # it stumbles over some numbers
        return spelled_out(text)


def ids(said: str) -> list[int]:
    """Phonemes as ids, silence at both ends."""
    return [EDGE, *(IDS[sign] for sign in said if sign in IDS), EDGE]


@cache
def reader() -> Callable[[str], str] | None:
    """The package's reading of English; None where it is not installed."""
    try:
        from hibari.g2p import G2P
    except ImportError:
        return None
    made: Callable[[str], str] = G2P()
    return made


# ---- without the package


_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_RULES: Sequence[tuple[str, str]] = (  # spelling -> sound; the first that fits counts
    *(("tion", "ʃən"), ("sion", "ʒən"), ("ough", "O"), ("augh", "ɔ"), ("eigh", "A"), ("igh", "I"), ("tch", "ʧ")),
    *(("dge", "ʤ"), ("sch", "sk"), ("ch", "ʧ"), ("sh", "ʃ"), ("th", "θ"), ("ph", "f"), ("wh", "w"), ("ck", "k")),
    *(("ng", "ŋ"), ("qu", "kw"), ("kn", "n"), ("wr", "ɹ"), ("ee", "i"), ("ea", "i"), ("oo", "u"), ("ou", "W")),
    *(("ow", "O"), ("oi", "Y"), ("oy", "Y"), ("ai", "A"), ("ay", "A"), ("au", "ɔ"), ("aw", "ɔ"), ("ie", "i")),
    *(("ar", "ɑɹ"), ("er", "əɹ"), ("ir", "ɜɹ"), ("or", "ɔɹ"), ("ur", "ɜɹ"), ("bb", "b"), ("cc", "k"), ("dd", "d")),
    *(("ff", "f"), ("gg", "ɡ"), ("ll", "l"), ("mm", "m"), ("nn", "n"), ("pp", "p"), ("rr", "ɹ"), ("ss", "s")),
    *(("tt", "t"), ("zz", "z"), ("ce", "s"), ("ci", "sɪ"), ("cy", "si"), ("ge", "ʤ"), ("x", "ks")),
    *zip("abcdefghijklmnopqrstuvwyz", "æbkdɛfɡhɪʤklmnɑpkɹstʌvwiz", strict=True),
)
_LONG = {"a": "A", "e": "i", "i": "I", "o": "O", "u": "u", "y": "I"}


def spelled_out(text: str) -> str:
    """Phonemes by spelling alone, word by word."""
    found = []
    for part in re.findall(r"[A-Za-z']+|\d|[.,!?;:—…]", text):
        if part.isdigit():
            part = _DIGITS[int(part)]
        if part[0].isalpha() or part[0] == "'":
            found.append(" " + _word(part.lower().replace("'", "")))
        else:
            found.append(part)
    return "".join(found)


def _word(word: str) -> str:
    """One word: a vowel before a consonant and a silent e is long, the first vowel is stressed."""
    if len(word) > 3 and word.endswith("e") and word[-2] not in "aeiou" and word[-3] in _LONG:
        head, long, last = word[:-3], _LONG[word[-3]], word[-2]
        said = _by_rules(head) + long + {"c": "s", "g": "ʤ"}.get(last, _by_rules(last))
    elif len(word) <= 3 and word[-1:] in _LONG and not any(sign in _LONG for sign in word[:-1]):
        said = _by_rules(word[:-1]) + _LONG[word[-1]]
    else:
        said = _by_rules(word[:-1] if len(word) > 3 and word.endswith("e") else word)
    first = re.search(r"[əiuɑɔɛɜɪʊʌæAIWYO]", said)
    return said if first is None else f"{said[: first.start()]}ˈ{said[first.start() :]}"


def _by_rules(word: str) -> str:
    said = ""
    while word:
        spelling, sound = next((rule for rule in _RULES if word.startswith(rule[0])), (word[0], ""))
        said, word = said + sound, word[len(spelling) :]
    return said
