#!/bin/sh
# From nothing to what reports/vllm holds: vLLM's CPU build in a venv of its own with what suffix decoding needs (for
# which there must be a C++ compiler), drafters exported, each served and asked the benchmark's prompts greedily. Takes
# 3.4 GB of disk, 4 GB of memory and some minutes for each server.
# The trained drafters must be there: they ship, or `outrider train draft-model medusa eagle3` makes them.
set -e
outrider=${OUTRIDER:-.venv/bin/outrider}
out=${1:-reports/vllm}
$outrider serve --install --dry-run --drafter suffix --port "${PORT:-8000}"
$outrider bench text --engine vllm --drafters "${DRAFTERS:-prompt-lookup,draft-model,medusa,eagle3,suffix}" \
    --num-prompts "${LIMIT:-8}" --max-new-tokens "${TOKENS:-64}" --engine-option=--enforce-eager --json "$out/cpu.json"
