"""An encoding gives back every bit, is near the entropy, and can harm nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rollover.swarm.publication import delta
from rollover.swarm.publication.delta import apply, encode
from rollover.swarm.publication.manifest import PublicationError

ITEM = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8, torch.float8_e4m3fn: 1}


def content(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def random_bytes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 256, size, dtype=np.uint8)


def check(old: np.ndarray, new: np.ndarray, item_bytes: int) -> bytes:
    encoded = encode(old, new, item_bytes)
    before = old.copy()
    assert np.array_equal(apply(old, encoded, item_bytes), new)
    assert np.array_equal(old, before)
    return encoded


@pytest.mark.parametrize("dtype", ITEM, ids=str)
@pytest.mark.parametrize("learning_rate", [1e-7, 1e-5, 1e-3, 1.0])
def test_a_step_of_training_comes_back_bit_for_bit(dtype: torch.dtype, learning_rate: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5000, generator=generator, dtype=torch.float64) * 0.02
    moved = weights + learning_rate * torch.randn(5000, generator=generator, dtype=torch.float64)
    check(content(weights.to(dtype)), content(moved.to(dtype)), ITEM[dtype])


def test_nan_with_each_payload_and_both_zeros_and_infinities_are_values() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    for shift in (1, 3, 100, 2**15, 2**16 - 1):
        check(every.view(np.uint8), np.roll(every, shift).view(np.uint8), 2)
    zeros = torch.tensor([0.0, -0.0, float("nan")], dtype=torch.bfloat16)
    check(content(zeros), content(torch.tensor([-0.0, float("nan"), 0.0], dtype=torch.bfloat16)), 2)
    assert encode(content(zeros), content(zeros), 2) == b""


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 3)), max_size=40),
)
def test_any_bits_come_back(item_bytes: int, pairs: list[tuple[int, int, int]]) -> None:
    mask = 2 ** (8 * item_bytes) - 1
    olds = [a & mask for a, _, _ in pairs]
    news = [(a, a + 1, a - 1, b)[kind] & mask for a, b, kind in pairs]
    unsigned = f"u{item_bytes}"
    check(np.array(olds, dtype=unsigned).view(np.uint8), np.array(news, dtype=unsigned).view(np.uint8), item_bytes)


def test_tensors_of_many_segments_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "SEGMENT", 7)
    rng = np.random.default_rng(0)
    for size in (0, 1, 6, 7, 8, 20, 21, 700):
        old = random_bytes(rng, 2 * size)
        new = old.copy()
        new[rng.random(2 * size) < 0.1] ^= 1
        check(old, new, 2)


@pytest.mark.parametrize("mean_gap", [1, 2, 30, 600, 300_000])
def test_gaps_of_every_length_come_back(mean_gap: int) -> None:
    rng = np.random.default_rng(mean_gap)
    old = np.zeros(2_000_000, dtype=np.uint16)
    new = old.copy()
    new[rng.random(old.size) < 1 / mean_gap] += 1
    new[[0, -1]] += 1
    check(old.view(np.uint8), new.view(np.uint8), 2)


def entropy_bits(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


@pytest.mark.parametrize("num_elements", [200_000, 2_000_000])
@pytest.mark.parametrize("learning_rate", [1e-7, 1e-6, 1e-5])
def test_an_encoding_is_at_most_1_3_times_the_entropy_of_what_changed(learning_rate: float, num_elements: int) -> None:
    """Places, and by how many values each has moved. Normal weights with a float32 master are the pessimistic case:
    many are near 0, where one step passes many bfloat16 values."""
    generator = torch.Generator().manual_seed(2)
    master = 0.02 * torch.randn(num_elements, generator=generator)
    step = learning_rate * torch.randn(num_elements, generator=generator)
    old, new = content(master.bfloat16()), content((master + step).bfloat16())
    before, after = old.view(np.uint16), new.view(np.uint16)
    moved = before != after
    places = moved.size * entropy_bits(np.array([moved.sum(), (~moved).sum()]))
    by = delta._ranks(after[moved]).astype(int) - delta._ranks(before[moved]).astype(int)
    steps = moved.sum() * entropy_bits(np.unique(by, return_counts=True)[1])
    assert 8 * len(check(old, new, 2)) < 1.3 * (places + steps)


def test_the_encoding_is_the_one_that_the_page_of_the_protocol_describes() -> None:
    old = torch.ones(5, dtype=torch.bfloat16)
    new = old.clone()
    new[1], new[3] = 1.0078125, -1.0  # the next value up; a far one
    expected = (
        "02 02"  # 2 bytes per element, 2 changes
        "04 01 01"  # gaps of 1 and 1
        "00 00 00"  # their higher bytes
        "04 02 01"  # steps of 1, stored as 2, and from the rank 0xbf80 to 0x407f, stored as 0xfe01
        "04 00 fe"
    )
    assert check(content(old), content(new), 2).hex() == expected.replace(" ", "")


# -- encodings that are none -----------------------------------------------------------------------------------------


OLD = np.zeros(2000, dtype=np.uint8)


def plane(raw: bytes, *, compressed: bool = False) -> bytes:
    packed = zstandard.compress(raw) if compressed else raw
    return delta._varint(len(packed) << 1 | compressed) + packed


def segment(num_changes: int, *planes: bytes, item_bytes: int = 2) -> bytes:
    return bytes([item_bytes]) + delta._varint(num_changes) + b"".join(planes)


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (b"\x02", "damaged"),
        (segment(1, item_bytes=4), "of 4 bytes"),
        (segment(1001), "changes 1,001 elements"),
        (segment(1), "damaged"),
        (segment(1, plane(b"\xff" * 6)), "6 bytes where 1 are expected"),
        (segment(1, plane(b"\x00" * 2**28, compressed=True)), "268,435,456 bytes where 1 are expected"),
        (segment(1, plane(b"\xe8"), plane(b"\x03"), b"\x00\x00"), "changes element 1,000 of 1,000"),
        (segment(2, *[plane(b"\xff\xff")] * 4), "changes element 8,589,934,591 of 1,000"),
        (segment(1, delta._varint(200)), "ends 100 bytes early"),
        (segment(1, delta._varint(11) + b"abcde"), "damaged|-1 bytes"),
        (b"\x02\xff\xff\xff\xff\xff\xff", "more than 35 bits"),
        (segment(1, b"\x00" * 4, plane(b"\x00" * 2)), "plane of 2 bytes where 1"),
        (segment(0) + b"more", "4 bytes too many"),
    ],
)
def test_what_is_no_encoding_is_refused(encoded: bytes, message: str) -> None:
    with pytest.raises(PublicationError, match=message):
        apply(OLD, encoded, 2)
    assert not OLD.any()


def test_no_flipped_byte_writes_outside_or_raises_another_error() -> None:
    rng = np.random.default_rng(4)
    old = random_bytes(rng, 4000)
    new = old.copy()
    new[rng.random(4000) < 0.05] ^= 3
    encoded = encode(old, new, 2)
    for place in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[place] ^= int(rng.integers(1, 256))
        try:
            assert apply(old, bytes(damaged), 2).nbytes == old.nbytes
        except PublicationError:
            continue
