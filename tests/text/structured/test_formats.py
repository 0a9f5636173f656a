"""Text that obeys a schema, an expression or a grammar, through every door; and input that can't be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.constraint import PathMasks, Walker
from outrider.core.errors import InvalidOption
from outrider.text import TextModel
from outrider.text.options import Options
from outrider.text.structured.response_format import format_of

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["cat", "dog"]}, "minItems": 1, "maxItems": 3},
        "old": {"type": "boolean"},
    },
    "required": ["name", "tags", "old"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
NUMBERS = 'start: item (", " item)*\nitem: /[0-9]{1,2}/'
WAYS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": FORMAT},
    "regex": {"regex": r"(yes|no), [a-f]{2,5}\."},
    "grammar": {"grammar": NUMBERS},
}
DRAFTERS = [None, "prompt-lookup", "draft-model", "jacobi", "token-recycling", "lookahead", "auto"]


def valid(way: str, text: str) -> bool:
    if way == "schema":
        value = json.loads(text)
        fits = set(value) == {"name", "tags", "old"} and len(value["name"]) <= 6 and isinstance(value["old"], bool)
        return fits and 1 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {"cat", "dog"}
    pattern = WAYS["regex"]["regex"] if way == "regex" else r"[0-9]{1,2}(, [0-9]{1,2})*"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "gumbel-match"])
def test_drafters_give_the_constrained_text_of_plain_decoding(lm: TextModel, way: str, sampled: bool) -> None:
    options = {"temperature": 1.0, "rule": "gumbel-match"} if sampled else {}
    results = {
        drafter: lm.generate(
            "a cat and a dog",
            drafter=drafter,
            max_new_tokens=120,
            seed=4,
            **({"draft_model": lm} if drafter == "draft-model" else {}),
            **options,
            **WAYS[way],
        )
        for drafter in DRAFTERS
    }
    plain = results[None]
    assert {name: result.text for name, result in results.items()} == dict.fromkeys(results, plain.text)
    assert plain.complete == (plain.finish_reason == "stop")
    if plain.complete:
        assert valid(way, plain.text)
        assert plain.parsed == (json.loads(plain.text) if way == "schema" else plain.text)
    assert way != "schema" or plain.complete, "a bounded schema ends"


def test_batches_streams_and_continuous_batches_obey(lm: TextModel) -> None:
    prompts, options = ["a cat", "the dog sat on the log"], {"max_new_tokens": 100, **WAYS["schema"]}
    results = lm.generate(prompts, temperature=1.0, n=2, **options)
    assert all(result.complete and valid("schema", result.text) for result in results)
    batch = lm.batch(rows=2, drafter="prompt-lookup", **options)
    requests = [batch.add(prompt) for prompt in prompts]
    list(batch)
    alone = [lm.generate(prompt, drafter=None, **options).text for prompt in prompts]
    assert [request.result.text for request in requests] == alone
    assert all(request.result.complete for request in requests)


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "draft-model"])
def test_requests_of_a_batch_have_formats_of_their_own(lm: TextModel, drafter: str | None) -> None:
    ways: list[dict[str, Any]] = [*WAYS.values(), {}, WAYS["schema"]]
    options: dict[str, Any] = {"max_new_tokens": 60, "drafter": drafter}
    options |= {"draft_model": lm} if drafter == "draft-model" else {}
    batch = lm.batch(rows=3, own_formats=True, **options)
    requests = [batch.add(f"a cat {number}", **way) for number, way in enumerate(ways)]
    list(batch)
    for number, (request, way) in enumerate(zip(requests, ways, strict=True)):
        alone, result = lm.generate(f"a cat {number}", **options, **way), request.result
        assert (result.tokens, result.complete) == (alone.tokens, alone.complete)
        assert not way or not result.complete or result.parsed == alone.parsed
        assert alone.trace.options.items() - {("draft_model", "")} <= result.trace.options.items()
    with pytest.raises(InvalidOption, match="open it with own_formats=True"):
        lm.batch(rows=2).add("a cat", regex="a+")


def test_a_limit_within_an_object_says_so(lm: TextModel) -> None:
    result = lm.generate("a cat", max_new_tokens=5, **WAYS["schema"])
    assert result.finish_reason == "length" and result.complete is False
    with pytest.raises(InvalidOption, match="not complete after 5 tokens, as max_new_tokens ended it"):
        _ = result.parsed


def test_text_without_a_format_has_no_value(lm: TextModel) -> None:
    result = lm.generate("a cat", max_new_tokens=2, response_format={"type": "text"})
    assert result.complete is None
    with pytest.raises(InvalidOption, match="no format"):
        _ = result.parsed


def test_a_pydantic_model_is_read_back(lm: TextModel) -> None:
    pydantic = pytest.importorskip("pydantic")
    pet = pydantic.create_model("Pet", age=(int, pydantic.Field(ge=0, le=20)), kind=(str, pydantic.Field(max_length=4)))
    result = lm.generate("a cat", response_format=pet, max_new_tokens=80, temperature=1.0)
    assert isinstance(result.parsed, pet) and 0 <= result.parsed.age <= 20


def test_masks_are_those_of_the_library_along_any_path(lm: TextModel) -> None:
    """A cursor that goes back and forth against one that starts anew for each path."""
    grammar = lm.sampling(Options(**WAYS["schema"]), 300).constraint
    assert grammar is not None
    ids = lm.tokens.encode('{"name": "ab", "tags": ["cat", "dog"], "old": true}', special=False)
    paths = [ids[:length] for length in (0, 3, 1, 9, 8, len(ids), 5)] + [[*ids[:4], lm.end[0]]]
    together = PathMasks.of(grammar, [[]]).bits([paths], 300)[0]
    for path, bits in zip(paths, together, strict=True):
        assert bits.equal(PathMasks.of(grammar, [[]]).bits([[path]], 300)[0, 0])
    walker = Walker(grammar)
    assert walker.reach([*ids, lm.end[0]]) and walker.cursor.complete
    assert not walker.reach([*ids, lm.end[0], lm.end[0]]) and not walker.reach([300]) and not walker.reach([-1])
    assert walker.reach(ids[:1]) and walker.cursor.forced()[0] == ids[1]


@pytest.mark.parametrize("way", ["schema", "regex", "grammar"])
def test_a_mask_has_the_tokens_that_the_grammar_reads(smollm2: TextModel, way: str) -> None:
    """Where the text is certain too, in whatever tokens it is written; there the library would force its own."""
    text = {
        "schema": '{"name": "ab", "tags": ["cat", "dog"], "old": true}',
        "regex": "yes, abcd.",
        "grammar": "12, 3, 45",
    }
    grammar, vocabulary = smollm2.sampling(Options(**WAYS[way]), 49152).constraint, 49152
    assert grammar is not None
    ids, choices = smollm2.tokens.encode(text[way], special=False), 0
    for length in range(len(ids) + 1):
        cursor, words = grammar.start(), np.zeros(vocabulary // 32, dtype=np.int32)
        assert all(cursor.advance(token) for token in ids[:length])
        cursor.fill(words)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        for token in range(vocabulary):
            if read := cursor.advance(token):
                cursor.retreat(1)
            assert read == bool(allowed[token]), (length, token)
        forced = cursor.forced()
        choices += bool(forced) and allowed.sum() > 1
        assert all(cursor.advance(token) for token in forced)
        if forced and length < len(ids) and way == "schema":
            written, guessed = (smollm2.tokens.piece(token) for token in (ids[length], forced[0]))
            assert written.startswith(guessed), "what follows may be written together with it"
    assert choices or way != "schema"


# A way through tokens of SmolLM2: 0 makes a mask, other numbers up to 8 go back by so many tokens, the rest are read.
WAY = """
107 18 34898 1799 1662 18 10079 1799 476 7979 1662 3 476 9712 1002 3 1662 109 2 476 21324 842 1002 476 16665 1662 4 1002
476 17024 1799 1662 18 3831 1799 476 10786 1662 3831 34804 45865 2 560 2 5127 10845 4768 1662 1662 5 14132 1 1577 3 79
456 2 9583 3 5127 10845 4768 1799 1662 5 14132 18 1 1799 1662 3 34804 10845 4768 1799 1662 1 476 37285 3 1799 1662 18
2058 1799 476 42 29102 2058 3 33 2 476 476 1 29102 1002 476 3831 34804 1662 5 24885 476 2058 1799 1662 3 2058 1799 476
17024 2 476 17024 2 1662 109 0 2 476 29102 23597
"""
NESTED = {"type": "object", "properties": {"maxDomainRecords": {"type": "integer"}, "maxDomains": {"type": "integer"}}}
LIMITS = {"type": "object", "properties": {"absolute": NESTED}}
OUTER = {"type": "object", "properties": {"limits": {"description": "Limits", **LIMITS}}, "additionalProperties": False}


@pytest.mark.slow
def test_a_mask_that_was_made_on_the_way_leaves_nothing_behind(smollm2: TextModel) -> None:
    """The library's own going back kept parts of a mask: after this way it allowed `},` where nothing may follow it."""
    wanted = {"response_format": {"type": "json_schema", "schema": OUTER}}
    grammar, vocabulary = smollm2.sampling(Options(**wanted), 49152).constraint, 49152
    assert grammar is not None
    cursor, place = grammar.start(), list[int]()
    for number in map(int, WAY.split()):
        if number > 8:
            place += [number] * cursor.advance(number)
        elif number:
            number = min(number, len(place))
            cursor.retreat(number)
            del place[len(place) - number :]
        else:
            cursor.fill(np.zeros(vocabulary // 32, dtype=np.int32))
    found = np.zeros(vocabulary // 32, dtype=np.int32)
    cursor.fill(found)
    assert torch.from_numpy(found).equal(PathMasks.of(grammar, [[]]).bits([[place]], vocabulary)[0, 0])
    assert smollm2.tokens.decode(place).endswith('"type": "integer"}')


BAD = {
    "an unsatisfiable schema": ({"response_format": {"type": "json_schema", "schema": {"enum": []}}}, "can't be used"),
    "bounds that cross": (
        {"response_format": {"type": "json_schema", "schema": {"type": "integer", "minimum": 5, "maximum": 3}}},
        "Unsatisfiable schema: minimum",
    ),
    "a keyword that is not enforced": (
        {"response_format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}},
        'Unimplemented keys: ["uniqueItems"]; put "x-guidance": {"lenient": true} into the schema',
    ),
    "oneOf": (
        {"response_format": {"type": "json_schema", "schema": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}}},
        'put "x-guidance": {"coerce_one_of": true} into the schema to read oneOf as anyOf',
    ),
    "a schema that is no dictionary": ({"response_format": {"type": "json_schema", "schema": [1]}}, "schema of resp"),
    "a schema that is not JSON": (
        {"response_format": {"type": "json_schema", "schema": {"const": {1, 2}}}},
        "schema can't be used",
    ),
    "an unknown type": ({"response_format": {"type": "json-schema"}}, "Did you mean 'json_schema'"),
    "a format of another kind": ({"response_format": 3}, "give a pydantic model"),
    "a grammar that can't be parsed": ({"grammar": "start: 'a"}, "the grammar can't be used"),
    "a grammar without a start": ({"grammar": 'begin: "a"'}, "the grammar can't be used"),
    "an invalid expression": ({"regex": "[a"}, "the regular expression can't be used"),
    "an empty expression": ({"regex": ""}, "at least one character"),
    "two formats": ({"regex": "a", "grammar": NUMBERS}, "regex and grammar are both given"),
    "stop strings": ({"regex": "a", "stop": "a"}, "before its format does"),
    "a relaxed rule": ({"regex": "a+", "rule": "typical"}, "may accept tokens that the constraint forbids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(lm: TextModel, name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(InvalidOption if name != "a relaxed rule" else Exception, match=re.escape(message)):
        lm.generate("a cat", max_new_tokens=4, **options)


def test_a_model_without_an_end_token_is_refused(lm: TextModel) -> None:
    endless = TextModel(lm.target, lm.tokens, name="endless", end=(), context=64)
    with pytest.raises(InvalidOption, match="no end token"):
        endless.generate("a", regex="a", drafter=None, max_new_tokens=2)


def test_formats_are_read_from_their_usual_spellings() -> None:
    whole = format_of({"type": "json_object"}, None, None)
    assert whole is not None and whole.source == {"type": "object"}
    short = format_of({"type": "json_schema", "schema": SCHEMA}, None, None)
    assert short is not None and short.source == SCHEMA and json.loads(short.fact()) == SCHEMA


def test_the_command_takes_schemas_expressions_and_grammars(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "numbers.lark").write_text(NUMBERS)
    common = ["text", "a cat", "--model", str(folder), "--max-new-tokens", "100", "--drafter", "plain"]
    run = CliRunner().invoke(cli, [*common, "--json-schema", str(tmp_path / "schema.json")])
    assert run.exit_code == 0 and valid("schema", run.stdout.strip()), run.output
    run = CliRunner().invoke(cli, [*common, "--regex", "(yes|no)"])
    assert run.stdout.strip() in ("yes", "no")
    run = CliRunner().invoke(cli, [*common, "--grammar", str(tmp_path / "numbers.lark"), "--temperature", "1"])
    assert run.exit_code == 0 and re.match("[0-9]", run.stdout)
    (tmp_path / "schema.json").write_text("{")
    run = CliRunner().invoke(cli, [*common, "--json-schema", str(tmp_path / "schema.json")])
    assert run.exit_code != 0 and isinstance(run.exception, InvalidOption | SystemExit)
