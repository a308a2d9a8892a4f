"""Adapters travel alone, and what engines serve is the same on every machine, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.publication import low_rank
from rollover.swarm.publication.low_rank import merged
from rollover.swarm.publication.manifest import PublicationError, PublishedAdapter, open_manifest, sign
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.weights.adapters import AdapterWeights, LowRank, MergedWeights
from tests.swarm.test_fetch import answers, fetch, flipped, manifest_of, open_fetcher, tensors
from tests.swarm.weights_kit import (
    Weights,
    assert_same,
    initial_weights,
    open_publisher,
    served,
    serving,
    source,
)

UP = "model.layers.0.up.weight"
RANK, SCALE = 4, 2.0


def adapters(version: int) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(version)
    a_RI, b_OR = (0.1 * torch.randn(*shape, generator=generator) for shape in ((RANK, 64), (64, RANK)))
    return {UP: LowRank(a_RI=a_RI, b_OR=b_OR * (version > 0), scale=SCALE)}


def weights(version: int) -> MergedWeights:
    return MergedWeights(served(initial_weights()), adapters(version))


def publish(publisher: SwarmPublisher, *versions: int) -> list[Any]:
    return [publisher.publish(AdapterWeights(version, weights(version))) for version in versions]


def expected(version: int) -> Weights:
    """The rule of the protocol, in plain Python and numpy's float32."""
    made = served(initial_weights())
    adapter = adapters(version)[UP]
    total = made[UP].float().numpy().copy()
    scaled = adapter.b_OR.numpy() * np.float32(adapter.scale)
    for k in range(RANK):
        for row in range(64):
            for column in range(64):
                total[row, column] = np.float32(total[row, column] + scaled[row, k] * adapter.a_RI.numpy()[k, column])
    return {**made, UP: torch.from_numpy(total).bfloat16()}


def merged_bytes(w: Any, dtype: str, a: Any, b: Any, scale: float) -> Any:
    with ThreadPoolExecutor(2) as pool:
        content = np.ascontiguousarray(w).reshape(-1).view(np.uint8)
        return merged(content, dtype, np.float32(a), np.float32(b), scale, pool=pool)


def test_the_example_of_the_docstring() -> None:
    result = merged_bytes(np.float32([[1, 2]]), "float32", [[1, 1]], [[3]], 0.5)
    assert result.view(np.float32).tolist() == [2.5, 3.5]


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50), st.integers(-(2**10), 2**10))
def test_sums_are_rounded_to_bfloat16_as_torch_rounds(bits: list[int], step: int) -> None:
    """Also where the sum lies between two values, overflows or is no number."""
    w = np.array([bits], dtype=np.uint16)
    a = np.full((1, len(bits)), step * 2.0**-9, dtype=np.float32)
    found = merged_bytes(w, "bfloat16", a, [[1.0]], 1.0).view(np.uint16)
    base = torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)
    sums = (base.float() + torch.from_numpy(a)).bfloat16()[0]
    theirs = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(theirs.isnan(), sums.isnan())
    keep = ~sums.isnan()
    assert torch.equal(theirs[keep].view(torch.int16), sums[keep].view(torch.int16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_and_threads_change_no_bit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    width = 4 if dtype == "float32" else 2
    values = generator.normal(size=(37, 53)).astype(np.float32)
    content = (
        values if width == 4 else values.astype(np.float16) if dtype == "float16" else values.view(np.uint16)[:, 1::2]
    )
    a, b = generator.normal(size=(5, 53)), generator.normal(size=(37, 5))
    one = merged_bytes(content, dtype, a, b, 0.3)
    monkeypatch.setattr(low_rank, "_BLOCK", 60)
    assert np.array_equal(one, merged_bytes(content, dtype, a, b, 0.3))


def test_the_sum_is_the_product_of_the_matrices() -> None:
    """Against exact arithmetic: within what adding in float32 may lose."""
    generator = np.random.default_rng(1)
    w, a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((3, 4), (6, 4), (3, 6)))
    found = merged_bytes(w, "float32", a, b, 0.5).view(np.float32).reshape(3, 4)
    for row in range(3):
        for column in range(4):
            exact = Fraction(float(w[row, column]))
            exact += sum(Fraction(float(b[row, k])) * Fraction(float(a[k, column])) for k in range(6)) / 2
            assert abs(float(exact) - found[row, column]) < 1e-5


async def test_a_worker_fetches_what_stays_once_and_has_the_sum_to_the_bit(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    published = publish(publisher, 0, 1, 2)
    assert [p.kind for p in published] == ["full", "adapter", "adapter"]
    frozen = set(b.digest for b in manifest_of(publisher, published[0].head).blobs[:1])

    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            for version, each in enumerate(published):
                fetched = await fetch(fetcher, each.head, server)
                assert_same(tensors(fetched), expected(version))
        assert sum(digest in frozen for digest, _ in server.asked) == 1
    adapter_bytes = 4 * RANK * (64 + 64)
    assert all(p.wire_bytes < 1.1 * adapter_bytes for p in published[1:])


async def test_what_has_hardly_changed_is_sent_as_a_delta_of_the_sums(tmp_path: Path) -> None:
    """Adapters are dense, however little they move; in bfloat16 few of the sums do."""
    publisher = open_publisher(tmp_path)
    moved = adapters(2)[UP]
    nearly = {UP: LowRank(a_RI=moved.a_RI, b_OR=moved.b_OR * 1.0001, scale=SCALE)}
    (first, second) = publish(publisher, 1, 2)
    third = publisher.publish(AdapterWeights(3, MergedWeights(served(initial_weights()), nearly)))
    assert [first.kind, second.kind, third.kind] == ["full", "adapter", "delta"]
    assert third.wire_bytes < second.wire_bytes / 4

    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            await fetch(fetcher, second.head, server)
            found = tensors(await fetch(fetcher, third.head, server))
        async with open_fetcher(publisher, tmp_path / "late") as late:
            assert_same(tensors(await fetch(late, third.head, server)), found)
    assert torch.allclose(found[UP].float(), expected(2)[UP].float(), atol=2e-3)


def test_engines_that_take_tensors_are_given_the_same_sum_up_to_rounding() -> None:
    ours, torchs = expected(1), dict(AdapterWeights(1, weights(1)).tensors())
    assert list(ours) == list(torchs)
    assert torch.allclose(ours[UP].float(), torchs[UP].float(), rtol=2**-7, atol=0)
    assert AdapterWeights(1, weights(1)).manifest.tensors[1].shape == (64, 64)


def test_a_publisher_started_again_names_the_same_blobs(tmp_path: Path) -> None:
    before = open_publisher(tmp_path)
    publish(before, 0, 1)
    again = open_publisher(tmp_path, run_epoch=2)
    (published,) = publish(again, 2)
    assert published.kind == "adapter"


async def test_adapters_and_whole_weights_may_follow_each_other(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    heads = [
        publisher.publish(source(0, initial_weights())).head,
        *(p.head for p in publish(publisher, 1)),
        publisher.publish(source(2, initial_weights())).head,
        *(p.head for p in publish(publisher, 3)),
    ]

    with serving(publisher.blobs.root) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            for version, head in enumerate(heads):
                want = expected(version) if version % 2 else served(initial_weights())
                assert_same(tensors(await fetch(fetcher, head, server)), want)


async def test_a_flipped_bit_in_an_adapter_costs_one_blob(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    *_, published = publish(publisher, 0, 1)
    last = manifest_of(publisher, published.head).blobs[-1].digest

    with serving(publisher.blobs.root, answers({last}, flipped, times=1)) as server:
        async with open_fetcher(publisher, tmp_path / "worker") as fetcher:
            assert_same(tensors(await fetch(fetcher, published.head, server)), expected(1))
            assert sum(digest == last for digest, _ in server.asked) >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank 0"),
        ({"rank": 65}, "rank 65"),
        ({"scale": float("inf")}, "scale inf"),
        ({"start": -1}, "outside"),
        ({"start": 10**9}, "outside"),
    ],
)
def test_adapters_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    publisher = open_publisher(tmp_path)
    (published,) = publish(publisher, 1)
    manifest = manifest_of(publisher, published.head)
    wrong = tuple(
        msgspec.structs.replace(t, adapter=msgspec.structs.replace(t.adapter, **change)) if t.adapter else t
        for t in manifest.tensors
    )
    blob = sign(msgspec.structs.replace(manifest, tensors=wrong), publisher._key)
    with pytest.raises(PublicationError, match=message):
        open_manifest(blob, publisher.public_key)


def test_a_vector_has_no_adapter(tmp_path: Path) -> None:
    publisher = open_publisher(tmp_path)
    (published,) = publish(publisher, 1)
    manifest = manifest_of(publisher, published.head)
    adapter = PublishedAdapter(rank=1, scale=1.0, start=0)
    wrong = tuple(msgspec.structs.replace(t, adapter=adapter) if len(t.shape) == 1 else t for t in manifest.tensors)
    with pytest.raises(PublicationError, match="cannot have an adapter"):
        open_manifest(sign(msgspec.structs.replace(manifest, tensors=wrong), publisher._key), publisher.public_key)
