"""The page with small random models, and an installed Chromium."""

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
    """The address of the page with our own models."""
    with OPENED.opened("small.py", tmp_path_factory.mktemp("page")) as address:
        yield address


@pytest.fixture(scope="session")
def published_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page with published models."""
    with OPENED.opened("published.py", tmp_path_factory.mktemp("page")) as address:
        yield address


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> Any:
    """Judges the accessibility of a page: `axe.run(page)`."""
    return pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()


class Visit:
    """An open page, with the JavaScript errors it raised, what its Content-Security-Policy blocked, and the requests it
    sent to other hosts."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.errors: list[str] = []
        self.foreign_requests: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._check)
        page.on("console", self._read)

    def _check(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.foreign_requests.append(request.url)

    def _read(self, message: Any) -> None:
        if "Content Security Policy" in message.text:
            self.errors.append(message.text)

    def open(self, query: str = "") -> Visit:
        self.page.goto(self.address + query)
        self.page.wait_for_selector("#text-run", state="attached")  # another tab may be open
        return self

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).first.click()
        if name not in ("Text", "Traces"):  # which open with a recording
            self.page.wait_for_selector(f"#{name.lower()}-out :is(.or-lane, svg)")

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def until(self, selector: str, words: str, seconds: float = 60) -> str:
        """Wait until an element contains a text; its whole text."""
        self.page.wait_for_function(
            "([where, what]) => document.querySelector(where)?.innerText.includes(what)",
            arg=[selector, words],
            timeout=1000 * seconds,
        )
        return self.text(selector)

    def choose(self, file: Path) -> None:
        """Open a trace file."""
        with self.page.expect_file_chooser() as waiting:
            self.page.click("#traces-open")
        waiting.value.set_files(file)

    def run(self, name: str, button: str = "run") -> str:
        """Press a button that runs; the status of that run. An earlier run's, or that of the recording with which a
        tab opens, may still be shown or just arrive."""
        status = f"#{name}-status"
        before = self.text(status)
        self.page.click(f"#{name}-{button}")
        done = (
            "([where, before]) => { const now = document.querySelector(where).innerText;"
            " return now !== before && now.includes('tokens per target pass') && !now.includes('recorded'); }"
        )
        self.page.wait_for_function(done, arg=[status, before], timeout=180_000)  # a race is six runs
        return self.text(status)


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Callable[..., Visit]]:
    """Opens the page in a new browser context."""
    yield from visits(chromium, address)


@pytest.fixture
def visit_published(chromium: Any, published_address: str) -> Iterator[Callable[..., Visit]]:
    """The same for the page with published models."""
    yield from visits(chromium, published_address)


def visits(chromium: Any, address: str) -> Iterator[Callable[..., Visit]]:
    """A function that opens a page; afterwards the test fails if a page raised an error or sent a foreign request."""
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
    assert [error for visit in visits for error in visit.errors] == []
    assert [url for visit in visits for url in visit.foreign_requests] == []
