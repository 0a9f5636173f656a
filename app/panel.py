"""A panel of the page, of one shape for every modality: what to ask, Run, Stop and Race, what came, every step of it.

Puts subjects and showing onto Gradio's components. Text of visitors and models enters the page through showing and
views alone, which escape it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

import gradio as gr

from outrider.app import limits, showing, views
from outrider.app.lane import LANE, Tickets
from outrider.app.look import CELLS
from outrider.app.recordings import Recording
from outrider.app.subjects import (
    Asked,
    Choice,
    Knob,
    Subject,
    checked,
    drafting,
    judging,
    offered,
    rules_for,
    summary,
    wording,
)
from outrider.app.svg import Drawing, safe
from outrider.core.bench import PLAIN
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS, RULES

PAUSE = {"text": 0.3, "image": 0.3, "speech": 0.25}  # seconds between two looks at what is under way, at least
_SHARE = 12  # times as long as the last look took, page and all: so showing takes a twelfth at most
SLOWER = {"as it was": 1.0, "4 times slower": 4.0, "20 times slower": 20.0}
M = TypeVar("M", Knob, Choice)
_KNOBS, _WORDS, _RULES = 4, 2, 3
_log = logging.getLogger("outrider.app")
Update = Any


def fault(error: Exception) -> Drawing:
    """What went wrong, in a line; in full in the terminal."""
    if isinstance(error, OutriderError):
        words = str(error)
    else:
        _log.exception("a run failed", exc_info=error)
        words = f"something unexpected went wrong ({type(error).__name__}); the terminal says more"
    return Drawing(f'<div class="or-error" role="alert">{safe(words[:600])}</div>')


def waiting(words: str) -> Drawing:
    return Drawing(
        f'<div class="or-figures" role="status"><span class="or-state">{safe(words)}</span></div>'
        '<div class="or-load"><div></div></div>'
    )


def visitor(request: gr.Request | None) -> str:
    return str(getattr(request, "session_hash", None) or "nobody")


def running(words: str) -> Drawing:
    return Drawing(f'<div class="or-figures" role="status"><span class="or-state">{safe(words)}</span></div>')


def quiet(**given: Any) -> dict[str, Any]:
    """For events that only redraw: at once, the last one counts, and nothing fades meanwhile."""
    return {
        "queue": False,
        "show_progress": "hidden",
        "trigger_mode": "always_last",
        "api_visibility": "private",
        **given,
    }


@dataclass
class Stage:
    """What came, and every step of it: for a run and for a trace that was opened alike."""

    name: str
    invitation: str = "Press Run."
    recording: Any = None
    status: Any = None
    out: Any = None
    place: Any = None
    step: Any = None
    charts: Any = None
    save: Any = None
    tabs: Any = None
    compare: Any = None  # two pictures under one slider
    race: Any = None
    slower: Any = None
    races: int = field(default=0)
    racing: bool = True

    def build(self, legend: bool) -> None:
        self.recording = gr.State(None, time_to_live=3600)
        self.status = gr.HTML(remark(""), elem_id=f"{self.name}-status")
        self.out = gr.HTML(
            remark(self.invitation), elem_id=f"{self.name}-out", elem_classes=["or-out"], js_on_load=CELLS
        )
        if legend:
            gr.HTML(views.legend())

    def build_steps(self, pictures: bool) -> None:
        with gr.Tabs(elem_id=f"{self.name}-more") as self.tabs:
            with gr.Tab("Steps", id="steps"):
                with gr.Row(equal_height=True):
                    back = gr.Button("◀ back", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-back")
                    self.place = gr.Slider(
                        1,
                        2,
                        1,
                        step=1,
                        label="call of the target",
                        scale=8,
                        elem_id=f"{self.name}-step",
                        interactive=True,
                    )
                    on = gr.Button("on ▶", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-on")
                self.step = gr.HTML(
                    remark("After a run, every call can be looked at here."),
                    elem_id=f"{self.name}-tree",
                    min_height=160,
                )
            with gr.Tab("Figures", id="figures"):
                self.charts = gr.HTML(
                    remark("After a run: acceptance, tokens of each call, time."),
                    elem_id=f"{self.name}-charts",
                    min_height=160,
                )
                self.save = gr.HTML("", elem_id=f"{self.name}-save")
            with gr.Tab("Race", id="race", visible=self.racing):
                with gr.Row(equal_height=True):
                    self.slower = gr.Radio(list(SLOWER), value="as it was", label="clock", scale=6)
                    again = gr.Button("Replay", size="sm", min_width=90, scale=1, elem_id=f"{self.name}-replay")
                self.race = gr.HTML(
                    remark("Press Race: plain decoding, then this drafter, with the same seed."),
                    elem_id=f"{self.name}-race",
                    min_height=200,
                )
                if pictures:
                    self.compare = gr.ImageSlider(
                        label="plain | speculative",
                        type="pil",
                        interactive=False,
                        visible=False,
                        max_height=400,
                        elem_id=f"{self.name}-compare",
                        format="png",
                    )
        moved = [self.out, self.step, self.charts]
        self.place.input(self._look, [self.recording, self.place], moved, **quiet())
        for button, by in ((back, -1), (on, 1)):
            button.click(
                lambda recording, place, by=by: self._move(recording, place, by),
                [self.recording, self.place],
                [self.place, *moved],
                **quiet(),
            )
        for trigger in (again.click, self.slower.input):
            trigger(self._replay, [self.recording, self.slower], [self.race], **quiet())

    @property
    def outputs(self) -> list[Any]:
        found = [
            self.recording,
            self.status,
            self.out,
            self.place,
            self.step,
            self.charts,
            self.save,
            self.race,
            self.tabs,
        ]
        return [*found, self.compare] if self.compare is not None else found

    def shown(self, recording: Recording, state: str = "", tab: str = "") -> list[Update]:
        """All of it, with a tab to begin with."""
        count = len(recording.trace.steps)
        place = gr.update(maximum=max(count, 2), value=max(count, 1))
        link = f'<a download="outrider-{recording.modality}.json" href="{recording.link()}">Download this trace</a>'
        found: list[Update] = [recording, showing.figures(recording.trace, state), showing.made(recording), place]
        found += [showing.step(recording, count - 1), showing.charts(recording), link, showing.race(recording)]
        found.append(gr.Tabs(selected=tab) if tab else gr.skip())
        return [*found, both(recording)] if self.compare is not None else found

    def only(self, status: str | None = None, out: str | None = None) -> list[Update]:
        """A status or what there is so far; all else stays."""
        found: list[Update] = [gr.skip() for _ in self.outputs]
        if status is not None:
            found[1] = status
        if out is not None:
            found[2] = out
        return found

    def _look(self, recording: Recording | None, place: float) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 3
        current = min(max(int(place), 1), len(recording.trace.steps)) - 1
        whole = current == len(recording.trace.steps) - 1
        return [
            showing.made(recording, None if whole else current),
            showing.step(recording, current),
            showing.charts(recording, current),
        ]

    def _move(self, recording: Recording | None, place: float, by: int) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 4
        to = min(max(int(place) + by, 1), len(recording.trace.steps))
        return [to, *self._look(recording, to)]

    def _replay(self, recording: Recording | None, slower: str) -> Update:
        if not isinstance(recording, Recording) or recording.plain is None:
            return gr.skip()
        self.races += 1  # another text, so that the page draws it anew
        return showing.race(recording, SLOWER.get(str(slower), 1.0), self.races)


def remark(words: str) -> Drawing:
    return Drawing(f'<div class="or-empty">{safe(words)}</div>')


def both(recording: Recording) -> Any:
    """Plain and speculative picture, for a slider between them."""
    if recording.plain is None or not recording.picture or not recording.plain.picture:
        return gr.update(visible=False, value=None)
    import io
    from base64 import b64decode

    from PIL import Image

    found = [Image.open(io.BytesIO(b64decode(one.picture)), formats=["PNG"]) for one in (recording.plain, recording)]
    if any(max(one.size) > 1024 for one in found):
        return gr.update(visible=False, value=None)
    pair = tuple(one.convert("RGB").resize((320, 320), Image.Resampling.NEAREST) for one in found)
    return gr.update(visible=True, value=pair)


class Panel:
    """One modality's part of the page."""

    def __init__(self, subject: Subject, tickets: Tickets) -> None:
        self.subject, self.tickets = subject, tickets
        self.stage = Stage(subject.name, racing=not subject.fixed)

    # ---- components

    def build(self) -> None:
        subject = self.subject
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self._controls()
            with gr.Column(scale=7, min_width=320):
                self.stage.build(legend=True)
                if subject.name == "image":
                    self.patches = gr.HTML(
                        remark("Click a cell of a grid: the codes that look most like it."),
                        elem_id="image-patches",
                        min_height=74,
                    )
                self.stage.build_steps(pictures=subject.name == "image")
        self._wire()

    def _controls(self) -> None:
        subject = self.subject
        drafters = offered(subject)
        usual = subject.usual if subject.usual in drafters else PLAIN
        self.prompt = gr.Textbox(
            label=subject.what.capitalize(),
            value=subject.examples[0],
            lines=3,
            max_lines=8,
            max_length=limits.PROMPT,
            elem_id=f"{subject.name}-prompt",
        )
        gr.Examples([[one] for one in subject.examples], [self.prompt], label="Examples", api_visibility="private")
        with gr.Group():
            self.drafter = gr.Dropdown(drafters, value=usual, label="Drafter", elem_id=f"{subject.name}-drafter")
            self.rule = gr.Dropdown(
                rules_for(subject, usual), value="exact", label="Rule", elem_id=f"{subject.name}-rule"
            )
        self.about = gr.HTML(self._about(usual, "exact"), elem_id=f"{subject.name}-about", min_height=74)
        with gr.Row():
            run = [gr.Button("Run", variant="primary", min_width=70, elem_id=f"{subject.name}-run")]
            run.append(gr.Button("Race", min_width=70, elem_id=f"{subject.name}-go", visible=not subject.fixed))
            run.append(gr.Button("Stop", variant="stop", min_width=70, elem_id=f"{subject.name}-stop"))
        self.run, self.go, self.stop = run
        with gr.Row():
            self.heat = gr.Slider(
                0, limits.HEAT, subject.heat, step=0.05, label="temperature (0 is greedy)", min_width=150
            )
            self.seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=limits.SEED, min_width=90)
        self.extras = [_component(one) for one in subject.extras]
        with gr.Accordion("Options of the drafter and the rule", open=False):
            self.drafting = [_slider(one) for one in _padded(drafting(subject, usual), _KNOBS)]
            self.wording = [_dropdown(one) for one in _padded(wording(subject, usual), _WORDS)]
            self.judging = [_slider(one) for one in _padded(judging("exact"), _RULES)]
        self.link = gr.HTML("", elem_id=f"{subject.name}-link", min_height=24)
        self.ticket = gr.State(0)

    @property
    def inputs(self) -> list[Any]:
        told = [self.prompt, self.drafter, self.rule, self.heat, self.seed, *self.extras]
        return [*told, *self.drafting, *self.wording, *self.judging]

    def _about(self, drafter: str, rule: str) -> Drawing:
        lossless = bool(RULES[rule].lossless)
        return Drawing(
            f'<div style="margin-bottom:4px">{views.badge(lossless)}</div><div style="font-size:.88em;opacity:.8">'
            f"<b>{safe(drafter)}</b>: {safe(summary(drafter, DRAFTERS))}.<br><b>{safe(rule)}</b>: "
            f"{safe(summary(rule, RULES))}.</div>"
        )

    # ---- events

    def _wire(self) -> None:
        self.drafter.input(
            self._chosen,
            [self.drafter, self.rule],
            [self.rule, self.about, *self.drafting, *self.wording, *self.judging],
            **quiet(),
        )
        self.rule.input(self._ruled, [self.drafter, self.rule], [self.about, *self.judging], **quiet())
        for button, work in ((self.run, self._run), (self.go, self._race)):
            button.click(self._begin, None, [self.ticket, self.stage.status], **quiet()).then(
                self._load,
                None,
                [self.stage.status],
                concurrency_limit=1,
                concurrency_id=LANE,
                show_progress="minimal",
                api_visibility="private",
            ).then(
                work,
                [self.ticket, *self.inputs],
                [*self.stage.outputs, self.link],
                concurrency_limit=1,
                concurrency_id=LANE,
                show_progress="hidden",
                api_visibility="private",
            )
        self.stop.click(self._stop, None, [self.stage.status], **quiet())
        if self.subject.name == "image":
            self.stage.out.click(self._like, [self.stage.recording], [self.patches], **quiet(queue=True))

    def _chosen(self, drafter: str, rule: str) -> list[Update]:
        rules = rules_for(self.subject, drafter) if drafter in offered(self.subject) else ["exact"]
        rule = rule if rule in rules else "exact"
        turned = [_turned(one) for one in _padded(drafting(self.subject, drafter), _KNOBS)]
        turned += [_reworded(one) for one in _padded(wording(self.subject, drafter), _WORDS)]
        return [
            gr.update(choices=rules, value=rule),
            self._about(drafter, rule),
            *turned,
            *self._ruled(drafter, rule)[1:],
        ]

    def _ruled(self, drafter: str, rule: str) -> list[Update]:
        if rule not in RULES:
            return [gr.skip()] * (1 + _RULES)
        return [self._about(drafter, rule), *(_turned(one) for one in _padded(judging(rule), _RULES))]

    def _begin(self, request: gr.Request) -> list[Update]:
        return [self.tickets.take(visitor(request)), waiting("Waiting for the model's lane …")]

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.tickets.give_back(visitor(request)) else gr.skip()

    def _load(self, progress: gr.Progress = gr.Progress(track_tqdm=True)) -> Iterator[Update]:  # noqa: B008
        if self.subject.loaded:
            yield gr.skip()
            return
        yield waiting(f"Loading {self.subject.about} …")
        progress(0.1, f"Loading {self.subject.about}")
        try:
            self.subject.load()
        except Exception as error:
            yield fault(error)

    def asked(self, values: Sequence[Any]) -> Asked:
        """The panel's controls, checked."""
        prompt, drafter, rule, heat, seed, *rest = values
        extras, rest = rest[: len(self.extras)], rest[len(self.extras) :]
        turned, worded, judged = rest[:_KNOBS], rest[_KNOBS : _KNOBS + _WORDS], rest[_KNOBS + _WORDS :]
        given: dict[str, Any] = {"prompt": prompt, "drafter": drafter, "rule": rule, "temperature": heat, "seed": seed}
        given |= {one.name: value for one, value in zip(self.subject.extras, extras, strict=True)}
        for key, name, turning, numbers in (
            ("drafter_options", drafter, partial(drafting, self.subject), turned),
            ("rule_options", rule, judging, judged),
        ):
            known = turning(name) if isinstance(name, str) else []
            given[key] = {one.name: value for one, value in zip(known, numbers, strict=False)}
        words = wording(self.subject, drafter) if isinstance(drafter, str) else []
        given["drafter_options"] |= {one.name: value for one, value in zip(words, worded, strict=False)}
        return checked(self.subject, given)

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from self._work(ticket, values, request, race=False)

    def _race(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from self._work(ticket, values, request, race=True)

    def _work(self, ticket: int, values: Sequence[Any], request: gr.Request, race: bool) -> Iterator[list[Update]]:
        going = partial(self.tickets.valid, visitor(request), ticket)
        try:
            asked = self.asked(values)
            plain: Recording | None = None
            if race:
                beside = replace(asked, drafter=PLAIN, drafter_options={})
                for update, found in follow(self.subject, beside, going, "plain decoding …"):
                    plain = found
                    yield [*self.stage.only(*update), gr.skip()]
            recording: Recording | None = None
            for update, found in follow(self.subject, asked, going, f"{asked.drafter} …"):
                recording = found
                yield [*self.stage.only(*update), gr.skip()]
            if recording is None or not recording.trace.steps:
                yield [*self.stage.only("", remark("Stopped before it began.")), gr.skip()]
                return
            whole = replace(recording, plain=plain) if plain is not None and plain.trace.steps else recording
            tab = "race" if whole.plain is not None else ""
            yield [*self.stage.shown(whole, "" if going() else "stopped", tab), self._link(asked)]
        except Exception as error:
            yield [*self.stage.only(fault(error)), gr.skip()]
        finally:
            if going():
                self.tickets.give_back(visitor(request))

    def _like(self, recording: Recording | None, event: gr.EventData) -> Update:
        cell = getattr(event, "cell", None)
        if not isinstance(recording, Recording) or not isinstance(cell, int):
            return gr.skip()
        found = [token for step in recording.trace.steps for token in step.emitted]
        if not 0 <= cell < len(found):
            return gr.skip()
        if not self.subject.loaded:
            return remark("The codes' patches come from the model: press Run once.")
        try:
            like = self.subject.like(found[cell])  # type: ignore[attr-defined]
        except Exception as error:
            return fault(error)
        shown = "".join(
            f'<figure><img alt="" src="{safe(data)}"><figcaption>{code}</figcaption></figure>' for code, data in like
        )
        row, column = divmod(cell, recording.columns)
        return Drawing(
            f'<div class="or-said">Code {found[cell]} at row {row + 1}, column {column + 1}, and those that '
            f'look most like it:</div><div class="or-patches">{shown}</div>'
        )

    # ---- links

    def _link(self, asked: Asked) -> Drawing:
        """An address that brings these settings back."""
        given: dict[str, Any] = {"panel": self.subject.name, "prompt": asked.prompt, "drafter": asked.drafter}
        given |= {"rule": asked.rule, "temperature": f"{asked.temperature:g}", "seed": asked.seed, **asked.extra}
        for letter, options in (("d", asked.drafter_options), ("r", asked.rule_options)):
            said = {name: value if isinstance(value, str) else f"{value:g}" for name, value in options.items()}
            given |= {f"{letter}.{name}": value for name, value in said.items()}
        return Drawing(f'<a href="?{safe(urlencode(given))}" target="_blank" rel="noopener">Link to these settings</a>')

    def linked(self, query: dict[str, str]) -> list[Update]:
        """The controls as an address says; what it doesn't say, or says wrongly, stays."""
        if query.get("panel") != self.subject.name:
            return [gr.skip() for _ in [*self.inputs, self.about]]
        try:
            asked = checked(self.subject, _plain(query, self.subject))
        except OutriderError:
            return [gr.skip() for _ in [*self.inputs, self.about]]
        found: list[Update] = [
            asked.prompt,
            asked.drafter,
            gr.update(choices=rules_for(self.subject, asked.drafter), value=asked.rule),
            asked.temperature,
            asked.seed,
        ]
        found += [asked.extra[one.name] for one in self.subject.extras]
        options = asked.drafter_options
        found += [_turned(one, options) for one in _padded(drafting(self.subject, asked.drafter), _KNOBS)]
        found += [_reworded(one, options) for one in _padded(wording(self.subject, asked.drafter), _WORDS)]
        found += [_turned(one, asked.rule_options) for one in _padded(judging(asked.rule), _RULES)]
        return [*found, self._about(asked.drafter, asked.rule)]


def _plain(query: dict[str, str], subject: Subject) -> dict[str, Any]:
    """What an address says, as plain values."""

    def number(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    given: dict[str, Any] = {key: query[key] for key in ("prompt", "drafter", "rule") if key in query}
    given |= {key: number(query[key]) for key in ("temperature", "seed") if key in query}
    for one in subject.extras:
        if one.name in query:
            given[one.name] = number(query[one.name]) if isinstance(one, Knob) else query[one.name]
    for key, letter in (("drafter_options", "d."), ("rule_options", "r.")):
        given[key] = {name.removeprefix(letter): number(v) for name, v in query.items() if name.startswith(letter)}
    return given


def follow(
    subject: Subject, asked: Asked, going: Callable[[], bool], words: str
) -> Iterator[tuple[tuple[str | None, str | None], Recording | None]]:
    """A run under way: what to show now and then, and at the end what was recorded. Stopping is looked for at every
    step; whatever ends it, what the target holds is let go of."""
    if not going():
        return
    if not subject.loaded:
        subject.load()
    live = subject.begin(asked)
    begun = shown = time.perf_counter()
    tokens = calls = 0
    first, pause = True, PAUSE[subject.name]
    try:
        for step in live:
            tokens, calls = tokens + len(step.emitted), calls + 1
            if not going():
                break
            now = time.perf_counter()
            if first or now - shown >= pause:
                said = f"{words} {tokens} tokens, {calls} calls, {tokens / calls:.2f} a call, "
                said += f"{tokens / max(now - begun, 1e-6):.1f} tokens a second"
                yield (running(said), live.seen()), None
                first, shown = False, time.perf_counter()
                pause = max(PAUSE[subject.name], _SHARE * (shown - now))
    finally:
        live.close()
    yield (None, None), live.recording()


def _padded(found: Sequence[M], count: int) -> list[M | None]:
    return [found[place] if place < len(found) else None for place in range(count)]


def _slider(knob: Knob | None) -> Any:
    if knob is None:
        return gr.Slider(0, 1, 0, step=0.01, label="-", visible=False)
    return gr.Slider(knob.low, knob.high, knob.value, step=knob.step, label=knob.label)


def _turned(knob: Knob | None, given: Any = None) -> Update:
    if knob is None:
        return gr.update(visible=False, minimum=0, maximum=1, value=0, label="-")
    value = (given or {}).get(knob.name, knob.value)
    return gr.update(visible=True, minimum=knob.low, maximum=knob.high, step=knob.step, value=value, label=knob.label)


def _dropdown(choice: Choice | None) -> Any:
    if choice is None:
        return gr.Dropdown([], label="-", visible=False)
    return _component(choice)


def _reworded(choice: Choice | None, given: Any = None) -> Update:
    if choice is None:
        return gr.update(visible=False, choices=[], value=None, label="-")
    value = (given or {}).get(choice.name, choice.value)
    return gr.update(visible=True, choices=list(choice.choices), value=value, label=choice.label)


def _component(one: Knob | Choice) -> Any:
    if isinstance(one, Choice):
        return gr.Dropdown(list(one.choices), value=one.value, label=one.label)
    return gr.Slider(one.low, one.high, one.value, step=one.step, label=one.label)
