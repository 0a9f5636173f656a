"""The demo in the terminal: a table and a tiny decoder, each with plain decoding and with a drafter, step by step.

Both models are generated from a seed, so nothing is fetched; tokens are numbers without meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.rule import Rule as Line
from rich.text import Text

from outrider.app.commands.threads import threads
from outrider.app.viz import terminal
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.tree_shapes import branching
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import unknown
from outrider.core.methods import DRAFTERS, RULES, make_drafter, make_rule
from outrider.core.methods.draft_model import DRAFT_MODEL, DYNAMIC_TREE, SAMPLED_TREE, TOP_K_TREE
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.methods.rules import BLOCK, EXACT, GUMBEL_MATCH, LENIENCE
from outrider.core.protocol import Target
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Step, Summary, Trace, machine, versions

VOCABULARY = 100
_PAUSE = 0.02  # seconds per target pass, in a terminal
_TREE = branching((2, 2, 1))
_SMALL: dict[str, dict[str, Any]] = {  # drafts small enough to print
    DRAFT_MODEL.name: {"length": 4},
    SAMPLED_TREE.name: {"tree": _TREE},
    TOP_K_TREE.name: {"tree": _TREE},
    DYNAMIC_TREE.name: {"nodes": 8, "width": 2, "depth": 3},
    JACOBI.name: {"window": 4},
    PROMPT_LOOKUP.name: {"length": 4},
}
_SHAPE = Config(
    vocabulary=VOCABULARY, hidden_size=64, layers=8, heads=4, kv_heads=2, head_dim=16, intermediate_size=128
)
_EXIT = 2  # layers used for drafting
_REFINING = 0.2  # scale of the later layers, which add less than the first ones, as in trained models
_RELAXED, _SETTINGS = LENIENCE.name, dict.fromkeys(LENIENCE.options, 0.5)
_ROWS = 16
_WIDEST = 100  # columns


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `outrider demo`."""

    drafter: str | None = None  # None: a chain for the table, a tree for the decoder
    rule: str = EXACT.name
    temperature: float = 1.0
    seed: int = 0
    tokens: int = 48


@dataclass(frozen=True, eq=False)
class Scene:
    """A target and its drafter."""

    name: str
    title: str
    models: str
    target: Target
    small: Target
    drafter: str
    options: Options

    @property
    def prompt(self) -> list[int]:
        return [(self.options.seed + place) % VOCABULARY for place in (3, 1, 4)]

    def steps(
        self,
        drafter: str | None,
        rule: str,
        temperature: float,
        reference: tuple[int, ...] = (),
        rows: int = 1,
        **settings: Any,
    ) -> Iterator[Step]:
        """Decode one or several rows. A drafter that copies gets a reference to copy from."""
        given: dict[str, Any] = dict(_SMALL.get(drafter or "", {}))
        if drafter and "model" in DRAFTERS[drafter].needs:
            given["model"] = self.small
        if drafter and reference and "references" in DRAFTERS[drafter].options:
            given["references"] = (reference,)
        return decode(
            self.target,
            make_drafter(drafter, **given),
            make_rule(rule, **settings),
            [self.prompt] * rows,
            sampling=Sampling(temperature=temperature),
            max_new_tokens=self.options.tokens,
            seed=range(self.options.seed, self.options.seed + rows),
        )

    def reference(self, plain: list[Step]) -> tuple[int, ...]:
        """The text for drafters that copy: the output of plain decoding with every seventh token changed."""
        tokens = (token for step in plain for token in step.emitted)
        return tuple((token + 1) % VOCABULARY if place % 7 == 6 else token for place, token in enumerate(tokens))

    def trace(self, steps: list[Step], drafter: str | None) -> Trace:
        options = self.options
        return Trace(
            steps=tuple(steps),
            method=drafter or "plain",
            rule=options.rule,
            lossless=make_rule(options.rule).lossless,
            seed=options.seed,
            options={"target": self.name, "temperature": options.temperature, "tokens": options.tokens},
            machine=machine(),
            versions=versions(),
        )

    def same(self, rule: str, temperature: float) -> tuple[int, int]:
        """How many tokens equal those of plain decoding, and the number of tokens."""
        plain = list(self.steps(None, rule, temperature))
        fast = list(self.steps(self.drafter, rule, temperature, self.reference(plain)))
        expected, actual = Trace(tuple(plain)).tokens(), Trace(tuple(fast)).tokens()
        return sum(a == b for a, b in zip(expected, actual, strict=True)), len(expected)


def scenes(options: Options) -> list[Scene]:
    """Both scenes. Invalid options raise before anything is printed."""
    for what, name, table in (("drafter", options.drafter, DRAFTERS), ("rule", options.rule, RULES)):
        if name is not None and name not in table:
            raise unknown(what, name, table)
    blurred = TableTarget(VOCABULARY, options.seed, sharpness=2.0, blur=0.2)
    large = decoder(options.seed)
    tree = SAMPLED_TREE.name if "tree" in RULES[options.rule].topology else DRAFT_MODEL.name
    made = [
        Scene(
            "table",
            f"A table: {VOCABULARY} tokens, each distribution a hash of the tokens before",
            "the same table, blurred",
            TableTarget(VOCABULARY, options.seed, sharpness=2.0),
            blurred,
            options.drafter or DRAFT_MODEL.name,
            options,
        ),
        Scene(
            "decoder",
            f"A tiny decoder: {_SHAPE.layers} layers of random weights",
            f"the target's own first {_EXIT} layers",
            large,
            large.view(exit=_EXIT),
            options.drafter or tree,
            options,
        ),
    ]
    for scene in made:
        next(scene.steps(scene.drafter, options.rule, options.temperature, (*scene.prompt, 0)))
    return made


def decoder(seed: int) -> Decoder:
    """A decoder whose later layers change the result of the first ones only slightly."""
    whole = Decoder.random(_SHAPE, seed, gain=3.0).network
    shares = [1.0] * _EXIT + [_REFINING] * (_SHAPE.layers - _EXIT)
    layers = [
        replace(layer, attention_norm=layer.attention_norm * share, mlp_norm=layer.mlp_norm * share)
        for layer, share in zip(whole.layers, shares, strict=True)
    ]
    return Decoder(Network(_SHAPE, whole.embedding, layers, whole.norm, whole.head))


def traces(options: Options) -> list[Trace]:
    """The traces that the demo shows."""
    made = []
    with threads(1):
        for scene in scenes(options):
            plain = list(scene.steps(None, options.rule, options.temperature))
            fast = list(scene.steps(scene.drafter, options.rule, options.temperature, scene.reference(plain)))
            made += [scene.trace(plain, None), scene.trace(fast, scene.drafter)]
    return made


def run(options: Options, console: Console | None = None) -> None:
    """Run the demo."""
    if console is None:
        console = Console(highlight=False)
        console.width = min(console.width, _WIDEST)
    pause = _PAUSE if console.is_terminal else 0.0
    with threads(1):
        first, second = scenes(options)
        console.print(
            "[bold]Outrider.[/] A fast drafter proposes several tokens; the target, the model whose output is wanted, "
            "scores all of them in one pass. Tokens are numbers here, without meaning."
        )
        if pause:
            console.print(f"[dim]Slowed down by {1e3 * pause:.0f} ms per target pass.[/]")
        console.print()
        console.print(terminal.legend(name(41)))
        play(console, 1, first, pause)
        play(console, 2, second, pause)
        if make_rule(options.rule).lossless and options.temperature > 0:
            relax(console, 3, first, pause)


def name(token: int) -> str:
    return f"{token:02d}"


def heading(console: Console, number: int, title: str) -> None:
    console.print()
    words = Text(f"{number}. {title}", style="bold")
    console.print(Line(words, align="left", style="dim") if len(words) < console.width - 4 else words)


def play(console: Console, number: int, scene: Scene, pause: float) -> None:
    """One target: plain decoding, the drafter, the draft tree of a step, and the summary."""
    options = scene.options
    heading(console, number, scene.title)
    method = DRAFTERS[scene.drafter]
    model = f"Its model is {scene.models}." if "model" in method.needs else "It uses no model."
    console.print(f"Drafter: [bold]{method.name}[/], {escape(method.summary)}. {model}")
    console.print(f"Rule: [bold]{options.rule}[/] at temperature {options.temperature:g}, seed {options.seed}.\n")
    console.print("[bold]Plain decoding[/]")
    plain = terminal.stream(console, scene.steps(None, options.rule, options.temperature), name, pause)
    console.print(f"\n[bold]With {method.name}[/]")
    steps = scene.steps(scene.drafter, options.rule, options.temperature, scene.reference(plain))
    fast = terminal.stream(console, steps, name, pause)
    console.print()
    show_tree(console, scene, fast)
    terminal.report(console, {"plain": Summary.of(plain), method.name: Summary.of(fast)})
    if not make_rule(options.rule).lossless:
        console.print(terminal.total_variation(fast))
    compare_with_plain(console, scene)


def show_tree(console: Console, scene: Scene, steps: list[Step]) -> None:
    """Print the last draft of full size; drafts close to the limit are shorter."""
    full = max(len(step.drafted) for step in steps)
    if not full:
        console.print("Nothing was drafted.")
        return
    chosen = max(place for place, step in enumerate(steps) if len(step.drafted) == full)
    before = [*scene.prompt, *(token for step in steps[:chosen] for token in step.emitted)]
    narrow = console.width < terminal.NARROW
    console.print(
        f"[bold]Target pass {chosen + 1}, the last with a full draft[/]" + (": p, q, chance" if narrow else "")
    )
    console.print(terminal.draft_tree(steps[chosen], before[-1], name, narrow=narrow))
    chain = DRAFTERS[scene.drafter].topology == ("chain",) and not any(steps[chosen].fixed)
    if chain and scene.options.rule in (EXACT.name, BLOCK.name) and scene.options.temperature > 0:
        console.print(
            "[dim]A sampled chain is verified as a block: it is accepted up to the last draft token that passes.[/]"
        )


def compare_with_plain(console: Console, scene: Scene) -> None:
    """Compare with plain decoding where the tokens must be identical."""
    options = scene.options
    temperature = options.temperature if options.temperature > 0 else 1.0
    checks = {
        "greedy": scene.same(EXACT.name, 0.0),
        f"{GUMBEL_MATCH} (temperature {temperature:g})": scene.same(GUMBEL_MATCH.name, temperature),
    }
    good = all(same == of for same, of in checks.values())
    result = ", ".join(f"{how} {same} of {of} tokens" for how, (same, of) in checks.items())
    verdict = "Identical to plain decoding: " if good else "Not identical to plain decoding: "
    console.print(Text.assemble((verdict, "bold green" if good else "bold red"), result, "."))
    if not RULES[options.rule].same_tokens and options.temperature > 0 and make_rule(options.rule).lossless:
        console.print(
            f"[dim]Above, {options.rule} sampled other tokens than plain decoding, from the same distribution.[/]"
        )


def relax(console: Console, number: int, scene: Scene, pause: float) -> None:
    """The same target with a relaxed rule: its speedup and its total variation."""
    rule, settings, temperature = _RELAXED, dict[str, Any](_SETTINGS), scene.options.temperature
    heading(console, number, f"The table again, with a relaxed rule: {rule}")
    values = ", ".join(f"{key} = {value}" for key, value in settings.items())
    console.print(f"Rule: [bold]{rule}[/], {escape(RULES[rule].summary)}. Here {values}.\n")
    reference = scene.reference(list(scene.steps(None, EXACT.name, temperature)))
    terminal.stream(console, scene.steps(scene.drafter, rule, temperature, reference, **settings), name, pause)
    strict = list(scene.steps(scene.drafter, EXACT.name, temperature, reference, rows=_ROWS))
    loose = list(scene.steps(scene.drafter, rule, temperature, reference, rows=_ROWS, **settings))
    console.print(f"\n[bold]{_ROWS} runs in one batch[/]")
    console.print(terminal.comparison({EXACT.name: Summary.of(strict), rule: Summary.of(loose)}))
    console.print(terminal.total_variation(loose))
