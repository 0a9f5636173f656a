"""Recordings as HTML: the output, one step, the headline figures, the charts, and a race against plain decoding.

Combines the drawings of `viz` by modality. Independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import median

from outrider.app.page.recordings import Recording
from outrider.app.viz import image_grid, reading, trace_html, waveform
from outrider.app.viz import story as trace_story
from outrider.app.viz.charts import by_position, histogram, per_step, speed, time_split
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.bench.other_load import warning
from outrider.core.methods import RULES
from outrider.core.trace import Trace

_BATCH = 16  # rows of a batch that are shown
SHOWN_RATE = 43.07  # assumed tokens of speech per second where a trace has no times


def answer(recording: Recording, clock: Sequence[float] | None = None, *, guesses: bool = True) -> Drawing:
    """What a run produced: clean text, a picture, or a strip of sound. `clock` are the seconds at which steps were
    done, for a replay."""
    steps = recording.trace.steps
    if recording.modality == "image":
        rows, columns = recording.rows, recording.columns
        return image_grid.layered(recording.picture, steps, rows, columns, clock=clock, overlays=guesses)
    if recording.modality == "speech":
        return _speech(recording, clock)
    if recording.trace.rows > 1:
        rows_of = sorted({step.row for step in steps})[:_BATCH]
        parts = [reading.answer([step for step in steps if step.row == row], recording.name) for row in rows_of]
        return side_by_side((f'<div class="or-lane">{part}</div>' for part in parts), 260)
    return reading.answer(steps, recording.name, clock=clock, guesses=guesses)


def output(recording: Recording) -> Drawing:
    """The result of a run in a sentence and as it reads; beside plain decoding, if that was run too."""
    if recording.plain is not None:
        return race(recording)
    lane = f'<div class="or-lane">{answer(recording)}{player(recording, "sound")}</div>'
    return Drawing(f'<p class="or-story">{safe(race_result(recording))}</p>{lane}')


def _speech(recording: Recording, clock: Sequence[float] | None = None) -> Drawing:
    steps, starts = recording.trace.steps, list(recording.starts)
    count = sum(len(step.emitted) for step in steps)
    if len(starts) != count:  # a bare trace has no times: use the codec's frame rate
        starts = [index / SHOWN_RATE for index in range(count)]
    wave, mel, seconds = _analysed(recording.sound)
    seconds = max(seconds, starts[-1] + 0.02 if starts else 0.0)
    return waveform.strip(steps, starts, seconds, wave=wave, mel=mel, words=recording.words, clock=clock)


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


_HEADLINES = ("tokens per target pass", "time", "tokens / s", "total variation, summed")


def figures(trace: Trace, state: str = "") -> Drawing:
    """The badge of the rule, the headline figures, and whether the timings can be relied on."""
    facts = trace_html.facts(trace)
    chips = [f"<span><b>{safe(facts[name])}</b> {safe(name)}</span>" for name in _HEADLINES if name in facts]
    prefix = f'<span class="or-state">{safe(state)}</span>' if state else ""
    busy = warning(trace.machine.get("other_load"))
    note = f'<span class="or-busy or-chip">{safe(busy)}</span>' if busy else ""
    badge = trace_html.badge(trace.lossless)
    return Drawing(f'<div class="or-figures" role="status">{prefix}{badge}{"".join(chips)}{note}</div>')


def steps(recording: Recording) -> Drawing:
    """The stepper, which the page's script builds: every target pass with its guesses and a sentence."""
    if not recording.trace.steps:
        return Drawing('<div class="or-empty">No steps.</div>')
    return Drawing(f'<div class="or-stepper" data-story="{trace_story.story(recording.trace, recording.name)}"></div>')


def charts(recording: Recording) -> Drawing:
    """All figures and charts of the trace."""
    trace = recording.trace
    summary = trace.summary()
    parts = [("Tokens of each target pass", per_step(trace.steps))]
    if summary.drafted:
        parts += [("Acceptance by position in the draft", by_position(summary))]
        parts += [("Accepted tokens per target pass", histogram(summary))]
    parts += [("Speed", speed(trace.steps)), ("Time by part of a target pass", time_split(summary.times))]
    cards = [f'<div class="or-card"><h3>{safe(title)}</h3>{chart}</div>' for title, chart in parts]
    facts = "".join(
        f"<span><b>{safe(value)}</b> {safe(name)}</span>" for name, value in trace_html.facts(trace).items()
    )
    head = f'<div class="or-figures">{facts}</div><div class="or-where">{safe(trace_html.conditions(trace))}</div>'
    return Drawing(head + side_by_side(cards, 280))


# ---- races


def clock(trace: Trace) -> list[float]:
    """The seconds from the start at which each step was done."""
    times, now, last = [], 0.0, -1
    for step in trace.steps:
        if step.index != last:  # batch rows share a round
            now, last = now + step.times.total, step.index
        times.append(now)
    return times


def race(recording: Recording) -> Drawing:
    """Plain decoding beside this recording, replayed on one clock by the page's script."""
    assert recording.plain is not None
    lanes = []
    runs = (("Plain decoding", recording.plain), (f"With guesses by {recording.trace.method}", recording))
    longest = max(clock(run.trace)[-1:] or [0.0] for _, run in runs)[0]
    for name, run in runs:
        times = clock(run.trace)
        end, summary = (times[-1] if times else 0.0), run.trace.summary()
        inner = answer(run, times, guesses=run is recording)
        lanes.append(
            f'<div class="or-lane" data-takes="{end:.3f}"><div class="or-lane-head"><b>{safe(name)}</b> '
            f'<span class="or-clock">{end:.2f} s</span>, {summary.target_passes} target passes</div>'
            f'<div class="or-track"><div class="or-run"></div></div>{inner}{player(run, name)}</div>'
        )
    return Drawing(
        f'<p class="or-story">{safe(race_result(recording))}</p>'
        f'<div class="or-race" data-longest="{longest:.3f}"><div class="or-lanes">{"".join(lanes)}</div></div>'
    )


def race_result(recording: Recording) -> str:
    """The result in one sentence made from the trace: how many target passes, how fast, and whether the outputs are
    equal; why not if they differ."""
    plain, trace = recording.plain, recording.trace
    summary = trace.summary()
    if trace.rows > 1:
        rounds = len({step.index for step in trace.steps})
        text = f"{trace.rows} rows, {summary.tokens} tokens, in {rounds} target passes that the rows share"
        longest = max(map(len, _tokens_by_row(trace).values()), default=0)
        return f"{text}; without guesses they take {longest}."
    if plain is None:
        if not summary.drafted:
            return f"{summary.tokens} tokens in {summary.target_passes} target passes, without guesses."
        text = f"{summary.tokens} tokens in {summary.target_passes} target passes instead of {summary.tokens}."
        return text if trace.lossless else f"{text} The rule is relaxed, so the output may differ from plain decoding."
    same = _tokens_by_row(plain.trace) == _tokens_by_row(trace)
    count = f"Same {summary.tokens} tokens." if same else f"{summary.tokens} tokens."
    passes = f"{summary.target_passes} target passes instead of {plain.trace.summary().target_passes}."
    return " ".join(part for part in (count, passes, _gain(recording), "" if same else _difference(trace)) if part)


def speedups(recording: Recording) -> list[float]:
    """The speedup of each pair of timings, sorted; the rate of the traces themselves if nothing was timed again."""
    plain = recording.plain
    assert plain is not None
    own, base = recording.trace.summary(), plain.trace.summary()
    share = own.tokens / max(base.tokens, 1)
    pairs = list(zip(plain.seconds, recording.seconds, strict=False)) or [(base.seconds, own.seconds)]
    return sorted(share * before / after for before, after in pairs if before > 0 and after > 0)


def _gain(recording: Recording) -> str:
    ratios = speedups(recording)
    if not ratios:
        return ""
    middle = median(ratios)
    text = f"{middle:.1f}x faster" if middle >= 1.05 else f"{middle:.2f}x the speed"
    text += f" ({ratios[0]:.1f} to {ratios[-1]:.1f} in {len(ratios)} timings)" if len(ratios) > 1 else ", timed once"
    limit = recording.trace.summary().tokens_per_pass
    if middle > 1.05 * limit:
        text += f"; more than the {limit:.1f} tokens per target pass allow, so the machine was busy"
    elif middle < 0.95:
        text += ", so guessing does not pay here"
    return f"{text}."


def _difference(trace: Trace) -> str:
    if not RULES[trace.rule].lossless if trace.rule in RULES else not trace.lossless:
        return "The outputs differ, because the rule is relaxed."
    if trace.options.get("temperature") == 0:
        return "The outputs differ from a near-tie on, where rounding decides between two tokens."
    return "The outputs differ, but have the same distribution (gumbel-match would give the same tokens)."


def _tokens_by_row(trace: Trace) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for step in trace.steps:
        if step.emitted:
            rows.setdefault(step.row, []).extend(step.emitted)
    return rows
