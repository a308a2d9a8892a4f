"""A manifest says what weights are, and a target that cannot apply them refuses them by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollover.errors import EngineError
from rollover.weights.base import Manifest, TensorSpec

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


def test_adapters_are_refused_with_the_version_they_belong_beside() -> None:
    with pytest.raises(EngineError, match="full weights only, but version 7 is given as adapters for version 6"):
        replace(FULL, base_version=6).require_full(7, "the engine")
