"""The worker process of another engine, run by that engine's venv: loads a model, then answers one prompt at a time.

Reads JSON lines (token ids, number of new tokens) and writes JSON lines (token ids, seconds, peak memory). Imports only
the standard library at the top and nothing of Outrider, which is not installed in the venv.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Generate = Callable[[Sequence[int], int], Sequence[int]]  # (prompt, maximum new tokens) -> new tokens, greedy
_STATUS, _REFS = "/proc/self/status", "/proc/self/clear_refs"


def transformers(options: dict[str, Any]) -> tuple[Generate, str]:
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

    def generate(ids: Sequence[int], limit: int) -> Sequence[int]:
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
        return tokens

    return generate, options["dtype"]


def openvino(options: dict[str, Any]) -> tuple[Generate, str]:
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

    def generate(ids: Sequence[int], limit: int) -> Sequence[int]:
        config.max_new_tokens = limit
        prompt = ov.Tensor(np.asarray([ids], dtype=np.int64))
        mask = ov.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        return list(pipe.generate(genai.TokenizedInputs(prompt, mask), config).tokens[0])

    return generate, "4-bit GGUF"


def vllm(options: dict[str, Any]) -> tuple[Generate, str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: one prompt at a time needs little
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # avoids a second process that busy-waits
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    lookup = {"method": "ngram", "num_speculative_tokens": options["length"], "prompt_lookup_max": options["max_ngram"]}
    model = LLM(
        options["folder"],
        dtype=options["dtype"],
        max_model_len=options["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **({"speculative_config": lookup} if options["lookup"] else {}),
        **({} if options["device"] == "cpu" else {"gpu_memory_utilization": share(options["folder"])}),
    )

    def generate(ids: Sequence[int], limit: int) -> Sequence[int]:
        params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=options["end"], detokenize=False)
        out = model.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)

    return generate, options["dtype"]


def sglang(options: dict[str, Any]) -> tuple[Generate, str]:
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

    def generate(ids: Sequence[int], limit: int) -> Sequence[int]:
        params = {"temperature": 0, "max_new_tokens": limit, "stop_token_ids": options["end"]}
        return list(engine.generate(input_ids=list(ids), sampling_params=params)["output_ids"])

    return generate, options["dtype"]


def share(folder: str) -> float:
    """The share of the GPU's memory that a server may take, so that several fit beside each other: the model's files
    with a quarter more, and 6 GB."""
    import torch

    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return min((1.25 * size + 6e9) / torch.cuda.get_device_properties(0).total_memory, 0.9)


LOADERS = {"transformers": transformers, "openvino-genai": openvino, "vllm": vllm, "sglang": sglang}


def peak(start: bool = False) -> int:
    """Return the peak memory since the last call with `start` (Linux; elsewhere 0)."""
    try:
        if start:
            with open(_REFS, "w") as refs:
                refs.write("5")
            return 0
        with open(_STATUS) as status:
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
        generate, precision = LOADERS[sys.argv[1]](json.loads(sys.argv[2]))
        answer(precision=precision)
        for line in sys.stdin:
            request = json.loads(line)
            peak(start=True)
            start = time.perf_counter()
            tokens = [int(token) for token in generate(request["ids"], request["limit"])]
            seconds = time.perf_counter() - start
            answer(tokens=tokens, seconds=seconds, memory=peak())
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
