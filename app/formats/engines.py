"""Reads the responses of vLLM, SGLang and llama.cpp's server, and AIPerf's records; writes AIPerf's record.

Field names are those of the engines' sources: vLLM's `--per-request-spec-decode-metrics` (pull request 48915), SGLang's
`meta_info`, llama.cpp's `timings`, and AIPerf's SpecDecodeAcceptanceRecord, alone or in its records file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.app.formats.acceptance import LARGEST, TEXT, Acceptance
from outrider.core.errors import TraceError

Json = Mapping[str, Any]


def recognised(content: Json) -> Acceptance | None:
    """The acceptance in a response of any of these engines; None if it is none of theirs."""
    for reader in (vllm, sglang, llama_cpp, aiperf):
        found = reader(content)
        if found is not None:
            return found.filled()
    return None


# ---- vLLM


def vllm(content: Json) -> Acceptance | None:
    """A chat or text completion of vLLM, or its object `metrics.speculative_decoding` alone."""
    metrics = _object(_object(content, "metrics"), "speculative_decoding") or content
    if (
        "num_spec_steps" not in metrics
        or "engine" in metrics
        or not isinstance(metrics.get("acceptance_histogram"), Sequence)
    ):
        return None
    where = "vLLM"
    return Acceptance(
        engine="vllm",
        method="vllm",
        steps=_steps(where, metrics),
        histogram=_counts(where, metrics, "acceptance_histogram"),
        passes=_count(where, metrics, "num_spec_steps"),
        drafted=_count(where, metrics, "num_draft_tokens"),
        accepted=_count(where, metrics, "num_accepted_draft_tokens"),
        longest=_count(where, metrics, "num_spec_tokens"),
        tokens=_count(where, _object(content, "usage"), "completion_tokens"),
        text=_text(content),
        pieces=_pieces(content),
    )


def _steps(where: str, metrics: Json) -> tuple[tuple[int, int], ...] | None:
    accepted, drafted = _counts(where, metrics, "per_step_accepted"), _counts(where, metrics, "per_step_drafted")
    if accepted is None or drafted is None:
        return None
    if len(accepted) != len(drafted):
        raise TraceError(f"{where}: per_step_accepted has {len(accepted)} entries and per_step_drafted {len(drafted)}")
    return tuple(zip(drafted, accepted, strict=True))


def _pieces(content: Json) -> tuple[tuple[int, str], ...]:
    """The generated tokens, from `token_ids` and log-probabilities of the choice, if both were requested."""
    choice = _choice(content)
    ids, logprobs = choice.get("token_ids"), _object(choice, "logprobs")
    texts: list[Any] = []
    if isinstance(logprobs.get("content"), list):  # of a chat
        texts = [entry.get("token") if isinstance(entry, Mapping) else None for entry in logprobs["content"]]
    elif isinstance(logprobs.get("tokens"), list):  # of a completion
        texts = logprobs["tokens"]
    if not isinstance(ids, list) or len(ids) != len(texts):
        return ()
    if not all(isinstance(token, int) and 0 <= token <= LARGEST for token in ids):
        return ()
    return tuple((token, text if isinstance(text, str) else "") for token, text in zip(ids, texts, strict=True))


# ---- SGLang


def sglang(content: Json) -> Acceptance | None:
    """A response of SGLang's `/generate`, or of its chat and completions with `return_meta_info`: totals and a
    histogram of accepted tokens; the order of steps is not reported."""
    meta = _object(content, "meta_info") or _object(_choice(content), "meta_info") or content
    if "spec_verify_ct" not in meta:
        return None
    where = "SGLang"
    histogram = _counts(where, meta, "spec_correct_drafts_histogram") or _counts(where, meta, "spec_accept_histogram")
    drafted = _count(where, meta, "spec_num_proposed_drafts")
    accepted = _count(where, meta, "spec_num_correct_drafts")
    return Acceptance(
        engine="sglang",
        method="sglang",
        histogram=histogram,
        passes=_count(where, meta, "spec_verify_ct"),
        drafted=_count(where, meta, "spec_draft_token_num") if drafted is None else drafted,
        accepted=_count(where, meta, "spec_accept_token_num") if accepted is None else accepted,
        tokens=_count(where, meta, "completion_tokens"),
        text=_text(content),
    )


# ---- llama.cpp


def llama_cpp(content: Json) -> Acceptance | None:
    """A response of llama.cpp's server: totals. Every target pass emits the accepted tokens and one more, which gives
    the number of passes, those without a draft included."""
    timings = _object(content, "timings")
    if "predicted_n" not in timings:
        return None
    where = "llama.cpp"
    tokens = _count(where, timings, "predicted_n")
    accepted = _count(where, timings, "draft_n_accepted") or 0
    if tokens is None or accepted > tokens:
        raise TraceError(f"{where}: predicted_n is {tokens}, less than draft_n_accepted, which is {accepted}")
    milliseconds = timings.get("predicted_ms")
    return Acceptance(
        engine="llama.cpp",
        method="llama.cpp",
        passes=tokens - accepted,
        drafted=_count(where, timings, "draft_n") or 0,
        accepted=accepted,
        tokens=tokens,
        seconds=float(milliseconds) / 1000 if isinstance(milliseconds, int | float) else None,
        prompt=content["prompt"][:TEXT] if isinstance(content.get("prompt"), str) else "",
        text=_text(content),
    )


# ---- AIPerf


def aiperf(content: Json) -> Acceptance | None:
    """AIPerf's SpecDecodeAcceptanceRecord, alone or as `spec_decode_acceptance` in a line of its records file."""
    record = _object(content, "spec_decode_acceptance") or content
    sparse = record.get("acceptance_histogram")
    if "num_spec_steps" not in record or not isinstance(sparse, Mapping) or not isinstance(record.get("engine"), str):
        return None
    where = "AIPerf"
    histogram: dict[int, int] = {}
    for key in sparse:
        if not str(key).isdecimal() or int(key) > 10_000:
            raise TraceError(f"{where}: acceptance_histogram has the key {str(key)[:20]!r}; expected a small number")
        histogram[int(key)] = _count(where, sparse, key) or 0
    return Acceptance(
        engine=record["engine"][:60],
        method=record["engine"][:60],
        steps=_steps(where, record),
        histogram=tuple(histogram.get(i, 0) for i in range(max(histogram, default=0) + 1)),
        passes=_count(where, record, "num_spec_steps"),
        drafted=_count(where, record, "num_draft_tokens"),
        accepted=_count(where, record, "num_accepted_draft_tokens"),
        longest=_count(where, record, "num_spec_tokens"),
        tokens=_count(where, record, "completion_tokens"),
    )


def to_aiperf(given: Acceptance) -> dict[str, Any]:
    """AIPerf's SpecDecodeAcceptanceRecord. Needs a histogram, and the number of draft tokens."""
    full = given.filled()
    if full.histogram is None or full.drafted is None or full.accepted is None or full.passes is None:
        raise TraceError(f"{full.engine} reported no histogram of accepted tokens, which AIPerf's record needs")
    record: dict[str, Any] = {
        "engine": full.engine,
        "mean_acceptance_length": 1 + full.accepted / full.passes if full.passes else 1.0,
        "draft_acceptance_rate": full.accepted / full.drafted if full.drafted else 0.0,
        "acceptance_histogram": {str(i): count for i, count in enumerate(full.histogram) if count},
        "num_accepted_draft_tokens": full.accepted,
        "num_draft_tokens": full.drafted,
        "num_spec_steps": full.passes,
        "num_spec_tokens": full.longest,
        "completion_tokens": full.tokens,
        "per_step_accepted": None,
        "per_step_drafted": None,
    }
    if full.steps is not None:
        record["per_step_accepted"] = [accepted for _, accepted in full.steps]
        record["per_step_drafted"] = [drafted for drafted, _ in full.steps]
    return record


# ---- fields


def _object(content: Json, name: str) -> Json:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def _choice(content: Json) -> Json:
    choices = content.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


def _text(content: Json) -> str:
    choice = _choice(content)
    for found in (_object(choice, "message").get("content"), choice.get("text"), content.get("text")):
        if isinstance(found, str):
            return found[:TEXT]
    found = content.get("content")
    return found[:TEXT] if isinstance(found, str) else ""


def _count(where: str, content: Json, name: str) -> int | None:
    found = content.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= LARGEST:
        raise TraceError(f"{where}: {name} is {str(found)[:40]}; expected a whole number from 0 to {LARGEST}")
    return found


def _counts(where: str, content: Json, name: str) -> tuple[int, ...] | None:
    found = content.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one <= LARGEST for one in found):
        raise TraceError(f"{where}: {name} is not a list of whole numbers from 0 to {LARGEST}")
    return tuple(found)
