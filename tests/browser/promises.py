"""What the page promises, measured on the models that are here: `python tests/browser/promises.py`. How soon it opens,
how soon the first token and the first patch are on the screen once models are loaded, and what showing a run as it
goes costs beside the same run from Python. Medians, and the range; runs take turns."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

from playwright.sync_api import sync_playwright

from outrider import text
from outrider.text.serving import free_port

_ROUNDS, _TOKENS = 5, 256
_TOKEN = "#text-out span.or-t"
_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_SOON = """([button, sign, count]) => new Promise(done => {
    const begun = performance.now(), shown = () => document.querySelectorAll(sign).length;
    let first = 0;
    const look = () => {
        if (!first && shown()) first = performance.now();
        const seen = shown();
        seen < count ? setTimeout(look, 25) : done([(first - begun) / 1000, (performance.now() - first) / 1000, seen]);
    };
    document.querySelector(button).click();
    look();
})"""


def told(name: str, values: list[float], unit: str = "s") -> None:
    print(f"{name}: {statistics.median(values):.2f} {unit} ({min(values):.2f}-{max(values):.2f})", flush=True)


def main() -> None:
    began, port = time.perf_counter(), free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outrider.app.cli", "demo", "--no-browser", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            while not answers(address):
                time.sleep(0.02)
            told("open after", [time.perf_counter() - began])
            with sync_playwright() as play:
                path = shutil.which("chromium") or shutil.which("google-chrome")
                browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.set_default_timeout(300_000)
                look(page, address)
                browser.close()
        finally:
            server.terminate()


def look(page: Any, address: str) -> None:
    def run(name: str, query: str, sign: str, count: int = 1) -> list[float]:
        """Seconds until the first sign, and from there until so many or more, and how many then."""
        page.goto(f"{address}?panel={name}&{query}")
        page.wait_for_function("name => document.querySelector(`#${name}-link`) !== null", arg=name)
        page.wait_for_timeout(1500)
        seen: list[float] = page.evaluate(_SOON, [f"#{name}-run", sign, count])
        page.wait_for_function(
            "name => document.querySelector(`#${name}-status`).innerText.includes('tokens per call')", arg=name
        )
        return seen

    for name, query, sign in (
        ("text", f"prompt={_PROMPT}&drafter=auto&max_new_tokens=32", _TOKEN),
        ("image", "prompt=red heart&drafter=jacobi", "#image-out image"),
    ):
        told(f"{name}, the first time, its model loaded too", [run(name, query, sign)[0]])
        told(f"{name}, on the screen after", [run(name, query, sign)[0] for _ in range(_ROUNDS)])
    lm = text.load("smollm2-135m")
    for drafter in ("plain", "prompt-lookup"):
        query = f"prompt={_PROMPT}&drafter={drafter}&max_new_tokens={_TOKENS}"
        shares = []
        for number in range(_ROUNDS + 1):
            times = streamed(lm, None if drafter == "plain" else drafter)
            _, seconds, tokens = run("text", query, _TOKEN, len(times) * 4 // 5)
            shares += [seconds / times[int(tokens) - 1]] if number else []  # the first is for warming up
        told(f"{drafter}, four fifths of {len(times)} tokens, times as long as from Python", shares, "x")


def streamed(lm: Any, drafter: str | None) -> list[float]:
    """When each token of a run came, in seconds behind the first."""
    times: list[float] = []
    for piece in lm.stream(_PROMPT, drafter=drafter, max_new_tokens=_TOKENS):
        times += [time.perf_counter()] * len(piece.step.emitted)
    return [one - times[0] for one in times]


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as found:
            return bool(found.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
