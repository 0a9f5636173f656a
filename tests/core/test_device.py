"""Which device and precision are taken where none is named, and what is said of a device that is not there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from outrider.core.device import best_device, control_group_memory, usable_device, usual_dtype
from outrider.core.errors import InvalidOption


@pytest.mark.parametrize(("cuda", "mps", "wanted"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")])
def test_cuda_comes_before_mps_before_the_cpu(
    cuda: bool, mps: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert best_device() == wanted


def test_auto_is_a_device_that_works_and_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert usable_device("auto") == torch.device("cpu")
    with pytest.raises(InvalidOption, match=r"the device 'nowhere' cannot be used here .*outrider doctor"):
        usable_device("nowhere")


def test_devices_without_bfloat16_take_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, wanted in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, yes=supported: yes)
        assert usual_dtype(torch.device("cuda")) == wanted
    assert usual_dtype(torch.device("mps")) == "float16"
    assert usual_dtype(torch.device("cpu")) == "bfloat16"


@pytest.mark.parametrize(
    ("membership", "files", "allowed"),
    [
        # version 2: the group's own files, and those of the container's root
        (
            "0::/job\n",
            {
                "job/memory.max": "1000",
                "job/memory.current": "700",
                "job/memory.stat": "anon 1\ninactive_file 100\n",
                "memory.max": "max",
                "memory.current": "5",
                "memory.stat": "",
            },
            [400],
        ),
        ("0::/\n", {"memory.max": "500", "memory.current": "700", "memory.stat": ""}, [0]),
        # version 1
        (
            "4:memory:/a/b\n1:cpu:/\n",
            {
                "memory/a/b/memory.limit_in_bytes": "900",
                "memory/a/b/memory.usage_in_bytes": "300",
                "memory/a/b/memory.stat": "total_inactive_file 50\n",
            },
            [650],
        ),
        # the group above has less left
        (
            "0::/pod/job\n",
            {
                "pod/job/memory.max": "1000",
                "pod/job/memory.current": "0",
                "pod/job/memory.stat": "",
                "pod/memory.max": "800",
                "pod/memory.current": "500",
                "pod/memory.stat": "",
            },
            [1000, 300],
        ),
        ("", {}, []),
    ],
)
def test_memory_limits_of_control_groups_are_read(
    membership: str, files: dict[str, str], allowed: list[int], tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert list(control_group_memory(tmp_path / "root", tmp_path / "membership")) == allowed
    assert list(control_group_memory(tmp_path / "root", tmp_path / "nowhere")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_freed_memory_is_returned() -> None:
    script = """
        from outrider.core.device import resident_memory, return_freed_memory
        kept = [bytes(20_000) for _ in range(5_000)]
        full, kept = resident_memory(), kept[-1]  # what is above the freed keeps the heap from shrinking
        freed = resident_memory()
        return_freed_memory()
        print(full, freed, resident_memory())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    full, freed, returned = map(int, done.stdout.split())
    if freed > full - 50_000_000:  # else it is another C library's malloc, which returned it by itself
        assert returned < full - 80_000_000
