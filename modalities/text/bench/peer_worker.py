"""The worker process of another engine, run by that engine's venv: loads a model, then answers one prompt at a time.

Reads JSON lines (token ids, number of new tokens) and writes JSON lines (token ids, seconds, peak memory). Imports only
the standard library at the top and nothing of Outrider, which is not installed in the venv.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Counts = dict[str, float]  # what an engine reports of a decoding, as outrider.core.bench.runner.Counts has it
Generate = Callable[[Sequence[int], int], tuple[Sequence[int], Counts | None]]  # (prompt, maximum new tokens); greedy
_START_TIMEOUT = 600.0  # seconds


@dataclass(frozen=True)
class Engine:
    """A loaded model: how it decodes, the precision of its weights, and the process that has them."""

    generate: Generate
    precision: str
    process: str = "self"  # its number


def transformers(options: dict[str, Any]) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["folder"], dtype=getattr(torch, options["dtype"]), use_safetensors=True, trust_remote_code=False
    )
    model = model.to(options["device"]).eval()
    model.generation_config.pad_token_id = options["end"][0]
    extra: dict[str, Any] = {"prompt_lookup_num_tokens": options["length"]} if options["lookup"] else {}
    if options["device"] != "cpu" and not options["lookup"]:
        extra = {"cache_implementation": "static"}  # compiled by transformers

    def generate(ids: Sequence[int], limit: int) -> tuple[Sequence[int], None]:
        prompt = torch.tensor([list(ids)], device=options["device"])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=limit,
                do_sample=False,
                eos_token_id=options["end"],
                **extra,
            )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens, None

    return Engine(generate, options["dtype"])


def openvino(options: dict[str, Any]) -> Engine:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    extra = {"prompt_lookup": True} if options["lookup"] else {}
    pipe = genai.LLMPipeline(options["gguf"], "CPU", INFERENCE_NUM_THREADS=options["threads"], **extra)
    config = genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = set(options["end"])
    if options["lookup"]:
        config.num_assistant_tokens = options["length"]
        config.max_ngram_size = options["max_ngram"]

    def generate(ids: Sequence[int], limit: int) -> tuple[Sequence[int], None]:
        config.max_new_tokens = limit
        prompt = ov.Tensor(np.asarray([ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        return list(pipe.generate(genai.TokenizedInputs(prompt, mask), config).tokens[0]), None

    return Engine(generate, "4-bit GGUF")


def vllm(options: dict[str, Any]) -> Engine:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: one prompt at a time needs little
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # avoids a second process that busy-waits
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    lookup = {
        "method": "ngram",
        "num_speculative_tokens": options["length"],
        "prompt_lookup_max": options["max_ngram"],
        "prompt_lookup_min": options["min_ngram"],
    }
    model = LLM(
        options["folder"],
        dtype=options["dtype"],
        max_model_len=options["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,  # they count drafts, and time without the prefill
        **({"speculative_config": lookup} if options["lookup"] else {}),
        **({} if options["device"] == "cpu" else {"gpu_memory_utilization": share(options["folder"])}),
    )

    def drafts() -> tuple[float, float]:
        found = {metric.name: getattr(metric, "value", 0) for metric in model.get_metrics()}
        names = ("num_draft_tokens", "num_accepted_tokens")
        drafted, accepted = (found.get(f"vllm:spec_decode_{name}", 0) for name in names)
        return drafted, accepted

    def generate(ids: Sequence[int], limit: int) -> tuple[Sequence[int], Counts]:
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=options["end"], detokenize=False)
        before = drafts()
        out = model.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)[0]
        tokens = list(out.outputs[0].token_ids)
        drafted, accepted = (now - then for now, then in zip(drafts(), before, strict=True))
        passes = max(len(tokens) - accepted, 1)  # what was accepted after the last token counts too
        seconds = out.metrics.last_token_ts - out.metrics.first_token_ts
        return tokens, {"passes": passes, "drafted": drafted, "accepted": accepted, "seconds": seconds}

    return Engine(generate, options["dtype"])


def sglang(options: dict[str, Any]) -> Engine:
    import sglang

    lookup = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": options["length"],
    }
    engine = sglang.Engine(
        model_path=options["folder"],
        dtype=options["dtype"],
        context_length=options["context"],
        max_running_requests=1,
        mem_fraction_static=share(options["folder"]),
        disable_radix_cache=True,
        skip_tokenizer_init=True,
        log_level="error",
        **(lookup if options["lookup"] else {}),
    )

    def generate(ids: Sequence[int], limit: int) -> tuple[Sequence[int], None]:
        params = {"temperature": 0, "max_new_tokens": limit, "stop_token_ids": options["end"]}
        return list(engine.generate(input_ids=list(ids), sampling_params=params)["output_ids"]), None

    return Engine(generate, options["dtype"])


def llama_cpp(options: dict[str, Any]) -> Engine:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = str(options["threads"])
    words = ["-m", options["gguf"], "-c", str(options["context"]), "-np", "1", "-t", threads, "-tb", threads]
    words += ["--host", "127.0.0.1", "--port", str(port), "--cache-ram", "0", "--no-ui", "--offline"]
    process = subprocess.Popen([options["server"], *words, *options["arguments"]], stdin=subprocess.DEVNULL)
    atexit.register(process.kill)
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + _START_TIMEOUT
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                break
        except OSError:  # not there yet, or loading
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("llama-server did not start; its log says why") from None
            time.sleep(0.1)

    def generate(ids: Sequence[int], limit: int) -> tuple[Sequence[int], Counts]:
        asked = {"prompt": list(ids), "n_predict": limit, "temperature": 0, "cache_prompt": False}
        body = json.dumps({**asked, "return_tokens": True}).encode()
        request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_START_TIMEOUT) as reply:
                response = json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"llama-server: {error.read().decode(errors='replace')[:200]}") from None
        return response["tokens"], counted(response["timings"])

    return Engine(generate, "the GGUF's", str(process.pid))


def counted(timings: dict[str, float]) -> Counts:
    """llama-server's timings of a completion. Every pass yields one token beside those that were accepted."""
    accepted = timings.get("draft_n_accepted", 0)
    return {
        "passes": timings["predicted_n"] - accepted,
        "drafted": timings.get("draft_n", 0),
        "accepted": accepted,
        "seconds": timings["predicted_ms"] / 1e3,
    }


def share(folder: str) -> float:
    """The share of the GPU's memory that a server may take, so that several fit beside each other: the model's files
    with a quarter more, and 6 GB."""
    import torch

    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return min((1.25 * size + 6e9) / torch.cuda.get_device_properties(0).total_memory, 0.9)


LOADERS = {
    "transformers": transformers,
    "openvino-genai": openvino,
    "vllm": vllm,
    "sglang": sglang,
    "llama.cpp": llama_cpp,
}


def peak(process: str, start: bool = False) -> int:
    """Return the peak memory of a process since the last call with `start` (Linux; elsewhere 0)."""
    try:
        if start:
            with open(f"/proc/{process}/clear_refs", "w") as refs:
                refs.write("5")
            return 0
        with open(f"/proc/{process}/status") as status:
            return 1024 * int(status.read().split("VmHWM:")[1].split()[0])
    except (OSError, IndexError):
        return 0


def main() -> None:
    """Answer until stdin ends. Output of libraries is redirected to stderr, because stdout carries the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**parts: Any) -> None:
        answers.write(json.dumps(parts) + "\n")
        answers.flush()

    try:
        engine = LOADERS[sys.argv[1]](json.loads(sys.argv[2]))
        answer(precision=engine.precision)
        for line in sys.stdin:
            request = json.loads(line)
            peak(engine.process, start=True)
            start = time.perf_counter()
            new, counts = engine.generate(request["ids"], request["limit"])
            seconds = time.perf_counter() - start
            more = {} if counts is None else {"counts": counts}
            answer(tokens=[int(token) for token in new], seconds=seconds, memory=peak(engine.process), **more)
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
