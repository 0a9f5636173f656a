"""Recordings as HTML: the output, one step, the headline figures, the charts, and a race against plain decoding.

Combines the drawings of `viz` by modality. Independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from outrider.app.page.recordings import Recording
from outrider.app.viz import image_grid, trace_html, waveform
from outrider.app.viz.charts import by_position, histogram, per_step, speed, time_split
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.methods import RULES
from outrider.core.trace import Step, Trace

NO_RACE = "Press Race to run plain decoding and then this drafter, with the same seed."


def output(recording: Recording, current: int | None = None) -> Drawing:
    """The output; with `current`, its state at that step."""
    steps = recording.trace.steps
    if recording.modality == "image":
        if not recording.picture:
            grids = image_grid.grids(_upto(steps, current), recording.rows, recording.columns)
            return side_by_side(grids.values(), min_width=146)
        return image_grid.picture(recording.picture, steps, recording.rows, recording.columns, current=current)
    if recording.modality == "speech":
        return _speech(recording, current=current)
    return trace_html.tokens(steps, recording.name, current=current)


def _upto(steps: Sequence[Step], current: int | None) -> Sequence[Step]:
    return steps if current is None else steps[: current + 1]


def _speech(recording: Recording, current: int | None = None, clock: Sequence[float] | None = None) -> Drawing:
    steps, starts = recording.trace.steps, list(recording.starts)
    count = sum(len(step.emitted) for step in steps)
    if len(starts) != count:  # a bare trace has no times: use the codec's frame rate
        starts = [index / 43.07 for index in range(count)]
    wave, mel, seconds = _analysed(recording.sound)
    seconds = max(seconds, starts[-1] + 0.02 if starts else 0.0)
    strip = waveform.strip(
        steps, starts, seconds, wave=wave, mel=mel, words=recording.words, clock=clock, current=current
    )
    return Drawing(strip + (player(recording, "speculative") if clock is None else ""))


def player(recording: Recording, label: str) -> str:
    if not recording.sound:
        return ""
    return (
        f'<div class="or-player"><span>{safe(label)}</span>'
        f'<audio controls preload="metadata" src="data:audio/wav;base64,{safe(recording.sound)}"></audio></div>'
    )


@lru_cache(maxsize=8)
def _analysed(sound: str) -> tuple[list[float], str, float]:
    """The envelope, the mel spectrogram as an image, and the seconds of a WAV file in base64."""
    if not sound:
        return [], "", 0.0
    import wave

    from outrider.app.page.backends.speech import envelope, mel_picture, unpacked

    try:
        decoded = unpacked(sound)
    except (wave.Error, EOFError, ValueError):
        return [], "", 0.0
    return envelope(decoded), mel_picture(decoded), decoded.seconds


def figures(trace: Trace, state: str = "") -> Drawing:
    """The headline figures with the badge of the rule, and a line with the settings and the machine."""
    chips = [f"<span><b>{safe(value)}</b> {safe(name)}</span>" for name, value in trace_html.facts(trace).items()]
    prefix = f'<span class="or-state">{safe(state)}</span>' if state else ""
    return Drawing(
        f'<div class="or-figures" role="status">{prefix}{trace_html.badge(trace.lossless)}{"".join(chips)}</div>'
        f'<div class="or-where">{safe(trace_html.conditions(trace))}</div>'
    )


def step(recording: Recording, index: int) -> Drawing:
    """One step: a caption with the drafter's note, the draft as a tree, and a table of its numbers."""
    if not recording.trace.steps:
        return Drawing('<div class="or-empty">No steps.</div>')
    count = len(recording.trace.steps)
    index = min(max(index, 0), count - 1)
    shown = recording.trace.steps[index]
    caption = f"Target pass {index + 1} of {count}: {len(shown.drafted)} drafted, {shown.accepted} accepted, "
    caption += f"{len(shown.emitted)} committed"
    if shown.times.total:
        caption += f", {1e3 * shown.times.total:.1f} ms"
    if shown.note:
        caption += f" ({shown.note[:160]})"
    tree = trace_html.draft_tree(shown, recording.root(index), recording.name)
    table = _table(trace_html.step_table(shown, recording.name))
    return Drawing(f'<div class="or-caption">{safe(caption)}</div>{tree}{table}')


def _table(rows: Sequence[Sequence[str]]) -> str:
    titles = ("", "token", "p", "q", "P(accept)", "total variation")
    head = "".join(f'<th scope="col">{title}</th>' for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="or-wide"><table class="or-table">{inner}</table></div>'


def charts(recording: Recording, current: int | None = None) -> Drawing:
    """All charts of the trace."""
    trace = recording.trace
    summary = trace.summary()
    parts = [("Tokens of each target pass", per_step(trace.steps, current))]
    if summary.drafted:
        parts += [("Acceptance by position in the draft", by_position(summary))]
        parts += [("Accepted tokens per target pass", histogram(summary))]
    parts += [("Speed", speed(trace.steps)), ("Time by part of the round", time_split(summary.times))]
    cards = [f'<div class="or-card"><h4>{safe(title)}</h4>{chart}</div>' for title, chart in parts]
    return side_by_side(cards, 330)


# ---- races


def clock(trace: Trace, slowdown: float = 1.0) -> list[float]:
    """The seconds from the start at which each step was done, times `slowdown`."""
    times, now, last = [], 0.0, -1
    for step in trace.steps:
        if step.index != last:  # batch rows share a round
            now, last = now + step.times.total, step.index
        times.append(now * slowdown)
    return times


def race(recording: Recording, slowdown: float = 1.0, replay: int = 0) -> Drawing:
    """A replay of plain decoding beside this recording, on the same clock."""
    if recording.plain is None:
        return Drawing(f'<div class="or-empty">{NO_RACE}</div>')
    lanes = []
    longest = max(clock(run.trace, slowdown)[-1:] or [0.0] for run in (recording, recording.plain))[0]
    for name, run in (("plain decoding", recording.plain), (recording.trace.method, recording)):
        times = clock(run.trace, slowdown)
        end, summary = (times[-1] if times else 0.0), run.trace.summary()
        if run.modality == "image" and run.picture:
            inner: str = image_grid.picture(run.picture, run.trace.steps, run.rows, run.columns, clock=times)
        elif run.modality == "speech":
            inner = _speech(run, clock=times)
        else:
            inner = trace_html.tokens(run.trace.steps, run.name, clock=times, rejected=False)
        lanes.append(
            f'<div class="or-lane"><div class="or-lane-head"><b>{safe(name)}</b> {summary.seconds:.2f} s, '
            f"{summary.target_passes} target passes, {summary.tokens_per_second:.1f} tokens / s</div>"
            f'<div class="or-track"><div class="or-run" style="--takes:{max(end, 0.01):.3f}s;'
            f'--share:{100 * end / max(longest, 1e-9):.1f}%"></div></div>{inner}{player(run, name)}</div>'
        )
    return Drawing(
        f'<div class="or-caption">{safe(race_result(recording))}</div><div class="or-lanes" data-replay="{replay}">'
        f"{''.join(lanes)}</div>"
    )


def race_result(recording: Recording) -> str:
    """A sentence with the speedup, whether the outputs are equal, and why not if they differ."""
    plain = recording.plain
    assert plain is not None
    baseline, summary = plain.trace.summary(), recording.trace.summary()
    ratio = summary.tokens_per_second / baseline.tokens_per_second if baseline.tokens_per_second else 0.0
    speed = f"{recording.trace.method} was {ratio:.2f} times as fast as plain decoding"
    if ratio < 1:
        speed += ", so drafting does not pay here"
    if _tokens_by_row(plain.trace) == _tokens_by_row(recording.trace):
        return f"{speed}; both outputs are the same, token for token."
    if not RULES[recording.trace.rule].lossless if recording.trace.rule in RULES else not recording.trace.lossless:
        return f"{speed}; the outputs differ, because the rule is relaxed."
    if recording.trace.options.get("temperature") == 0:
        return f"{speed}; the outputs differ from a near-tie on, where rounding decides between two tokens."
    return f"{speed}; the outputs differ, but have the same distribution (gumbel-match would give the same tokens)."


def _tokens_by_row(trace: Trace) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for step in trace.steps:
        if step.emitted:
            rows.setdefault(step.row, []).extend(step.emitted)
    return rows
