"""The faults that an audit of the CUDA path found, each put back for one test: what runs in every suite sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outrider.core.drafters.trained import lookahead_embeddings
from outrider.core.engine import cuda_graphs, network, offload
from outrider.core.engine.cuda_graphs import CudaRecorder, GraphPool
from outrider.core.engine.kv_cache import cache
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.linear import Dense
from outrider.core.engine.types import Layer
from outrider.core.testing.shadow.device import shadow_device
from tests.core.shadow import test_batches, test_capture, test_lengths, test_matrix, test_targets

Patch = pytest.MonkeyPatch


def lengths_as_bounds(patch: Patch) -> None:
    """The host knows only bounds, which grow faster than the rows."""
    advance = cache.advance

    def loose(rows: Any, scored: int, draft: Any, verdict: Any, *rest: Any) -> Any:
        return advance(rows, scored, draft, replace(verdict, outcome=None), *rest)

    patch.setattr(cache, "advance", loose)


def a_graph_for_every_tree(patch: Patch) -> None:
    """Verdicts are recorded for each shape of tree that the host makes."""
    lend = GraphPool.lend

    def by_shape(self: GraphPool, key: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        return lend(self, (*key, str(inputs[7]) if "round" in key else ""), inputs, *rest, **more)

    patch.setattr(GraphPool, "lend", by_shape)


def one_failure_ends_all(patch: Patch) -> None:
    record = GraphPool._record

    def failing(self: GraphPool, capture: Any, recorder: Any) -> None:
        record(self, capture, recorder)
        self.record = None if capture.failed else self.record

    patch.setattr(GraphPool, "_record", failing)


def captures_at_once(patch: Patch) -> None:
    patch.setattr(cuda_graphs, "_CAPTURING", nullcontext())


def buffers_shared_by_threads(patch: Patch) -> None:
    make = GraphPool.__init__

    def unlocked(self: GraphPool, *given: Any) -> None:
        make(self, *given)
        self.lock = nullcontext()  # type: ignore[assignment]

    patch.setattr(GraphPool, "__init__", unlocked)


def a_store_for_every_arrangement(patch: Patch) -> None:
    arrange = Cache._arrange_in_place

    def moved(self: Cache, order: Any, host: Any, width: int) -> None:
        if self.pool is None:
            arrange(self, order, host, width)
            return
        layers, _, heads, size, dim = self.store.shape
        store = self.pool.borrow((layers, len(order), heads, width, dim), self.dtype)
        for new, old in enumerate(order):
            if old >= 0:
                store[:, new, :, : min(host[new], size)] = self.store[:, old, :, : min(host[new], size)]
        self.store = store

    patch.setattr(Cache, "_arrange_in_place", moved)


def host_tensor_in_pass(patch: Patch) -> None:
    patch.setattr(lookahead_embeddings, "upload", lambda values, device: torch.as_tensor(values))


def packed_weights_of_no_size(patch: Patch) -> None:
    """Only weights that aren't quantised are counted and moved."""

    def unquantised(layer: Layer) -> Iterator[torch.Tensor]:
        return (linear.weight for linear in layer.linears if isinstance(linear, Dense))

    patch.setattr(offload, "_tensors", unquantised)


def captures_on_the_current_device(patch: Patch) -> None:
    patch.setattr(CudaRecorder, "__call__", lambda self, work: self._captured(work))


def attention_by_cudnn(patch: Patch) -> None:
    patch.setattr(network, "attention", lambda *given: F.scaled_dot_product_attention(*given[:4]))


# What is put back, by its number in the audit, and the test that must see it.
FAULTS: dict[str, tuple[Callable[[Patch], None], Callable[[Patch], object]]] = {
    "1": (lengths_as_bounds, lambda patch: test_lengths.test_the_host_knows_all_lengths("eagle3", 0, patch)),
    "2": (a_graph_for_every_tree, lambda patch: test_capture.test_trees_of_the_host_share_recordings()),
    "3": (one_failure_ends_all, lambda patch: test_capture.test_a_failed_capture_concerns_its_shape_alone()),
    "4": (captures_at_once, lambda patch: test_capture.test_threads_capture_in_turns()),
    "5": (buffers_shared_by_threads, lambda patch: test_capture.test_no_thread_writes_buffers_that_another_reads()),
    "6": (
        a_store_for_every_arrangement,
        lambda patch: test_batches.test_rows_come_and_go_in_one_buffer(False, None, shadow_device, patch),
    ),
    "7": (
        host_tensor_in_pass,
        lambda patch: test_matrix.test_tokens_are_those_of_the_cpu(shadow_device, "pass", "exact", "greedy", 1),
    ),
    "7, offload in 8 bits": (
        packed_weights_of_no_size,
        lambda patch: test_targets.test_drafting_changes_no_token("offloaded 8-bit weights", shadow_device),
    ),
    "8": (
        captures_on_the_current_device,
        lambda patch: test_capture.test_a_graph_is_captured_on_the_pool_s_device(),
    ),
    "9": (attention_by_cudnn, lambda patch: test_targets.test_attention_runs_without_cudnn(shadow_device)),
}


@pytest.mark.parametrize("number", FAULTS)
def test_a_fault_put_back_is_seen(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_back, check = FAULTS[number]
    with pytest.MonkeyPatch.context() as patch:
        check(patch)
    put_back(monkeypatch)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, ArithmeticError, RuntimeError)):
        check(patch)
