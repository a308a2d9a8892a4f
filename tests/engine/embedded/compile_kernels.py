"""Compiles every Triton kernel ahead of time, for GPUs that need not be there: ``python -m
tests.engine.embedded.compile_kernels bf16``. Prints a line for each kernel, variant and GPU."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollover.engine.embedded import experts_triton, paged_triton

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SIZES = {"D": 128, "S": 32}


def variants(number: str) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Return the kernels with the types of their arguments and their constants, as ``TritonAttention`` launches them
    for tensors of this number format."""
    tensors = {name: f"*{number}" for name in ("qkv", "keys", "values")}
    placed = {"tables": "*i64", "lengths": "*i64", "row_stride": "i32", "table_stride": "i32"}
    parts = {name: "*fp32" for name in ("sums", "peaks", "totals")}
    heads = {"eps": "fp32", "num_heads": "i32", "num_kv": "i32"}
    norms = {name: f"*{number}" for name in ("q_norm", "k_norm")}
    angles = {name: f"*{number}" for name in ("cosines", "sines")}
    return [
        (
            paged_triton._place,
            {**tensors, **norms, **angles, **placed, **heads},
            {"NORM": True, "ROTATE": True, **SIZES},
        ),
        (
            paged_triton._place,
            {**tensors, **angles, **placed, **heads},
            {"NORM": False, "ROTATE": False, "q_norm": None, "k_norm": None, **SIZES},
        ),
        *(
            (
                paged_triton._attend,
                {**tensors, **placed, **parts, "num_kv": "i32", "scale": "fp32"},
                {"GROUP": group, "ROWS": max(16, group), "SPLITS": splits, "WINDOW": window, **SIZES},
            )
            for group, splits, window in ((4, 1, 0), (4, 16, 0), (4, 16, 4096))
        ),
        *(
            (
                experts_triton._products,
                {
                    **{name: f"*{number}" for name in ("x", "weights", "out")},
                    **{"order": "*i64", "starts": "*i64", "in_size": "i32", "out_size": "i32"},
                },
                {"SHARED": shared, "GATED": gated, "ROWS": rows, "COLUMNS": 64, "DEPTH": 32},
            )
            for shared, gated, rows in ((8, True, 16), (1, False, 64))
        ),
        (paged_triton._combine, {**parts, "out": f"*{number}"}, {"D": SIZES["D"], "SPLITS": 16}),
    ]


def compile_all(number: str) -> None:
    made = {kernel for kernel, _, _ in variants(number)}
    ours = (*vars(paged_triton).values(), *vars(experts_triton).values())
    assert made == {each for each in ours if isinstance(each, triton.JITFunction)}
    for kernel, types, constants in variants(number):
        # Every argument has a type or a constant, in the order of the kernel's own signature.
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        assert {*types, *constants} == {*kernel.arg_names}
        for name, target in TARGETS.items():
            triton.compile(ASTSource(kernel, signature, constants), target=target)
            print(name, number, flush=True)


if __name__ == "__main__":
    for number in sys.argv[1:]:
        compile_all(number)
