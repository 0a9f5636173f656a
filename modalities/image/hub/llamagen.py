"""LlamaGen (arXiv 2406.06525) on our own transformer: images of a class or a caption, as codes of a VQGAN.

`convert` turns the two published files (transformer and image tokenizer) into a folder for `outrider.image.load`.
Rotary positions are by row and column; the positions before the image are not rotated. As in the original code,
guidance compares with the unconditional class, or with the unconditional caption cut to the prompt's length. Captions
are encoded by a T5 of transformers in lower case; the original code also removes URLs and special characters, and
masks padding before a caption, which is left out here. Code ids come first, then those of classes, or of T5's words and
the unconditional caption.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.assets import store
from outrider.core.assets.hub_models import DTYPES, folder_of
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.checkpoints import assemble
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.image.grid import Grid
from outrider.image.hub.vqgan import Vqgan
from outrider.image.tokenizer import images, most_frequent

if TYPE_CHECKING:
    from PIL.Image import Image

KIND = "llamagen"
TEXT_ENCODER = "google/flan-t5-xl"
# (width, layers) -> attention heads, which tensor shapes do not reveal: B, L, XL, XXL, XXXL, 1B, 3B, 7B
_HEADS = {
    (768, 12): 12,
    (1024, 24): 16,
    (1280, 36): 20,
    (1536, 48): 24,
    (2560, 48): 40,
    (2048, 22): 32,
    (3200, 24): 32,
    (4096, 32): 32,
}
_CODEC = "codec.safetensors"


class LlamaGen:
    """A network with its conditioning tensors and image tokenizer; `text` names the T5 that encodes captions."""

    def __init__(
        self, config: Mapping[str, Any], network: Network, conditioning: Mapping[str, Tensor], codec: Vqgan, text: str
    ) -> None:
        self.codec, self._text, self._conditioning, self.network = codec, text, conditioning, network
        self.raster, self.vocabulary = Grid(config["side"], config["side"]), network.config.vocabulary
        self.classes: list[str] = config.get("classes") or []
        self.captioned = "nothing" in conditioning
        self.guidance = 7.5 if self.captioned else 4.0
        self._networks: dict[int, Network] = {}

    # ---- prompts

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give " + ("a caption" if self.captioned else "a class"))
        if self.captioned:
            limit = len(self._conditioning["nothing"])
            ids = self._text_encoder[1](prompt.strip().lower(), truncation=True, max_length=limit).input_ids
            return [self.vocabulary + int(token) for token in ids]
        count = len(self._conditioning["table"]) - 1
        if prompt.strip().isdigit() and int(prompt) < count:
            return [self.vocabulary + int(prompt)]
        if prompt.strip() not in self.classes:
            if self.classes:
                raise unknown("class", prompt, self.classes)
            raise InvalidOption(f"'{prompt}' is not a class; give a number from 0 to {count - 1}")
        return [self.vocabulary + self.classes.index(prompt.strip())]

    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        if not self.captioned:
            return [self.vocabulary + len(self._conditioning["table"]) - 1]
        end = len(self._conditioning["nothing"])
        return [self.vocabulary + self._num_words + index for index in range(end - len(prompt), end)]

    @cached_property
    def _text_encoder(self) -> tuple[Any, Any]:
        """The T5 model and its tokenizer."""
        folder = folder_of(self._text)
        dtype = str(self.network.dtype).removeprefix("torch.")
        model = store.transformers_model(folder, dtype, self.network.device, "T5EncoderModel")
        return model, store.transformers_processor(folder)

    @property
    def _num_words(self) -> int:
        return int(self._text_encoder[0].config.vocab_size)

    @torch.no_grad()
    def _project(self, features: Tensor) -> Tensor:
        """T5 features of a caption [L, C] -> input embeddings [L, D]."""
        inner = F.gelu(F.linear(features, self._conditioning["fc1"]), approximate="tanh")
        return F.linear(inner, self._conditioning["fc2"])

    # ---- images

    def target(
        self, prompts: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        lengths = {len(prompt) for prompt in prompts}
        if len(lengths) > 1:
            raise InvalidOption(
                f"the captions of this batch are {', '.join(map(str, sorted(lengths)))} tokens long; captions of one "
                "batch must be equally long, so generate them one after another"
            )
        if not self.captioned:
            free = [unconditional or self.unconditional(prompt) for prompt in prompts]
            return Guided(Decoder(self._class_network), prompts, free, guidance, skip_first=True)
        if unconditional is not None:
            raise InvalidOption(
                "a model of captions was trained with one unconditional caption; leave out negative_prompt"
            )
        length, first = lengths.pop(), self.vocabulary
        with torch.no_grad():
            ids = torch.tensor(prompts, device=self.network.device) - self.vocabulary
            captions = self._project(self._text_encoder[0](input_ids=ids).last_hidden_state).flatten(0, 1)
            nothing = self._project(self._conditioning["nothing"][-length:])
        network = copy.copy(self._after(length))
        network.embedding = torch.cat([network.embedding, captions, nothing])
        caption_ids = [list(range(first + row * length, first + (row + 1) * length)) for row in range(len(prompts))]
        last = first + len(prompts) * length
        free = [list(range(last, last + length))] * len(prompts)
        return Guided(Decoder(network), caption_ids, free, guidance, skip_first=True)

    @cached_property
    def _class_network(self) -> Network:
        """The network with class embeddings after those of codes."""
        network = copy.copy(self._after(1))
        network.embedding = torch.cat([network.embedding, self._conditioning["table"]])
        return network

    def _after(self, prompt_length: int) -> Network:
        """The network for images that begin after `prompt_length` tokens."""
        if prompt_length not in self._networks:
            base = self.network
            scaling = ("grid", {"columns": float(self.raster.columns), "first": float(prompt_length)})
            config = replace(base.config, rope_scaling=scaling, context=prompt_length + len(self.raster))
            self._networks[prompt_length] = Network(config, base.embedding, base.layers, base.norm, base.head)
        return self._networks[prompt_length]

    def to_images(self, grids: Tensor) -> list[Image]:
        return images(self.codec.decode(grids))

    @cached_property
    def white(self) -> int:
        return most_frequent(self.codec.encode(torch.ones(1, 3, 8 * self.codec.factor, 8 * self.codec.factor)))

    @property
    def code_vectors(self) -> Tensor:
        return self.codec.codes


def open_folder(folder: Path, dtype: str, device: torch.device | str, *, text: str | None = None) -> LlamaGen:
    """Open a folder written by `convert`. `text` names a T5 to use instead of the one in the folder's config."""
    described, tensors = store.read_json(folder / "config.json"), store.tensors_of(folder / "model.safetensors")
    width, layers, heads = (int(described[name]) for name in ("width", "layers", "heads"))
    dim = width // heads
    config = Config(
        vocabulary=len(tensors["model.embed_tokens.weight"]),
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=len(tensors["model.layers.0.self_attn.k_proj.weight"]) // dim,
        head_dim=dim,
        intermediate_size=len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        norm_eps=1e-5,
        tied=False,
    )
    own = {name: tensors[name] for name in tensors if not name.startswith("before.")}
    network = assemble(config, own, dtype=DTYPES[dtype], device=device, convert=fastest)
    conditioning = {
        name.removeprefix("before."): tensors[name].to(device, DTYPES[dtype]) for name in tensors if name not in own
    }
    codec = Vqgan(store.tensors_of(folder / _CODEC), device)
    if len(codec.codes) != config.vocabulary:
        raise Incompatible(f"the model has {config.vocabulary:,} codes and its tokenizer {len(codec.codes):,}")
    return LlamaGen(described, network, conditioning, codec, text or described.get("text", TEXT_ENCODER))


# ---- conversion of published files


def convert(
    model: str | Path,
    codec: str | Path,
    folder: str | Path,
    *,
    pixels: int,
    heads: int | None = None,
    text: str = TEXT_ENCODER,
    classes: Sequence[str] = (),
) -> Path:
    """Convert published files, such as c2i_L_384.pt and vq_ds16_c2i.pt, to a folder for `outrider.image.load`.

    `pixels` is the side of the images that the model was trained on; `heads` is needed for unpublished sizes;
    `classes` are optional names to give as prompts instead of class numbers; `text` is the T5 that encodes captions."""
    weights = _unwrap(store.tensors_of(Path(model)), "tok_embeddings.weight")
    codec_weights = _unwrap(store.tensors_of(Path(codec)), "quantize.embedding.weight")
    width = weights["tok_embeddings.weight"].shape[1]
    layers = _num_layers(weights)
    heads = heads or _HEADS.get((width, layers))
    if heads is None:
        raise InvalidOption(f"a model of {layers} layers of width {width} is not a published size; give heads=")
    factor = Vqgan(codec_weights).factor
    if pixels % factor:
        raise InvalidOption(f"pixels is {pixels}; it must be a multiple of {factor}, the side of a code's patch")
    path = Path(folder).expanduser()
    store.write_tensors(path / "model.safetensors", renamed(weights, heads))
    store.write_tensors(
        path / _CODEC,
        {name: tensor.contiguous() for name, tensor in codec_weights.items() if "codebook_used" not in name},
    )
    described = {"model_type": KIND, "width": width, "layers": layers, "heads": heads, "side": pixels // factor}
    described |= {"text": text} if "cls_embedding.uncond_embedding" in weights else {"classes": list(classes)}
    store.write_atomically(path / "config.json", json.dumps(described, indent=2))
    return path


def _unwrap(tensors: Mapping[str, Tensor], known: str) -> dict[str, Tensor]:
    """The weights among the tensors of a training checkpoint, with the prefix of their part removed; `known` is the
    name of one of them."""
    for prefix in ("", "model.", "module.", "state_dict.", "ema."):
        if prefix + known in tensors:
            names = [name for name in tensors if name.startswith(prefix)]
            if not prefix:  # the file may hold other parts beside the weights
                names = [name for name in names if name.split(".")[0] not in ("optimizer", "ema", "discriminator")]
            return {name.removeprefix(prefix): tensors[name] for name in names}
    raise Incompatible(f"the file has no tensor '{known}'; is it published by LlamaGen?")


def _num_layers(weights: Mapping[str, Tensor]) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("layers.")})


def renamed(weights: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The transformer's tensors under Llama's names in transformers, and the conditioning tensors under "before.".

    LlamaGen stores the two components of each rotary pair next to each other; the rows of queries and keys are
    reordered so that they are half a head apart."""
    result = {
        "model.embed_tokens.weight": weights["tok_embeddings.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    parts = {"table": "embedding_table.weight", "fc1": "cap_proj.fc1.weight", "fc2": "cap_proj.fc2.weight"}
    for ours, theirs in {**parts, "nothing": "uncond_embedding"}.items():
        if f"cls_embedding.{theirs}" in weights:
            result[f"before.{ours}"] = weights[f"cls_embedding.{theirs}"]
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    }
    width = weights["tok_embeddings.weight"].shape[1]
    dim = width // heads
    for index in range(_num_layers(weights)):
        source, target = f"layers.{index}", f"model.layers.{index}"
        for theirs, ours in names.items():
            result[f"{target}.{ours}.weight"] = weights[f"{source}.{theirs}.weight"]
        qkv = weights[f"{source}.attention.wqkv.weight"]
        kv_width = (len(qkv) - width) // 2
        for part, weight in zip("qkv", torch.split(qkv, [width, kv_width, kv_width]), strict=True):
            if part != "v":
                weight = weight.view(-1, dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
            result[f"{target}.self_attn.{part}_proj.weight"] = weight
    return {name: tensor.contiguous() for name, tensor in result.items()}
