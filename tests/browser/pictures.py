"""Takes screenshots of every tab, light and dark, wide and narrow: `python tests/browser/pictures.py FOLDER [TAB ...]`.

A TAB may also be `wide` or `narrow`, for that shape alone. Uses the installed models. The files have a palette of 160
colours, so that they stay small."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from outrider.app.page.app import serve

_RUNS = {
    "text": ("Write a Python function that reverses a string, then one that reverses a list.", "eagle3"),
    "image": ("red heart", "jacobi"),
    "speech": ("Good morning.", "jacobi"),
}
_TABS = {"opening", "text", "image", "speech", "lab", "batch", "traces"}
_SHAPES = {"wide": (1400, 900), "narrow": (400, 800)}


def main(folder: Path, only: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page, address = serve(browser=False)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for shape, (width, height) in _SHAPES.items():
            if (only & set(_SHAPES)) and shape not in only:
                continue
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                context.set_default_timeout(300_000)
                take(context.new_page(), address, lambda name, s=shape, t=theme: folder / f"{name}-{s}-{t}.png", only)
                context.close()
        browser.close()
    page.close(verbose=False)


def take(page: Any, address: str, file: Callable[[str], Path], only: set[str]) -> None:
    """Run and photograph each tab."""

    def save(name: str, whole: bool = True) -> None:
        page.wait_for_timeout(1200)
        shot = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
        shot.quantize(160, dither=Image.Dither.NONE).save(file(name), optimize=True)
        print(file(name), flush=True)

    def wait(name: str) -> None:
        page.wait_for_function(
            # a run's own figures, not those of the recording or of a race that goes on
            "name => { const said = document.querySelector(`#${name}-status`).innerText;"
            " return said.includes('no weights') ||"
            " said.includes('tokens per target pass') && !/recorded|Loading|Timing|tokens \\/ pass/.test(said); }",
            arg=name,
        )

    if "opening" in only:
        page.goto(address)
        page.wait_for_selector("#text-out .or-lane")
        page.wait_for_timeout(3000)
        save("opening", whole=False)
    for name, (prompt, drafter) in _RUNS.items():
        if name not in only:
            continue
        page.goto(f"{address}?panel={name}&prompt={prompt}&drafter={drafter}&max_new_tokens=64")
        page.wait_for_function("name => document.querySelector(`#${name}-run`) !== null", arg=name)
        page.wait_for_timeout(2500)
        page.click(f"#{name}-go" if name == "image" else f"#{name}-run")
        wait(name)
        page.wait_for_timeout(6000 if name == "image" else 500)
        view = {"text": "Guesses", "image": "Acceptance"}.get(name)
        if view:
            page.locator(f"#{name}-{name}-views").get_by_label(view).check()
        save(name)
        if name == "text":
            page.locator("#text-steps .or-g").first.click()
            page.locator("#text-steps").scroll_into_view_if_needed()
            save("card", whole=False)
            page.keyboard.press("Escape")
            page.click("#text-settings button")
            save("settings")
            page.click("#text-settings button")
            page.click("#text-numbers button")
            page.click("#text-faster button")
            save("numbers")
    if "traces" in only:
        page.goto(f"{address}?panel=traces")
        page.wait_for_timeout(1500)
        page.click("#traces-pick input")
        page.get_by_role("option", name="text a relaxed rule").click()
        page.wait_for_function("document.querySelector('#traces-steps').innerText.includes('Target pass')")
        save("traces")
    for name in ("batch", "lab"):
        if name in only:
            page.goto(f"{address}?panel={name}")
            page.wait_for_timeout(1500)
            page.click(f"#{name}-run")
            sign = "Done." if name == "lab" else "tokens per target pass"
            page.wait_for_function(
                "([name, sign]) => document.querySelector(`#${name}-status`).innerText.includes(sign)", arg=[name, sign]
            )
            save(name)


if __name__ == "__main__":
    chosen = set(sys.argv[2:])
    main(Path(sys.argv[1]), chosen if chosen - set(_SHAPES) else chosen | _TABS)
