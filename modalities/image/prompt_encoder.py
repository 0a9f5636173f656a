"""Encodes a prompt (a style and a few words) as the ids that the token model reads before an image.

Every prompt has the same number of ids, so that an image's positions do not depend on it. Classifier-free guidance
compares with the unconditional prompt. Prompt ids follow those of the codes. Independent of models.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.core.errors import InvalidOption, unknown

LENGTH = 8  # words of a prompt; further ones are ignored
_STOP_WORDS = frozenset(("a", "an", "and", "at", "for", "in", "of", "on", "or", "the", "to", "with"))
_ENDINGS = (("ies", "y"), ("es", ""), ("s", ""), ("ing", ""), ("ing", "e"), ("ed", ""), ("ed", "e"))

# Names of common emoji: the default prompts of contact sheets, and of the measure of prompt agreement.
COMMON = (
    *("red heart", "pizza", "grinning face", "cat with tears of joy", "smiling face with sunglasses", "fire", "rocket"),
    *("sun", "full moon", "star", "rainbow", "snowflake", "umbrella", "cloud", "high voltage", "four leaf clover"),
    *("rose", "sunflower", "tulip", "cherry blossom", "cactus", "deciduous tree", "evergreen tree", "mushroom"),
    *("red apple", "banana", "watermelon", "strawberry", "lemon", "grapes", "pineapple", "avocado", "carrot"),
    *("bread", "cheese wedge", "hamburger", "french fries", "cooked rice", "ice cream", "doughnut", "birthday cake"),
    *("hot beverage", "beer mug", "wine glass", "dog face", "cat face", "mouse face", "rabbit face", "fox", "bear"),
    *("panda", "koala", "lion", "cow face", "pig face", "frog", "monkey face", "chicken", "penguin", "bird", "owl"),
    *("fish", "octopus", "tropical fish", "whale", "turtle", "snake", "snail", "butterfly", "honeybee", "lady beetle"),
    *("thumbs up", "waving hand", "clapping hands", "eyes", "brain", "tooth", "crown", "top hat", "glasses", "ring"),
    *("soccer ball", "basketball", "trophy", "guitar", "bell", "key", "hammer", "light bulb", "books", "envelope"),
    *("alarm clock", "camera", "mobile phone", "automobile", "bus", "bicycle", "airplane", "sailboat", "house"),
    *("wrapped gift", "balloon", "pile of poo", "ghost", "robot", "alien", "skull"),
)

# Names held out of all sets in training, whose words are all in the vocabulary: for evaluation.
HELD_OUT = (
    *("anger symbol", "blossom", "blue heart", "copyright", "couple with heart man man", "cross mark button", "e mail"),
    *("ear", "eleven thirty", "envelope with arrow", "factory", "fireworks", "flag japan", "green square"),
    *("heart hands", "heart with arrow", "hot dog", "japanese not free of charge button", "keycap 2", "kiss"),
    *("kitchen knife", "last quarter moon face", "locked", "low battery", "magnifying glass tilted right", "man guard"),
    *("man in motorized wheelchair", "man playing water polo", "man pouting", "man teacher", "man wearing turban"),
    *("man zombie", "men holding hands", "military helmet", "old man", "old woman", "open file folder", "ox"),
    *("page facing up", "palm tree", "person facepalming", "person running facing right", "person with white cane"),
    *("polar bear", "pregnant man", "prohibited", "purple heart", "purple square", "record button"),
    *("red paper lantern", "rightwards hand", "satellite", "six thirty", "small airplane", "speech balloon"),
    *("tired face", "waxing crescent moon", "white circle", "white question mark", "white square button"),
    "women with bunny ears",
)
PROMPTS = {"common": COMMON, "held-out": HELD_OUT}


def words(text: str) -> list[str]:
    """The words of a text in lower-case ASCII, without stop words."""
    ascii_text = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return [word for word in re.findall(r"[a-z]+|[0-9]+", ascii_text) if word not in _STOP_WORDS]


def most_common_words(texts: Iterable[tuple[str, Sequence[str]]], limit: int) -> tuple[str, ...]:
    """The most common words of (name, keywords) pairs, in alphabetical order. A word in a name counts ten times."""
    counts: Counter[str] = Counter()
    for name, keywords in texts:
        for word in set(words(name)):
            counts[word] += 10
        for word in {word for keyword in keywords for word in words(keyword)}:
            counts[word] += 1
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(sorted(ranked[:limit]))


@dataclass(frozen=True)
class PromptEncoder:
    """The prompt vocabulary of one model: its styles and words."""

    codes: int  # number of image codes, whose ids come first
    styles: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def empty(self) -> int:
        """The id of a style or word that was not given."""
        return self.codes

    @property
    def unknown(self) -> int:
        """The id of a word outside the vocabulary."""
        return self.codes + 1

    @property
    def size(self) -> int:
        """The number of ids, codes included."""
        return self.codes + 2 + len(self.styles) + len(self.words)

    @property
    def length(self) -> int:
        """The number of ids in a prompt."""
        return 1 + LENGTH

    @cached_property
    def _ids(self) -> dict[str, int]:
        first = self.codes + 2 + len(self.styles)
        return {word: first + index for index, word in enumerate(self.words)}

    @property
    def unconditional(self) -> list[int]:
        """The ids of the prompt without style or words."""
        return [self.empty] * self.length

    def word_id(self, word: str) -> int | None:
        """The id of a word or of its base form; None if neither is in the vocabulary."""
        if word in self._ids:
            return self._ids[word]
        for ending, stem in _ENDINGS:
            if word.endswith(ending) and (base := self._ids.get(word.removesuffix(ending) + stem)) is not None:
                return base
        return self._ids.get(word + "s")

    def style_id(self, name: str | None) -> int:
        if name is None:
            return self.empty
        if name not in self.styles:
            raise unknown("style", name, self.styles)
        return self.codes + 2 + self.styles.index(name)

    def word_ids(self, text: str) -> list[int]:
        """The ids of the first LENGTH words of a text."""
        ids = [self.word_id(word) for word in words(text)[:LENGTH]]
        return [self.unknown if word is None else word for word in ids]

    def pad(self, style: str | None, word_ids: Sequence[int]) -> list[int]:
        """The ids of a prompt from its style and at most LENGTH word ids."""
        return [self.style_id(style), *word_ids, *[self.empty] * (LENGTH - len(word_ids))]

    def encode(self, text: str, style: str | None = None) -> list[int]:
        """The ids of a prompt. Words outside the vocabulary become `unknown`."""
        return self.pad(style, self.word_ids(text))

    def encode_checked(self, text: str, style: str | None = None) -> list[int]:
        """Like `encode`, but raises InvalidOption if the prompt has no known word."""
        if not isinstance(text, str):
            raise InvalidOption(f"the prompt is a {type(text).__name__}; give a few words, such as 'red heart'")
        given = words(text)
        if not given:
            raise InvalidOption("the prompt is empty; give a few words, such as 'red heart'")
        if all(self.word_id(word) is None for word in given):
            from difflib import get_close_matches

            similar = [match for word in given for match in get_close_matches(word, self.words, n=2)]
            hint = f"did you mean {', '.join(similar)}?" if similar else "try the name of an emoji, such as 'red heart'"
            raise InvalidOption(f"none of the words in {text[:60]!r} is known to this model; {hint}")
        return self.encode(text, style)
