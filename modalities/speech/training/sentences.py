"""Sentences of the speech training set, and held-out sentences.

Sources: usage examples of WordNet, for their wide vocabulary; speeches to a congress, in the public domain; everyday
phrases and numbers generated from patterns; and Moby-Dick, for evaluation only. A sentence is held out by its own hash,
so the split does not change when sources are added.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from outrider.core.assets.archives import members
from outrider.core.errors import OutriderError, unknown

KINDS = ("examples", "speeches", "everyday", "numbers", "novel")  # the novel is for evaluation only
_HELD_OUT_EVERY = 25  # about one sentence in 25 is held out
_SHARES: Mapping[str, int] = {"examples": 5, "speeches": 2, "everyday": 2, "numbers": 1}  # of every ten
_WORDS, _LETTERS = (3, 26), (12, 170)  # the shortest and longest sentence
_SENTENCE = re.compile(r"[^.!?]+[.!?]+(?=\s|$)")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9 ,;:'.!?-]*")
_ABBREVIATION = re.compile(r"\b(?:[A-Z]|[A-Z]{2,}|Mr|Mrs|Dr|St|etc|vs|Jr|Sr|Gen|No)\.|\b[A-Z]{2,}\b|[a-z][A-Z]|\d")


class SentenceError(OutriderError):
    """There are not enough sentences of a kind."""


@dataclass(frozen=True)
class Sentence:
    """A sentence and its kind, one of KINDS."""

    text: str
    kind: str


def training_sentences() -> Iterator[Sentence]:
    """An endless stream of training sentences: kinds in fixed shares, always in the same order."""
    sources = {kind: _all_of(kind) for kind in _SHARES}
    order = [kind for kind, count in _SHARES.items() for _ in range(count)]
    random.Random("kinds").shuffle(order)
    seen: set[str] = set()
    while sources:
        for kind in order:
            if kind not in sources:
                continue
            text = next((text for text in sources[kind] if not _is_held_out(text) and text not in seen), None)
            if text is None:
                del sources[kind]
                continue
            seen.add(text)
            yield Sentence(text, kind)


def held_out(kind: str, count: int) -> list[Sentence]:
    """The first `count` held-out sentences of a kind."""
    if kind not in KINDS:
        raise unknown("kind of sentence", kind, KINDS)
    texts: dict[str, None] = {}
    for text in _all_of(kind):
        if kind == "novel" or _is_held_out(text):
            texts[text] = None
        if len(texts) == count:
            return [Sentence(text, kind) for text in texts]
    raise SentenceError(f"{count} held-out sentences of the kind {kind} were requested; there are {len(texts)}")


def _is_held_out(text: str) -> bool:
    return hashlib.sha256(f"held/{text.lower()}".encode()).digest()[0] * _HELD_OUT_EVERY < 256


def _all_of(kind: str) -> Iterator[str]:
    """All sentences of a kind: those of a source ordered by hash, or an endless stream from patterns."""
    if kind in _GENERATED:
        rng, generate = random.Random(f"sentences/{kind}"), _GENERATED[kind]
        while True:
            yield generate(rng)
    texts = {text for raw in _SOURCES[kind]() if (text := clean(raw)) is not None}
    yield from sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def clean(raw: str) -> str | None:
    """A sentence with normalised spaces, capital and full stop, or None if it is too short or long or has characters or
    abbreviations that are not read out reliably."""
    text = " ".join(raw.split()).strip(" ,;:-'")
    if not text or not _PLAIN.fullmatch(text) or _ABBREVIATION.search(text) or "--" in text:
        return None
    words = text.split()
    if not _WORDS[0] <= len(words) <= _WORDS[1] or not _LETTERS[0] <= len(text) <= _LETTERS[1]:
        return None
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."


# ---- sources


def _examples() -> Iterator[str]:
    for text in members("wordnet", r"/dict/data\.(noun|verb|adj|adv)$"):
        for line in text.splitlines():
            _, bar, gloss = line.partition(" | ")
            if bar:
                yield from re.findall(r'"([^"]+)"', gloss)


def _speeches() -> Iterator[str]:
    for text in members("speeches", r"/data/\d.*\.json$"):
        yield from _SENTENCE.findall(" ".join(json.loads(text)["text"].split()))


def _novel() -> Iterator[str]:
    for text in members("moby-dick", r"/data/chapter_\d+\.json$"):
        yield from _SENTENCE.findall(" ".join(json.loads(text)["text"].split()))


_SOURCES: Mapping[str, Callable[[], Iterator[str]]] = {
    "examples": _examples,
    "speeches": _speeches,
    "novel": _novel,
}

# ---- patterns with slots

_FILLINGS: Mapping[str, str] = {
    "name": "Anna Ben Carla David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nora Oliver Paul Rosa Sam Tina "
    "Victor",
    "place": "station library market hospital museum office bakery airport school bridge park theatre harbour garden",
    "thing": "umbrella letter camera ticket blanket hammer bicycle lamp suitcase pencil jacket basket guitar mirror "
    "clock",
    "food": "soup bread rice salad cheese pasta chicken apples chocolate pancakes tomatoes coffee honey mushrooms fish",
    "animal": "dog cat horse fox rabbit bear owl duck sheep goat tiger mouse whale parrot squirrel",
    "look": "red green yellow old new heavy quiet bright cold empty wooden small strange beautiful broken round",
    "does": "sleeps runs waits sings works swims hides rests shouts jumps listens watches eats dances whispers",
    "how": "slowly quickly quietly gladly often rarely carefully badly alone outside",
    "feeling": "happy tired hungry worried proud surprised angry thirsty calm curious bored sorry",
    "weather": "sunny cloudy windy rainy foggy cold warm stormy dry freezing",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November December",
    "when": "today tomorrow tonight later soon now again early",
    "job": "doctor teacher baker driver painter farmer lawyer singer nurse pilot waiter engineer",
}
_EVERYDAY = (
    "Good morning, {name}.",
    "Good evening, everyone.",
    "How are you {when}?",
    "Thank you very much, {name}.",
    "The quick {look} {animal} jumps over the lazy {animal}.",
    "Where is the {place}, please?",
    "Could you bring me the {look} {thing}?",
    "I left my {thing} at the {place}.",
    "My {animal} {does} {how}.",
    "It will be {weather} {when}.",
    "Is it {weather} where you live?",
    "We had {food} and {food} for dinner.",
    "Would you like some {food}?",
    "Turn left at the {place}, then go straight on.",
    "Please open the {look} door.",
    "{name} is a {job}, and {name} wants to become one too.",
    "Why is the {animal} so {feeling}?",
    "I am {feeling}, but not as {feeling} as {name}.",
    "Don't forget the {thing}!",
    "Call me when you get to the {place}.",
    "The {look} {thing} belongs to the {job}.",
    "What did {name} say about the {place}?",
    "Let's meet at the {place} on {day}.",
    "She put the {thing} beside the {look} {thing}.",
    "Every {animal} near the {place} {does} {how}.",
    "Turn off the lights and play some music.",
    "You can't have {food} without {food}.",
    "Who took my {look} {thing}?",
    "He {does} {how}, and nobody minds.",
    "Excuse me, is this the way to the {place}?",
    "I think the {job} is {feeling} {when}.",
    "That was a {look} idea, {name}!",
    "If it is {weather}, we will stay at the {place}.",
    "The {animal} and the {animal} are {feeling}.",
    "Remind me to buy {food} {when}.",
    "There is a {look} {animal} in the {place}.",
)
_NUMBERS = (
    "The number is {count}.",
    "It costs {small} dollars and {tens} cents.",
    "The train leaves at {hour} {minute}.",
    "My birthday is on the {nth} of {month}.",
    "There are {count} people at the {place}.",
    "Set a timer for {tens} minutes.",
    "Call {digits}.",
    "In {year}, the {place} was closed.",
    "Page {count}, please.",
    "It is {tens} degrees and {weather}.",
    "We need {small} chairs, {small} tables and {tens} cups.",
    "{count} plus {small} is more than {small}.",
    "About {tens} percent of them came by bus.",
    "The meeting on {day} starts at {hour} o'clock.",
    "She ran {small} miles in {tens} minutes.",
    "Room {count} is on the {nth} floor.",
)


def _fill(patterns: tuple[str, ...], rng: random.Random) -> str:
    """A random pattern with its slots filled at random."""

    def value(slot: re.Match[str]) -> str:
        if slot[1] in _FILLINGS:
            return rng.choice(_FILLINGS[slot[1]].split())
        return _COUNTS[slot[1]](rng)

    text = re.sub(r"\{(\w+)\}", value, rng.choice(patterns))
    return re.sub(r"\ba(?= [aeiou])", "an", text[0].upper() + text[1:])


_COUNTS: Mapping[str, Callable[[random.Random], str]] = {
    "small": lambda rng: spelled(rng.randint(2, 20)),
    "tens": lambda rng: spelled(rng.randint(5, 99)),
    "count": lambda rng: spelled(int(10 ** rng.uniform(1, 6))),
    "hour": lambda rng: spelled(rng.randint(1, 12)),
    "minute": lambda rng: spelled(rng.randint(10, 59)),
    "digits": lambda rng: " ".join(spelled(rng.randint(0, 9)) for _ in range(rng.randint(4, 7))),
    "year": lambda rng: f"{spelled(rng.randint(14, 19))} {spelled(rng.randint(11, 99))}",
    "nth": lambda rng: rng.choice(_ORDINALS),
}
_GENERATED: Mapping[str, Callable[[random.Random], str]] = {
    "everyday": lambda rng: _fill(_EVERYDAY, rng),
    "numbers": lambda rng: _fill(_NUMBERS, rng),
}
_ORDINALS: tuple[str, ...] = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh"),
    *("twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth", "seventeenth", "eighteenth", "nineteenth"),
    *("twentieth", "thirtieth"),
)
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))


def spelled(number: int) -> str:
    """An integer below a trillion in words.

    >>> spelled(1042)
    'one thousand forty-two'
    """
    if number < 0:
        return "minus " + spelled(-number)
    if number < 20:
        return _UNITS[number]
    if number < 100:
        tens, units = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_UNITS[units]}" if units else "")
    for size, name in _LARGE:
        if number >= size:
            count, remainder = divmod(number, size)
            return f"{spelled(count)} {name}" + (f" {spelled(remainder)}" if remainder else "")
    raise AssertionError
