"""Responses of other engines: llama.cpp's is a real one, others are as documentation and sources describe them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VLLM: dict[str, Any] = {  # the shape of vLLM's documentation, with its detailed arrays
    "choices": [
        {
            "message": {"content": "a b c d e f"},
            "token_ids": [1, 2, 3, 4, 5, 6],
            "logprobs": {"content": [{"token": text} for text in ("a", " b", " c", " d", " e", " f")]},
        }
    ],
    "usage": {"completion_tokens": 6},
    "metrics": {
        "speculative_decoding": {
            "mean_acceptance_length": 2.5,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [0, 1, 1, 0],
            "num_spec_steps": 2,
            "num_accepted_draft_tokens": 3,
            "num_draft_tokens": 6,
            "num_spec_tokens": 3,
            "per_step_accepted": [2, 1],
            "per_step_drafted": [3, 3],
        }
    },
}
SGLANG = {
    "text": "the answer",
    "meta_info": {
        "completion_tokens": 7,
        "spec_verify_ct": 3,
        "spec_num_correct_drafts": 3,
        "spec_num_proposed_drafts": 9,
        "spec_accept_rate": 1 / 3,
        "spec_accept_length": 7 / 3,
        "spec_correct_drafts_histogram": [1, 1, 1],
    },
}
# written by llama-server (llama-cpp-python 0.3.36, --spec-type ngram-simple)
LLAMA = json.loads(Path(__file__).with_name("llama-server.json").read_text(encoding="utf-8"))
