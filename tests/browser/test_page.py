"""The page in a browser: runs, Stop, steps, races, traces and links, wide and narrow, light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>${window.hit=1}{{constructor}}`\u202e\x07'


def numbers(text: str) -> dict[str, str]:
    """The headline figures by name."""
    return {line.partition(" ")[2]: line.partition(" ")[0] for line in text.splitlines() if " " in line}


def test_text_streams_and_every_step_can_be_shown(visit: Open) -> None:
    seen = visit()
    seen.page.fill("#text-prompt textarea", "the cat sat on the mat and the cat sat")
    figures = numbers(seen.run("text"))
    passes = int(figures["target passes"])
    assert int(figures["tokens"]) == 96 and passes < 96 and "drafted" in seen.text("#text-out + *, .or-legend")
    assert seen.page.locator("#text-out .or-t").count() >= 96
    assert f"Target pass {passes} of {passes}" in seen.text("#text-tree")
    seen.page.click("#text-back")
    seen.until("#text-tree", f"Target pass {passes - 1} of {passes}")
    slider = seen.page.locator("#text-step input[type=range]")
    slider.focus()
    slider.press("Home")
    seen.until("#text-tree", f"Target pass 1 of {passes}")
    slider.press("ArrowRight")
    seen.until("#text-tree", f"Target pass 2 of {passes}")
    assert "token" in seen.text("#text-tree") and seen.page.locator("#text-tree svg").count() == 1


def test_figures_on_the_page_are_those_of_the_downloaded_trace(visit: Open) -> None:
    from outrider.app.page import recordings
    from outrider.app.viz import trace_html

    seen = visit()
    text = seen.run("text")
    seen.tab("Charts")
    with seen.page.expect_download() as waiting:
        seen.page.get_by_text("Download this trace").first.click()
    recording = recordings.read(Path(waiting.value.path()).read_bytes())
    for name, value in trace_html.facts(recording.trace).items():
        assert f"{value} {name}" in text
    written = "".join(recording.name(token) for token in recording.trace.tokens())
    shown = seen.page.evaluate(
        "[...document.querySelectorAll('#text-out span.or-t')].map(one => one.textContent).join('')"
    )
    assert shown.replace("⏎", "\n") == written.replace("\t", "⇥")
    titles = seen.page.evaluate("[...document.querySelectorAll('#text-charts title')].map(one => one.textContent)")
    for accepted, passes in enumerate(recording.trace.summary().histogram):
        assert f"{accepted} accepted: {passes} target passes" in titles


def test_a_picture_is_drawn_and_its_codes_have_similar_ones(visit: Open) -> None:
    seen = visit()
    seen.tab("Image")
    figures = numbers(seen.run("image"))
    assert figures["tokens"] == "256" and int(figures["target passes"]) < 256
    assert seen.page.locator("#image-out image").count() == 1
    assert seen.page.locator("#image-out [data-cell]").count() == 4 * 256
    seen.page.locator("#image-out [data-cell='17']").first.click()
    seen.until("#image-patches", "row 2, column 2")
    assert seen.page.locator("#image-patches img").count() > 3
    seen.run("image", "go")
    seen.until("#image-race", "plain decoding")
    assert seen.page.locator("#image-race image").count() == 2
    seen.page.wait_for_selector("#image-compare img")


def test_speech_can_be_played_and_shows_its_rounds(visit: Open) -> None:
    seen = visit()
    seen.tab("Speech")
    seen.run("speech")
    assert seen.page.locator("#speech-out audio").count() == 1
    length = seen.page.evaluate(
        "new Promise(done => { const one = document.querySelector('#speech-out audio');"
        " if (one.duration) done(one.duration); one.onloadedmetadata = () => done(one.duration); one.load(); })"
    )
    assert length > 0.5
    assert seen.page.locator("#speech-out svg polygon, #speech-out svg image").count() == 2
    seen.run("speech", "go")
    seen.until("#speech-race", "plain decoding")
    assert seen.page.locator("#speech-race audio").count() == 2


def test_a_race_shows_both_runs_and_can_be_replayed(visit: Open) -> None:
    seen = visit()
    seen.run("text", "go")
    text = seen.until("#text-race", "plain decoding")
    assert "the same, token for token" in text
    lanes = seen.page.locator("#text-race .or-lane")
    assert lanes.count() == 2
    shown = (
        "[...document.querySelectorAll('#text-race .or-lane:nth-child(%d) .or-t')]"
        ".filter(one => getComputedStyle(one).opacity === '1').length"
    )
    seen.page.get_by_label("20 times slower").first.check()
    seen.page.wait_for_function("document.querySelector('#text-race .or-lanes').dataset.replay !== '0'")
    early = seen.page.evaluate(shown % 1)
    seen.page.wait_for_timeout(1500)
    assert early < 96 and seen.page.evaluate(shown % 1) >= early
    seen.page.get_by_label("real time").first.check()
    seen.page.wait_for_function(f"{shown % 1} === 96", timeout=30_000)


_STOP_AT_FIRST_SIGHT = """() => {
    const find = (what) => document.querySelector("#image-" + what);
    const shown = () => find("out").innerHTML, before = shown();
    const look = () => shown() != before && shown().includes("<image") ? find("stop").click() : setTimeout(look, 2);
    look();
}"""


def test_stop_ends_a_run_and_keeps_its_steps(visit: Open) -> None:
    seen = visit()
    seen.tab("Image")
    for _ in range(5):  # a short run may end before Stop is clicked
        seen.page.evaluate(_STOP_AT_FIRST_SIGHT)
        seen.page.click("#image-run")
        text = seen.until("#image-status", "tokens per target pass")
        if "stopped" in text:
            break
    assert "stopped" in text and int(numbers(text)["tokens"]) < 256
    assert numbers(seen.run("image"))["tokens"] == "256"


def test_compare_measures_and_theory_follows_its_sliders(visit: Open) -> None:
    seen = visit()
    seen.tab("Compare")
    seen.page.fill("#compare-prompts textarea", "the cat sat on the mat")
    seen.page.click("#compare-run")
    seen.until("#compare-status", "Done.", 120)
    text = seen.text("#compare-out")
    assert all(
        expected in text for expected in ("plain", "prompt-lookup", "suffix", "tokens / pass", "best draft length")
    )
    seen.tab("Theory")
    before = seen.text("#theory-out")
    seen.page.locator("#theory-a input[type=range]").press("End")
    seen.until("#theory-out", "5.00 tokens per target pass")
    assert "1.87 times" in before


def test_a_trace_file_is_opened_and_stepped_through(visit: Open, tmp_path: Path) -> None:
    from outrider.app.page import recordings

    seen = visit()
    seen.tab("Traces")
    for title, path in recordings.examples().items():
        recording = recordings.read(path.read_bytes())
        seen.choose(path)
        seen.until("#traces-about", recording.prompt[:40])
        passes = len(recording.trace.steps)
        seen.until("#traces-tree", f"Target pass {passes} of {passes}")
        seen.page.click("#traces-back")
        seen.until("#traces-tree", f"Target pass {max(passes - 1, 1)} of {passes}")
        assert title
    bad = tmp_path / "bad.json"
    bad.write_text('{"recording": 1, "<b>": 2}')
    seen.choose(bad)
    assert "not a recording" in seen.until("#traces-status", "not a recording")


def test_hostile_texts_are_shown_as_text(visit: Open, tmp_path: Path) -> None:
    from outrider.app.page import recordings

    path = next(
        path for path in recordings.examples().values() if recordings.read(path.read_bytes()).modality == "text"
    )
    example = json.loads(path.read_bytes())
    seen = visit()
    seen.page.fill("#text-prompt textarea", EVIL)
    seen.run("text")
    seen.run("text", "go")
    evil = {
        **example,
        "prompt": EVIL,
        "names": dict.fromkeys(example["names"], EVIL),
        "words": [[0.1, EVIL]],
    }
    evil["trace"] = {**example["trace"], "method": EVIL, "rule": EVIL, "options": {"model": EVIL}}
    evil["trace"]["machine"] = {"gpu": EVIL}
    evil["plain"] = {**evil, "plain": None}
    file = tmp_path / "evil.json"
    file.write_text(json.dumps(evil))
    seen.tab("Traces")
    seen.choose(file)
    seen.until("#traces-about", "<img src=x")
    seen.page.click("#traces-back")
    seen.page.wait_for_timeout(500)
    assert seen.page.evaluate("window.hit") is None
    assert seen.page.locator("img[src=x]").count() == 0
    assert "⟨202E⟩" in seen.text("#traces-out") and "\u202e" not in seen.text("#traces-out")


def test_a_prompt_that_is_too_long_is_refused_with_a_message(visit: Open) -> None:
    seen = visit()
    seen.page.evaluate("document.querySelector('#text-prompt textarea').removeAttribute('maxlength')")
    seen.page.fill("#text-prompt textarea", "x" * 100_000)
    seen.page.click("#text-run")
    seen.page.wait_for_function(
        "['2,000', 'tokens per target pass'].some("
        "text => document.querySelector('#text-status').innerText.includes(text))"
    )
    assert len(seen.text("#text-status")) < 1_000


def test_a_link_restores_the_settings(visit: Open) -> None:
    seen = visit()
    seen.open("?panel=image&prompt=cat&drafter=suffix&rule=lenience&r.lenience=0.3&temperature=0.5&seed=7")
    seen.page.wait_for_function("document.querySelector('#image-prompt textarea')?.value === 'cat'")
    assert "relaxed" in seen.until("#image-about", "lenience")
    text = seen.run("image")
    assert "rule lenience" in text and "seed 7" in text and "total variation" in text


@pytest.mark.parametrize(("width", "theme"), [(1400, "dark"), (420, "light"), (420, "dark")])
def test_the_page_fits_the_screen(visit: Open, width: int, theme: str) -> None:
    seen = visit(width, 900, theme)
    dark = seen.page.evaluate("document.body.classList.contains('dark')")
    assert dark == (theme == "dark")
    seen.run("text")
    for tab in ("Text", "Theory"):
        seen.page.set_viewport_size({"width": max(width, 420), "height": 900})
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width + 2, f"{tab} is {wide} wide"
