"""A manifest says what weights are, and a target that cannot apply them refuses them by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.errors import EngineError
from rollover.weights.base import Manifest, Shard, TensorSpec

SPEC = TensorSpec(name="w", shape=(1024, 8), dtype="bfloat16")
FULL = Manifest(version=7, tensors=(SPEC,))


def test_a_tensor_has_the_size_of_its_shape_in_its_number_format() -> None:
    assert SPEC.num_bytes == 16384
    assert replace(SPEC, dtype="float32").num_bytes == 32768


def test_full_weights_of_the_version_asked_for_are_accepted() -> None:
    FULL.require_full(7, "the engine")


def test_another_version_than_the_one_announced_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^the engine was asked to load weights version 8, but was given 7$"):
        FULL.require_full(8, "the engine")


@pytest.mark.parametrize("kind", ["delta", "adapter"])
def test_a_delta_and_an_adapter_are_refused_with_the_version_they_apply_to(kind: str) -> None:
    part = replace(FULL, kind=kind, base_version=6)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=f"full weights only, but version 7 is given as {kind} of version 6"):
        part.require_full(7, "the engine")


def test_a_shard_is_refused_with_its_rows() -> None:
    sharded = replace(FULL, tensors=(replace(SPEC, shard=Shard(dim=0, start=512, stop=1024)),))
    with pytest.raises(EngineError, match="of 'w' it was given rows 512 to 1024 of dimension 0"):
        sharded.require_full(7, "the engine")


@pytest.mark.parametrize(("kind", "base"), [("full", 6), ("delta", None), ("adapter", None)])
def test_a_base_version_goes_with_what_applies_to_one(kind: str, base: int | None) -> None:
    with pytest.raises(ValueError, match="names the version that it applies to"):
        Manifest(version=7, kind=kind, base_version=base, tensors=())  # type: ignore[arg-type]
