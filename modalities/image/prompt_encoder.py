"""What people type, as the ids that a token model reads before the picture: a style and a few words.

Every prompt becomes equally many ids, so that pictures stand at the same places whatever was asked for; the prompt that
asks for nothing is what guidance is measured against. Ids begin where those of the codes end. Knows nothing of models.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from outrider.core.errors import InvalidOption, unknown

LENGTH = 8  # words of a prompt that are read
_SILENT = frozenset(("a", "an", "and", "at", "for", "in", "of", "on", "or", "the", "to", "with"))
_ENDINGS = (("ies", "y"), ("es", ""), ("s", ""), ("ing", ""), ("ing", "e"), ("ed", ""), ("ed", "e"))

# What is asked for most: for contact sheets and for judging whether a picture shows what its prompt says.
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

# Names that were held out of all sets when the model learned, of whose words it knows every one: for measuring.
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
    """Its words as they are looked up: plain small letters, without those that say nothing."""
    plain = unicodedata.normalize("NFKD", text.lower()).encode("ascii", "ignore").decode()
    return [one for one in re.findall(r"[a-z]+|[0-9]+", plain) if one not in _SILENT]


def commonest(texts: Iterable[tuple[str, Sequence[str]]], most: int) -> tuple[str, ...]:
    """The words of names, which count tenfold, and of keywords: the commonest ones, in order of the alphabet."""
    counts: Counter[str] = Counter()
    for name, keywords in texts:
        for one in set(words(name)):
            counts[one] += 10
        for one in {word for keyword in keywords for word in words(keyword)}:
            counts[one] += 1
    ranked = sorted(counts, key=lambda one: (-counts[one], one))
    return tuple(sorted(ranked[:most]))


@dataclass(frozen=True)
class PromptEncoder:
    """The styles and words that one model knows."""

    codes: int  # ids of the picture's own tokens, which come first
    styles: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def nothing(self) -> int:
        """Stands for a style or a word that was not given."""
        return self.codes

    @property
    def other(self) -> int:
        """Stands for a word that isn't known."""
        return self.codes + 1

    @property
    def size(self) -> int:
        """Of all ids, codes included."""
        return self.codes + 2 + len(self.styles) + len(self.words)

    @property
    def length(self) -> int:
        """Ids of a prompt."""
        return 1 + LENGTH

    @cached_property
    def _ids(self) -> dict[str, int]:
        first = self.codes + 2 + len(self.styles)
        return {word: first + place for place, word in enumerate(self.words)}

    @property
    def free(self) -> list[int]:
        """The prompt that asks for nothing."""
        return [self.nothing] * self.length

    def known(self, word: str) -> int | None:
        """The id of a word, or of what it is a form of."""
        if word in self._ids:
            return self._ids[word]
        for ending, stem in _ENDINGS:
            if word.endswith(ending) and (found := self._ids.get(word.removesuffix(ending) + stem)) is not None:
                return found
        return self._ids.get(word + "s")

    def style(self, name: str | None) -> int:
        if name is None:
            return self.nothing
        if name not in self.styles:
            raise unknown("style", name, self.styles)
        return self.codes + 2 + self.styles.index(name)

    def encode(self, text: str, style: str | None = None) -> list[int]:
        """A prompt's ids, all of its words that fit; words that aren't known stand as such."""
        found = [self.known(one) for one in words(text)][:LENGTH]
        ids = [self.other if one is None else one for one in found]
        return [self.style(style), *ids, *[self.nothing] * (LENGTH - len(ids))]

    def read(self, text: str, style: str | None = None) -> list[int]:
        """The same for what a person typed: refused where there is nothing to go by."""
        if not isinstance(text, str):
            raise InvalidOption(f"the prompt is a {type(text).__name__}; give a few words, such as 'red heart'")
        asked = words(text)
        if not asked:
            raise InvalidOption("the prompt is empty; give a few words, such as 'red heart'")
        if all(self.known(one) is None for one in asked):
            from difflib import get_close_matches

            near = [one for word in asked for one in get_close_matches(word, self.words, n=2)]
            hint = f"; did you mean {', '.join(near)}?" if near else "; try the name of an emoji, such as 'red heart'"
            raise InvalidOption(f"none of the words in {text[:60]!r} is known to this model{hint}")
        return self.encode(text, style)
