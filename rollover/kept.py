"""Kept sets: the tokens among which each token was drawn, if sampling settings (top-k, top-p, min-p) left out others.

The kept set of a token is a ``bytes``: its token ids in ascending order, the first one and then the differences, as
varints of 7 bits per byte (LEB128). ``b""`` means that the token was drawn from the whole vocabulary. Sets are read and
written in ``rollover.kept_codec``, which needs numpy; this module does not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

MAX_KEPT = 4096
"""The most tokens of a kept set."""
DEFAULT_KEPT = 512
"""The most tokens of a kept set if no top-k is given: top-p and min-p alone have no bound."""


def join_kept(kept: Sequence[bytes]) -> bytes:
    """Return all sets in one piece: their lengths in bytes as little-endian uint16, then the sets."""
    return struct.pack(f"<{len(kept)}H", *map(len, kept)) + b"".join(kept)


def split_kept(blob: bytes, num_tokens: int) -> tuple[bytes, ...]:
    """Undo ``join_kept``. Raises ``ValueError`` for bytes that are not the sets of so many tokens."""
    if not blob:
        return ()
    start, sets = 2 * num_tokens, []
    for length in struct.unpack_from(f"<{num_tokens}H", blob) if start <= len(blob) else ():
        sets.append(blob[start : start + length])
        start += length
    if start != len(blob):
        raise ValueError(f"{len(blob)} bytes are not the kept sets of {num_tokens} tokens")
    return tuple(sets)
