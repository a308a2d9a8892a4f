"""Weights are split into buckets, in the number formats in which they are served."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.hf.weights import EMBEDDING, HEAD
from rollover.weights.base import TensorSpec
from rollover.weights.buckets import as_served, buckets, cast, flattened


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["float32", "bfloat16"])), min_size=1, max_size=30),
    st.integers(1, 60),
)
def test_buckets_hold_every_weight_once_in_order_within_the_limit(sizes: list[tuple[int, str]], limit: int) -> None:
    specs = [spec(f"w{i}", size, dtype=dtype) for i, (size, dtype) in enumerate(sizes)]
    assert [s.num_bytes for s in specs] == [size * (4 if dtype == "float32" else 2) for size, dtype in sizes]
    pieces = buckets(specs, limit_bytes=limit)
    assert sorted(s.name for p in pieces for s in p.tensors) == sorted(s.name for s in specs)
    for piece in pieces:
        assert piece.tensors and (piece.num_bytes <= limit or len(piece.tensors) == 1)
        starts = [sum(s.num_bytes for s in piece.tensors[:i]) for i in range(len(piece.tensors))]
        assert all(
            start % (4 if s.dtype == "float32" else 2) == 0 for start, s in zip(starts, piece.tensors, strict=True)
        )
    firsts = [min(int(s.name[1:]) for s in p.tensors) for p in pieces]
    assert firsts == sorted(firsts)
    assert all(a.num_bytes + specs[b].num_bytes > limit for a, b in zip(pieces, firsts[1:], strict=False))


def test_a_server_takes_its_formats_and_a_tied_matrix_twice_if_it_has_two() -> None:
    held = [spec(EMBEDDING, 8, 4), spec("n", 4), spec("x", 2)]
    formats = {EMBEDDING: "bfloat16", HEAD: "bfloat16", "n": "float32", "x": "float8_e4m3fn"}
    served = {s.name: s for s in as_served(held, formats)}
    assert {name: s.dtype for name, s in served.items()} == formats | {"x": "float32"}
    assert served[HEAD].shape == (8, 4)
    assert HEAD not in {s.name for s in as_served(held, {EMBEDDING: "float32"})}
    weights = {EMBEDDING: torch.arange(32.0).reshape(8, 4), "n": torch.ones(4)}
    assert torch.equal(cast(weights, served[HEAD]), weights[EMBEDDING].bfloat16())
    assert cast(weights, served["n"]).data_ptr() == weights["n"].data_ptr()


def test_a_flat_bucket_is_its_tensors_one_after_the_other() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3).T, torch.ones(3, dtype=torch.bfloat16)]
    flat = flattened(iter(tensors), 30)
    assert torch.equal(flat[:24].view(torch.float32).reshape(3, 2), tensors[0])
    assert torch.equal(flat[24:].view(torch.bfloat16), tensors[1])
