"""The inputs of drafters that come from a text model: other models by name, bridges to other tokenizers, trained heads,
texts as token ids, bigrams, measured costs. One function each; independent of the names of drafters."""

from __future__ import annotations

import hashlib
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.store import head_folder
from outrider.core.cost.break_even import Costs
from outrider.core.drafters.draft_model.fewer_tokens import can_predict_fewer, predicting
from outrider.core.drafters.draft_model.vocab_bridge import Translated
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.engine.loading.model_object import target_of
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import AUTO, DRAFTERS, Input
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.resolve import DEFAULT, Request
from outrider.core.methods.row import HEADS, Method
from outrider.core.protocol import Drafter
from outrider.core.training.draft_head import DraftHead
from outrider.text import bigrams, datastore, recipes
from outrider.text.measurements import costs_of_rounds, draft_model_of, measured
from outrider.text.vocab_bridge import Bridge

if TYPE_CHECKING:
    from outrider.text.model import TextModel

_LONGEST = 10  # tokens that are drafted at most
# The next token is worth its costs, in target passes, if all before it are accepted with at least this many times that
# probability: it then is accepted three times in four itself, and a target pass is worth 1.5 tokens.
_WORTH = 2.0
_COMMON = 1 << 16  # tokens of a vocabulary of several languages that make 97 % of English text and code


def missing_inputs(target: str, method: Method, model: TextModel | None = None) -> tuple[str, ...]:
    """The inputs that a drafter of a target needs and that are missing, in words. If only the target's name is given,
    measurements count as missing."""
    missing = []
    given = (model is not None and model.draft_model is not None) or draft_model_of(target) is not None
    for option in method.needs:
        kind = method.inputs.get(option)
        if given and kind in (Input.DRAFT_MODEL, Input.FOREIGN_MODEL):
            continue
        if kind in HEADS:
            if model is not None and model.head is not None and method.name in drafters_of_head(model, model.head):
                continue
            source = shlex.quote(str(model.source if model else target))
            train = f"`outrider train {recipes.recipe_for(method)} --model {source}`"
            missing += [] if recipes.find(target, method.name) else [f"{kind}: {train}"]
        elif kind is Input.DRAFT_MODEL:
            trained = recipes.find(target, recipes.draft_model_for(target, method.name))
            missing += [] if trained else [f"{option}=..., {kind}"]
        elif kind is Input.SKIP:
            known = model is not None and measured(model, method.name).is_file()
            command = f"`outrider bench text --calibrate {method.name}` finds them"
            missing += [] if known else [f"{option}=..., {kind}: {command}"]
        elif kind in (Input.FOREIGN_MODEL, Input.DATASTORE):
            missing.append(f"{option}=..., {kind}")
    return tuple(missing)


# ---- models and heads


def companion(model: TextModel, source: Any) -> TextModel | None:
    """Another language model, given as NAME or NAME:DTYPE; None if the source is weights trained for this model."""
    if isinstance(source, type(model)):
        return source
    if not isinstance(source, str | Path) or Path(source).suffix == ".safetensors":
        return None
    return model.companion(str(source))


def target(model: TextModel, request: Request) -> Any:
    return _target(model, request.value) if request.given else model.target()


def draft_model(model: TextModel, vocabulary: int | None, request: Request) -> Any:
    """The draft model given, else the one trained for this target, else the one published for it."""
    return _predicting(named_draft_model(model, request.value, request.method.name), vocabulary)


def _predicting(draft_model: Any, count: int | None) -> Any:
    """The draft model with an output layer over its first `count` tokens; 0: over all; None: over those that are
    common, where that halves the layer. Tokenizers number frequent tokens first."""
    if not can_predict_fewer(draft_model):
        if count:
            raise InvalidOption(
                "draft_vocabulary needs a draft model that our own decoder runs, with the target's tokenizer"
            )
        return draft_model
    if count is None:
        count = _COMMON if draft_model.vocabulary >= 2 * _COMMON else 0
    return predicting(draft_model, count) if 0 < count < draft_model.vocabulary else draft_model


def confident_length(
    model: TextModel, source: Any, vocabulary: int | None, members: Callable[[], Mapping[str, Drafter]]
) -> dict[str, Any]:
    """Options of a draft model that drafts on while another token should pay, by the costs of rounds with these
    drafters. A drafted token is taken to cost what the draft model reads in a pass, in passes of the target."""
    drafted = _predicting(named_draft_model(model, source, DRAFT_MODEL.name), vocabulary)
    cost = drafted.weight_bytes / max(model.target().weight_bytes, 1)
    if not cost:
        return {}
    costs = Costs.parse(costs_of_rounds(model, "", members))
    verifying = (costs.ratio(1, _LONGEST) - 1) / _LONGEST
    threshold = round(min(_WORTH * (cost + max(verifying, 0.0)), 0.9), 2)
    return {"policy": "confidence", "threshold": threshold, "last": True, "joint": True, "length": _LONGEST}


def draft_models(model: TextModel, request: Request) -> Any:
    if not isinstance(request.value, Sequence) or isinstance(request.value, str):
        return request.value if request.given else DEFAULT
    return [_target(model, source) for source in request.value]


def foreign_model(model: TextModel, request: Request) -> Any:
    other = companion(model, request.value or draft_model_of(model.name))
    if other is not None:
        return other.target()
    if request.value is None or not _of_kind(request, Input.BRIDGE):
        raise InvalidOption(
            f"the drafter '{request.method.name}' needs {request.option}=..., another language model of any tokenizer: "
            "a name such as 'smollm2-135m', a folder, a GGUF file, or a loaded model"
        )
    return request.value  # a target, given with its bridge


def bridge(model: TextModel, request: Request) -> Any:
    if request.value is not None:
        return request.value
    other = companion(model, _of_kind(request, Input.FOREIGN_MODEL) or draft_model_of(model.name))
    return DEFAULT if other is None else _bridge(model, other)


def trained_head(model: TextModel, request: Request) -> Any:
    return _trained(model, request.method.name, request.value)


def _of_kind(request: Request, kind: Input) -> Any:
    """The value given for another input of the method."""
    return next((request.options.get(option) for option, each in request.method.inputs.items() if each is kind), None)


def _target(model: TextModel, source: Any) -> Any:
    """Another language model with its tokens translated to this one's; anything else is returned as it is."""
    other = companion(model, source)
    if other is None and hasattr(source, "generate") and hasattr(source, "config"):
        return target_of(source)[0]()  # a model object of transformers, which must have the same tokens
    if other is None:
        return source
    own = other.target()
    alike = own.vocabulary == model.target().vocabulary and other.tokens.names == model.tokens.names
    return own if alike else Translated(own, _bridge(model, other))


def _bridge(model: TextModel, other: TextModel) -> Bridge:
    if other not in model.bridges:
        sizes = model.target().vocabulary, other.target().vocabulary
        model.bridges[other] = Bridge(model.tokens, other.tokens, *sizes)
    return model.bridges[other]


def named_draft_model(model: TextModel, source: Any = None, drafter: str = DRAFT_MODEL.name) -> Any:
    """A draft model by name or file; None: the one trained for this target, else the one published for it."""
    if source is None and recipes.find(model.name, recipes.draft_model_for(model.name, drafter)) is None:
        source = draft_model_of(model.name)
    source = _target(model, source)
    return _trained(model, recipes.draft_model_for(model.name, drafter) if source is None else DRAFT_MODEL.name, source)


def _trained(model: TextModel, drafter: str, source: Any) -> Any:
    """The source if it is an object; else the weights in a file, or those of the drafter's recipe."""
    if source is not None and not isinstance(source, str | Path):
        return source
    path = recipes.find(model.name, drafter) if source is None else head_folder(source)
    if path is None:
        raise recipes.missing(model.source, drafter)
    if (path, drafter) in model.prepared_heads:
        return model.prepared_heads[path, drafter]
    if (path, drafter) not in model.draft_heads:
        model.draft_heads[path, drafter] = recipes.load(path, drafter, model.target())
    head = model.draft_heads[path, drafter].drafts(model.target())
    if isinstance(head, DraftHead):  # prepared for this machine, without the state of a generation
        model.prepared_heads[path, drafter] = head
    return head


def drafters_of_head(model: TextModel, source: Any) -> list[str]:
    """The drafters that can run a draft head, in the order of the table: eagle before eagle2."""
    path = head_folder(source) if isinstance(source, str | Path) else None
    head = source
    if path is not None:
        loaded = (each for (file, _), each in model.draft_heads.items() if file == path)
        head = next(loaded, None) or recipes.load(path, None, model.target())
    drafters = recipes.drafters_of(head)
    if not drafters:
        raise InvalidOption(
            f"head is a {type(head).__name__}, which no drafter runs; give a draft head, or its file, folder or hub id"
        )
    if path is not None:
        model.draft_heads[path, drafters[-1]] = head
    return drafters


def can_be_merged(model: TextModel, drafter: str) -> bool:
    """Whether `auto` merges a head's guesses with those of other drafters: fixed ones, in trees. On a GPU, where the
    rounds of a head alone are recorded and those of merged drafters wait for the host, it does not."""
    return model.device == "cpu" and DRAFTERS[drafter].drafts_trees


def can_draft_for_itself(model: TextModel) -> bool:
    """Whether there are cheaper views of the model: it runs on our own decoder, and its layers are in memory."""
    target = model.target()
    return isinstance(target, Decoder) and target.network.before_layer is None


def head_trained_here(model: TextModel) -> Path | None:
    """The best head that `outrider train` made for this target, of those that can be merged."""
    path = recipes.trained_tree(model.name) if model.device == "cpu" else None
    if path is None or not isinstance(model.target(), Decoder):
        return None
    try:
        drafters_of_head(model, path)
    except OutriderError as error:
        warnings.warn(f"`auto` does without {path}: {error}", stacklevel=2)
        return None
    return path


# ---- texts as token ids


def text(model: TextModel, request: Request) -> Any:
    return DEFAULT if request.value is None else _ids(model, request.value)


def texts(model: TextModel, request: Request) -> Any:
    if request.value is None:
        return DEFAULT
    given = [request.value] if isinstance(request.value, str) else request.value
    return [_ids(model, document) for document in given]


def store(model: TextModel, request: Request) -> Any:
    given = request.value
    if given is None and request.option not in request.method.needs:
        return DEFAULT
    if given is None:
        raise InvalidOption(
            f"the drafter '{request.method.name}' needs {request.option}=..., the path of a datastore; build one "
            "with `outrider datastore build FILES -o my.store`"
        )
    if isinstance(given, str | Path):
        return datastore.load(Path(given).expanduser(), model.tokens)
    return given if isinstance(given, Datastore) else [_ids(model, document) for document in given]


def _ids(model: TextModel, text: str | Sequence[int]) -> list[int]:
    return model.tokens.encode(text, special=False) if isinstance(text, str) else list(text)


# ---- computed or measured once per model


def bigram_table(model: TextModel, request: Request) -> Any:
    return request.value if request.given else bigrams.bigrams(model)


def successors(model: TextModel, request: Request) -> Any:
    """The initial table of successors: by default the model's bigrams, None for an empty one. Bigrams that take long to
    compute are computed only if "bigrams" is given; `auto` uses them if they are in the cache."""
    if request.given and request.value != "bigrams":
        return request.value
    wanted = request.given or (request.within is not AUTO and bigrams.quick(model.target()))
    table = bigrams.bigrams(model) if wanted else bigrams.known_bigrams(model, model.target().vocabulary)
    return None if table is None else bigrams.Bigrams(table)


def acceptance(model: TextModel, request: Request) -> Any:
    path = measured(model, request.method.name)
    return path if request.value is None and path.is_file() else request.value


def skip(model: TextModel, request: Request) -> Any:
    if request.value is not None:
        return request.value
    name, path = request.method.name, measured(model, request.method.name)
    if not path.is_file():
        raise InvalidOption(
            f"the drafter '{name}' needs {request.option}=..., the sublayers to skip, such as "
            f"'attention.5,mlp.5'; `outrider bench text --calibrate {name}` finds and stores them"
        )
    return path


def costs(model: TextModel, rows: int, request: Request) -> Any:
    """The costs given, else those of rounds measured on this machine; the trace records them."""
    given = request.value
    if given is None:
        own = request.method is AUTO
        members = request.members if own else partial(request.members, AUTO)
        given = costs_of_rounds(model, _label(request) if own else "", members, rows)
    if not isinstance(given, str):
        return given
    request.notes["costs"] = given
    return Costs.parse(given)


def _label(request: Request) -> str:
    """A suffix of the costs' file name for members or options other than the defaults."""
    usual, options = request.method.presets["drafters"], request.options.get("options")
    names = tuple(request.options.get("drafters", usual))
    label = (
        ""
        if names == usual
        else "-" + "+".join(name if isinstance(name, str) else type(name).__name__ for name in names)
    )
    return label + ("-" + hashlib.sha256(repr(options).encode()).hexdigest()[:8] if options else "")
