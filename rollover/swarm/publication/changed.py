"""The share of elements that a step of training has changed, as they are served."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rollover.swarm.publication.delta import SEGMENT, Bytes

_THREADS = min(8, os.cpu_count() or 1)


def changed_fraction(old: Mapping[str, Bytes], new: Mapping[str, Bytes], item_bytes: Mapping[str, int]) -> float | None:
    """Return the share of elements whose bits differ, over all tensors; ``None`` where names or sizes do.

    Args:
        old, new: the bytes of each tensor by name.
        item_bytes: bytes per element.

    Example: of two bfloat16 tensors of 50 elements, one of which has a new value in one place, it is 0.01.
    """
    if {name: content.nbytes for name, content in old.items()} != {n: c.nbytes for n, c in new.items()}:
        return None
    with ThreadPoolExecutor(_THREADS) as pool:
        num_changed = sum(pool.map(lambda name: _num_changed(old[name], new[name], item_bytes[name]), new))
    num_elements = sum(content.nbytes // item_bytes[name] for name, content in new.items())
    return num_changed / num_elements if num_elements else 0.0


def _num_changed(old: Bytes, new: Bytes, item_bytes: int) -> int:
    before, after = old.view(f"u{item_bytes}"), new.view(f"u{item_bytes}")
    starts: Iterable[int] = range(0, before.size, SEGMENT)
    return sum(int(np.count_nonzero(before[i : i + SEGMENT] != after[i : i + SEGMENT])) for i in starts)
