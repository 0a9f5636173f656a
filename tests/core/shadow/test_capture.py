"""Captures on the shadow device: one at a time, on the pool's own device, and a failure concerns one shape."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.engine.cuda_graphs import CudaRecorder, GraphPool, Inputs, Replay
from outrider.core.engine.transformer import Decoder
from outrider.core.methods import make_rule
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.testing.shadow.device import shadow_device
from tests.core.shadow.cases import PROMPTS, SAMPLINGS, network


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


class RandomTries(WeightFree, TrieDrafter):
    """Up to sixteen guesses in any shape, as lookup drafters find them in long texts."""

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.random, self.shapes = random.Random(1), set[tuple[int, ...]]()

    def tries(self, room: Sequence[int]) -> list[Trie]:
        trie = Trie()
        for _ in range(self.random.randrange(17)):
            parent = self.random.randrange(-1, len(trie))
            if parent < 0 or trie.depths[parent] < room[0]:
                trie.grow(parent, self.random.randrange(61))
        self.shapes.add(tuple(trie.parents))
        return [trie]

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        """Nothing to learn."""

    def end(self) -> None:
        """Nothing to free."""


def test_trees_of_the_host_share_recordings() -> None:
    """Their parents are inputs, and sizes, depths and widths come in powers of two."""
    with shadow_device():
        shared, drafter, sampling = network("cuda"), RandomTries(), SAMPLINGS["greedy"]
        steps = decode(Decoder(shared), drafter, make_rule(), PROMPTS[:1], sampling=sampling, max_new_tokens=150)
        rounds = len(list(steps))
        assert shared.graphs is not None and rounds > 100 and len(drafter.shapes) > 80
        assert shared.graphs.pool.captured <= 60  # a round for each of two buckets of columns, and updates


def test_no_thread_writes_buffers_that_another_reads() -> None:
    """One thread stops between its replay and the copy of the result, while another runs the same shape."""
    others: list[Future[Tensor]] = []

    def run(value: float) -> Tensor:
        return graphs.run((), [torch.full((3,), value, device="cuda")], double)

    def interrupted(work: Callable[[], Any]) -> tuple[Any, Replay]:
        out, replay = record(work)

        def replay_and_wait() -> None:
            replay()
            if not others:
                others.append(threads.submit(run, 2))
                wait(others, timeout=3)  # it waits for the lock

        return out, replay_and_wait

    with shadow_device(), ThreadPoolExecutor(1) as threads:
        graphs, record = pool(), CudaRecorder(torch.device("cuda:0"))
        graphs.record = interrupted
        assert run(1).tolist() == [2, 2, 2]
        assert others[0].result().tolist() == [4, 4, 4]


def test_threads_capture_in_turns() -> None:
    """One thread stops in the middle of its capture, while another would capture a graph of its own."""
    others: list[Future[Tensor]] = []

    def stops(inputs: Inputs) -> Tensor:
        if torch.cuda.is_current_stream_capturing() and not others:
            others.append(threads.submit(pool().run, (), [given], double))
            wait(others, timeout=3)  # it waits for its turn
        return double(inputs)

    with shadow_device(), ThreadPoolExecutor(1) as threads:
        given = torch.ones(3, device="cuda")
        assert pool().run((), [given], stops).tolist() == [2, 2, 2]
        assert others[0].exception() is None
