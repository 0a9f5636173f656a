"""Fuzzing: damaged files and untrusted input are either read correctly or raise a one-line OutriderError.

Cases are seeded and reproducible. Damaged traces are in tests/core/test_trace.py.
"""

from __future__ import annotations

import importlib
import io
import json
import random
import runpy
import shutil
import struct
import zipfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider import text
from outrider.core.assets.store import Checkpoint, convert_gguf
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.training.checkpoint import load as load_trained
from outrider.core.training.optim import accelerator, load_checkpoint, save_checkpoint
from outrider.core.training.trainer import Progress
from outrider.image import recipes
from outrider.image.model import ImageModel
from outrider.image.prompt_encoder import PromptEncoder
from outrider.image.tokenizer import Layout, Tokenizer
from outrider.image.training.data import SIZE, Pictures
from outrider.speech.mel import BINS
from outrider.speech.phonemes import ids, phonemes, split_utterances
from outrider.speech.training.data import Utterance
from outrider.speech.training.data import load_file as load_speech
from outrider.speech.training.data import save as save_speech
from outrider.text.bench.run import load_prompts
from tests.fuzzing import COUNTS, WRONG, bent, damaged, survives, words

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
TINY = runpy.run_path(str(HERE / "text" / "tiny.py"))
ODD = ([], {}, [[]], None, 3, [None], [{}], b"x", [b"x"], [3], [-1], [1 << 40], [1.5], [True])  # not prompts


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 4), "b": torch.ones(3), "c": torch.zeros(2, dtype=torch.bfloat16)}, path)
    good = path.read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])

    def once(rng: random.Random) -> None:
        if rng.random() < 0.5:
            result = json.dumps(bent(rng, header)).encode()
            path.write_bytes(struct.pack("<Q", len(result)) + result + good[8 + size :])
        else:
            path.write_bytes(damaged(rng, good))
        for tensor in Checkpoint(path).values():
            tensor.float().sum()

    survives(600, once, refused=0.5)


def test_datastores(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    Datastore.build([[1, 2, 3], [2, 3, 4], [5] * 20], {"tokenizer": "x"}).save(path)
    good = path.read_bytes()

    def once(rng: random.Random) -> None:
        path.write_bytes(damaged(rng, good))
        Datastore.load(path, 100).find([1, 2, 3], 8, 1)

    survives(600, once, refused=0.5)


def test_image_datasets(tmp_path: Path) -> None:
    path, words = tmp_path / "p.npz", ("a", "b")
    keywords = (("x",), ("y",))
    Pictures(
        np.zeros((2, SIZE, SIZE, 3), np.uint8), ("noto",), np.zeros(2, np.int64), words, keywords, np.zeros(2)
    ).save(path)
    good = path.read_bytes()

    def once(rng: random.Random) -> None:
        path.write_bytes(rezipped(rng, good) if rng.random() < 0.7 else damaged(rng, good))
        assert len(Pictures.load(path)) == 2

    survives(400, once, refused=0.5)


def test_speech_datasets(tmp_path: Path) -> None:
    path, said = tmp_path / "s.npz", np.array([1, 2, 3])
    one = Utterance("a b", "x", said, said, 1.0, np.zeros((BINS, 6), np.uint8), said)
    save_speech(path, [one, one])
    good = path.read_bytes()

    def once(rng: random.Random) -> None:
        path.write_bytes(rezipped(rng, good) if rng.random() < 0.7 else damaged(rng, good))
        load_speech(path)

    survives(400, once, refused=0.3)


def rezipped(rng: random.Random, good: bytes) -> bytes:
    """Return an archive in which one array is damaged (with a valid checksum) or has another shape or dtype."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(made, "w") as new:
        chosen = rng.choice(old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == chosen:
                kind = rng.randrange(4)
                if kind == 0:
                    data = damaged(rng, data[:128]) + data[128:]
                elif kind == 1:
                    data = damaged(rng, data)
                elif kind == 2:
                    data = data.replace(b"(", b"(%d, " % rng.choice(COUNTS), 1)[: len(data)]
                else:
                    continue
            new.writestr(name, data)
    return made.getvalue()


def test_training_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    made = accelerator(True, "no")
    model = torch.nn.Linear(3, 2)
    made.prepare(model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(made, tmp_path, {"of": "a", **asdict(Progress(best={"a": 1.0}, history=[{"minutes": 1.0}]))})
    files = {path: path.read_bytes() for path in sorted((tmp_path / "checkpoint").iterdir())}
    state = json.loads((tmp_path / "checkpoint" / "state.json").read_text(encoding="utf-8"))

    def once(rng: random.Random) -> None:
        path = rng.choice(list(files))
        result = json.dumps(bent(rng, state)).encode()
        path.write_bytes(result if path.suffix == ".json" and rng.random() < 0.7 else damaged(rng, files[path]))
        try:
            assert isinstance(load_checkpoint(made, tmp_path, "a", Progress), Progress)
        finally:
            path.write_bytes(files[path])

    survives(300, once, refused=0.3)


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, path = runpy.run_path(str(HERE / "core" / "assets" / "test_gguf.py")), tmp_path / "bent.gguf"
    module["write_quantised"](path, {"ffn_gate": module["KINDS"].Q4_1, "ffn_up": module["KINDS"].Q8_0})
    good = path.read_bytes()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))

    def once(rng: random.Random) -> None:
        path.write_bytes(damaged(rng, good[:6000]) + good[6000:] if rng.random() < 0.8 else damaged(rng, good))
        try:
            convert_gguf(path, rng.choice(["float32", "int4"]))
        finally:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    survives(60, once, refused=0.3)


def test_trained_weights(tmp_path: Path) -> None:
    """Damages the JSON beside our weights."""
    source = recipes.weights("image-tokens")
    path = tmp_path / "tokens.safetensors"
    path.symlink_to(source)
    good = json.loads(source.with_suffix(".json").read_text(encoding="utf-8"))
    good = {**good, "config": {**good["config"], "words": good["config"]["words"][:3]}, "provenance": {}}

    def once(rng: random.Random) -> None:
        result = json.dumps(bent(rng, good)).encode()
        path.with_suffix(".json").write_bytes(result if rng.random() < 0.7 else damaged(rng, result))
        load_trained(path, recipes.KINDS, None)

    survives(15, once, refused=0.8)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_models(file: str, tmp_path: Path) -> None:
    """Damages a model folder's files; what still loads generates two tokens."""
    folder = TINY["write"](tmp_path / "tiny")
    result = (folder / file).read_text(encoding="utf-8")
    importlib.import_module("transformers.models.llama.modeling_llama")  # 200 MB that are no case's

    def once(rng: random.Random) -> None:
        if rng.random() < 0.75:
            (folder / file).write_text(json.dumps(bent(rng, json.loads(result))), encoding="utf-8")
        else:
            (folder / file).write_bytes(damaged(rng, result.encode()))
        text.load(folder, dtype="float32").generate("ab", max_new_tokens=2, drafter=None)

    survives(30, once)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    good = b'{"prompt": "a", "id": 1, "task": "x"}\n{"turns": ["b"], "question_id": 3, "category": "y"}\n'

    def once(rng: random.Random) -> None:
        path.write_bytes(damaged(rng, good))
        load_prompts(path)

    survives(400, once, refused=0.3)


COMMON: dict[str, tuple[Any, ...]] = {  # valid and invalid values
    "drafter": (None, "jacobi", "draft-model"),
    "temperature": (0.0, 1.0),
    "top_k": (0, 5),
    "top_p": (0.5, 1.0),
    "logprobs": (True,),
    "seed": (1,),
    "drafter_options": ({"window": 4}, {"x": 1}),
}
OF_TEXT = {
    **COMMON,
    "drafter": (None, "jacobi", "suffix", "auto"),
    "rule": ("exact", "typical"),
    "max_new_tokens": (1, 2),
    "min_p": (0.0, 0.1),
    "repetition_penalty": (1.2,),
    "stop": ("a", ["b", "c"], [""], [1]),
    "alternatives": (0, 2),
    "raw": (True,),
    "rule_options": ({"epsilon": 0.2}, {"x": 1}),
}
OF_PICTURES = {
    **COMMON,
    "style": (None, "noto"),
    "rule": ("exact", "lantern"),
    "guidance_scale": (0, 1.0, 3.0),
    "entropy_aware": (True,),
    "rule_options": ({"delta": 0.2}, {"delta": "x"}),
}
OF_SPEECH = {**COMMON, "rule": ("exact", "tolerance"), "speed": (0.7, 1.5), "rule_options": ({"x": 1},)}


def asked(rng: random.Random, good: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return random prompts, batches or invalid values, with mostly valid options."""
    said = words(rng)
    prompt = rng.choice(ODD if rng.random() < 0.1 else (said, f"cat {said}", f"{said} cat", [f"{said} cat", "cat"]))
    options = {name: rng.choice((*values, rng.choice(WRONG))) for name, values in good.items() if rng.random() < 0.2}
    return prompt, options | ({said: 1} if rng.random() < 0.05 else {})


def test_prompts(tmp_path: Path) -> None:
    lm = text.load(TINY["write"](tmp_path / "tiny"), dtype="float32")

    def once(rng: random.Random) -> None:
        said, kind = words(rng), rng.randrange(5)
        if kind == 0:
            lm.generate(said, max_new_tokens=2, drafter="prompt-lookup", raw=rng.random() < 0.5)
        elif kind == 1:
            role, content = rng.choice(("user", "evil", said, 3, None)), rng.choice((said, None, 3, [said]))
            lm.generate([{"role": role, "content": content}], max_new_tokens=2)  # type: ignore[list-item]
        elif kind == 2:
            lm.generate([said, f"{said}x"], max_new_tokens=2)
        elif kind == 3:
            prompt, options = asked(rng, OF_TEXT)
            with closing(lm.stream(prompt, **{"max_new_tokens": 2, **options})) as stream:
                next(stream, None)
        else:
            lm.generate(rng.choice(ODD), max_new_tokens=2)

    survives(300, once, refused=0.1)


def test_pictures() -> None:
    made = runpy.run_path(str(HERE / "image" / "conftest.py"))["made"]
    tokens, draft = made(), made(1, layers=1).network()
    codec = Tokenizer(Layout((4, 3, 3), (8, 16, 16))).eval()
    im = ImageModel(tokens.network(), tokens.prompt_encoder, codec, name="tiny", draft=lambda: draft)

    def once(rng: random.Random) -> None:
        prompt, options = asked(rng, OF_PICTURES)
        with closing(im.stream(prompt, **options)) as stream:
            next(stream)

    survives(400, once, refused=0.3)


def test_speech() -> None:
    speaker = runpy.run_path(str(HERE / "speech" / "conftest.py"))["small_speaker"]()

    def once(rng: random.Random) -> None:
        text, options = asked(rng, OF_SPEECH)
        with closing(speaker.stream(text, **options)) as stream:
            next(stream)

    survives(200, once, refused=0.3)


def test_image_and_speech_requests() -> None:
    names = PromptEncoder(36, ("noto", "fluent"), ("cat", "red", "heart"))

    def once(rng: random.Random) -> None:
        said = words(rng)
        if rng.random() < 0.5:
            names.encode_checked(said, rng.choice(("noto", None, said, "")))
        else:
            for part in split_utterances(said):
                ids(phonemes(part))

    survives(300, once, refused=0.1)
