"""Text to phonemes: splits a text into utterances and converts them to phoneme ids.

The phoneme symbols are Kokoro's, one character each, so that the teacher and our model read the same. hibari (the
package hibari-tts of the extra `speech`) converts English text with a dictionary, a tagger and a small network; without
it, a few spelling rules of our own are used, with poorer pronunciation. Independent of sound.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from outrider.core.errors import OutriderError

EDGE = 0  # the id of silence at both ends of an utterance
SYMBOLS = ' .,!?;:—…"()“”' + "bdfhjklmnpstvwzɡŋɹʃʒðθʤʧ" + "əiuɑɔɛɜɪʊʌæɐɾᵊᵻʔ" + "TAIWYOQaoeɒː" + "ˈˌ"
IDS = {symbol: index + 1 for index, symbol in enumerate(SYMBOLS)}
PAUSES = frozenset(IDS[symbol] for symbol in ' .,!?;:—…"()“”')
COUNT = len(SYMBOLS) + 1
MAX_LENGTH = 220  # characters of an utterance
_MAX_TEXT = 20_000  # characters
_LETTERS = re.compile(r"[^\W\d_]+")
_ADDRESS = re.compile(  # of the web or of mail; tried where words begin, so that the time is linear
    r"(?<![\w.+-])(?:https?://\S*\w/?|www\.\S*\w/?|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    r"|(?:[\w-]+\.)+(?:com|edu|gov|io|net|org)\b(?:/\S*\w/?)?)"
)
_SPOKEN = {".": "dot", "/": "slash", "-": "dash", "_": "underscore", "?": "question mark", "=": "equals", "&": "and"}
_SPOKEN |= {"@": "at", "#": "hash", "%": "percent", "+": "plus", ":": "colon", "~": "tilde"}
_REPLACED = {"’": "'", "‘": "'", "–": "—", "«": "“", "»": "”", "\u00a0": " "}


class TextError(OutriderError):
    """Text that cannot be spoken."""


def split_utterances(text: str, max_length: int = MAX_LENGTH) -> list[str]:
    """Split a text into utterances: short sentences are joined, long ones are split at punctuation or between words."""
    if not isinstance(text, str):
        raise TextError(f"the text is a {type(text).__name__}; give a string")
    if len(text) > _MAX_TEXT:
        raise TextError(f"the text has {len(text):,} characters; give at most {_MAX_TEXT:,} at a time")
    text = "".join(_REPLACED.get(character, character) for character in unicodedata.normalize("NFKC", text))
    if not text.strip():
        raise TextError("the text is empty; give at least one word")
    if not any(character.isalnum() for character in text):
        raise TextError(f"{text.strip()[:30]!r} has nothing to speak; give letters or digits")
    if foreign := next(filter(_is_foreign, _LETTERS.findall(text)), None):
        raise TextError(
            f"{foreign[:30]!r} is not in Latin letters; spell it in them, or leave it out: the voice is English"
        )
    text = _ADDRESS.sub(_spelled, text)
    utterances: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        current = ""
        for sentence in re.findall(r".+?(?:[.!?…]+[\"”')]*(?=\s|$)|$)", " ".join(paragraph.split())):
            for part in _split_sentence(sentence.strip(), max_length):
                if current and len(current) + len(part) < max_length // 2:
                    current += " " + part
                    continue
                utterances.append(current)
                current = part
        utterances.append(current)
    return [utterance for utterance in utterances if any(character.isalnum() for character in utterance)]


def _is_foreign(word: str) -> bool:
    """Whether a word is in other letters than Latin ones. A single Greek letter is read by its name."""
    scripts = Counter(unicodedata.name(letter, "").partition(" ")[0] for letter in word)
    return scripts["GREEK"] > 1 or not scripts.keys() <= {"LATIN", "GREEK", "MODIFIER"}


def _spelled(address: re.Match[str]) -> str:
    """An address as it is said."""
    parts = re.split(r"(\W|_)", address[0].partition("://")[2] or address[0])
    return " ".join("w w w" if part == "www" else _SPOKEN.get(part, part) for part in parts if part)


def _split_sentence(sentence: str, max_length: int) -> list[str]:
    """The sentence, in parts of at most `max_length` characters."""
    parts = []
    while len(sentence) > max_length:
        head = sentence[:max_length]
        end = max(head.rfind(mark) for mark in (", ", "; ", ": ", " — "))
        if end < max_length // 4:
            end = head.rfind(" ")
        end = end + 1 if end > 0 else max_length
        parts.append(sentence[:end].strip())
        sentence = sentence[end:].strip()
    return [*parts, sentence] if sentence else parts


def phonemes(text: str) -> str:
    """The phonemes of a text, one character each."""
    symbols = " ".join("".join(symbol for symbol in _convert(text) if symbol in IDS).split())
    if not any(IDS[symbol] not in PAUSES and symbol not in "ˈˌ" for symbol in symbols):
        raise TextError(f"{text.strip()[:30]!r} has nothing to speak in English; give English words")
    return symbols


def _convert(text: str) -> str:
    if (convert := hibari()) is None:
        return by_spelling(text)
    try:
        return convert(text)
    except Exception:  # hibari fails on some numbers
        return by_spelling(text)


def ids(symbols: str) -> list[int]:
    """The ids of phonemes, with EDGE at both ends."""
    return [EDGE, *(IDS[symbol] for symbol in symbols if symbol in IDS), EDGE]


@cache
def hibari() -> Callable[[str], str] | None:
    """hibari's conversion of English text to phonemes, or None if it is not installed."""
    try:
        from hibari.g2p import G2P
    except ImportError:
        return None
    convert: Callable[[str], str] = G2P()
    return convert


# ---- spelling rules, without hibari


_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_RULES: Sequence[tuple[str, str]] = (  # spelling -> phonemes; the first match applies
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


def by_spelling(text: str) -> str:
    """Phonemes by spelling rules alone, word by word."""
    parts = []
    for part in re.findall(r"[A-Za-z']+|\d|[.,!?;:—…]", text):
        if part.isdigit():
            part = _DIGITS[int(part)]
        if part[0].isalpha() or part[0] == "'":
            parts.append(" " + _word(part.lower().replace("'", "")))
        else:
            parts.append(part)
    return "".join(parts)


def _word(word: str) -> str:
    """The phonemes of a word. A vowel before a consonant and a silent e is long; the first vowel is stressed."""
    if len(word) > 3 and word.endswith("e") and word[-2] not in "aeiou" and word[-3] in _LONG:
        head, long, last = word[:-3], _LONG[word[-3]], word[-2]
        symbols = _by_rules(head) + long + {"c": "s", "g": "ʤ"}.get(last, _by_rules(last))
    elif len(word) <= 3 and word[-1:] in _LONG and not any(letter in _LONG for letter in word[:-1]):
        symbols = _by_rules(word[:-1]) + _LONG[word[-1]]
    else:
        symbols = _by_rules(word[:-1] if len(word) > 3 and word.endswith("e") else word)
    vowel = re.search(r"[əiuɑɔɛɜɪʊʌæAIWYO]", symbols)
    return symbols if vowel is None else f"{symbols[: vowel.start()]}ˈ{symbols[vowel.start() :]}"


def _by_rules(word: str) -> str:
    symbols = ""
    while word:
        spelling, match = next((rule for rule in _RULES if word.startswith(rule[0])), (word[0], ""))
        symbols, word = symbols + match, word[len(spelling) :]
    return symbols
