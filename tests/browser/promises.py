"""Measures the page with the installed models: `python tests/browser/promises.py [--quick]`.

Prints, as medians with their range: the time until the page opens; from opening an address to the first result (a
recorded race) and until the page is built over it; from Run to the first token or patch on the screen; and how much
slower a run on the page is than the same from Python. `--quick` prints the two that are promised, each within a second:
the first result, and the first token of text, of the first run and of others."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import sync_playwright

from outrider import text
from outrider.text.vllm.server import free_port

_ROUNDS, _TOKENS = 5, 256
_PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."
_SOON = """([button, sign]) => new Promise(done => {
    const begun = performance.now();
    const look = () => document.querySelector(sign) ? done((performance.now() - begun) / 1000) : setTimeout(look, 25);
    document.querySelector(button).click();
    look();
})"""
_RATE = """([button, status]) => new Promise(done => {
    let found = null;
    const look = () => {
        const text = document.querySelector(status).innerText;
        const now = text.match(/(\\d+) tokens, .* ([\\d.]+) tokens \\/ s/);
        if (now) found = [Number(now[1]), Number(now[2])];
        found && text.includes("tokens per target pass") ? done(found) : setTimeout(look, 100);
    };
    document.querySelector(button).click();
    look();
})"""


def show(name: str, values: list[float], unit: str = "s") -> None:
    print(f"{name}: {statistics.median(values):.2f} {unit} ({min(values):.2f}-{max(values):.2f})", flush=True)


def main() -> None:
    quick, soon = "--quick" in sys.argv[1:], []
    for number in range(0 if quick else _ROUNDS + 1):
        with opened() as (address, seconds):
            soon += [seconds] if number else []  # the first run compiles bytecode
    if soon:
        show("page opens after", soon)
    with opened() as (address, _), sync_playwright() as play:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(300_000)
        look(page, address, quick)
        browser.close()


@contextmanager
def opened() -> Iterator[tuple[str, float]]:
    """The page's address, and the seconds until it answered."""
    began, port = time.perf_counter(), free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "outrider.app.cli", "demo", "--no-browser", "--port", str(port)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=kept) as server:
        try:
            while not answers(address):
                time.sleep(0.02)
            yield address, time.perf_counter() - began
        finally:
            server.terminate()


def look(page: Any, address: str, quick: bool) -> None:
    def run(name: str, query: str, watch: str, *watched: str) -> Any:
        """Start a run in a tab; the result of the JavaScript `watch`."""
        page.goto(f"{address}?panel={name}&{query}")
        page.wait_for_function("name => document.querySelector(`#${name}-run`) !== null", arg=name)
        page.wait_for_timeout(1500)
        seen = page.evaluate(watch, [f"#{name}-run", *watched])
        page.wait_for_function(
            "name => document.querySelector(`#${name}-status`).innerText.includes('tokens per target pass')", arg=name
        )
        return seen

    found = [recorded(page, address) for _ in range(_ROUNDS)]
    show("first result after opening", [first for first, _ in found])
    show("page built after opening", [built for _, built in found])
    kinds = (
        (
            "text",
            f"prompt={_PROMPT}&drafter=auto&max_new_tokens=32",
            "#text-out [aria-label='the answer so far']",
        ),
        ("image", "prompt=red heart&drafter=jacobi", "#image-out .or-lane:first-child:last-child image"),
    )
    for name, query, sign in kinds[: 1 if quick else 2]:
        show(f"{name}, first output of the first run after", [run(name, query, _SOON, sign)])
        show(f"{name}, first output after", [run(name, query, _SOON, sign) for _ in range(_ROUNDS)])
    if quick:
        return
    lm = text.load("smollm2-135m")
    for drafter in ("plain", "prompt-lookup"):
        query = f"prompt={_PROMPT}&drafter={drafter}&max_new_tokens={_TOKENS}"
        shares = []
        for number in range(_ROUNDS + 1):
            times = streamed(lm, None if drafter == "plain" else drafter)
            tokens, rate = run("text", query, _RATE, "#text-status")
            shares += [tokens / times[tokens - 1] / rate] if number else []  # the first run is a warm-up
        show(f"{drafter}, {len(times)} tokens, time relative to Python", shares, "x")


def recorded(page: Any, address: str) -> tuple[float, float]:
    """The seconds from opening the page until a recorded race is on the screen, and until the page is built."""
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector(":is(#or-first, #text-out .or-race) .or-t")
    first = time.perf_counter() - began
    page.wait_for_selector("#text-out .or-race .or-t")
    return first, time.perf_counter() - began


def streamed(lm: Any, drafter: str | None) -> list[float]:
    """The seconds after which each token of a run arrived."""
    times, begun = list[float](), time.perf_counter()
    for piece in lm.stream(_PROMPT, drafter=drafter, max_new_tokens=_TOKENS):
        times += [time.perf_counter() - begun] * len(piece.step.emitted)
    return times


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main()
