"""Options that several commands share, and functions that parse their values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from outrider.image import ImageModel, PublishedModel

# Defaults, so that `outrider --help` need not import the methods; a test compares them with the modalities' own.
TEXT_DRAFTER, IMAGE_DRAFTER, SPEECH_DRAFTER, LOOKUP_DRAFTER = "auto", "jacobi", "jacobi", "prompt-lookup"
RULE = "exact"
PLOT_ENDINGS = (".png", ".svg", ".pdf")  # of figures that matplotlib draws
COMMON_ENDINGS = (".png", ".jpg", ".webp", ".svg", ".pdf")  # of pictures, for messages
DEVICE = DTYPE = "auto"  # the best device of the machine, and the precision for it

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the results to FILE as JSON; - is stdout.",
        callback=lambda path: path if str(path) == "-" else writable(path),
    ),
]
DrafterNames = Annotated[
    str, typer.Option("--drafters", metavar="NAMES", help="Comma-separated drafters, from `outrider methods`.")
]
DrafterOptions = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set an option of the drafter. Repeatable.")
]
RuleName = Annotated[str, typer.Option(help="Acceptance rule, from `outrider methods`.")]
RuleNames = Annotated[
    str,
    typer.Option(
        "--rules", metavar="NAMES", help="Comma-separated acceptance rules; each is measured with each drafter."
    ),
]
RuleOptions = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set an option of the acceptance rule. Repeatable.")
]
DrafterGrid = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter-option",
        metavar="[DRAFTER.]NAME=V1,V2",
        help="Values of a drafter's option, one table row each; without DRAFTER, of every drafter that has it. "
        "Repeatable.",
    ),
]
RuleGrid = Annotated[
    list[str] | None,
    typer.Option(
        "--rule-option",
        metavar="[RULE.]NAME=V1,V2",
        help="Values of a rule's option, one table row each; without RULE, of every rule that has it. Repeatable.",
    ),
]
Compare = Annotated[
    bool, typer.Option("--compare", help="Run plain decoding too; report the speedup and whether the outputs agree.")
]
TraceFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the trace to FILE as JSON.", callback=lambda path: writable(path)),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy decoding.")]
TopK = Annotated[int, typer.Option(help="Sample from the K likeliest tokens; 0 turns this off.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted from the logit of every token generated before.")]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtracted from a token's logit once for every time it was generated before.")
]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same output.")]
FirstSeed = Annotated[int, typer.Option(help="Random seed of the first prompt; others use further seeds.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate per prompt.")]
NumPrompts = Annotated[int, typer.Option(min=1, help="Number of prompts.")]
FirstPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", min=1, help="Number of prompts, taken from the tasks in turn. Default: all."),
]
Repeat = Annotated[int, typer.Option(min=1, help="Timed repetitions of each prompt; the median is reported.")]
TextPrompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="JSON lines, each with `prompt`, `turns` or `messages` (SPEED-Bench); records: built-in texts to read "
        "out as JSON. Default: built-in prompts.",
    ),
]
ImagePrompts = Annotated[
    str, typer.Option("--prompts", metavar="SET|FILE", help="Built-in set (common, held-out), or a file of lines.")
]
TextModelName = Annotated[
    str, typer.Option("--model", help="Target: a catalogue name, a hub id, a folder or a GGUF file.")
]
TextDraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="NAME[:DTYPE]",
        help="Draft model: a catalogue name, a hub id, a folder or a GGUF file.",
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        "--head", metavar="NAME", help="Draft head: a hub id, a folder or a file. Default: the one that ships."
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens", min=1, help="Maximum number of draft tokens per target pass. Default: the drafter's."
    ),
]
TextDtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="Precision of the weights: float32, bfloat16, float16, int8 or int4; auto: by the device."
    ),
]
Dtypes = Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated precisions of the weights.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="Precision: float32, bfloat16, float16 (Llasa, Orpheus: int8, int4 too); auto: by the device.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="torch device: cpu, cuda, cuda:1, mps; auto is cuda, else mps, else cpu.",
        callback=lambda name: device_named(name),
    ),
]
KVCacheDtype = Annotated[
    str | None, typer.Option(help="Precision of the KV cache: int8. Default: that of the activations.")
]
VOCODER = "hifi-gan"
VocoderName = Annotated[
    str,
    typer.Option("--vocoder", help="Of our voice: hifi-gan, or vocos, which is far faster and sounds less clear."),
]
OwnWeights = Annotated[
    Path | None, typer.Option("--weights", metavar="DIR", help="Weights you trained. Default: those that ship.")
]
_SERVED = "The page on the network"
PageHost = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on. Any but this machine's own needs a password.",
        rich_help_panel=_SERVED,
    ),
]
PageAllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="Name or address by which the page is reached, besides --host. Repeatable.",
        rich_help_panel=_SERVED,
    ),
]
PagePassword = Annotated[
    str | None,
    typer.Option(
        metavar="PASSWORD",
        envvar="OUTRIDER_PASSWORD",
        help="Password of the page. The variable keeps it out of the list of processes.",
        rich_help_panel=_SERVED,
    ),
]
PublishedName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Published model: a hub id (owner/name) or a folder.")
]
DraftModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Draft model of the same family: a hub id or a folder.")
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Set a loading option of the published model. Repeatable."),
]
Style = Annotated[
    str | None, typer.Option(help="Emoji style: noto, twemoji, openmoji, fluent. Default: by the prompt.")
]
GuidanceScale = Annotated[
    float | None,
    typer.Option(help="Classifier-free guidance; 1 turns it off. Default: 3, or the published model's."),
]
ImageBatch = Annotated[int, typer.Option(min=1, help="Images decoded side by side.")]


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr while something long runs, gone when it ends; yields a function that changes its text. Nothing
    is shown where stderr is no terminal."""
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield status.update


def writable(path: Path | None, endings: Iterable[str] = ()) -> Path | None:
    """The path of an output, refused before any work if it can't be written: its folder is missing, it is a folder, or
    its ending is not one of `endings`, where there are any."""
    if path is None:
        return None
    folder = next(parent for parent in path.absolute().parents if parent.exists())  # folders below are made
    known = sorted(endings)
    if known and path.suffix.lower() not in known:
        shown = [ending for ending in COMMON_ENDINGS if ending in known] or known
        raise typer.BadParameter(f"'{path}' must end in {' or '.join(shown)}")
    if not folder.is_dir():
        raise typer.BadParameter(f"'{path}' can't be written: {folder} is no folder")
    if path.is_dir():
        raise typer.BadParameter(f"'{path}' is a folder; give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"'{path}' can't be written: permission denied")
    return path


def picture_file(path: Path) -> Path:
    """The path of an image, in a format that Pillow writes."""
    from PIL import Image

    Image.init()
    return (
        writable(path, (ending for ending, name in Image.registered_extensions().items() if name in Image.SAVE)) or path
    )


def device_named(name: str) -> str:
    """The name of a device; auto is the best of this machine."""
    if name != DEVICE:
        return name
    from outrider.core.device import best_device

    return best_device()


def methods(drafter: str, rule: str, drafter_option: list[str] | None, rule_option: list[str] | None) -> dict[str, Any]:
    """Drafter and rule as keyword arguments of `generate`; "plain" means no drafter."""
    return {
        "drafter": None if drafter in ("plain", "none") else drafter,
        "rule": rule,
        "drafter_options": pairs(drafter_option, "--drafter-option"),
        "rule_options": pairs(rule_option, "--rule-option"),
    }


def names(given: str) -> tuple[str, ...]:
    """The names of a comma-separated list."""
    return tuple(name.strip() for name in given.split(",") if name.strip())


def pairs(given: list[str] | None, name: str) -> dict[str, Any]:
    """Parse NAME=VALUE arguments; a value is parsed as JSON if it is valid JSON, else it is text."""
    options = {}
    for argument in given or []:
        key, sign, value = argument.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"'{argument}' is not of the form NAME=VALUE", param_hint=name)
        try:
            options[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            options[key.replace("-", "_")] = value
    return options


def by_owner(given: list[str] | None, name: str) -> dict[str, dict[str, Any]]:
    """Parse OWNER.NAME=VALUE arguments into each owner's options."""
    options: dict[str, dict[str, Any]] = {}
    for argument in given or []:
        owner, dot, option = argument.partition(".")
        if not dot or "=" in owner:
            raise typer.BadParameter(f"'{argument}' is not of the form OWNER.NAME=VALUE", param_hint=name)
        options.setdefault(owner, {}).update(pairs([option], name))
    return options


def listed(given: list[str] | None, name: str) -> dict[str, Any]:
    """Parse [METHOD.]NAME=V1,V2 arguments into lists of values; a value that is valid JSON counts as one."""
    options: dict[str, Any] = {}
    for argument in given or []:
        key, sign, values = argument.partition("=")
        owner, dot, option = key.rpartition(".")
        ((plain, value),) = pairs([f"{option}{sign}{values}"], name).items()
        several = values.split(",") if isinstance(value, str) else [values]
        options[f"{owner}{dot}{plain}"] = [pairs([f"_={part}"], name)["_"] for part in several]
    return options


def published(
    model: str | None, draft_model: str | None, model_option: list[str] | None, weights: Path | None
) -> dict[str, Any] | None:
    """Keyword arguments of `load` for a published model, with the folder of its heads; None where --model is not
    given."""
    options = {} if draft_model is None else {"draft_model": draft_model}
    options |= pairs(model_option, "--model-option")
    if model is None and options:
        raise typer.BadParameter("needs --model, the published model", param_hint="--draft-model, --model-option")
    return None if model is None else {**options, "folder": weights}


def shown_model(
    panel: str, model: str | None, draft_model: str | None, option: list[str] | None
) -> dict[str, Any] | None:
    """The published model that a tab of the page shows; None: the model that ships."""
    if model is None and (draft_model is not None or option):
        raise typer.BadParameter(
            f"needs --{panel}-model, the published model", param_hint=f"--{panel}-draft-model, --{panel}-model-option"
        )
    if model is None:
        return None
    return {"model": model, "draft_model": draft_model, "options": pairs(option, f"--{panel}-model-option")}


def image_model(
    model: str | None,
    draft_model: str | None,
    model_option: list[str] | None,
    weights: Path | None,
    *,
    device: str,
    dtype: str,
) -> ImageModel | PublishedModel:
    """The published image model of this name; without a name, the one that ships."""
    from outrider.image import load

    options = published(model, draft_model, model_option, weights)
    if options is None:
        return load("emoji", device=device, dtype=dtype, folder=weights)
    loaded: PublishedModel = load(str(model), device=device, dtype=dtype, **options)
    return loaded


def image_prompts(prompts: str) -> tuple[str, ...]:
    """The prompts of a built-in set, or the lines of a file."""
    from outrider.image.prompt_encoder import PROMPTS

    if prompts in PROMPTS:
        return PROMPTS[prompts]
    file = Path(prompts)
    if not file.is_file():
        raise typer.BadParameter(
            f"there is no file {file}; the built-in sets are {' and '.join(PROMPTS)}", param_hint="--prompts"
        )
    return lines(file)


def lines(file: Path) -> tuple[str, ...]:
    """The lines of a text file that are not blank."""
    from outrider.core.errors import InvalidOption, unreadable

    try:
        return tuple(filter(None, map(str.strip, file.read_text("utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(unreadable(file, error)) from None


def file_size(count: int) -> str:
    """Bytes as a number below 1000 with its unit: 27 MB."""
    amount, unit = float(count), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}"
