"""The static viewer in a browser: steps, views, cards, files, links, narration, keyboard, axe, narrow screens."""

from __future__ import annotations

import functools
import http.server
import json
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.app.page import recordings
from outrider.app.viewer import html
from outrider.app.viz.story import sentence, story

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
RECORDINGS = html.recordings()
ENGINES = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "app" / "formats" / "responses.py")))
RECORDED = Path(__file__).parents[1] / "app" / "formats" / "vllm.json"  # by vLLM's CPU build
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\u202e\x07'


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page and of a trace beside it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text(html.page(), encoding="utf-8")
    (folder / "mine.json").write_bytes(RECORDINGS["text-copying-prompt-lookup"].read_bytes())
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def view(chromium: Any, site: str) -> Iterator[Open]:
    """Opens the page; afterwards no page may have raised an error, logged one or asked another host."""
    contexts, problems = [], []

    def opened(fragment: str = "", width: int = 1400, theme: str = "light", touch: bool = False) -> Any:
        size = {"width": width, "height": 900 if width > 500 else 640}
        context = chromium.new_context(viewport=size, color_scheme=theme, has_touch=touch)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        own = site.rpartition("/")[0]
        page.on("request", lambda one: None if one.url.startswith((own, "data:")) else problems.append(one.url))
        page.goto(site + fragment)
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait for an expression; Playwright's own way evaluates a string, which the page's policy forbids."""
    for _ in range(300):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


def drop(page: Any, name: str, content: str) -> None:
    """Drop a file on the page."""
    moved = page.evaluate_handle(
        "([name, content]) => { const all = new DataTransfer();"
        " all.items.add(new File([content], name)); return all; }",
        [name, content],
    )
    page.dispatch_event("body", "drop", {"dataTransfer": moved})


def test_the_first_step_is_visible_within_three_seconds(view: Open) -> None:
    """Counted in processor time, so that other processes do not matter."""
    page = view()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}["TaskDuration"]

    before = spent()
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert spent() - before < 3
    assert page.inner_text("#sentence") == "No guess: one target pass wrote “The”."
    assert page.inner_text("#output").strip() == "The"


def test_the_keyboard_steps_plays_and_opens_cards(view: Open) -> None:
    page = view("#recording=text-random-numbers-decide")
    last = int(page.get_attribute("#position", "max")) + 1
    for key, count in (("ArrowRight", 2), ("End", last), ("ArrowLeft", last - 1), ("Home", 1)):
        page.keyboard.press(key)
        assert page.inner_text("#count") == f"{count} / {last}"
    page.select_option("#speed", "10")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press(" ")
    assert page.inner_text("#play") == "Pause"
    until(page, f"document.querySelector('#count').innerText === '{last} / {last}'")
    assert page.inner_text("#play") == "Play"
    page.locator("#output .token[tabindex='0']").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#count") == f"{last} / {last}"  # within the text, arrows go from token to token
    assert page.evaluate("[...document.querySelectorAll('#output .token')].indexOf(document.activeElement)") == 1
    page.keyboard.press("Enter")
    assert page.locator("dialog[open] h2").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.keyboard.press("Tab")  # into the draft, not through every token
    assert page.evaluate("document.activeElement.closest('#output') === null")


def test_a_card_shows_p_q_the_random_number_and_the_decision(view: Open) -> None:
    trace = json.loads(RECORDINGS["text-random-numbers-decide"].read_bytes())["trace"]
    seen = {True: 0, False: 0}
    page = view("#recording=text-random-numbers-decide&view=guesses")
    for number, step in enumerate(trace["steps"], 1):
        node = next((n for n, chance in enumerate(step["chance"]) if step["tried"][n] and 0.05 < chance < 0.95), None)
        if node is None:
            continue
        page.evaluate(f"location.hash = '#recording=text-random-numbers-decide&step={number}'")
        until(page, f"document.querySelector('#count').innerText.startsWith('{number} /')")
        page.locator("#draft .node").nth(node).click()
        bars = page.locator("dialog .meter").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
        assert bars[0].endswith(f"{step['p'][node]:.4f}") and bars[1].endswith(f"{step['q'][node]:.4f}")
        number_drawn = float(bars[2].rpartition(" ")[2])
        accepted = node in step["path"]
        assert accepted == (number_drawn < step["chance"][node])
        assert f"so the guess was {'accepted' if accepted else 'rejected'}" in page.inner_text("dialog .decision")
        seen[accepted] += 1
        page.click("#close")
    assert min(seen.values()) > 0


def test_views_of_a_text(view: Open) -> None:
    page = view("#recording=text-a-small-model-drafts&step=12")
    said = "Guessed 5, kept 3; the target wanted “appears”, not “is”, so the rest was discarded."
    assert page.inner_text("#sentence") == said
    clean = page.inner_text("#output")
    page.check("input[name=view][value=who]")
    assert page.inner_text("#output") == clean and page.locator("#output .target").count() > 3
    assert page.locator("#output .rejected").count() == 0
    page.check("input[name=view][value=guesses]")
    assert page.locator("#output .rejected").count() == 12
    page.check("input[name=run][value=plain]")
    assert page.inner_text("#count") == "1 / 48" and "run=plain" in page.url


_EVERY_STEP = """() => {
    const all = [], next = document.querySelector("#next"), dialog = document.querySelector("dialog");
    for (;;) {
        const nodes = [...document.querySelectorAll("#draft .node")].map(one => {
            one.click();
            const bars = [...dialog.querySelectorAll(".meter")].map(bar => bar.getAttribute("aria-label"));
            dialog.close();
            const drawn = bars.map(bar => / number ([0-9.]+)$/.exec(bar)).find(Boolean);
            return [parseFloat(one.style.left) / 126 + 1, one.classList[1],
                drawn ? Number(drawn[1]).toFixed(3) : "", one.querySelector("small").textContent];
        });
        all.push([document.querySelector("#sentence").textContent, nodes]);
        if (next.disabled) return all;
        next.click();
    }
}"""


def numbered(said: str) -> list[float]:
    return [float(one) for one in re.findall(r"[0-9.]+", said)]


def test_the_viewer_tells_steps_as_the_page(view: Open) -> None:
    """Sentences, and of each guess its column, its state, its numbers and the random number that decided: the viewer's
    script computes them from the trace, the page gets them from Python."""
    page, drawn = view(), 0
    for name in [name for name in RECORDINGS if not name.startswith("speech-")]:
        page.evaluate(f"location.hash = '#recording={name}'")
        until(page, f"document.querySelector('#pick').value === '{name}'")
        shown = page.evaluate(_EVERY_STEP)
        recording = recordings.read(RECORDINGS[name].read_bytes())
        told = json.loads(unescape(str(story(recording.trace, recording.name))))
        assert not told["missing"] and len(shown) == len(recording.trace.steps)
        for step, round_, (said, guesses) in zip(recording.trace.steps, told["rounds"], shown, strict=True):
            if recording.modality == "text":  # the viewer calls a token of a picture "code 7"
                assert said == sentence(step, recording.name)
            own = []
            for _, column, _, state, p, q, _, dice in round_["rows"][0]["nodes"]:
                thrown = "" if dice is None else f"{dice:.3f}"
                numbers = (
                    "not reached" if state == "untried" else f"p {p:.2f}  {'fixed' if q is None else f'q {q:.2f}'}"
                )
                own.append([column, state, thrown, numbers])
                drawn += dice is not None
            theirs = [one for one in guesses if one[1] not in ("resampled", "bonus")]
            for (*their, theirs_said), (*ours, ours_said) in zip(sorted(theirs), sorted(own), strict=True):
                assert their == ours, f"{name}, step {step.index + 1}"
                assert numbered(theirs_said) == pytest.approx(numbered(ours_said), abs=0.011)
    assert drawn > 20


def test_pictures_and_speech(view: Open) -> None:
    page = view("#recording=image-neighbours-pass&step=20")
    written = sum(
        len(step["emitted"])
        for step in json.loads(RECORDINGS["image-neighbours-pass"].read_bytes())["trace"]["steps"][:20]
    )
    assert page.locator(".codes .code:not(.veil)").count() == written
    assert page.evaluate("document.querySelector('.frame img').naturalWidth") == 64
    page.select_option("#overlay", "entropy")
    assert "entropy" in page.get_attribute(".codes", "class")
    page.locator(".codes .code").first.click()
    assert "target pass 1" in page.inner_text("dialog .body")
    page.keyboard.press("Escape")
    page.select_option("#pick", "speech-a-sentence")
    spoken = json.loads(RECORDINGS["speech-a-sentence"].read_bytes())["trace"]["steps"]
    assert page.locator(".strip .code").count() == sum(len(step["emitted"]) for step in spoken)
    length = (
        "new Promise(done => { const one = document.querySelector('audio');"
        " if (one.duration) done(one.duration); one.onloadedmetadata = () => done(one.duration); })"
    )
    assert page.evaluate(length) > 0.5
    before = page.evaluate("document.querySelector('.playhead').style.left")
    page.evaluate("document.querySelector('audio').currentTime = 0.4")
    until(page, f"document.querySelector('.playhead').style.left !== '{before}'")
    player = page.evaluate_handle("document.querySelector('audio')")
    page.click("#next")
    assert page.evaluate("one => one.isConnected", player)  # stepping doesn't stop the sound


def test_files_are_dropped_chosen_and_linked(view: Open, site: str) -> None:
    page = view()
    drop(page, "dropped.json", RECORDINGS["text-a-tree-of-successors"].read_text())
    until(page, "document.querySelector('#title').textContent === 'dropped.json'")
    assert "reverses a string" in page.inner_text("#prompt")
    page.set_input_files("#open", RECORDED)
    until(page, "document.querySelector('#title').textContent === 'vllm.json'")
    reply = json.loads(RECORDED.read_bytes())
    metrics = reply["metrics"]["speculative_decoding"]
    assert page.inner_text("#count") == f"1 / {metrics['num_spec_steps'] + 1}"
    assert f"{metrics['num_accepted_draft_tokens']} of {metrics['num_draft_tokens']} draft tokens" in page.inner_text(
        "#facts"
    )
    page.keyboard.press("Escape")
    page.locator("#position").press("End")
    assert page.inner_text("#output").strip() == reply["choices"][0]["message"]["content"]
    page.locator("#position").press("Home")
    linked = view(f"#trace={site.rpartition('/')[0]}/mine.json&step=3&view=guesses")
    assert linked.inner_text("#title").lower() == "mine.json" and linked.inner_text("#count") == "3 / 4"
    for bad, said in (
        ("{", "not JSON"),
        ("{}", "not a trace"),
        ('{"schema": 1, "steps": [{"emitted": "x"}]}', "not a list"),
    ):
        drop(page, "bad.json", bad)
        until(page, "said => document.querySelector('#error').textContent.includes(said)", said)
    assert page.inner_text("#count") == f"1 / {metrics['num_spec_steps'] + 1}"  # what was shown stays


def test_python_and_the_page_read_engines_alike(view: Open) -> None:
    from outrider.app.formats.engines import recognised, to_aiperf
    from outrider.app.formats.files import opened

    page = view()
    record = to_aiperf(opened(json.dumps(ENGINES.VLLM).encode()).as_acceptance())
    contents = {"vllm": ENGINES.VLLM, "aiperf": record, "llama": ENGINES.LLAMA, "sglang": ENGINES.SGLANG}
    for name, content in contents.items():
        found = recognised(content)
        assert found is not None
        drop(page, f"{name}.json", json.dumps(content))
        until(page, "name => document.querySelector('#title').textContent === name", f"{name}.json")
        if found.steps is not None:
            assert page.inner_text("#count") == f"1 / {len(found.trace().steps)}"
            assert f"{found.accepted} of {found.drafted} draft tokens accepted" in page.inner_text("#facts")
        else:
            shown = dict(zip(*(page.locator(f".figures {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
            assert (shown["target passes"], shown["of them accepted"]) == (str(found.passes), str(found.accepted))


def test_hostile_traces_are_shown_as_text(view: Open) -> None:
    content = json.loads(RECORDINGS["text-copying-prompt-lookup"].read_bytes())
    content |= {"prompt": EVIL, "names": dict.fromkeys(content["names"], EVIL), "plain": None}
    content["trace"] |= {"method": EVIL, "rule": EVIL, "options": {"model": EVIL, "text": EVIL}}
    for step in content["trace"]["steps"]:
        step["note"] = EVIL
    page = view()
    drop(page, EVIL + ".json", json.dumps(content))
    until(page, "document.querySelector('#prompt').textContent.includes('<img')")
    page.keyboard.press("End")
    page.locator("#output .token").first.click()
    assert page.evaluate("window.hit") is None and page.locator("img[src=x]").count() == 0
    assert "⟨202E⟩" in page.inner_text("#output") and "\u202e" not in page.content()


def test_the_narration_moves_the_stepper(view: Open) -> None:
    page = view()
    chapters = html.chapters()
    expected = [one for chapter in chapters for one in chapter["paragraphs"]]  # type: ignore[attr-defined]
    for one in expected[1:]:
        page.click("#story-next")
        assert page.inner_text("#paragraphs [aria-current=step]") == one["text"]
        assert page.inner_text("#count").startswith(f"{one['step']} /")
        assert page.input_value("#pick") == one["recording"]
    assert page.is_disabled("#story-next")
    page.select_option("#chapter", "3")
    assert page.inner_text("#count").startswith(f"{chapters[3]['paragraphs'][0]['step']} /")  # type: ignore[index]


@pytest.mark.parametrize(("width", "theme"), [(320, "light"), (320, "dark"), (1400, "light"), (1400, "dark")])
def test_every_kind_fits_and_axe_finds_nothing(view: Open, axe: Any, width: int, theme: str) -> None:
    page = view("", width, theme)
    shown = [
        ("text-random-numbers-decide", "guesses"),
        ("image-neighbours-pass", "read"),
        ("speech-a-sentence", "read"),
    ]
    for name, kind in shown:
        page.evaluate(f"location.hash = '#recording={name}&step=4&view={kind}'")
        until(page, f"document.querySelector('#pick').value === '{name}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = axe.run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
    page.locator("#draft .node").first.click()
    assert axe.run(page).response["violations"] == []
    small = "all => all.filter(one => one.offsetHeight && one.offsetHeight < 24).map(one => one.outerHTML.slice(0, 80))"
    assert page.locator("button, select").evaluate_all(small) == []


def test_a_swipe_steps(view: Open) -> None:
    page = view("#recording=text-copying-prompt-lookup&step=2", 400, touch=True)
    swipe = """from => { const one = document.querySelector('#output'), to = 300 - from;
        const touch = x => new Touch({ identifier: 1, target: one, clientX: x, clientY: 300 });
        one.dispatchEvent(new TouchEvent('touchstart', { touches: [touch(from)], bubbles: true }));
        one.dispatchEvent(new TouchEvent('touchend', { changedTouches: [touch(to)], bubbles: true })); }"""
    page.evaluate(swipe, 250)
    assert page.inner_text("#count") == "3 / 4"
    page.evaluate(swipe, 50)
    assert page.inner_text("#count") == "2 / 4"
