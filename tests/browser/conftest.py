"""The page on models made on the spot, and a browser that is there already: Debian's or any other Chromium."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


OPENED = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("opened.py"))))


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the page on our own models."""
    with OPENED.opened("small.py", tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="session")
def published_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the page on published ones."""
    with OPENED.opened("published.py", tmp_path_factory.mktemp("page")) as found:
        yield found


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no browser")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """A page that is open, and what it complained of or asked others for."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.faults: list[str] = []
        self.strangers: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.strangers.append(request.url)

    def open(self, query: str = "") -> Visit:
        self.page.goto(self.address + query)
        self.page.wait_for_selector("#text-run")
        return self

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).first.click()

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, selector: str, words: str, seconds: float = 60) -> str:
        """Wait until a part of the page says so."""
        self.page.wait_for_function(
            "([where, what]) => document.querySelector(where)?.innerText.includes(what)",
            arg=[selector, words],
            timeout=1000 * seconds,
        )
        return self.text(selector)

    def choose(self, file: Path) -> None:
        """Open a trace."""
        with self.page.expect_file_chooser() as waiting:
            self.page.click("#traces-open")
        waiting.value.set_files(file)

    def run(self, name: str, button: str = "run") -> str:
        self.page.click(f"#{name}-{button}")
        return self.until(f"#{name}-status", "tokens per call")


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Callable[..., Visit]]:
    """Opens the page anew."""
    yield from visits(chromium, address)


@pytest.fixture
def visit_published(chromium: Any, published_address: str) -> Iterator[Callable[..., Visit]]:
    """The same, of the page on published models."""
    yield from visits(chromium, published_address)


def visits(chromium: Any, address: str) -> Iterator[Callable[..., Visit]]:
    """Opens a page as often as it is asked to; fails the test if the page ever complained, or asked anybody else for
    anything."""
    contexts, visits = [], []

    def make(width: int = 1400, height: int = 900, theme: str = "light") -> Visit:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        context.set_default_timeout(60_000)
        contexts.append(context)
        visits.append(Visit(context.new_page(), address))
        return visits[-1].open()

    yield make
    for context in contexts:
        context.close()
    assert [fault for one in visits for fault in one.faults] == []
    assert [stranger for one in visits for stranger in one.strangers] == []
