"""Takes screenshots of every tab, light and dark, wide and narrow: `python tests/browser/pictures.py FOLDER [TAB ...]`.

Uses the installed models. The files have a palette of 160 colours, so that they stay small."""

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
    "text": ("Write a Python function that reverses a string, then one that reverses a list.", "token-recycling"),
    "image": ("red heart", "jacobi"),
    "speech": ("Good morning.", "jacobi"),
}
_SHAPES = {"wide": (1400, 1000), "narrow": (420, 900)}


def main(folder: Path, only: set[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page, address = serve(browser=False)
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for shape, (width, height) in _SHAPES.items():
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                context.set_default_timeout(300_000)
                take(context.new_page(), address, lambda name, s=shape, t=theme: folder / f"{name}-{s}-{t}.png", only)
                context.close()
        browser.close()
    page.close(verbose=False)


def take(page: Any, address: str, file: Callable[[str], Path], only: set[str]) -> None:
    """Run and photograph each tab."""

    def save(name: str) -> None:
        page.wait_for_timeout(1200)
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
        shot.quantize(160, dither=Image.Dither.NONE).save(file(name), optimize=True)
        print(file(name), flush=True)

    def wait(name: str) -> None:
        page.wait_for_function(
            "name => ['tokens per target pass', 'no weights'].some("
            "text => document.querySelector(`#${name}-status`).innerText.includes(text))",
            arg=name,
        )

    for name, (prompt, drafter) in _RUNS.items():
        if name not in only:
            continue
        page.goto(f"{address}?panel={name}&prompt={prompt}&drafter={drafter}&max_new_tokens=64")
        page.wait_for_function("name => document.querySelector(`#${name}-link`) !== null", arg=name)
        page.wait_for_timeout(1500)
        page.click(f"#{name}-go" if name == "image" else f"#{name}-run")
        wait(name)
        if name == "text":
            for _ in range(2):
                page.click("#text-back")
        save(name)
        if name == "text":
            page.get_by_role("tab", name="Charts").first.click()
            save("charts")
    if "theory" in only:
        page.goto(f"{address}?panel=theory")
        page.wait_for_timeout(1500)
        save("theory")
    if "traces" in only:
        page.goto(f"{address}?panel=traces")
        page.wait_for_timeout(1500)
        page.click("#traces-pick input")
        page.get_by_role("option", name="text a relaxed rule").click()
        page.wait_for_function("document.querySelector('#traces-tree').innerText.includes('Target pass')")
        save("traces")
    if "compare" in only:
        page.goto(f"{address}?panel=compare")
        page.wait_for_timeout(1500)
        page.click("#compare-run")
        page.wait_for_function("document.querySelector('#compare-status').innerText.includes('Done.')")
        save("compare")


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]) or {"text", "image", "speech", "compare", "theory", "traces"})
