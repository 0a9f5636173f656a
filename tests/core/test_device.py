"""Which device and precision are taken where none is named, and what is said of a device that is not there."""

from __future__ import annotations

import pytest
import torch

from outrider.core.device import best_device, usable_device, usual_dtype
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
