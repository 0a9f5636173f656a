"""The page without a browser: its endpoints, validation, drawings, recordings, cancellation and links.

Over 400 lines: one page, served once for all of them.
"""

from __future__ import annotations

import gc
import json
import re
import runpy
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

gradio = pytest.importorskip("gradio")

from outrider.app.page import recordings, render, validate  # noqa: E402
from outrider.app.page.backends.interface import (  # noqa: E402
    Backend,
    checked,
    compatible,
    drafter_choices,
    drafter_knobs,
    knobs,
    rules_for,
)
from outrider.app.page.drafter_menu import drafter_menu  # noqa: E402
from outrider.app.page.kept_recordings import KeptRecordings  # noqa: E402
from outrider.app.page.lab_tab import LabTab, contenders, negative_log_likelihood  # noqa: E402
from outrider.app.page.modality_tab import ModalityTab  # noqa: E402
from outrider.app.page.recordings import Recording  # noqa: E402
from outrider.app.page.run_queue import RunQueue  # noqa: E402
from outrider.app.page.runner import follow, race  # noqa: E402
from outrider.app.page.trace_view import TraceView  # noqa: E402
from outrider.app.viz import charts, image_grid  # noqa: E402
from outrider.app.viz.dice import dice  # noqa: E402
from outrider.app.viz.svg import safe, visible  # noqa: E402
from outrider.app.viz.token_styles import tokens_of  # noqa: E402
from outrider.core.bench.runner import PLAIN, Bench, Item  # noqa: E402
from outrider.core.errors import InvalidOption, TraceError  # noqa: E402
from outrider.core.methods import DRAFTERS, RULES  # noqa: E402
from outrider.core.trace import Trace  # noqa: E402
from outrider.speech.audio import Sound  # noqa: E402

# Gradio leaves event loops open behind it, here and in its client; `tidy` collects what they hold.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.slow]
SMALL = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "browser" / "small.py")))
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "${alert(1)} {{constructor}} `x`",
    "</script><script>alert(1)</script>",
    "\u202egnirts\u202c \x00\x1b[31m \ud83d\ude00",
    "'\"&lt;",
)


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Backend]:
    result: dict[str, Backend] = SMALL.backends(tmp_path_factory.mktemp("models"))
    return result


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    from gradio_client import Client

    client = Client(address, verbose=False)
    yield client
    client.close()


_RECORDED: dict[str, Recording] = {}


def record(backend: Backend, **given: Any) -> Recording:
    """The recording of a complete run; runs with the same settings are recorded once."""
    key = json.dumps([backend.name, given])
    if key not in _RECORDED:
        settings = checked(backend, {"prompt": backend.examples[0], **given})
        *_, (_, recording) = follow(backend, settings, lambda: True, "")
        assert recording is not None
        _RECORDED[key] = recording
    return _RECORDED[key]


# ---- endpoints


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_an_endpoint_returns_the_same_as_a_run_on_the_page(
    client: Any, backends: dict[str, Backend], name: str
) -> None:
    backend = backends[name]
    drafter = "suffix" if name == "text" else "jacobi"
    reply = client.predict(backend.examples[0], drafter, "exact", 0.7, 3, None, api_name=f"/{name}")
    recording = recordings.read(json.dumps(reply["recording"]))
    assert recording.modality == name and recording.trace.seed == 3 and recording.trace.method == drafter
    assert reply["summary"]["tokens"] == recording.trace.summary().tokens > 0
    again = record(backend, drafter=drafter, temperature=0.7, seed=3)
    assert again.trace.tokens() == recording.trace.tokens()
    if name == "image":
        assert b64decode(recording.picture).startswith(b"\x89PNG")
    if name == "speech":
        assert b64decode(recording.sound).startswith(b"RIFF")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((" ", "suffix", "exact", 0.0, 0), "empty"),
        (("x" * 100_000, "suffix", "exact", 0.0, 0), "at most 2,000"),
        (("x", "/etc/passwd", "exact", 0.0, 0), "unknown drafter"),
        (("x", "suffix", "block", 0.0, 0), "cannot verify"),
        (("x", "suffix", "no-such", 0.0, 0), "unknown rule"),
        (("x", "suffix", "exact", 99.0, 0), "temperature"),
        (("x", "suffix", "exact", 0.0, -1), "seed"),
        (("x", "suffix", "exact", 0.0, 0, {"max_new_tokens": 10**9}), "max_new_tokens"),
        (("x", "suffix", "exact", 0.0, 0, {"drafter_options": {"nodes": 10**6}}), "nodes"),
        (("x", "suffix", "exact", 0.0, 0, {"drafter_options": {"model": "/etc"}}), "unknown option"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(client: Any, given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(Exception, match=words):
        client.predict(*given, api_name="/text")


def test_there_are_three_public_endpoints(client: Any) -> None:
    assert set(client.view_api(return_format="dict", print_info=False)["named_endpoints"]) == {
        "/text",
        "/image",
        "/speech",
    }


@pytest.mark.parametrize("path", ["/etc/passwd", __file__, "http://127.0.0.1:22/", "/proc/self/environ"])
def test_local_files_are_not_served(address: str, path: str) -> None:
    import httpx

    assert httpx.get(f"{address}gradio_api/file={path}").status_code == 403


def test_a_full_queue_refuses_requests(address: str) -> None:
    import httpx

    with httpx.Client(base_url=address, timeout=60) as browser:
        config = browser.get("config").json()
        number = next(event["id"] for event in config["dependencies"] if event["api_name"] == "text")
        given = {"data": ["the cat", PLAIN, "exact", 0.0, 0, {"max_new_tokens": 48}], "fn_index": number}
        requests = [{**given, "session_hash": f"visitor{number}"} for number in range(4 * validate.WAITING)]
        replies = [browser.post("gradio_api/queue/join", json=request) for request in requests]
    full = [reply for reply in replies if reply.status_code == 503]
    assert full and "queue is full" in full[0].text.lower()


# ---- drafters and rules


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_every_offered_pair_of_drafter_and_rule_runs(backends: dict[str, Backend], name: str) -> None:
    """Each drafter with one rule, each rule with one drafter, so that each drafter and each rule runs at least once."""
    backend = backends[name]
    drafters = backend.drafters()
    pairs = []
    for index, drafter in enumerate(drafters):
        rules = rules_for(backend, drafter)
        pairs.append((drafter, rules[index % len(rules)]))
    pairs += [
        (next(name for name in drafters if compatible(name, rule)), rule) for rule in backend.rules() if rule != "block"
    ]
    short = {"max_new_tokens": 6} if name == "text" else {}
    for drafter, rule in pairs:
        settings = checked(backend, {"prompt": backend.examples[0], "drafter": drafter, "rule": rule, **short})
        live = backend.begin(settings)
        for count, _ in enumerate(live):
            if count >= 3:
                break
        live.close()
        assert live.recording().trace.lossless == RULES[rule].lossless == settings.lossless


def test_rules_that_cannot_verify_a_drafter_are_not_offered(backends: dict[str, Backend]) -> None:
    assert not {"block"} & {*rules_for(backends["text"], "suffix"), *rules_for(backends["text"], "prompt-lookup")}
    assert (
        not compatible("token-recycling", "block") and compatible("draft-model", "block") and compatible(PLAIN, "block")
    )


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.lossless is False])
def test_sliders_of_relaxed_rules_name_the_exact_setting(name: str) -> None:
    sliders = knobs(name, RULES)
    assert sliders, "a relaxed rule has a slider"
    for knob in sliders:
        anchor = (RULES[name].exact_at or {}).get(knob.name)
        if anchor is not None and anchor != float("inf"):
            assert knob.exact == anchor and knob.low <= anchor <= knob.high and f"exact at {anchor:g}" in knob.label
        assert knob.low <= knob.value <= knob.high


def test_knobs_refuse_values_out_of_range() -> None:
    for table in (DRAFTERS, RULES):
        for name in table:
            for knob in knobs(name, table):
                assert knob.read(knob.low) == knob.low and knob.read(knob.value) == pytest.approx(knob.value)
                with pytest.raises(InvalidOption):
                    knob.read(knob.high + 1)


def test_choices_have_the_modality_s_values_and_defaults(backends: dict[str, Backend]) -> None:
    image = {choice.name: choice for choice in drafter_choices(backends["image"], "jacobi")}
    assert {name: choice.value for name, choice in image.items()} == {"filler": "above", "renew": "couple"}
    assert next(knob for knob in drafter_knobs(backends["image"], "jacobi") if knob.name == "window").value == 16
    text = {choice.name: choice for choice in drafter_choices(backends["text"], "jacobi")}
    assert "above" not in text["filler"].choices and text["renew"].value == "greedy"
    options = {"renew": "gumbel", "filler": "left", "window": 4}
    settings = checked(backends["image"], {"prompt": "red heart", "drafter": "jacobi", "drafter_options": options})
    assert settings.options()["drafter_options"] == options
    record(backends["image"], drafter="jacobi", rule="exact", drafter_options=options)
    with pytest.raises(InvalidOption, match="filler"):
        checked(backends["text"], {"prompt": "x", "drafter": "jacobi", "drafter_options": {"filler": "above"}})


# ---- drawings


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_drawings_show_the_figures_of_the_trace(backends: dict[str, Backend], name: str) -> None:
    recording = record(backends[name], drafter="suffix", rule="exact")
    summary = recording.trace.summary()
    figures = render.figures(recording.trace)
    for expected in (
        f"<b>{summary.tokens}</b> tokens",
        f"<b>{summary.target_passes}</b> target passes",
        f"<b>{summary.tokens_per_pass:.2f}</b>",
    ):
        assert expected in render.charts(recording)
    assert f"<b>{summary.tokens_per_pass:.2f}</b> tokens per target pass" in figures
    bars = charts.by_position(summary)
    for place, (share, reached) in enumerate(zip(summary.by_position, summary.conditional, strict=True), 1):
        assert f"position {place}: accepted in {share:.1%} of drafts, {reached:.1%} where it was reached" in bars
    counts = charts.histogram(summary)
    assert all(
        f"{accepted} accepted: {passes} target passes" in counts for accepted, passes in enumerate(summary.histogram)
    )
    split = charts.time_split(summary.times)
    assert (
        f"draft: {1e3 * summary.times.draft:.1f} ms" in split and f"score: {1e3 * summary.times.score:.1f} ms" in split
    )
    means = charts.running_mean(recording.trace.steps)
    assert means[-1][1] == pytest.approx(summary.tokens_per_pass)
    assert (
        sum(sum(group.sources.values()) for group in charts.pass_groups(recording.trace.steps, 10**6)) == summary.tokens
    )
    told = opened_story(render.steps(recording))
    rows = [row for round_ in told["rounds"] for row in round_["rows"]]
    assert len(rows) == len(recording.trace.steps) and told["missing"] == 0
    for row, step in zip(rows, recording.trace.steps, strict=True):
        assert [told["names"][out[0]] for out in row["out"]] == [visible(recording.name(t))[:60] for t in step.emitted]
        states = ["rejected" if tried else "untried" for tried in step.tried]
        for node, source in zip(step.path, step.sources, strict=False):
            states[node] = source
        assert [node[3] for node in row["nodes"]] == states
        for node, given in zip(row["nodes"], step.p, strict=True):
            assert node[4] == pytest.approx(given, abs=1e-4)
        if step.drafted:
            assert row["say"].startswith(f"Guessed {len(step.drafted)}")


def opened_story(html: str) -> dict[str, Any]:
    """The data of a stepper, as a browser reads it from the attribute."""
    found: dict[str, Any] = json.loads(unescape(html.split('data-story="')[1].split('"')[0]))
    return found


def test_grids_show_the_numbers_of_the_trace(backends: dict[str, Backend]) -> None:
    recording = record(backends["image"], drafter="jacobi", rule="lenience", rule_options={"lenience": 0.2})
    steps = recording.trace.steps
    flat = {
        what: [value for line in image_grid.cells(steps, what, 16, 16) for value in line]
        for what in ("round", "chance", "entropy", "relaxed")
    }
    assert flat["round"] == [step.index + 1 for step in steps for _ in step.emitted]
    assert flat["entropy"] == [value for step in steps for value in step.entropy]
    sources = [source for step in steps for source in step.sources]
    assert flat["relaxed"] == [float(source == "relaxed") for source in sources]
    accepted = [source in ("drafted", "relaxed") for source in sources]
    assert [value is not None for value in flat["chance"]] == accepted
    shown = render.output(recording)
    assert shown.count("data-cell") == 4 * 256 and all(f"or-layer-{name}" in shown for name in ("pass", "entropy"))


def test_a_race_replays_both_traces_at_their_recorded_times(backends: dict[str, Backend]) -> None:
    backend = backends["text"]
    fast, plain = record(backend, drafter="suffix"), record(backend, drafter=PLAIN)
    whole = replace(fast, plain=plain)
    count, passes = plain.trace.summary().tokens, fast.trace.summary().target_passes
    assert f"Same {count} tokens. {passes} target passes instead of {count}." in render.race_result(whole)
    assert plain.trace.summary().tokens_per_pass == 1.0
    times = render.clock(fast.trace)
    assert times[-1] == pytest.approx(fast.trace.summary().seconds) and times == sorted(times)
    shown = render.race(whole)
    assert f'data-at="{times[-1]:.3f}"' in shown and f'data-at="{render.clock(plain.trace)[-1]:.3f}"' in shown
    limit = fast.trace.summary().tokens_per_pass
    before, after = plain.trace.summary().seconds, fast.trace.summary().seconds
    timed = replace(whole, seconds=(1.0, 1.0, 1.0), plain=replace(plain, seconds=(1.1, 1.3, 2.0)))
    assert render.speedups(timed) == pytest.approx([1.1, 1.3, 2.0])
    assert "(1.1 to 2.0 in 3 timings)" in render.race_result(timed)
    impossible = replace(timed, plain=replace(plain, seconds=(99.0, 99.0, 99.0)))
    assert limit < 90 and "so the machine was busy" in render.race_result(impossible)
    assert render.speedups(whole) == pytest.approx([before / after])


def test_a_race_times_both_sides_three_times(backends: dict[str, Backend]) -> None:
    settings = checked(backends["text"], {"prompt": "the cat sat", "drafter": "suffix", "max_new_tokens": 8})
    *_, (_, recording) = race(backends["text"], settings, lambda: True)
    assert recording is not None and recording.plain is not None
    assert len(recording.seconds) == len(recording.plain.seconds) == 3 and recording.plain.trace.method == PLAIN
    assert recordings.read(recording.to_json()) == recording
    assert "in 3 timings" in render.race_result(recording)


def test_the_answer_is_clean_text_and_its_guesses_are_kept_apart(backends: dict[str, Backend]) -> None:
    trace = record(backends["text"], drafter="suffix").trace
    tokens = trace.tokens()
    names = {str(token): f"w{token} " for token in {*tokens, *(t for step in trace.steps for t in step.drafted)}}
    names[str(tokens[0])], names[str(tokens[-1])] = "first\n\tline", "<|im_end|>"
    recording = Recording("text", trace, "", names)
    html = render.output(recording)
    shown = re.findall(r'<span class="or-t ([^"]*)"[^>]*>(.*?)</span>', html, re.S)
    assert len(shown) == len(tokens) and all("or-d" in kind or "or-w" in kind for kind, _ in shown)
    read = "".join(re.sub("<.*?>", "", inner) for kind, inner in shown if "or-m" not in kind)
    wanted = "".join(names[str(token)] for token in tokens if names[str(token)] != "<|im_end|>")
    assert unescape(read) == wanted and "\n\t" in wanted
    rejected = sum(kind == "rejected" for step in trace.steps for _, kind in tokens_of(step))
    assert html.count('<s class="or-t or-x') == rejected


@pytest.mark.parametrize("name", ["text", "speech"])
def test_a_comparison_has_the_likelihood_of_relaxed_outputs(backends: dict[str, Backend], name: str) -> None:
    backend = backends[name]
    for rule, judged in (("exact", False), ("lenience", True)):
        given = {"rule": rule, "temperature": 1.0, "seed": 1}
        bench = Bench(contenders(backend, ["suffix"], given, lambda: True), [Item("0", "all", backend.examples[0])])
        for _ in bench.go():
            pass
        for name in ("plain", "suffix"):
            steps = [step for run in bench.of(name) for step in run.outcome.steps]
            assert all(len(step.logprobs) == (len(step.emitted) if judged else 0) for step in steps)
            likelihood = negative_log_likelihood(bench.of(name))
            assert likelihood == "" if not judged else 0 < float(likelihood) < 20


# ---- untrusted texts and files


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(backends: dict[str, Backend], text: str) -> None:
    recording = record(backends["text"], drafter="suffix")
    named = replace(recording, names=dict.fromkeys(recording.names, text), prompt=text)
    read = recordings.read(named.to_json())
    pages = [
        render.steps(read),
        render.output(read),
        render.charts(read),
        render.race(replace(read, plain=read)),
        render.figures(read.trace),
    ]
    for page in pages:
        assert "<img src=x" not in page and "<script" not in page and "${" not in page and "{{" not in page
        assert not any(sign in page for sign in "\u202e\x00\x1b`")


def test_hostile_fields_of_a_trace_are_escaped(backends: dict[str, Backend]) -> None:
    evil = "<img src=x onerror=alert(1)>${alert(1)}"
    trace = replace(record(backends["text"]).trace, method=evil, rule=evil, options={"model": evil, "dtype": evil})
    recording = recordings.read(Trace(**{**vars(trace), "machine": {"gpu": evil}}).to_json())
    page = render.figures(recording.trace) + render.race(replace(recording, plain=recording))
    assert "<img" not in page and "${" not in page and safe(evil) in page


def silent_wav(rate: int) -> str:
    """A WAV file in base64 that gives this rate."""
    data = bytearray(Sound(np.zeros(8, dtype=np.float32)).wav())
    data[24:28] = rate.to_bytes(4, "little")
    return b64encode(data).decode()


def test_files_that_are_not_traces_are_refused(backends: dict[str, Backend]) -> None:
    good = json.loads(record(backends["image"], drafter="suffix", rule="exact").to_json())
    bad: list[Any] = [b"", b"\xff\xfe", b"[]", b"{}", b"null", b"[" * 100_000, "x" * (validate.FILE + 1)]
    bad += [json.dumps({**good, **change}) for change in (
        {"recording": 9}, {"rows": 10**6}, {"picture": "PHNjcmlwdD4="}, {"sound": "!!"}, {"names": {"1": "x" * 10_000}},
        {"sound": silent_wav(0)},
        {"modality": "video"}, {"more": 1}, {"plain": {**good, "modality": "text"}}, {"trace": {"steps": [{}]}},
    )]  # fmt: skip
    for data in bad:
        with pytest.raises(TraceError):
            recordings.read(data)
    assert recordings.read(json.dumps(good)).to_json() == json.dumps(good, separators=(",", ":"))


def test_bare_traces_can_be_read(backends: dict[str, Backend]) -> None:
    for name in recordings.MODALITIES:
        trace = record(backends[name], drafter="suffix", rule="exact").trace
        opened = recordings.read(trace.to_json())
        assert opened.modality == name and opened.trace == trace
        assert render.output(opened) and render.steps(opened) and render.charts(opened)


def test_bundled_recordings_can_be_read() -> None:
    examples = recordings.examples()
    assert {recordings.read(path.read_bytes()).modality for path in examples.values()} >= {"text"}
    assert sum(path.stat().st_size for path in examples.values()) < 2_000_000


def test_tabs_open_with_a_recording(backends: dict[str, Backend]) -> None:
    for name in ("text", "image", "speech"):
        shown = TraceView(name, KeptRecordings()).example
        assert shown is not None and shown.trace.lossless
        assert re.search("Same|have the same distribution", render.race_result(shown))
    rows = TraceView("batch", KeptRecordings()).example
    assert rows is not None and rows.trace.rows == 4 and rows.trace.summary().accepted > 0
    lab = LabTab(backends, RunQueue(1, lambda: 0), KeptRecordings())
    measured = str(lab.open_example(SimpleNamespace(session_hash="new")))
    assert "Recorded with smollm2-135m" in measured and "threads; 2 prompts" in measured
    assert all(f"<td>{name}</td>" in measured for name in (PLAIN, "auto", "prompt-lookup", "jacobi"))


# ---- stopping


def test_a_cancelled_run_ends_at_the_next_step_and_keeps_its_steps(backends: dict[str, Backend]) -> None:
    left = iter([True] * 4 + [False] * 100)
    settings = checked(backends["text"], {"prompt": "the cat", "drafter": PLAIN})
    *_, (_, recording) = follow(backends["text"], settings, lambda: next(left), "")
    assert recording is not None and len(recording.trace.steps) == 4


def test_cancelled_runs_free_their_memory(backends: dict[str, Backend]) -> None:
    backend = backends["text"]
    settings = checked(backend, {"prompt": "the cat sat", "drafter": "suffix", "max_new_tokens": 256})

    def cancelled() -> None:
        run = follow(backend, settings, lambda: True, "")
        next(run)
        run.close()

    def held() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").is_file():
        pytest.skip("memory is read from /proc")
    for _ in range(5):
        cancelled()
    before = held()
    for _ in range(20):
        cancelled()
    assert held() - before < 5 * 2**20


# ---- links


def test_a_link_restores_the_settings(backends: dict[str, Backend]) -> None:
    tab = ModalityTab(backends["text"], RunQueue(), KeptRecordings())
    with gradio.Blocks():
        tab.build()
    given = {"panel": "text", "prompt": "a <b> & c", "drafter": "suffix", "rule": "lenience", "temperature": "0.5"}
    updates = tab.from_query({**given, "seed": "7", "d.nodes": "9", "r.lenience": "0.4", "max_new_tokens": "12"})
    assert updates[0] == "a <b> & c" and updates[1] == "suffix" and updates[3:6] == [0.5, 7, 12]
    assert len(updates) == len(tab.linked) and updates[-1] == gradio.skip()
    options = updates[5 + len(backends["text"].extra_options) :]
    assert [update["value"] for update in options[:2]] == [9, 16] and options[6]["value"] == 0.4
    settings = checked(backends["text"], {**given, "temperature": 0.5, "seed": 7})
    assert "prompt=a+%3Cb%3E+%26amp%3B+c" not in tab._link(settings) and "a+%3Cb%3E+%26+c" in tab._link(settings)
    assert all(update == gradio.skip() for update in tab.from_query({**given, "panel": "image"}))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"drafter": "<x>"}, "unknown drafter"),
        ({"temperature": "nan"}, "temperature"),
        ({"d.nodez": "3"}, "unknown option"),
        ({"prompt": "x" * 5_000}, "5,000 characters"),
        ({"r.lenience": "7"}, "lenience"),
    ],
)
def test_a_link_with_one_invalid_setting_keeps_the_others(
    backends: dict[str, Backend], wrong: dict[str, str], words: str
) -> None:
    tab = ModalityTab(backends["text"], RunQueue(), KeptRecordings())
    with gradio.Blocks():
        tab.build()
    given = {"panel": "text", "prompt": "a cat", "drafter": "suffix", "rule": "lenience", "seed": "7"}
    updates = tab.from_query({**given, **wrong})
    assert words in updates[-1] and "<x>" not in updates[-1] and updates[4] == 7
    assert updates[0] == ("a cat" if "prompt" not in wrong else backends["text"].examples[0])
    assert updates[1] == ("suffix" if "drafter" not in wrong else backends["text"].default_drafter)


def test_the_menu_begins_with_five_recommended_drafters() -> None:
    from outrider.app.page.backends.text import TextBackend

    menu = drafter_menu(TextBackend())
    names = [name for _, name in menu]
    assert len(names) == len(set(names)) and set(names) == {PLAIN, *TextBackend().drafters()}
    assert names[0] == "auto" and 4 <= sum(label.startswith("★") for label, _ in menu) <= 5


def test_the_dice_are_the_numbers_that_decided(backends: dict[str, Backend]) -> None:
    seen = 0
    for seed in range(4):
        trace = record(
            backends["image"], drafter="jacobi", rule="token", seed=seed, drafter_options={"renew": "gumbel"}
        ).trace
        for step, numbers in zip(trace.steps, dice(trace), strict=True):
            for node, number in enumerate(numbers):
                if number is not None:
                    seen += 1
                    assert step.tried[node] and (number < step.chance[node]) == (node in step.path)
    assert seen > 50
