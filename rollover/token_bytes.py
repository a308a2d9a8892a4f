"""Bytes beside tokens, one piece per token: its kept set (``rollover.kept``) or its route (``rollover.routes``).

In one piece they are their lengths in bytes as little-endian uint16, then the bytes themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence


def join_bytes(pieces: Sequence[bytes]) -> bytes:
    """Return the pieces of all tokens in one.

    Example: ``join_bytes((b"ab", b""))`` is ``b"\\x02\\x00\\x00\\x00ab"``.
    """
    return struct.pack(f"<{len(pieces)}H", *map(len, pieces)) + b"".join(pieces)


def split_bytes(blob: bytes, num_tokens: int) -> tuple[bytes, ...]:
    """Undo ``join_bytes``. Raises ``ValueError`` for bytes that are not the pieces of so many tokens."""
    if not blob:
        return ()
    start, pieces = 2 * num_tokens, []
    for length in struct.unpack_from(f"<{num_tokens}H", blob) if start <= len(blob) else ():
        pieces.append(blob[start : start + length])
        start += length
    if start != len(blob):
        raise ValueError(f"{len(blob)} bytes do not make {num_tokens} tokens")
    return tuple(pieces)


def in_order(runs: Iterable[tuple[Sequence[bytes], int]]) -> tuple[bytes, ...]:
    """Return the pieces of several runs of tokens, one after the other, given the pieces and the number of tokens of
    each run; ``b""`` for each token of a run without pieces. No run has any: nothing."""
    runs = list(runs)
    if not any(pieces for pieces, _ in runs):
        return ()
    return tuple(piece for pieces, num_tokens in runs for piece in pieces or (b"",) * num_tokens)
