"""The page that decodes in the browser: its steps are those of our decoder and drafters, with guesses and without."""

from __future__ import annotations

import functools
import json
import runpy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.app.viewer import live
from outrider.core.assets import store
from outrider.core.trace import Step, Trace

pytest.importorskip("onnx")
pytestmark = pytest.mark.browser
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "text" / "tiny.py")))
PROMPT = "the cat sat on the mat and the dog sat on the log. the cat sat on"
Opened = Callable[[Path], Any]
NODES = ("drafted", "parents", "fixed", "tried", "chance", "p", "q")
NAMES = (*NODES, "path", "emitted", "sources", "finish", "index")


def fetch_runtime() -> None:
    for asset in ("onnxruntime-web", "tokenizers-js"):
        try:
            store.fetch(asset)
        except store.AssetError as error:
            pytest.skip(str(error))


def circling(folder: Path) -> Path:
    written: Path = TINY.write(folder)
    weak = ("o_proj.weight", "down_proj.weight")
    tensors = {name: tensor * (0.2 if name.endswith(weak) else 1) for name, tensor in TINY.tensors().items()}
    store.write_tensors(written / "model.safetensors", tensors, {"format": "pt"})
    return written


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model's folder, and the page's. The last token decides most of the next, so the text goes in circles."""
    fetch_runtime()
    folder = tmp_path_factory.mktemp("live")
    model = circling(folder / "tiny")
    live.write(folder / "page", str(model))
    return model, folder / "page"


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opened]:
    """Serves a folder and opens its page with the model loaded; afterwards no page may have raised an error."""
    closing, problems = [], []

    def open_page(folder: Path) -> Any:
        server = live.server(folder)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        context = chromium.new_context()
        context.set_default_timeout(120_000)
        closing.append((context, server, thread))
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.click("#live-run")
        status = page.locator("#live-status")
        until(page, lambda: "is loaded" in status.inner_text(), status.inner_text)
        return page

    yield open_page
    for context, server, thread in closing:
        context.close()
        server.shutdown()
        server.server_close()
        thread.join()
    assert problems == []


def until(page: Any, done: Callable[[], bool], told: Callable[[], str], seconds: float = 240) -> None:
    for _ in range(int(seconds * 10)):
        if done():
            return
        page.wait_for_timeout(100)
    raise AssertionError(told())


def decoded(page: Any, prompt: str, drafter: str, tokens: int) -> dict[str, Any]:
    """The recording of a run."""
    page.fill("#live-prompt", prompt)
    page.select_option("#live-drafter", drafter)
    page.fill("#live-tokens", str(tokens))
    page.click("#live-run")
    save = page.locator("#live-save")
    until(page, save.is_enabled, page.locator("#live-status").inner_text)
    assert page.get_attribute("#live", "data-same") == "true", page.inner_text("#live-status")
    with page.expect_download() as waiting:
        save.click()
    found: dict[str, Any] = json.loads(Path(waiting.value.path()).read_text())
    return found


def rate(page: Any, row: str) -> float:
    """The table's tokens per target pass."""
    return float(page.locator(f"#live-{row} td").nth(2).inner_text())


def ours(model: Path, prompt: str, drafters: list[Any], tokens: int) -> list[list[Step]]:
    """The steps of our own decoder with the weights that the page has, for each drafter."""
    import torch

    from outrider.core.decode import decode
    from outrider.core.distribution import Sampling
    from outrider.core.engine import checkpoints
    from outrider.core.engine.long_context import make_decoder
    from outrider.core.engine.quantization import onnx_graph
    from outrider.core.rules.rejection import rejection
    from outrider.text.tokenizer import Tokens

    described, reader = store.read_json(model / "config.json"), Tokens.load(model)
    config, tensors = checkpoints.parse_config(described), checkpoints.readable(described, store.Checkpoint(model))
    network = onnx_graph.rounded(checkpoints.assemble(config, tensors, dtype=torch.float32, device="cpu"))
    ids = reader.encode(reader.render([{"role": "user", "content": prompt}]), special=False)
    run = functools.partial(decode, sampling=Sampling(temperature=0, end=(2,)), max_new_tokens=tokens)
    return [list(run(make_decoder(network), drafter, rejection, [ids])) for drafter in drafters]


def replay(page: Any, steps: int) -> None:
    """Step through the run with guesses, and open a card."""
    assert page.inner_text("#count") == f"{steps} / {steps}" and page.is_checked("input[name=run][value=main]")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Home")
    assert page.inner_text("#count") == f"1 / {steps}"
    page.locator("#output .token").first.click()
    assert "target pass 1" in page.inner_text("#card")
    page.keyboard.press("Escape")


def test_steps_are_those_of_our_own_decoder_and_drafters(opened: Opened, tiny: tuple[Path, Path]) -> None:
    from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
    from outrider.core.drafters.lookup.suffix import Suffix

    model, folder = tiny
    page = opened(folder)
    suffix = Suffix()  # remembers the first output at the second run
    for drafter, made in (("suffix", suffix), ("suffix", suffix), ("prompt-lookup", PromptLookup())):
        found = decoded(page, PROMPT, drafter, 40)
        guessed, plain = ours(model, PROMPT, [made, None], 40)
        for trace, steps in ((found["trace"], guessed), (found["plain"]["trace"], plain)):
            read = Trace.from_json(json.dumps(trace))
            for here, there in zip(read.steps, steps, strict=True):
                assert {name: getattr(here, name) for name in NAMES} == {name: getattr(there, name) for name in NAMES}
        assert rate(page, "guesses") > 2 and rate(page, "plain") == 1
    replay(page, len(guessed))


@pytest.mark.slow
def test_the_default_model_fits_and_copies(opened: Opened, tmp_path: Path) -> None:
    fetch_runtime()
    try:
        store.fetch("smollm2-135m")
    except store.AssetError as error:
        pytest.skip(str(error))
    assert live.write(tmp_path / "page") < live.LARGEST
    page = opened(tmp_path / "page")
    text = "The quick brown fox jumps over the lazy dog. The five boxing wizards jump quickly."
    decoded(page, f"Repeat this text word for word: {text}", "prompt-lookup", 24)
    assert rate(page, "guesses") > 1.5 and rate(page, "plain") == 1
