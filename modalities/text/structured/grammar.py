"""Grammars as constraints, through llguidance: JSON schemas, regular expressions and Lark grammars over a tokenizer.

llguidance parses with derivatives and an Earley parser while it generates, so that a grammar needs no table made
beforehand; it rolls back, as trees need, knows the tokens that are forced, and refuses what it does not implement
instead of leaving it out. Independent of models and of how masks are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.core.errors import InvalidOption, OutriderError, install_command
from outrider.text.tokenizer import Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# one way to write each document, as Python's json writes it: more tokens are forced, and none can be blanks for ever
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LONGEST_ERROR = 300
_LENIENT = '; put "x-guidance": {"lenient": true} into the schema to leave out what is not enforced'
_HINTS = {  # by what llguidance's error contains
    "coerce_one_of": '; put "x-guidance": {"coerce_one_of": true} into the schema to read oneOf as anyOf',
    "Unimplemented keys": _LENIENT,
    "Unknown format": _LENIENT,
}


class GrammarError(OutriderError):
    """A grammar that became too complex while generating."""


class Grammars:
    """Makes constraints for one tokenizer whose texts end with one of the ids `end`."""

    def __init__(self, tokens: Tokens, end: Sequence[int]) -> None:
        self.tokens, self._end = tokens, tuple(end)
        self._made: dict[int, LLTokenizer] = {}  # by size of the vocabulary

    def json_schema(self, schema: Mapping[str, Any], vocabulary: int) -> Grammar:
        """Documents of a JSON schema; its key "x-guidance" sets how they are written."""
        library = _library()
        try:
            source = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_STYLE)
        except (TypeError, ValueError) as error:
            raise InvalidOption(f"the JSON schema can't be used: {_short(error)}") from None
        return self._grammar(source, "JSON schema", vocabulary)

    def regex(self, pattern: str, vocabulary: int) -> Grammar:
        """Texts that a regular expression matches as a whole."""
        return self._grammar(_library().LLMatcher.grammar_from_regex(pattern), "regular expression", vocabulary)

    def lark(self, grammar: str, vocabulary: int, what: str = "grammar") -> Grammar:
        """Texts of a grammar in llguidance's variant of Lark; its rule `start` is the whole text."""
        return self._grammar(_library().LLMatcher.grammar_from_lark(grammar), what, vocabulary)

    def _grammar(self, source: str, what: str, vocabulary: int) -> Grammar:
        tokenizer = self._tokenizer(vocabulary)
        wrong, notes = _library().LLMatcher.validate_grammar_with_warnings(source, tokenizer)
        if wrong:
            error = notes[0] if notes else "it is invalid"
            hint = next((_HINTS[part] for part in _HINTS if part in error), "")
            raise InvalidOption(f"the {what} can't be used: {_short(error)}{hint}")
        matcher = _library().LLMatcher(tokenizer, _unforced(source), log_level=0)
        if matcher.is_error():
            raise InvalidOption(f"the {what} can't be used: {_short(matcher.get_error())}")
        return Grammar(matcher, tokenizer, self._end, vocabulary)

    def _tokenizer(self, vocabulary: int) -> LLTokenizer:
        if not self._end:
            raise InvalidOption("the model has no end token, which constrained output needs in order to end")
        if vocabulary not in self._made:
            try:
                made = _library().LLTokenizer(self.tokens.serialized(), n_vocab=vocabulary, eos_token=[*self._end])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # panics of the library are no Exception
                raise InvalidOption(f"this model's tokenizer can't be constrained: {_short(error)}") from None
            self._made[vocabulary] = made
        return self._made[vocabulary]


class Grammar:
    """A constraint by a grammar; the output may end where a text of the grammar does."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end: tuple[int, ...], vocabulary: int) -> None:
        self._matcher, self._more = matcher, (tokenizer, end, vocabulary)

    def start(self) -> _Place:
        return _Place(self._matcher.deep_copy(), *self._more)


class _Place:
    """Masks and forced tokens are worked out on copies: the library leaves parts of them in a matcher that goes back
    afterwards, and its next masks then hold tokens that may not follow."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end: tuple[int, ...], vocabulary: int) -> None:
        self._matcher, self._tokenizer, self._end, self._vocabulary = matcher, tokenizer, end, vocabulary
        self._ended = False  # an end token has been read, which the matcher is not told

    def advance(self, token: int) -> bool:
        if self._ended or not 0 <= token < self._vocabulary:
            return False
        if token in self._end:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        read: bool = self._matcher.try_consume_tokens([token]) == 1
        _check(self._matcher)
        return read

    def retreat(self, count: int) -> None:
        if count and self._ended:
            self._ended, count = False, count - 1
        if count and not self._matcher.rollback(count):
            raise GrammarError(f"the grammar can't go back: {_short(self._matcher.get_error())}")

    def fill(self, words: np.ndarray) -> None:
        if not self._ended:
            matcher = self._matcher.deep_copy()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            _check(matcher)

    def forced(self) -> list[int]:
        if self._ended:
            return []
        matcher = self._matcher.deep_copy()
        tokens: list[int] = self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes())
        ends = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_stopped()
        return [*tokens, self._end[0]] if ends else tokens

    @property
    def complete(self) -> bool:
        return self._ended or bool(self._matcher.is_accepting())


def _unforced(source: str) -> str:
    """The same grammar with masks of all tokens that may follow: where the text is certain, the library's masks else
    have only the token that its tokenizer would write, though the grammar reads others, and so the law of the output
    would depend on whether a mask was asked for."""
    text = source  # Lark, or JSON around it or around a schema
    if source.lstrip().startswith("{"):
        (grammar,) = json.loads(source)["grammars"]
        text = grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"
    return text + '\n%llguidance {"no_forcing": true}\n'


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"the grammar can't be followed further: {_short(matcher.get_error())}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidOption(
            f"constrained output needs the package llguidance; install it with {install_command('structured')}"
        ) from None
    return llguidance


def _short(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_ERROR else text[: _LONGEST_ERROR - 3] + "..."
