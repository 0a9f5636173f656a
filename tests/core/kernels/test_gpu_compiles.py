"""Triton compiles the kernels for a GPU, without one: the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

HOPPER = ("cuda", 90, 32)
ATTENTION = ["*bf16"] * 3 + ["*i8", "*i64", "*i32", "*fp32", "*i32", *["i32"] * 5, "fp32", *["i32"] * 6]
ROTARY = ["*bf16"] * 4 + ["*i64", "*i64", "*bf16", "*i32", *["i32"] * 7, "fp32", *["i32"] * 7]
TILE = {"GROUP": 3, "DIM": 64, "SIZE": 64, "HEIGHT": 16, "WIDTH": 64, "WIDEN": False}
PRODUCT = {"BIAS": True, "GROUP": 32, "HEIGHT": 16, "WIDTH": 16, "DEPTH": 64, "WIDEN": False}
FEW_ROWS = [*["*bf16"] * 4, "i32", "i32", "i32"]
# module, kernel, the types of its arguments, its constants
PROGRAMS: list[tuple[str, str, list[str], dict[str, Any]]] = [
    ("norm", "_add_norm", ["*fp32", "*bf16", "*fp32", "*bf16", "i32", "fp32"], {"ADDS": True, "BLOCK": 1024}),
    ("rotary", "_rotate_and_write", ROTARY, {"FIXED": False, "NORM": True, "PAGE": 64, "DIM": 64, "HALF": 32}),
    (
        "tree_attention",
        "_tree_attention",
        ATTENTION,
        dict(MASK=True, ENTRIES=False, PAGE=0, SPLITS=1, UNROLL=1, **TILE),
    ),
    (
        "tree_attention",
        "_tree_attention",
        ATTENTION,
        dict(MASK=True, ENTRIES=True, PAGE=64, SPLITS=4, UNROLL=4, **TILE),
    ),
    ("products", "_swiglu", ["*bf16", "*bf16", "i32"], {"BLOCK": 1024}),
    ("products", "_few_rows", ["*bf16", "*bf16", *FEW_ROWS], dict(KIND=0, **PRODUCT)),
    ("products", "_few_rows", ["*bf16", "*i8", *FEW_ROWS], dict(KIND=1, **PRODUCT)),
    ("products", "_few_rows", ["*bf16", "*u8", *FEW_ROWS], dict(KIND=2, **PRODUCT)),
    ("sampling", "_keep_largest", ["*fp32", "*fp32", "i32", "fp32", "fp32"], {"MASS": True, "BLOCK": 1024}),
    ("sampling", "_keep_largest", ["*fp32", "*fp32", "i32", "fp32", "fp32"], {"MASS": False, "BLOCK": 1024}),
]


def compile_all() -> None:
    """Compile them in this process, in which Triton does not interpret."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module, name, types, constants in PROGRAMS:
        kernel = getattr(importlib.import_module(f"outrider.core.kernels.gpu.{module}"), name)
        given = iter(types)
        signature = {each: "constexpr" if each in constants else next(given) for each in kernel.arg_names}
        assert next(given, None) is None, name
        values = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        made = triton.compile(ASTSource(kernel, signature, values), target=GPUTarget(*HOPPER))
        assert made.asm["cubin"]


def test_the_compiler_accepts_the_kernels(tmp_path: Any) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    compile_all()
