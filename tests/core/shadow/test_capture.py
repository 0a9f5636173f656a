"""Captures on the shadow device: one at a time, on the pool's own device, and a failure concerns one shape."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor

from outrider.core.engine.cuda_graphs import CudaRecorder, GraphPool, Inputs
from outrider.core.testing.shadow.device import shadow_device


def pool(device: str = "cuda:0") -> GraphPool:
    place = torch.device(device)
    return GraphPool(place, CudaRecorder(place))


def double(inputs: Inputs) -> Tensor:
    assert inputs[0] is not None
    return inputs[0] * 2


def test_a_failed_capture_concerns_its_shape_alone() -> None:
    def waits_for_three(inputs: Inputs) -> Tensor:
        assert inputs[0] is not None
        return inputs[0] * (inputs[0].sum().item() if len(inputs[0]) == 3 else 2)

    with shadow_device():
        graphs = pool()
        with pytest.warns(UserWarning, match="not captured in a CUDA graph: operation not permitted"):
            assert graphs.run((), [torch.ones(3, device="cuda")], waits_for_three).tolist() == [3, 3, 3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert graphs.run((), [torch.ones(3, device="cuda") * 2], waits_for_three).tolist() == [12, 12, 12]
            assert graphs.run((), [torch.ones(2, device="cuda")], waits_for_three).tolist() == [2, 2]
        assert graphs.captured == graphs.replayed == 1


def test_an_error_of_the_work_itself_is_raised() -> None:
    def broken(inputs: Inputs) -> Tensor:
        raise RuntimeError("out of memory")

    memory = "out of memory"
    with shadow_device(), pytest.warns(UserWarning, match=memory), pytest.raises(RuntimeError, match=memory):
        pool().run((), [torch.ones(3, device="cuda")], broken)


def test_a_graph_is_captured_on_the_pool_s_device() -> None:
    with shadow_device(2) as gpu:
        graphs = pool("cuda:1")
        for value in (1.0, 3.0):
            assert graphs.run((), [torch.full((2,), value, device="cuda:1")], double).tolist() == [2 * value] * 2
        assert graphs.captured == gpu.counts.captures == 1 and graphs.replayed == 2


def test_threads_capture_in_turns_and_share_no_buffer() -> None:
    errors: list[BaseException] = []

    def work(graphs: GraphPool, start: int) -> None:
        try:
            for value in range(start, start + 60):
                size = 1 + value % 5
                given = torch.full((size,), float(value), device="cuda")
                assert graphs.run((), [given], double).tolist() == [2.0 * value] * size
        except BaseException as error:
            errors.append(error)

    with shadow_device():
        shared, own = pool(), pool()
        threads = [threading.Thread(target=work, args=given) for given in ((shared, 0), (shared, 1000), (own, 2000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
