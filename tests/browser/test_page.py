"""The page in a browser: runs, Stop, steps, races, traces and links, wide and narrow, light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.app.viz.svg import visible

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>${window.hit=1}{{constructor}}`\u202e\x07'


def test_the_page_opens_with_a_recorded_race(visit: Open) -> None:
    seen = visit()
    text = seen.text("#text-out .or-story")
    assert "Same" in text and "target passes instead of" in text
    assert seen.page.locator("#text-out .or-lane").count() == 2
    shown = "[...document.querySelectorAll('#text-out .or-t')].filter(one => !one.matches('.or-later')).length"
    seen.page.wait_for_function(f"{shown} === document.querySelectorAll('#text-out .or-t').length", timeout=30_000)
    slider = seen.page.locator("#text-out input[type=range]")
    slider.focus()
    slider.press("Home")
    early = seen.page.evaluate(shown)
    slider.press("End")
    assert early < seen.page.evaluate(shown)


_COPIED = """() => {
    const box = document.querySelector('#text-out .or-tokens[tabindex]'), selection = getSelection();
    selection.selectAllChildren(box);
    const text = selection.toString();
    selection.removeAllRanges();
    return text;
}"""


def test_text_streams_and_every_step_can_be_shown(visit: Open) -> None:
    seen = visit()
    seen.open("?panel=text&drafter=prompt-lookup&prompt=the+cat+sat+on+the+mat+and+the+cat+sat")  # auto may not draft
    seen.until("#text-settings", "drafter prompt-lookup")
    seen.run("text")
    passes = int(seen.page.get_attribute("#text-steps input[type=range]", "max"))
    assert passes < 96 and seen.page.locator("#text-out .or-t:not(.or-x)").count() == 96
    slider = seen.page.locator("#text-steps input[type=range]")
    slider.focus()
    slider.press("End")
    seen.until("#text-steps .or-count", f"Target pass {passes} of {passes}")
    seen.page.get_by_label("one target pass back").first.click()
    seen.until("#text-steps .or-count", f"Target pass {passes - 1} of {passes}")
    seen.page.keyboard.press("Home")
    seen.until("#text-steps .or-count", f"Target pass 1 of {passes}")
    seen.page.keyboard.press("ArrowRight")
    seen.until("#text-steps .or-count", f"Target pass 2 of {passes}")
    seen.page.locator("#text-steps .or-play").click()
    at = "Number(document.querySelector('#text-steps .or-count').innerText.match(/[0-9]+/)[0])"
    seen.page.wait_for_function(f"{at} >= 4")  # a busy machine may miss a pass
    seen.page.locator("#text-steps .or-play").click()
    assert "uess" in seen.text("#text-steps .or-say")


def test_any_token_opens_a_card_by_click_keyboard_and_touch(visit: Open) -> None:
    seen = visit()
    seen.page.locator("#text-out .or-d:not(.or-later)").first.click()
    assert "p, target" in seen.text("[role=dialog]") and "guessed and accepted" in seen.text("[role=dialog]")
    seen_color = "one => [getComputedStyle(one).backgroundColor, one.offsetWidth / one.parentElement.offsetWidth]"
    color, share = seen.page.locator("[role=dialog] .or-meter-fill.or-p").first.evaluate(seen_color)
    assert color == "rgb(0, 114, 178)" and abs(share - float(seen.text("[role=dialog] .or-meter-value"))) < 0.01
    seen.page.keyboard.press("Escape")
    assert seen.page.locator("[role=dialog]").count() == 0
    seen.page.focus("#text-out .or-lane:last-child .or-tokens")
    for _ in range(3):
        seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("Enter")
    assert seen.page.locator("[role=dialog] .or-token").count() == 1
    seen.page.get_by_label("close").click()
    chips = seen.page.locator("#text-steps .or-g")
    chips.first.focus()
    seen.page.keyboard.press("Enter")
    assert seen.page.locator("[role=dialog]").count() == 1


def test_rejected_guesses_and_markers_are_never_copied(visit: Open) -> None:
    from outrider.app.page import recordings

    seen = visit()
    seen.run("text")
    seen.page.click("#text-numbers button")
    with seen.page.expect_download() as waiting:
        seen.page.get_by_text("Download this trace").first.click()
    recording = recordings.read(Path(waiting.value.path()).read_bytes())
    written = "".join(recording.name(token) for token in recording.trace.tokens())
    for view in ("Read", "Who wrote it", "Guesses"):
        seen.page.locator("#text-text-views").get_by_label(view).check()
        assert seen.page.evaluate(_COPIED).split() == visible(written).replace("⏎", "\n").split(), view
    assert seen.page.locator("#text-out .or-x:visible").count() > 0


def test_figures_on_the_page_are_those_of_the_downloaded_trace(visit: Open) -> None:
    from outrider.app.page import recordings
    from outrider.app.viz import trace_html

    seen = visit()
    seen.run("text")
    seen.page.click("#text-numbers button")
    with seen.page.expect_download() as waiting:
        seen.page.get_by_text("Download this trace").first.click()
    recording = recordings.read(Path(waiting.value.path()).read_bytes())
    text = seen.text("#text-charts")
    for name, value in trace_html.facts(recording.trace).items():
        assert f"{value} {name}" in text
    titles = seen.page.evaluate("[...document.querySelectorAll('#text-charts title')].map(one => one.textContent)")
    for accepted, passes in enumerate(recording.trace.summary().histogram):
        assert f"{accepted} accepted: {passes} target passes" in titles
    assert "In this run" in seen.text("#text-advice")
    seen.page.click("#text-faster button")
    before = seen.until("#text-theory", "The theory gives")
    seen.page.wait_for_timeout(500)  # Gradio sets the values of what has just opened once more
    acceptance = seen.page.locator("#text-a input[type=range]")
    acceptance.press("Home" if float(acceptance.input_value()) > 0.5 else "End")
    seen.page.wait_for_function("text => document.querySelector('#text-theory').innerText !== text", arg=before)


def test_a_picture_is_drawn_and_its_codes_have_similar_ones(visit: Open) -> None:
    seen = visit()
    seen.tab("Image")
    assert "256 tokens in" in seen.run("image") + seen.text("#image-out")
    assert seen.page.locator("#image-out image").count() == 1
    assert seen.page.locator("#image-out [data-cell]").count() == 4 * 256
    assert seen.page.locator("#image-out [data-cell]:visible").count() == 0
    seen.page.locator("#image-image-views").get_by_label("Acceptance").check()
    assert seen.page.locator("#image-out [data-cell]:visible").count() == 256
    seen.page.locator("#image-out .or-layer-acceptance [data-cell='17']").click()
    seen.until("#image-patches", "row 2, column 2")
    assert seen.page.locator("#image-patches img").count() > 3
    seen.run("image", "go")
    seen.until("#image-out", "Plain decoding")
    assert seen.page.locator("#image-out image").count() == 2
    slider = seen.page.locator("#image-out input[type=range]")
    slider.focus()
    slider.press("Home")
    assert seen.page.locator("#image-out .or-veil:visible").count() >= 2 * 250, "the race uncovers the pictures"


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
    assert seen.page.locator("#speech-out .or-playhead").count() == 1
    seen.page.evaluate("document.querySelector('#speech-out audio').currentTime = 0.3")
    seen.page.wait_for_selector("#speech-out .or-playhead[transform]", state="attached")
    seen.run("speech", "go")
    seen.until("#speech-out", "Plain decoding")
    assert seen.page.locator("#speech-out audio").count() == 2


def test_a_race_shows_both_runs_and_their_spread(visit: Open) -> None:
    seen = visit()
    seen.run("text", "go")
    text = seen.until("#text-out .or-story", "in 3 timings")
    assert "Same 96 tokens." in text
    assert seen.page.locator("#text-out .or-lane").count() == 2
    seen.page.get_by_label("speed of the replay").select_option("1")
    shown = "document.querySelectorAll('#text-out .or-lane:nth-child(1) .or-t:not(.or-later)').length"
    seen.page.wait_for_function(f"{shown} === 96", timeout=30_000)


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
    assert "stopped" in text
    assert seen.page.locator("#image-out .or-layer-source [data-cell]").count() < 256
    seen.run("image")
    assert seen.page.locator("#image-out .or-layer-source [data-cell]").count() == 256


def test_the_lab_ranks_drafters(visit: Open) -> None:
    seen = visit()
    seen.tab("Lab")
    assert "Press Measure for this machine" in seen.text("#lab-out") and "prompt-lookup" in seen.text("#lab-out")
    seen.page.click("#lab-settings button")
    seen.page.fill("#lab-prompts textarea", "the cat sat on the mat")
    seen.page.click("#lab-run")
    seen.until("#lab-status", "Done.", 180)
    assert "Speedup over plain decoding" in seen.text("#lab-out")
    seen.page.click("#lab-out summary")
    text = seen.text("#lab-out")
    wanted = ("plain", "prompt-lookup", "suffix", "tokens per target pass", "best draft length")
    assert all(expected in text for expected in wanted)


def test_a_batch_shows_its_rows_side_by_side(visit: Open) -> None:
    seen = visit()
    seen.tab("Batch")
    assert "4 rows" in seen.text("#batch-out .or-story") and "recorded" in seen.text("#batch-status")
    seen.page.fill("#batch-prompts textarea", "the cat sat on the mat\nthe dog sat on the mat")
    seen.run("batch")
    assert seen.page.locator("#batch-out .or-tokens").count() == 2
    assert "2 rows" in seen.text("#batch-out .or-story")
    seen.page.get_by_label("one target pass on").last.click()
    assert seen.page.locator("#batch-steps .or-row").count() in (1, 2)


def test_a_trace_file_is_opened_and_stepped_through(visit: Open, tmp_path: Path) -> None:
    from outrider.app.page import recordings

    seen = visit()
    seen.tab("Traces")
    for title, path in recordings.examples().items():
        recording = recordings.read(path.read_bytes())
        seen.choose(path)
        seen.until("#traces-about", recording.prompt[:40])
        passes = len(recording.trace.steps)
        seen.until("#traces-steps .or-count", f" of {passes}")
        seen.page.locator("#traces-steps").get_by_label("one target pass on").click()
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
    seen.page.locator("#traces-steps").get_by_label("one target pass on").click()
    seen.page.locator("#traces-steps .or-g").first.click()
    assert "<img src=x" in seen.text("[role=dialog]")
    assert seen.page.evaluate("window.hit") is None
    assert seen.page.locator("img[src=x]").count() == 0
    assert "⟨202E⟩" in seen.text("#traces-out") and "\u202e" not in seen.text("#traces-out")
    assert "\u202e" not in seen.text("#traces-steps") and "\u202e" not in seen.text("[role=dialog]")


def test_a_prompt_that_is_too_long_is_refused_with_a_message(visit: Open) -> None:
    seen = visit()
    seen.page.fill("#text-prompt textarea", "x" * 3_000)
    seen.page.click("#text-run")
    assert len(seen.until("#text-status", "shorten it to at most 2,000")) < 1_000


def test_a_link_restores_the_settings(visit: Open) -> None:
    seen = visit()
    seen.open("?panel=image&prompt=cat&drafter=suffix&rule=lenience&r.lenience=0.3&temperature=0.5&seed=7")
    seen.page.wait_for_function("document.querySelector('#image-prompt textarea')?.value === 'cat'")
    assert "relaxed" in seen.until("#image-settings", "rule lenience")
    assert "total variation" in seen.run("image")
    seen.page.click("#image-numbers button")
    text = seen.until("#image-charts", "rule lenience")
    assert "seed 7" in text
    seen.open("?panel=text&prompt=cat&temperature=99&seed=7")
    assert "temperature" in seen.until("#text-status", "left out of the link")


@pytest.mark.parametrize(
    ("width", "height", "theme"),
    [(320, 640, "light"), (400, 800, "dark"), (768, 1024, "light"), (1400, 900, "dark"), (1400, 900, "light")],
)
def test_the_page_fits_the_screen_and_is_accessible(visit: Open, axe: Any, width: int, height: int, theme: str) -> None:
    seen = visit(width, height, theme)
    assert seen.page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    box = seen.page.locator("#text-run").bounding_box()
    assert box["y"] + box["height"] <= height, "Run is not visible without scrolling"
    assert seen.page.locator("#text-out").bounding_box()["y"] < seen.page.locator("#text-prompt").bounding_box()["y"]
    for tab in ("Text", "Image", "Speech", "Lab", "Batch", "Traces"):
        show(seen, tab)
        if tab not in ("Text", "Traces"):
            seen.page.wait_for_selector(f"#{tab.lower()}-out :is(.or-lane, svg)")
        wide = seen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{tab} is {wide} wide"
        found = axe.run(seen.page).response["violations"]
        wrong = [(one["id"], [node["target"] for node in one["nodes"]][:4]) for one in found]
        assert wrong == [], f"{tab}: {wrong}"


def show(seen: Any, tab: str) -> None:
    """Choose a tab, which a narrow screen may keep in a menu."""
    found = seen.page.get_by_role("tab", name=tab, exact=True).first
    if not found.is_visible():
        seen.page.locator(".overflow-menu > button, button.overflow-menu").first.click()
        found = seen.page.locator(".overflow-dropdown button", has_text=tab).first
    found.click()
