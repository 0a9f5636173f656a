"""Opens the page with published models, tiny and with random weights: pictures by Janus, sound by MusicGen.

The other tabs are those of small.py."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent


def write(folder: Path) -> dict[str, dict[str, str]]:
    """Write a model and a draft model of each modality, with their processors; their folders."""
    from transformers import EncodecFeatureExtractor, MusicgenProcessor, T5Tokenizer

    tiny = SimpleNamespace(**runpy.run_path(str(HERE.parent / "tiny_classes.py")))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"\u2581{word}", -1.0) for word in ("", "a", "slow", "waltz")]
    processor = MusicgenProcessor(EncodecFeatureExtractor(), T5Tokenizer(vocab=pieces, extra_ids=0))
    for part, layers in (("model", 2), ("draft_model", 1)):
        for item in tiny.janus(2 - layers, layers):
            item.save_pretrained(folder / "image" / part)
        for item in (tiny.musicgen(2 - layers, layers), processor):
            item.save_pretrained(folder / "speech" / part)
    return {
        panel: {part: str(folder / panel / part) for part in ("model", "draft_model")} for panel in ("image", "speech")
    }


def main(folder: Path) -> None:
    """Serve the page until stdin is closed."""
    import torch

    from outrider.app.page.app import serve
    from outrider.app.page.backends.interface import ModelSpec

    torch.set_num_threads(1)
    ours = SimpleNamespace(**runpy.run_path(str(HERE / "small.py"))).backends(folder)
    named = {panel: ModelSpec(**given) for panel, given in write(folder).items()}
    page, address = serve(browser=False, own=ours, published=named)
    print(address, flush=True)
    sys.stdin.read()
    page.close(verbose=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
