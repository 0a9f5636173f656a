"""Crafted files of kinds that others hand over: none ends the process, hangs, or takes its memory.

Each case is a small seed from below, changed by a seeded mutator. OUTRIDER_FUZZ=N sets the number of cases a kind.
tests/test_fuzz.py has prompts, options and files that this package writes.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from outrider import text
from outrider.app.page import recordings
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.engine import checkpoints
from outrider.core.engine.architectures import ARCHITECTURES
from outrider.core.errors import InvalidOption
from outrider.core.kernels import native
from outrider.core.trace import Trace
from outrider.core.training.checkpoint import save
from outrider.image.training.data import on_white
from outrider.speech.audio import Sound
from outrider.text.recipes import recipe
from outrider.text.tokenizer import Tokens
from outrider.text.untrusted.process import BoundedProcess
from tests.core.engine.test_architectures import LONG, SHAPE, YARN
from tests.fuzzing import bent, damaged, survives, words
from tests.text.tiny import TEMPLATE, tokenizer, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library()  # is compiled in the usual cache
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


# ---- tokenizers and chat templates

_WORDS = {"[UNK]": 0, "hello": 1, "world": 2, "##s": 3, "a": 4}
_SPLIT: dict[str, Any] = {"type": "Split", "pattern": {"Regex": "\\w+|\\s"}, "behavior": "Isolated", "invert": False}
_BASE: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[UNK]",
    },
    "added_tokens": [
        {"id": 0, "content": "[UNK]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ],
    "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Prepend", "prepend": "_"}, {"type": "Strip", "strip_left": True, "strip_right": True},
    ]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        _SPLIT, {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"},
    ]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [0], "tokens": ["[UNK]"]}},
    },
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "[UNK]"},
}  # fmt: skip
TOKENIZERS: tuple[dict[str, Any], ...] = (
    json.loads(tokenizer().to_str()),
    _BASE,
    _BASE | {"model": {"type": "WordPiece", "vocab": _WORDS, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100}},
    _BASE | {"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                       "vocab": [["[UNK]", 0.0], ["he", -1.5], ["llo", -2.0], ["o", -3.0], ["_", -1.0]]}},
)  # fmt: skip
_PATTERNS = (
    "(?<",
    "*",
    "(a+)+$",
    "(?=x)*",
    "[^",
    "\\p{Foo}",
    "(?i:'s)|\\s+(?!\\S)",
    "",
    "x" * 5000,
    "(((((((((a",
    "(.)\\1{9999}",
)
TEMPLATES = (
    TEMPLATE,
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 3000000000 }}",
    "{% set x = namespace(s='ab') %}{% for a in range(40) %}{% set x.s = x.s ~ x.s %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ ''.__class__.__mro__ }}{{ messages | tojson(indent=9) }}",
    "{{ '%999999999d' % 1 }}{{ messages[0].content | center(99999999) }}",
    "{{ 9 ** 9 ** 9 }}{{ range(10 ** 12) | list }}",
    "{{ raise_exception(messages) }}{{ strftime_now('%Y' * 999) }}",
    "{% generation %}{{ messages[0]['content'] | replace('', messages | string) | wordwrap(1) }}{% endgeneration %}",
)
_PARTS = (
    "{{", "}}", "{%", "%}", "{#", "'", "messages", "[0]", "|join", "|batch(0)", "for x in messages", "endfor", "if",
    "9" * 30, "**", "*", "\x00", "range(99999)", "|urlize", ".format(x)", "loop.index", "break", "set",
    "import 'x' as y", "include 'x'", "extends 'x'",
)  # fmt: skip


def test_tokenizers(tmp_path: Path) -> None:
    def once(rng: random.Random) -> None:
        whole = bent(rng, rng.choice(TOKENIZERS))
        if rng.random() < 0.3:
            place = rng.choice((_SPLIT, {"type": "Replace", "pattern": {}, "content": "x" * rng.choice((0, 1, 9999))}))
            which = "pre_tokenizer" if place is _SPLIT else "normalizer"
            whole = whole | {which: place | {"pattern": {"Regex": rng.choice(_PATTERNS)}}}
        data = json.dumps(whole).encode()
        (tmp_path / "tokenizer.json").write_bytes(data if rng.random() < 0.8 else damaged(rng, data))
        tokens = Tokens.load(tmp_path)
        ids = tokens.encode(words(rng).replace("\ud800", "") or "a", special=rng.random() < 0.5)
        tokens.decode(ids[:100])

    survives(300, once, refused=0.2)


def test_chat_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = BoundedProcess(seconds=1, megabytes=500)
    monkeypatch.setattr("outrider.text.tokenizer.shared", lambda: bounded)
    tokens = Tokens(tokenizer(), "", {"bos_token": "<s>"})

    def once(rng: random.Random) -> None:
        text = rng.choice(TEMPLATES if rng.random() < 0.02 else TEMPLATES[:1] + TEMPLATES[4:])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice((*_PARTS, "")) + text[at + rng.choice((0, 0, 1, 9)) :]
        tokens.template = text
        tokens.render([{"role": "user", "content": words(rng) or "a"}, {"role": "assistant", "content": "x"}])

    survives(300, once, refused=0.3)
    bounded.close()


# ---- configs, heads and their JSON


def test_configs() -> None:
    ropes = ({"rope_parameters": YARN}, {"rope_parameters": LONG}, {"layer_types": ["full_attention"] * 4})
    shapes = [SHAPE | {"model_type": name} for name in ARCHITECTURES]
    shapes += [shape | rope for shape in shapes for rope in ropes]

    def once(rng: random.Random) -> None:
        config = bent(rng, rng.choice(shapes))
        checkpoints.parse_config(bent(rng, config) if rng.random() < 0.3 else config)

    survives(300, once, refused=0.2)


def test_draft_heads(tmp_path: Path) -> None:
    lm = text.load(write(tmp_path / "m"), dtype="float32", device="cpu")
    paths = {name: tmp_path / f"{name}.safetensors" for name in ("medusa", "eagle3", "dflash", "ctc", "mtp", "hydra")}
    known = {}
    for name, path in paths.items():
        save(recipe(name).make(lm.target(), None), path, {})  # type: ignore[arg-type]
        known[name] = json.loads(path.with_suffix(".json").read_text())

    def once(rng: random.Random) -> None:
        name = rng.choice(list(paths))
        whole = known[name] | {"config": bent(rng, known[name]["config"])}
        data = json.dumps(whole if rng.random() < 0.8 else bent(rng, known[name])).encode()
        paths[name].with_suffix(".json").write_bytes(data if rng.random() < 0.9 else damaged(rng, data))
        lm.draft_heads.clear()
        lm.prepared_heads.clear()
        lm.generate("ab", max_new_tokens=3, drafter=name, head=str(paths[name]))

    survives(60, once, refused=0.5)


# ---- traces, datastores, images, sound


def _recording() -> dict[str, Any]:
    path = ROOT / "app" / "traces" / "text-a-relaxed-rule.json"
    whole: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return whole


def test_traces() -> None:
    whole = _recording()
    for part in (whole["trace"], (whole.get("plain") or whole)["trace"]):
        part["steps"] = part["steps"][:3]
    bare = whole["trace"]

    def once(rng: random.Random) -> None:
        if rng.random() < 0.5:
            trace = Trace.from_json(json.dumps(bent(rng, bare)))
            trace.summary()
        else:
            data = json.dumps(bent(rng, whole)).encode()
            recordings.read(data if rng.random() < 0.8 else damaged(rng, data))

    survives(200, once, refused=0.3)


def test_datastores(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    Datastore.build([[1, 2, 3], [2, 3, 4], [5] * 20], {"tokenizer": "x"}).save(path)
    good = path.read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])

    def once(rng: random.Random) -> None:
        text = json.dumps(bent(rng, header)).encode()
        text += b" " * (-len(text) % 8)
        whole = len(text).to_bytes(8, "little") + text + good[8 + size :]
        path.write_bytes(whole if rng.random() < 0.5 else damaged(rng, good))
        Datastore.load(path, 100).find([1, 2, 3], 8, 1)

    survives(300, once, refused=0.5)


def test_images() -> None:
    made = io.BytesIO()
    Image.fromarray(np.arange(3072, dtype=np.uint8).reshape(32, 32, 3)).save(made, "PNG")
    good, whole = made.getvalue(), _recording()
    whole["trace"]["steps"] = whole["trace"]["steps"][:2]
    whole["plain"], whole["modality"] = None, "image"

    def once(rng: random.Random) -> None:
        data = damaged(rng, good)
        if rng.random() < 0.5:
            on_white(data)
        else:
            recordings.read(json.dumps(whole | {"picture": b64encode(data).decode()}))

    survives(200, once, refused=0.2)


def test_sound() -> None:
    good = Sound(np.zeros(200, np.float32), 8000).wav()

    def once(rng: random.Random) -> None:
        Sound.load(io.BytesIO(damaged(rng, good[:60] if rng.random() < 0.5 else good))).resample(16000)

    survives(200, once, refused=0.2)


def test_a_case_that_hangs_or_takes_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_FUZZ_START", raising=False)

    def hang(_: random.Random) -> None:
        while True:
            pass

    with pytest.raises(AssertionError, match="case 0: TimeoutError: more than"):
        survives(1, hang, seconds=0.2)
    # in a process of its own: here the allocator may have that much from earlier tests
    take = "from tests.fuzzing import survives; survives(1, lambda _: b'x' * (900 << 20))"
    done = subprocess.run([sys.executable, "-c", take], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "AssertionError: case 0: takes" in done.stderr
    with pytest.raises(AssertionError, match="case 0: ValueError"):
        survives(1, lambda _: int("x"))


def test_rates_of_sound_are_bounded() -> None:
    """The filter of an exact ratio of 44,101 to 22,050 would take gigabytes."""
    changed = Sound(np.zeros(44_101, np.float32), 44_101).resample(22_050)
    assert (changed.sample_rate, len(changed.samples)) == (22_050, 22_051)
    assert len(Sound(np.zeros(0, np.float32), 8000).resample(16_000).samples) == 0
    for rate in (1, 999, 1_000_001):
        with pytest.raises(InvalidOption, match="samples per second; it must have 1,000 to 1,000,000"):
            Sound.load(io.BytesIO(Sound(np.zeros(9, np.float32), rate).wav()))
