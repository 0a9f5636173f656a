"""Writes a folder with a page that decodes a language model in the browser: the viewer, the model as an ONNX graph, its
tokenizer, and onnxruntime's WebAssembly with a tokenizer in JavaScript, which npm carries. Any web server can serve it.

The page is the viewer with one more script, which starts a worker; the worker runs the files beside it. Independent of
what the page shows.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outrider.app.viewer import html
from outrider.core.assets import store
from outrider.core.assets.archives import contents
from outrider.core.assets.files import writing
from outrider.core.errors import InvalidOption, OutriderError

LARGEST = 100_000_000  # bytes of a folder with the default model
_SCRIPTS = ("live-worker.js", "live-model.js", "live-drafters.js")
_PACKAGES = {  # asset -> path inside the package -> name in the folder
    "onnxruntime-web": {
        "package/dist/ort.wasm.bundle.min.mjs": "ort.mjs",
        "package/dist/ort-wasm-simd-threaded.wasm": "ort.wasm.gz",
    },
    "tokenizers-js": {"package/dist/tokenizers.min.mjs": "tokenizers.mjs"},
}
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}prompt\N{OBJECT REPLACEMENT CHARACTER}"


def write(folder: Path, source: str = "smollm2-135m", *, positions: int = 2048) -> int:
    """Write the folder for a model, which is a name, a folder or a GGUF file; the folder's size in bytes."""
    import torch

    from outrider.core.engine import checkpoints
    from outrider.core.engine.quantization import onnx_graph
    from outrider.text.loading import end_tokens, find
    from outrider.text.tokenizer import Tokens

    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "live.json").is_file())):
        raise InvalidOption(f"{folder} holds something else; give a new folder")
    onnx_graph.require()
    model, name = find(source, dtype="float32")
    described = store.read_json(model / "config.json")
    config, tokens = checkpoints.parse_config(described), Tokens.load(model)
    onnx_graph.check(config)
    before, after = _around(tokens)
    files = _runtime()
    tensors = checkpoints.readable(described, store.Checkpoint(model))
    network = checkpoints.assemble(config, tensors, dtype=torch.float32, device="cpu")
    with _replaced(folder) as made:
        matrices = onnx_graph.write(network, made / "model.onnx", made / "weights.bin", positions=positions)
        settings = {
            "model": name,
            "bytes": (made / "weights.bin").stat().st_size,
            "tied": config.tied,
            "matrices": matrices,
            "layers": config.layers,
            "width": 2 * config.kv_heads * config.head_dim,
            "positions": min(positions, config.context),
            "end": end_tokens(model, described, tokens),
            "before": before,
            "after": after,
            "special": tokens.template is None,
        }
        files |= {name: html.text(name).encode() for name in _SCRIPTS}
        files["index.html"] = html.page(live=True).encode()
        files["tokenizer.json.gz"] = _packed(tokens.serialized().encode())
        files["licences.txt"] = _licences(source).encode()
        files["live.json"] = json.dumps(settings).encode()
        for name, content in files.items():
            (made / name).write_bytes(content)
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A new folder beside this one, which takes its place if the block succeeds."""
    made = folder.with_name(f"{folder.name}.partial")
    with writing(made):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        try:
            yield made
            shutil.rmtree(folder, ignore_errors=True)
            made.replace(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _around(tokens: Any) -> tuple[str, str]:
    """What the chat template puts before and after a prompt."""
    if tokens.template is None:
        return "", ""
    before, mark, after = tokens.render([{"role": "user", "content": _MARK}]).partition(_MARK)
    if not mark or _MARK in after:
        raise OutriderError("the model's chat template changes the prompt, so the page could not apply it")
    return before, after


def _runtime() -> dict[str, bytes]:
    """The files of the packages, fetched if necessary; the WebAssembly is compressed."""
    found = {}
    for asset, wanted in _PACKAGES.items():
        for path, content in contents(asset, "|".join(f"^{path}$" for path in wanted)):
            name = wanted[path]
            found[name] = _packed(content) if name.endswith(".gz") else content
    return found


def _packed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _licences(source: str) -> str:
    rows = [store.ASSETS[name] for name in (*_PACKAGES, source) if name in store.ASSETS]
    return "".join(f"{row.name}: {row.licence}; {row.origin}\n" for row in rows)


class _Handler(SimpleHTTPRequestHandler):
    """Serves a folder with the headers that let a page use threads."""

    extensions_map = {  # noqa: RUF012
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".gz": "application/octet-stream",
    }

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the folder on this machine; port 0 is a free one."""
    if not (folder / "live.json").is_file():
        raise InvalidOption(f"{folder} has no live.json; write the folder first")
    return ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, directory=str(folder)))
