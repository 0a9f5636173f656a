"""Loading models from every kind of source, and the errors for what is not a model."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import text
from outrider.core.assets import store
from outrider.core.assets.store import AssetError
from outrider.core.engine import checkpoints
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.checkpoints import CheckpointError
from outrider.core.engine.loading import folder as folder_loading
from outrider.core.engine.loading.folder import LoadError
from outrider.core.engine.self_draft_views import quantized
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, OutriderError
from outrider.text import TextModel
from outrider.text.bench.engine import decoder

RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 16, "drafter": "prompt-lookup"}
PROMPT = "the cat sat on the mat and the dog sat on"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int4"])
def test_every_precision_generates(dtype: str, folder: Path) -> None:
    model = text.load(str(folder), dtype=dtype)
    assert len(model.generate(PROMPT, **RAW).tokens) == 16
    assert model.dtype == dtype
    assert model.context == 512
    assert model.end == (2,)
    assert model.folder == folder


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_quantized_checkpoints_say_how_they_are_read(dtype: str, folder: Path, tmp_path: Path) -> None:
    """FP8 in blocks, as Qwen3 is published, against the same values in 32 bits."""
    shutil.copytree(folder, tmp_path / "fp8")
    shutil.copytree(folder, tmp_path / "plain")
    described = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(described | {"quantization_config": method}))
    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name in [name for name in plain if "_proj." in name]:
        scale = (plain[name].abs().max() / 448).float().view(1, 1)
        stored[name] = (plain[name].float() / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"], plain[name] = scale, stored[name].float() * scale
    save_file(stored, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    save_file(plain, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="fp8: weights that are stored in FP8 are dequantised to"):
        model = text.load(tmp_path / "fp8", dtype=dtype)
    assert (
        model.generate(PROMPT, **RAW).tokens
        == text.load(tmp_path / "plain", dtype=dtype).generate(PROMPT, **RAW).tokens
    )
    (tmp_path / "fp8" / "config.json").write_text(
        json.dumps(described | {"quantization_config": {"quant_method": "x"}})
    )
    with pytest.raises(LoadError, match="int4 needs our own decoder, but the weights are quantized by 'x'"):
        text.load(tmp_path / "fp8", dtype="int4")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_unsupported_architecture_runs_through_transformers(
    tiny: SimpleNamespace, tmp_path: Path, lm: TextModel
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tiny.write(tmp_path / "gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    model = text.load(folder, dtype="float32")
    assert isinstance(model.target(), TransformersTarget)
    assert model.context == 128
    plain, drafted = (model.generate(PROMPT, **RAW | {"drafter": name}).tokens for name in (None, "prompt-lookup"))
    assert plain == drafted
    talk = [{"role": "user", "content": "the cat"}]
    assert "reused" in model.generate(talk, drafter=None, max_new_tokens=4).trace.options
    reply = {"role": "assistant", "content": "x"}
    out = model.generate([*talk, reply, talk[0]], drafter=None, max_new_tokens=4)
    assert out.trace.options["reused"]
    assert out.tokens == model.generate([[*talk, reply, talk[0]]], drafter=None, max_new_tokens=4)[0].tokens
    with pytest.raises(LoadError, match="int4 needs our own decoder"):
        text.load(folder, dtype="int4")
    held = load_file(folder / "model.safetensors")
    del held["transformer.h.1.mlp.c_fc.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssetError, match=r"no tensor 'transformer.h.1.mlp.c_fc.weight'"):
        text.load(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_model_objects_run_and_changes_to_them_are_noticed(folder: Path, lm: TextModel) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = text.load(theirs, tokenizer=AutoTokenizer.from_pretrained(folder))
    assert isinstance(model.target(), Decoder), "a copy of the weights, on what is fastest"
    before = model.generate(PROMPT, **RAW).tokens
    assert before == lm.generate(PROMPT, **RAW).tokens
    theirs.model.embed_tokens.weight.data *= torch.linspace(-1, 1, 32)
    after = model.generate(PROMPT, **RAW).tokens
    assert after != before
    ids = torch.tensor([model.encode(PROMPT, raw=True)])
    wanted = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
    )
    assert wanted[0, ids.shape[1] :].tolist() == after
    theirs.model.layers[0].register_forward_hook(lambda *_: None)
    assert isinstance(model.target(), TransformersTarget), "with a hook it may compute something else"
    assert model.generate(PROMPT, **RAW).tokens == after
    with pytest.raises(InvalidOption, match="give it as tokenizer"):
        text.load(theirs)
    with pytest.raises(InvalidOption, match="a int is not a model"):
        text.load(3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_recurrent_state_raises_with_the_reason(tiny: SimpleNamespace, tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    folder = tiny.write(tmp_path / "mamba")
    config = MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(folder)
    with pytest.raises(Incompatible, match="reads one token per pass once it has a state"):
        text.load(folder, dtype="float32")


def _without(name: str) -> Any:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        del held[name]
        save_file(held, folder / "model.safetensors")

    return change


def _config(**changed: Any) -> Any:
    def change(folder: Path) -> None:
        result = json.loads((folder / "config.json").read_text()) | changed
        (folder / "config.json").write_text(json.dumps(result))

    return change


def _remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_without("model.layers.1.mlp.up_proj.weight"), CheckpointError, "no tensor 'model.layers.1.mlp.up_proj"),
        (_config(hidden_size=64), CheckpointError, "has the shape"),
        (_config(model_type="no_such_architecture"), AssetError, "transformers can't load .*no_such_architecture"),
        (
            _config(model_type="no_such_architecture", auto_map={"AutoModelForCausalLM": "x--y.Z"}),
            AssetError,
            "code of its own",
        ),
        (
            _config(model_type="gpt2", hidden_size=4096, num_attention_heads=64),
            AssetError,
            "parameters, but its weights have only .* lacks an entry",
        ),
        (_config(vocab_size=250), OutriderError, "has the shape|belong together"),
        (_remove("config.json"), LoadError, "no config.json"),
        (_remove("model.safetensors"), AssetError, "no safetensors"),
        (_remove("tokenizer.json"), OutriderError, "has no tokenizer|no fast version"),
    ],
)
def test_an_incomplete_model_folder_raises(
    spoil: Any, error: type[Exception], message: str, folder: Path, tmp_path: Path
) -> None:
    spoilt = shutil.copytree(folder, tmp_path / "m")
    spoil(spoilt)
    with pytest.raises(error, match=message):
        text.load(spoilt)


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ("no-such-model", {}, LoadError, "no model 'no-such-model'.*smollm2-135m"),
        ("./no/such", {}, LoadError, "not a folder or GGUF file"),
        (Path("some/folder"), {}, LoadError, "not a folder or GGUF file"),
        ("no-such.gguf", {}, AssetError, "there is no file"),
        ("owner/name", {}, AssetError, "not in the hub's cache and HF_HUB_OFFLINE is set"),
        ("smollm2-135m", {"dtype": "float8"}, InvalidOption, "unknown dtype 'float8'"),
    ],
)
def test_invalid_sources_raise(source: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        text.load(source, **options)


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "meta9"])
def test_a_missing_device_raises(device: str, folder: Path) -> None:
    with pytest.raises(InvalidOption, match="outrider doctor"):
        text.load(folder, device=device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_offloaded_layers_change_no_token(folder: Path, dtype: str) -> None:
    whole, part = (text.load(folder, dtype=dtype, offload=offload) for offload in (None, 0.5))
    wanted = whole.generate("the cat", drafter="prompt-lookup", max_new_tokens=12)
    assert part.generate("the cat", drafter="prompt-lookup", max_new_tokens=12).tokens == wanted.tokens
    with pytest.raises(Incompatible, match="offloaded"):
        part.generate("the cat", drafter="draft-verify", drafter_options={"skip": ("attention.1",)})


def test_invalid_offload_raises(folder: Path) -> None:
    with pytest.raises(InvalidOption, match="one layer has"):
        text.load(folder, dtype="float32", offload=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_of_8_bits(folder: Path, dtype: str) -> None:
    lm = text.load(folder, dtype=dtype, kv_cache_dtype="int8")
    plain, drafted = (lm.generate("the cat", drafter=one, max_new_tokens=12) for one in (None, "prompt-lookup"))
    assert drafted.tokens == plain.tokens
    assert plain.trace.options["kv_cache_dtype"] == "int8" and lm.measurement_key().endswith("cache-int8")
    exact = text.load(folder, dtype=dtype)
    assert lm.target().slot_bytes < exact.target().slot_bytes  # type: ignore[attr-defined]
    with pytest.raises(OutriderError, match="int8"):
        text.load(folder, kv_cache_dtype="int3")


@pytest.mark.parametrize("by_transformers", [False, True])
def test_code_beside_a_known_class_is_not_run(
    by_transformers: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the published folders of Phi-3 and DeepSeek-V3, whose classes transformers has by now."""
    copy = shutil.copytree(folder, tmp_path / "m")
    (copy / "configuration_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n")
    names = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "configuration_x.X"}
    config = json.loads((copy / "config.json").read_text()) | {"auto_map": names}
    (copy / "config.json").write_text(json.dumps(config))
    if by_transformers:
        refuse = CheckpointError("not on our own decoder")
        monkeypatch.setattr(checkpoints, "parse_config", lambda described: (_ for _ in ()).throw(refuse))
    lm = text.load(copy, dtype="float32")
    assert isinstance(lm.target(), TransformersTarget) == by_transformers
    assert lm.generate("the cat", max_new_tokens=4).tokens and not (tmp_path / "ran").exists()


def test_too_little_memory_is_said_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_loading, "free_memory", lambda device: 1000)
    with pytest.raises(LoadError, match=r"needs 0\.0 GB .* cpu has 0\.0 GB free; load a smaller model, give offload"):
        text.load(folder)
    assert text.load(folder, offload=0.5).generate("the cat", max_new_tokens=2).tokens


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss"])
def test_the_weights_are_counted_from_the_configuration(model_type: str) -> None:
    """As packed checkpoints have fewer elements than weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if model_type == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if model_type == "gpt_oss":
        shape |= {"num_local_experts": 4}
    config = AutoConfig.for_model(model_type, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = checkpoints.parse_config(config.to_dict()).parameters
    norms = sum(weight.numel() for name, weight in model.named_parameters() if "norm" in name or "bias" in name)
    assert 0 <= model.num_parameters() - norms - counted <= 0.01 * counted


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    spoilt = shutil.copytree(folder, tmp_path / "m")
    (spoilt / "model.safetensors").rename(spoilt / "model-00001-of-00002.safetensors")
    files = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (spoilt / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(AssetError, match=r"names files that are not beside it: model-00002-of-00002.safetensors"):
        text.load(spoilt)


def test_a_long_load_shows_a_progress_bar_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0)
    text.load(folder)
    assert "Loading tiny" not in capfd.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    text.load(folder)
    assert "Loading tiny" in capfd.readouterr().err


def test_a_gguf_file_is_named_by_its_path_in_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`outrider train --model` finds it by its path only."""
    writer = runpy.run_path(str(Path(__file__).parents[1] / "core" / "assets" / "test_gguf.py"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = writer["write"](tmp_path / "small.gguf")
    lm = text.load(file)
    with pytest.raises(InvalidOption, match=f"`outrider train eagle3 --model {file}`"):
        lm.generate("the cat", drafter="eagle3", max_new_tokens=4)
    assert f"--model {file}`" in lm.drafters["eagle3"].missing[0]


def test_other_programs_get_plain_weights_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    writer = runpy.run_path(str(Path(__file__).parents[1] / "core" / "assets" / "test_gguf.py"))
    file = tmp_path / "small.gguf"
    writer["write_quantised"](file, {"ffn_gate": writer["KINDS"].Q4_1, "ffn_up": writer["KINDS"].Q4_1})
    small, plain = (text.load(file, dtype=dtype) for dtype in ("int4", "bfloat16"))
    assert small.folder != plain.folder == plain.plain_folder() == small.plain_folder()
    assert "quantization_config" not in store.read_json(plain.folder / "config.json")
    parts = {name.rpartition("_")[2] for name in store.Checkpoint(small.folder) if "up_proj" in name}
    assert parts == {"levels", "scales", "offsets"}


def test_a_gguf_file_drafts_for_itself_with_its_weights_of_4_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    writer = runpy.run_path(str(Path(__file__).parents[1] / "core" / "assets" / "test_gguf.py"))
    file = tmp_path / "small.gguf"
    writer["write_quantised"](file, {"ffn_gate": writer["KINDS"].Q4_1, "ffn_up": writer["KINDS"].Q4_1})
    lm = text.load(file, dtype="bfloat16")
    network = decoder(lm).network
    drafting, stored = quantized(network, 4), decoder(text.load(file, dtype="int4", drafting=True)).network
    x = torch.randn(3, network.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(network.dtype)
    assert torch.equal(drafting.layers[0].up_gate(x), stored.layers[0].up_gate(x))
    assert drafting.embedding is network.embedding and quantized(network, 4) is drafting
    assert lm.generate("the cat", drafter="qspec", max_new_tokens=12).tokens == (
        lm.generate("the cat", drafter=None, max_new_tokens=12).tokens
    )
