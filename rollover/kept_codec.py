"""Reads and writes kept sets (``rollover.kept``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollover.kept import MAX_KEPT

Ints = NDArray[np.int64]

_MAX_VARINT_BYTES = 4


def encode_kept(counts_T: Ints, ids_N: Ints) -> tuple[bytes, ...]:
    """Return the kept sets of T tokens, given the sizes of the sets and their ids, ascending and set after set.

    Example: ``encode_kept(np.array([2, 1]), np.array([3, 200, 7]))`` is ``(b"\\x03\\xc5\\x01", b"\\x07")``.
    """
    gaps_N = np.diff(ids_N, prepend=0)
    firsts_T = np.cumsum(counts_T) - counts_T
    starts_T = firsts_T[counts_T > 0]
    gaps_N[starts_T] = ids_N[starts_T]
    widths_N = np.ones_like(gaps_N)
    for bits in (7, 14, 21):
        widths_N += gaps_N >= 1 << bits
    places_N = np.cumsum(widths_N) - widths_N
    packed = np.zeros(int(widths_N.sum()), dtype=np.uint8)
    for i in range(_MAX_VARINT_BYTES):
        has = widths_N > i
        more = (widths_N[has] > i + 1).astype(np.int64) << 7
        packed[places_N[has] + i] = (gaps_N[has] >> 7 * i & 0x7F) | more
    ends_T = np.append(np.cumsum(widths_N), 0)[np.cumsum(counts_T) - 1].tolist()
    blob, start, sets = packed.tobytes(), 0, []
    for end, count in zip(ends_T, counts_T.tolist(), strict=True):
        sets.append(blob[start:end] if count else b"")
        start = end if count else start
    return tuple(sets)


def decode_kept(kept: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Return the sizes of kept sets, ``[T]``, 0 for the whole vocabulary, and their ids, ``[N]``, set after set. Raises
    ``ValueError`` for bytes that are no kept set.

    Example: ``decode_kept((b"\\x03\\xc5\\x01", b""))`` is ``([2, 0], [3, 200])``.
    """
    packed = np.frombuffer(b"".join(kept), dtype=np.uint8).astype(np.int64)
    is_last = packed < 0x80
    byte_ends_T = np.cumsum([len(one) for one in kept], dtype=np.int64)
    filled_ends = byte_ends_T[byte_ends_T > 0] - 1
    ends_N = is_last.nonzero()[0]
    starts_N = np.append(-1, ends_N[:-1]) + 1 if len(ends_N) else ends_N
    if not is_last[filled_ends].all() or (ends_N - starts_N >= _MAX_VARINT_BYTES).any():
        raise ValueError("a kept set is cut off, or has a token id of more than 28 bits")
    if not len(packed):
        return np.zeros(len(kept), dtype=np.int64), ends_N
    shifts = 7 * (np.arange(len(packed)) - np.repeat(starts_N, ends_N - starts_N + 1))
    gaps_N = np.add.reduceat((packed & 0x7F) << shifts, starts_N)
    num_until = np.append(0, np.cumsum(is_last))
    ends_T = num_until[byte_ends_T]
    counts_T = np.diff(ends_T, prepend=0)
    sums_N = np.cumsum(gaps_N)
    before_T = np.append(0, sums_N)[ends_T - counts_T]
    firsts_T = (ends_T - counts_T)[counts_T > 0]
    is_first = np.zeros(len(gaps_N), dtype=bool)
    is_first[firsts_T] = True
    if (gaps_N[~is_first] == 0).any():
        raise ValueError("a kept set names a token twice")
    return counts_T, sums_N - np.repeat(before_T, counts_T)


def mean_kept(kept: Sequence[bytes]) -> float:
    """Return the mean size of the kept sets, of which there must be at least one."""
    return np.count_nonzero(np.frombuffer(b"".join(kept), dtype=np.uint8) < 0x80) / len(kept)


def check_kept(kept: Sequence[bytes], token_ids: Sequence[int], vocab_size: int | None = None) -> None:
    """Raise ``ValueError`` unless there is a kept set for each token, which contains it, is not too large and contains
    only tokens of a vocabulary of this size."""
    if len(kept) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens came with {len(kept)} kept sets")
    counts_T, ids_N = decode_kept(kept)
    if counts_T.max(initial=0) > MAX_KEPT:
        raise ValueError(
            f"a token was drawn from {counts_T.max():,} tokens, and kept sets have at most {MAX_KEPT:,}: lower"
            " rollout.top_k"
        )
    if vocab_size is not None and ids_N.max(initial=0) >= vocab_size:
        raise ValueError(f"a kept set has token {ids_N.max()}, but the vocabulary has {vocab_size} tokens")
    drawn_N = np.repeat(np.array(token_ids, dtype=np.int64), counts_T)
    owners_N = np.repeat(np.arange(len(kept)), counts_T)
    has_T = np.bincount(owners_N[ids_N == drawn_N], minlength=len(kept)) > 0
    if lost := np.flatnonzero(~has_T & (counts_T > 0)).tolist():
        raise ValueError(f"token {token_ids[lost[0]]} is not in its kept set")
    if (counts_T == 0).any():
        raise ValueError(f"token {token_ids[int((counts_T == 0).argmax())]} came without its kept set")
