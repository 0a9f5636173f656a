"""LlamaGen (arXiv 2406.06525) on our own transformer: pictures of a class or of a caption, as codes of a VQGAN.

`convert` makes a folder of the two files that are published, one of the transformer and one of the picture tokenizer;
`outrider.image.load` opens it. Rotary positions go by row and column, and what stands before the picture has none.
Guidance is against the class of nothing, or the caption of nothing cut to the asked one's length, as its own code does
it. A caption is read by a T5 of transformers, in lower case; its own code also strips addresses and other marks out.
Padding in front of a caption, which its own code hides, is left out instead. Ids of codes come first, then those of
classes, or of T5's words and the caption of nothing.
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
TEXT = "google/flan-t5-xl"
# heads by width and layers, which the tensors don't tell: B, L, XL, XXL, XXXL, 1B, 3B, 7B
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
    """A network with its conditions and its picture tokenizer; `text` names the T5 that reads captions."""

    def __init__(
        self, described: Mapping[str, Any], network: Network, before: Mapping[str, Tensor], codec: Vqgan, text: str
    ) -> None:
        self.codec, self._text, self._before, self._network = codec, text, before, network
        self.raster, self.vocabulary = Grid(described["side"], described["side"]), network.config.vocabulary
        self.classes: list[str] = described.get("classes") or []
        self.captioned = "nothing" in before
        self.guidance = 7.5 if self.captioned else 4.0
        self._networks: dict[int, Network] = {}

    # ---- what is asked for

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give " + ("a caption" if self.captioned else "a class"))
        if self.captioned:
            found = self._reader[1](
                prompt.strip().lower(), truncation=True, max_length=len(self._before["nothing"])
            ).input_ids
            return [self.vocabulary + int(one) for one in found]
        count = len(self._before["table"]) - 1
        if prompt.strip().isdigit() and int(prompt) < count:
            return [self.vocabulary + int(prompt)]
        if prompt.strip() not in self.classes:
            if self.classes:
                raise unknown("class", prompt, self.classes)
            raise InvalidOption(f"'{prompt}' is no class; give its number, from 0 to {count - 1}")
        return [self.vocabulary + self.classes.index(prompt.strip())]

    def free(self, asked: Sequence[int]) -> list[int]:
        if not self.captioned:
            return [self.vocabulary + len(self._before["table"]) - 1]
        count, nothing = len(asked), len(self._before["nothing"])
        return [self.vocabulary + self._words + place for place in range(nothing - count, nothing)]

    @cached_property
    def _reader(self) -> tuple[Any, Any]:
        folder = folder_of(self._text)
        dtype = str(self._network.dtype).removeprefix("torch.")
        model = store.transformers_model(folder, dtype, self._network.device, "T5EncoderModel")
        return model, store.transformers_processor(folder)

    @property
    def _words(self) -> int:
        return int(self._reader[0].config.vocab_size)

    @torch.no_grad()
    def _projected(self, features: Tensor) -> Tensor:
        """What T5 makes of a caption [L, C] -> what the network reads [L, D]."""
        inner = F.gelu(F.linear(features, self._before["fc1"]), approximate="tanh")
        return F.linear(inner, self._before["fc2"])

    # ---- what draws it

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Guided:
        lengths = {len(one) for one in asked}
        if len(lengths) > 1:
            raise InvalidOption(
                f"captions of one batch are {', '.join(map(str, sorted(lengths)))} tokens long, and their pictures "
                "would begin in different places; draw them one after another"
            )
        free = [self.free(one) for one in asked]
        if not self.captioned:
            return Guided(Decoder(self._wide), asked, free, guidance, instead=True)
        length, first = lengths.pop(), self.vocabulary
        with torch.no_grad():
            ids = torch.tensor(asked, device=self._network.device) - self.vocabulary
            heard = self._projected(self._reader[0](input_ids=ids).last_hidden_state).flatten(0, 1)
            nothing = self._projected(self._before["nothing"][-length:])
        told = [list(range(first + row * length, first + (row + 1) * length)) for row in range(len(asked))]
        network = copy.copy(self._at(length))
        network.embedding = torch.cat([network.embedding, heard, nothing])
        last = first + len(asked) * length
        return Guided(Decoder(network), told, [list(range(last, last + length))] * len(asked), guidance, instead=True)

    @cached_property
    def _wide(self) -> Network:
        """With the classes behind the codes."""
        found = copy.copy(self._at(1))
        found.embedding = torch.cat([found.embedding, self._before["table"]])
        return found

    def _at(self, first: int) -> Network:
        """The network whose pictures begin behind so many tokens."""
        if first not in self._networks:
            given = self._network
            scaling = ("grid", {"columns": float(self.raster.columns), "first": float(first)})
            config = replace(given.config, rope_scaling=scaling, context=first + len(self.raster))
            self._networks[first] = Network(config, given.embedding, given.layers, given.norm, given.head)
        return self._networks[first]

    def pictures(self, grids: Tensor) -> list[Image]:
        return images(self.codec.decode(grids))

    @cached_property
    def white(self) -> int:
        return most_frequent(self.codec.encode(torch.ones(1, 3, 8 * self.codec.factor, 8 * self.codec.factor)))

    @property
    def looks(self) -> Tensor:
        return self.codec.codes


def opened(folder: Path, dtype: str, device: torch.device | str, *, text: str | None = None) -> LlamaGen:
    """A folder that `convert` wrote; `text` names another T5 than it does."""
    described, tensors = store.read_json(folder / "config.json"), store.tensors_of(folder / "model.safetensors")
    width, layers, heads = (int(described[name]) for name in ("width", "layers", "heads"))
    dim = width // heads
    config = Config(
        vocabulary=len(tensors["model.embed_tokens.weight"]),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=len(tensors["model.layers.0.self_attn.k_proj.weight"]) // dim,
        head_dim=dim,
        hidden=len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        norm_eps=1e-5,
        tied=False,
    )
    own = {name: tensors[name] for name in tensors if not name.startswith("before.")}
    network = assemble(config, own, dtype=DTYPES[dtype], device=device, form=fastest)
    before = {
        name.removeprefix("before."): tensors[name].to(device, DTYPES[dtype]) for name in tensors if name not in own
    }
    codec = Vqgan(store.tensors_of(folder / _CODEC), device)
    if len(codec.codes) != config.vocabulary:
        raise Incompatible(f"the model draws {config.vocabulary:,} codes and its tokenizer has {len(codec.codes):,}")
    return LlamaGen(described, network, before, codec, text or described.get("text", TEXT))


# ---- from what is published


def convert(
    model: str | Path,
    codec: str | Path,
    folder: str | Path,
    *,
    pixels: int,
    heads: int | None = None,
    text: str = TEXT,
    classes: Sequence[str] = (),
) -> Path:
    """A folder for `outrider.image.load`, of published files such as c2i_L_384.pt and vq_ds16_c2i.pt. `pixels` is the
    side of the pictures that it was trained on; `heads`, of sizes that aren't published; `classes`, names to call
    classes by instead of their numbers; `text`, the T5 that captions were read by."""
    from safetensors.torch import save_file

    found = _named(store.tensors_of(Path(model)), "tok_embeddings.weight")
    drawn = _named(store.tensors_of(Path(codec)), "quantize.embedding.weight")
    width = found["tok_embeddings.weight"].shape[1]
    layers = len({name.split(".")[1] for name in found if name.startswith("layers.")})
    heads = heads or _HEADS.get((width, layers))
    if heads is None:
        raise InvalidOption(
            f"a model of {layers} layers of {width} isn't one of the published; say how many heads it has"
        )
    factor = Vqgan(drawn).factor
    if pixels % factor:
        raise InvalidOption(f"pixels is {pixels}; a code stands for {factor} of them on each side, so it must divide")
    place = Path(folder).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    save_file(renamed(found, heads), str(place / "model.safetensors"))
    save_file(
        {name: one.contiguous() for name, one in drawn.items() if "codebook_used" not in name}, str(place / _CODEC)
    )
    described = {"model_type": KIND, "width": width, "layers": layers, "heads": heads, "side": pixels // factor}
    described |= {"text": text} if "cls_embedding.uncond_embedding" in found else {"classes": list(classes)}
    store.written(place / "config.json", json.dumps(described, indent=2))
    return place


def _named(tensors: Mapping[str, Tensor], known: str) -> dict[str, Tensor]:
    """Without the name of the part of a training's file that the weights stand in."""
    for before in ("", "model.", "module.", "state_dict.", "ema."):
        if before + known in tensors:
            held = [name for name in tensors if name.startswith(before)]
            if not before:  # other parts may stand beside
                held = [name for name in held if name.split(".")[0] not in ("optimizer", "ema", "discriminator")]
            return {name.removeprefix(before): tensors[name] for name in held}
    raise Incompatible(f"the file holds no tensor '{known}'; is it one that LlamaGen publishes?")


def renamed(found: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The transformer's tensors under the names of Llama in transformers, and the conditions' under "before."; queries
    and keys with the pairs that turn together half a head apart, as ours have them, where theirs stand side by side."""
    made = {
        "model.embed_tokens.weight": found["tok_embeddings.weight"],
        "model.norm.weight": found["norm.weight"],
        "lm_head.weight": found["output.weight"],
    }
    parts = {"table": "embedding_table.weight", "fc1": "cap_proj.fc1.weight", "fc2": "cap_proj.fc2.weight"}
    for ours, theirs in {**parts, "nothing": "uncond_embedding"}.items():
        if f"cls_embedding.{theirs}" in found:
            made[f"before.{ours}"] = found[f"cls_embedding.{theirs}"]
    plain = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    }
    width = found["tok_embeddings.weight"].shape[1]
    dim = width // heads
    for index in range(len({name.split(".")[1] for name in found if name.startswith("layers.")})):
        theirs, ours = f"layers.{index}", f"model.layers.{index}"
        for one, other in plain.items():
            made[f"{ours}.{other}.weight"] = found[f"{theirs}.{one}.weight"]
        every = found[f"{theirs}.attention.wqkv.weight"]
        shared = (len(every) - width) // 2
        for part, weight in zip("qkv", torch.split(every, [width, shared, shared]), strict=True):
            if part != "v":
                weight = weight.view(-1, dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
            made[f"{ours}.self_attn.{part}_proj.weight"] = weight
    return {name: one.contiguous() for name, one in made.items()}
