"""Small models of all three modalities with random weights; as a script, opens the page with them."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_TESTS = Path(__file__).parent.parent


def _part(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(_TESTS / name)))


class _Slow:
    """A run that takes long enough to be stopped."""

    def __init__(self, live: Any) -> None:
        self._live = live

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        time.sleep(0.02)
        return next(self._live)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)


def backends(folder: Path) -> dict[str, Any]:
    import torch

    from outrider.app.page.backends.image import ImageBackend
    from outrider.app.page.backends.speech import SpeechBackend
    from outrider.app.page.backends.text import TextBackend
    from outrider.image.model import ImageModel
    from outrider.image.tokenizer import Layout, Tokenizer
    from outrider.text import load

    written = _part("text/tiny.py").write(folder / "tiny")

    def image() -> ImageModel:
        torch.manual_seed(0)
        tokens = _part("image/conftest.py").made()
        codec = Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16))).eval()
        return ImageModel(tokens.network(), tokens.prompt_encoder, codec, name="tiny")

    class SlowPictures(ImageBackend):
        def begin(self, asked: Any) -> Any:
            return _Slow(super().begin(asked))

    return {
        "text": TextBackend(lambda: load(written, dtype="float32")),
        "image": SlowPictures(image),
        "speech": SpeechBackend(_part("speech/conftest.py").small_speaker),
    }


def main(folder: Path) -> None:
    """Serve the page until stdin is closed."""
    import torch

    from outrider.app.page.app import serve

    torch.set_num_threads(1)
    page, address = serve(browser=False, own=backends(folder))
    print(address, flush=True)
    sys.stdin.read()
    page.close(verbose=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
