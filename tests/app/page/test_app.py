"""The page without a browser: what may be asked, what comes out for programs, what is refused, what is let go of."""

from __future__ import annotations

import gc
import json
import runpy
import warnings
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

gradio = pytest.importorskip("gradio")

from outrider.app.page import recordings, render, validate  # noqa: E402
from outrider.app.page.backends.interface import Backend, checked, drafting, knobs, rules_for, together, wording  # noqa: E402
from outrider.app.page.compare_tab import contenders, surprise  # noqa: E402
from outrider.app.page.modality_tab import Panel  # noqa: E402
from outrider.app.page.recordings import Recording  # noqa: E402
from outrider.app.page.run_queue import RunQueue  # noqa: E402
from outrider.app.page.runner import follow  # noqa: E402
from outrider.app.viz import charts, image_grid  # noqa: E402
from outrider.app.viz.svg import safe  # noqa: E402
from outrider.core.bench.runner import PLAIN, Bench, Item  # noqa: E402
from outrider.core.errors import InvalidOption, TraceError  # noqa: E402
from outrider.core.methods import DRAFTERS, RULES  # noqa: E402
from outrider.core.trace import Trace  # noqa: E402

# Gradio leaves event loops open behind it, here and in its client; what they hold is collected by `tidy`.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.slow]
SMALL, OPENED = (
    SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "browser" / f"{name}.py")))
    for name in ("small", "opened")
)
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
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Backend]:
    found: dict[str, Backend] = SMALL.subjects(tmp_path_factory.mktemp("models"))
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the page."""
    with OPENED.opened("small.py", tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Any]:
    from gradio_client import Client

    found = Client(address, verbose=False)
    yield found
    found.close()


_MADE: dict[str, Recording] = {}


def made(subject: Backend, **given: Any) -> Recording:
    """A run to its end, the same one for all tests that ask for it."""
    key = json.dumps([subject.name, given])
    if key not in _MADE:
        asked = checked(subject, {"prompt": subject.examples[0], **given})
        *_, (_, recording) = follow(subject, asked, lambda: True, "")
        assert recording is not None
        _MADE[key] = recording
    return _MADE[key]


# ---- for programs


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_a_program_gets_what_the_modality_gives(client: Any, subjects: dict[str, Backend], name: str) -> None:
    subject = subjects[name]
    drafter = "suffix" if name == "text" else "jacobi"
    told = client.predict(subject.examples[0], drafter, "exact", 0.7, 3, None, api_name=f"/{name}")
    recording = recordings.read(json.dumps(told["recording"]))
    assert recording.modality == name and recording.trace.seed == 3 and recording.trace.method == drafter
    assert told["summary"]["tokens"] == recording.trace.summary().tokens > 0
    again = made(subject, drafter=drafter, temperature=0.7, seed=3)
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
        (("x", "suffix", "block", 0.0, 0), "can't judge"),
        (("x", "suffix", "no-such", 0.0, 0), "unknown rule"),
        (("x", "suffix", "exact", 99.0, 0), "temperature"),
        (("x", "suffix", "exact", 0.0, -1), "seed"),
        (("x", "suffix", "exact", 0.0, 0, {"max_new_tokens": 10**9}), "max_new_tokens"),
        (("x", "suffix", "exact", 0.0, 0, {"drafter_options": {"nodes": 10**6}}), "nodes"),
        (("x", "suffix", "exact", 0.0, 0, {"drafter_options": {"model": "/etc"}}), "unknown option"),
    ],
)
def test_what_is_out_of_bounds_is_refused_in_words(client: Any, given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(Exception, match=words):
        client.predict(*given, api_name="/text")


def test_only_three_endpoints_are_there_for_programs(client: Any) -> None:
    assert set(client.view_api(return_format="dict", print_info=False)["named_endpoints"]) == {
        "/text",
        "/image",
        "/speech",
    }


@pytest.mark.parametrize("path", ["/etc/passwd", __file__, "http://127.0.0.1:22/", "/proc/self/environ"])
def test_files_of_this_machine_are_not_given_out(address: str, path: str) -> None:
    import httpx

    assert httpx.get(f"{address}gradio_api/file={path}").status_code == 403


def test_a_full_queue_says_so(address: str) -> None:
    import httpx

    with httpx.Client(base_url=address, timeout=60) as browser:
        config = browser.get("config").json()
        number = next(one["id"] for one in config["dependencies"] if one["api_name"] == "text")
        given = {"data": ["the cat", PLAIN, "exact", 0.0, 0, {"max_new_tokens": 48}], "fn_index": number}
        asked = [{**given, "session_hash": f"visitor{place}"} for place in range(4 * validate.WAITING)]
        said = [browser.post("gradio_api/queue/join", json=one) for one in asked]
    full = [one for one in said if one.status_code == 503]
    assert full and "queue is full" in full[0].text.lower()


# ---- what goes together


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_every_offered_pair_of_drafter_and_rule_runs(subjects: dict[str, Backend], name: str) -> None:
    """Each drafter with one rule, each rule with one drafter, in turns: as many runs as there are of the more."""
    subject = subjects[name]
    drafters = subject.drafters()
    pairs = [(one, rules_for(subject, one)[place % len(rules_for(subject, one))]) for place, one in enumerate(drafters)]
    pairs += [
        (next(one for one in drafters if together(one, rule)), rule) for rule in subject.rules() if rule != "block"
    ]
    short = {"max_new_tokens": 6} if name == "text" else {}
    for drafter, rule in pairs:
        asked = checked(subject, {"prompt": subject.examples[0], "drafter": drafter, "rule": rule, **short})
        live = subject.begin(asked)
        for count, _ in enumerate(live):
            if count >= 3:
                break
        live.close()
        assert live.recording().trace.lossless == RULES[rule].lossless == asked.lossless


def test_rules_that_cannot_judge_are_not_offered(subjects: dict[str, Backend]) -> None:
    assert not {"block"} & {*rules_for(subjects["text"], "suffix"), *rules_for(subjects["text"], "prompt-lookup")}
    assert not together("token-recycling", "block") and together("draft-model", "block") and together(PLAIN, "block")


@pytest.mark.parametrize("name", [one for one, rule in RULES.items() if rule.lossless is False])
def test_sliders_of_relaxed_rules_say_where_they_are_exact(name: str) -> None:
    found = knobs(name, RULES)
    assert found, "a relaxed rule has something to turn"
    for knob in found:
        anchor = (RULES[name].anchor or {}).get(knob.name)
        if anchor is not None and anchor != float("inf"):
            assert knob.exact == anchor and knob.low <= anchor <= knob.high and f"exact at {anchor:g}" in knob.label
        assert knob.low <= knob.value <= knob.high


def test_every_knob_stays_within_its_bounds() -> None:
    for table in (DRAFTERS, RULES):
        for name in table:
            for knob in knobs(name, table):
                assert knob.read(knob.low) == knob.low and knob.read(knob.value) == pytest.approx(knob.value)
                with pytest.raises(InvalidOption):
                    knob.read(knob.high + 1)


def test_words_are_chosen_and_begin_as_the_modality_does(subjects: dict[str, Backend]) -> None:
    drawn = {one.name: one for one in wording(subjects["image"], "jacobi")}
    assert {name: one.value for name, one in drawn.items()} == {"filler": "above", "renew": "couple"}
    assert next(one for one in drafting(subjects["image"], "jacobi") if one.name == "window").value == 16
    said = {one.name: one for one in wording(subjects["text"], "jacobi")}
    assert "above" not in said["filler"].choices and said["renew"].value == "greedy"
    options = {"renew": "gumbel", "filler": "left", "window": 4}
    asked = checked(subjects["image"], {"prompt": "red heart", "drafter": "jacobi", "drafter_options": options})
    assert asked.options()["drafter_options"] == options
    made(subjects["image"], drafter="jacobi", rule="exact", drafter_options=options)
    with pytest.raises(InvalidOption, match="filler"):
        checked(subjects["text"], {"prompt": "x", "drafter": "jacobi", "drafter_options": {"filler": "above"}})


# ---- what is shown is the trace's


@pytest.mark.parametrize("name", recordings.MODALITIES)
def test_figures_shown_are_those_of_the_trace(subjects: dict[str, Backend], name: str) -> None:
    recording = made(subjects[name], drafter="suffix", rule="exact")
    found = recording.trace.summary()
    said = render.figures(recording.trace)
    for one in (
        f"<b>{found.tokens}</b> tokens",
        f"<b>{found.target_passes}</b> calls",
        f"<b>{found.tokens_per_pass:.2f}</b>",
    ):
        assert one in said
    bars = charts.by_position(found)
    for place, (share, reached) in enumerate(zip(found.by_position, found.conditional, strict=True), 1):
        assert f"position {place}: accepted in {share:.1%} of drafts, {reached:.1%} where it was reached" in bars
    counts = charts.histogram(found)
    assert all(f"{accepted} accepted: {calls} calls" in counts for accepted, calls in enumerate(found.histogram))
    split = charts.time_split(found.times)
    assert f"draft: {1e3 * found.times.draft:.1f} ms" in split and f"score: {1e3 * found.times.score:.1f} ms" in split
    running = charts.running(recording.trace.steps)
    assert running[-1][1] == pytest.approx(found.tokens_per_pass)
    assert sum(sum(one.sources.values()) for one in charts.calls(recording.trace.steps, 10**6)) == found.tokens
    for place, step in enumerate(recording.trace.steps):
        tree = render.step(recording, place)
        assert f"{len(step.drafted)} drafted, {step.accepted} accepted, {len(step.emitted)} committed" in tree
        for node in step.path:
            assert f"p {step.p[node]:.4f}" in tree and f"chance {step.chance[node]:.4f}" in tree


def test_grids_hold_the_numbers_of_their_codes(subjects: dict[str, Backend]) -> None:
    recording = made(subjects["image"], drafter="jacobi", rule="lenience", rule_options={"lenience": 0.2})
    steps = recording.trace.steps
    flat = {
        what: [one for line in image_grid.cells(steps, what, 16, 16) for one in line]
        for what in ("round", "chance", "entropy", "relaxed")
    }
    assert flat["round"] == [step.index + 1 for step in steps for _ in step.emitted]
    assert flat["entropy"] == [one for step in steps for one in step.entropy]
    sources = [source for step in steps for source in step.sources]
    assert flat["relaxed"] == [float(one == "relaxed") for one in sources]
    accepted = [source in ("drafted", "relaxed") for source in sources]
    assert [one is not None for one in flat["chance"]] == accepted
    assert render.made(recording).count("data-cell") == 4 * 256


def test_a_race_is_replayed_by_the_clock_of_both_traces(subjects: dict[str, Backend]) -> None:
    subject = subjects["text"]
    fast, plain = made(subject, drafter="suffix"), made(subject, drafter=PLAIN)
    whole = replace(fast, plain=plain)
    assert "came to the same, token for token" in render.verdict(whole)
    assert plain.trace.summary().tokens_per_pass == 1.0
    times = render.clock(fast.trace)
    assert times[-1] == pytest.approx(fast.trace.summary().seconds) and times == sorted(times)
    shown = render.race(whole)
    assert f"--at:{times[-1]:.3f}s" in shown and f"--at:{render.clock(plain.trace)[-1]:.3f}s" in shown


@pytest.mark.parametrize("name", ["text", "speech"])
def test_the_lab_says_what_relaxing_costs_in_the_target_s_own_eyes(subjects: dict[str, Backend], name: str) -> None:
    subject = subjects[name]
    for rule, judged in (("exact", False), ("lenience", True)):
        given = {"rule": rule, "temperature": 1.0, "seed": 1}
        bench = Bench(contenders(subject, ["suffix"], given, lambda: True), [Item("0", "all", subject.examples[0])])
        for _ in bench.go():
            pass
        for one in ("plain", "suffix"):
            told = [step for run in bench.of(one) for step in run.outcome.steps]
            assert all(len(step.logprobs) == (len(step.emitted) if judged else 0) for step in told)
            said = surprise(bench.of(one))
            assert said == "" if not judged else 0 < float(said) < 20


# ---- strangers' texts and files


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup(subjects: dict[str, Backend], text: str) -> None:
    recording = made(subjects["text"], drafter="suffix")
    named = replace(recording, names=dict.fromkeys(recording.names, text), prompt=text)
    read = recordings.read(named.to_json())
    steps = range(len(read.trace.steps))
    pages = [
        render.made(read),
        render.charts(read),
        render.race(replace(read, plain=read)),
        render.figures(read.trace),
    ]
    for page in [*pages, *(render.step(read, place) for place in steps)]:
        assert "<img src=x" not in page and "<script" not in page and "${" not in page and "{{" not in page
        assert not any(sign in page for sign in "\u202e\x00\x1b`")


def test_hostile_facts_of_a_trace_stay_text(subjects: dict[str, Backend]) -> None:
    evil = "<img src=x onerror=alert(1)>${alert(1)}"
    trace = replace(made(subjects["text"]).trace, method=evil, rule=evil, options={"model": evil, "dtype": evil})
    recording = recordings.read(Trace(**{**vars(trace), "machine": {"gpu": evil}}).to_json())
    page = render.figures(recording.trace) + render.race(replace(recording, plain=recording))
    assert "<img" not in page and "${" not in page and safe(evil) in page


def test_files_that_are_no_traces_are_refused(subjects: dict[str, Backend]) -> None:
    good = json.loads(made(subjects["image"], drafter="suffix", rule="exact").to_json())
    bad: list[Any] = [b"", b"\xff\xfe", b"[]", b"{}", b"null", b"[" * 100_000, "x" * (validate.FILE + 1)]
    bad += [json.dumps({**good, **change}) for change in (
        {"recording": 9}, {"rows": 10**6}, {"picture": "PHNjcmlwdD4="}, {"sound": "!!"}, {"names": {"1": "x" * 10_000}},
        {"modality": "video"}, {"more": 1}, {"plain": {**good, "modality": "text"}}, {"trace": {"steps": [{}]}},
    )]  # fmt: skip
    for one in bad:
        with pytest.raises(TraceError):
            recordings.read(one)
    assert recordings.read(json.dumps(good)).to_json() == json.dumps(good, separators=(",", ":"))


def test_a_bare_trace_opens_as_well(subjects: dict[str, Backend]) -> None:
    for name in recordings.MODALITIES:
        trace = made(subjects[name], drafter="suffix", rule="exact").trace
        opened = recordings.read(trace.to_json())
        assert opened.modality == name and opened.trace == trace
        assert render.made(opened) and render.step(opened, 0) and render.charts(opened)


def test_recordings_that_ship_can_be_opened() -> None:
    found = recordings.examples()
    assert {recordings.read(path.read_bytes()).modality for path in found.values()} >= {"text"}
    assert sum(path.stat().st_size for path in found.values()) < 2_000_000


# ---- stopping


def test_a_run_ends_at_the_step_after_stop_and_keeps_what_there_is(subjects: dict[str, Backend]) -> None:
    left = iter([True] * 4 + [False] * 100)
    asked = checked(subjects["text"], {"prompt": "the cat", "drafter": PLAIN})
    *_, (_, recording) = follow(subjects["text"], asked, lambda: next(left), "")
    assert recording is not None and len(recording.trace.steps) == 4


def test_twenty_cancels_leave_no_memory_behind(subjects: dict[str, Backend]) -> None:
    subject = subjects["text"]
    asked = checked(subject, {"prompt": "the cat sat", "drafter": "suffix", "max_new_tokens": 256})

    def cancelled() -> None:
        run = follow(subject, asked, lambda: True, "")
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


def test_an_address_brings_settings_back(subjects: dict[str, Backend]) -> None:
    panel = Panel(subjects["text"], RunQueue())
    with gradio.Blocks():
        panel.build()
    given = {"panel": "text", "prompt": "a <b> & c", "drafter": "suffix", "rule": "lenience", "temperature": "0.5"}
    updates = panel.linked({**given, "seed": "7", "d.nodes": "9", "r.lenience": "0.4", "max_new_tokens": "12"})
    assert updates[0] == "a <b> & c" and updates[1] == "suffix" and updates[3:6] == [0.5, 7, 12]
    assert [one["value"] for one in updates[6:8]] == [9, 16] and updates[12]["value"] == 0.4
    asked = checked(subjects["text"], {**given, "temperature": 0.5, "seed": 7})
    assert "prompt=a+%3Cb%3E+%26amp%3B+c" not in panel._link(asked) and "a+%3Cb%3E+%26+c" in panel._link(asked)
    for wrong in ({**given, "drafter": "<x>"}, {**given, "panel": "image"}, {**given, "temperature": "nan"}):
        assert all(one == {"__type__": "update"} for one in panel.linked(wrong))
