"""The shadow device refuses, counts and replays what a CUDA device would."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from outrider.core.testing.shadow.device import ShadowDevice, shadow_device
from outrider.core.testing.shadow.runtime import ShadowError


@pytest.fixture
def gpu() -> Iterator[ShadowDevice]:
    with shadow_device(2) as device:
        yield device


def test_results_stay_on_the_device(gpu: ShadowDevice) -> None:
    x = torch.arange(6, device="cuda").view(2, 3)
    assert x.device == x.T.device == (x * 2.0).sum(0).device == torch.device("cuda", 0)
    assert x.cpu().device.type == "cpu" and x.cpu().tolist() == [[0, 1, 2], [3, 4, 5]]
    module = torch.nn.Linear(3, 4).to("cuda").requires_grad_(False)
    assert module(x.float()).is_cuda


def test_host_and_device_tensors_do_not_mix(gpu: ShadowDevice) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(ShadowError, match="a host tensor"):
        x + torch.ones(3)
    with pytest.raises(ShadowError, match="cuda:"):
        torch.cat([x, torch.ones(3, device="cuda:1")])
    with pytest.raises(TypeError, match="cpu"):
        x.numpy()
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2], "a number of no dimensions passes by value"


def test_views_launch_nothing_and_kernels_are_counted(gpu: ShadowDevice) -> None:
    x = torch.zeros(4, 6, device="cuda")
    gpu.reset()
    _ = x.view(6, 4).T[1:, None].expand(-1, 2, -1), x.shape, x.contiguous(), x.reshape(24), x.to("cuda"), x.float()
    assert gpu.counts.launches == 0
    x += 1
    x[0] = 2
    x.T.contiguous()
    x[[True] * 4]
    assert gpu.counts.launches == 4 and gpu.counts.waits == 1, "a list is an index from the host"


def test_waits_and_uploads_are_counted(gpu: ShadowDevice) -> None:
    gpu.reset()
    x = torch.arange(3).pin_memory().to("cuda", non_blocking=True)
    assert (gpu.counts.uploads, gpu.counts.pageable) == (1, 0)
    torch.tensor([1], device="cuda")
    assert (gpu.counts.uploads, gpu.counts.pageable, gpu.counts.waits) == (2, 1, 0)
    _ = x.tolist(), x.cpu(), x[x > 1], bool(x[0])
    assert gpu.counts.waits == 4
    assert any("test_shadow.py" in place for _, place in gpu.counts.places)


def test_a_graph_runs_again_over_its_buffers(gpu: ShadowDevice) -> None:
    buffer, graph = torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = torch.empty(3, device="cuda")
        total.copy_((buffer * 2 + 1).cumsum(0))
        last = total[1:] * 3
    buffer.copy_(torch.tensor([1.0, 2, 3]))
    gpu.reset()
    graph.replay()
    assert total.tolist() == [3, 8, 15] and last.tolist() == [24, 45]
    assert gpu.counts.launches == gpu.counts.replays == 1
    del buffer
    with pytest.raises(ShadowError, match="freed after its capture"):
        graph.replay()


def test_a_capture_forbids_what_cuda_forbids(gpu: ShadowDevice) -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        for forbidden in (x.sum().item, x.tolist, x.nonzero, lambda: torch.tensor([1.0], device="cuda"), x.cpu):
            with pytest.raises(ShadowError, match="capturing"):
                forbidden()


def test_one_capture_at_a_time(gpu: ShadowDevice) -> None:
    errors = []

    def capture() -> None:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                pass
        except ShadowError as error:
            errors.append(str(error))

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
    assert errors == ["two captures at once: another thread is capturing"]


def test_a_graph_captures_the_current_device_alone(gpu: ShadowDevice) -> None:
    x, graph = torch.ones(2, device="cuda:1"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [2, 2], "the kernels of cuda:1 are not in a graph of cuda:0"
    with torch.cuda.device(1), torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = x * 2
    x.fill_(7)
    graph.replay()
    assert y.tolist() == [14, 14]


def test_streams_are_ordered_by_waits_alone(gpu: ShadowDevice) -> None:
    x, side = torch.ones(2, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(ShadowError, match="without waiting"):
        _ = x * 2
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
        event = torch.cuda.Event()
        event.record()
    with pytest.raises(ShadowError, match="without waiting"):
        _ = y + 1
    torch.cuda.current_stream().wait_event(event)
    assert (y + 1).tolist() == [3, 3]


def test_threads_started_under_it_use_it(gpu: ShadowDevice) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="cuda") + 1))
    thread.start()
    thread.join()
    assert found[0].is_cuda and gpu.counts.launches == 2


def test_nothing_is_left_behind() -> None:
    with shadow_device():
        assert torch.cuda.is_available()
    assert torch.ones(1).device.type == "cpu" and isinstance(torch.cuda.Stream, type)
    assert torch.cuda.device_count() == 0 or torch.cuda.get_device_name() != "shadow device"
