"""Loading reads tensors one by one: the memory that it takes, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = """
import json, sys, threading, time
from pathlib import Path
import torch
from outrider.core.assets.store import Checkpoint, read_json
from outrider.core.engine import checkpoints

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

folder = Path(sys.argv[1])
torch.randn(64, 64, dtype=torch.bfloat16) @ torch.randn(64, 64, dtype=torch.bfloat16)
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

watcher = threading.Thread(target=watch)
watcher.start()
decoder = checkpoints.load(read_json(folder / "config.json"), Checkpoint(folder), dtype=torch.bfloat16)
done.set()
watcher.join()
print(json.dumps({"peak": max(peak, anonymous()) - before, "held": anonymous() - before}))
"""
SHAPE = {
    "model_type": "llama",
    "vocab_size": 24_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_loading_takes_the_weights_and_one_tensor(tmp_path: Path) -> None:
    """A checkpoint of two shards and some 190 MB."""
    width, middle, shared = 1024, 2816, 256

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), 0.01, dtype=torch.bfloat16)

    shards: list[dict[str, torch.Tensor]] = [{"model.embed_tokens.weight": drawn(24_000, width)}, {}]
    shards[1]["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    for index in range(6):
        at, shard = f"model.layers.{index}", shards[index // 3]
        rows = {"q": width, "k": shared, "v": shared, "o": width}
        shard |= {f"{at}.self_attn.{name}_proj.weight": drawn(count, width) for name, count in rows.items()}
        shard |= {f"{at}.mlp.{name}_proj.weight": drawn(middle, width) for name in ("gate", "up")}
        shard[f"{at}.mlp.down_proj.weight"] = drawn(width, middle)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shard[f"{at}.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    names = {}
    for number, shard in enumerate(shards):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file(shard, tmp_path / file, {"format": "pt"})
        names |= dict.fromkeys(shard, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    largest = max(tensor.nbytes for shard in shards for tensor in shard.values())
    assert 180e6 < size < 220e6
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc returns what is freed at once
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    measured = json.loads(done.stdout)
    assert measured["peak"] < size + largest, measured
