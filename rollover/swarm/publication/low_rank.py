"""A matrix and its adapter become the matrix that engines serve, with the same bits on every machine.

The sum ``W + s B A`` is taken over the rank, one product after the other, each multiplied and then added in float32,
and rounded to the number format of ``W`` at the end, to the nearest and ties to even. A product of matrices by a
library would be faster; but how it orders its sums, and so the last bit, depends on the machine, and the digest of the
result could not be checked.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from rollover.swarm.publication.delta import Bytes

_BLOCK = 2**16
"""Elements that are worked on at a time, small enough for a core's own cache."""

Floats = NDArray[np.float32]


def merged(content: Bytes, dtype: str, a_RI: Floats, b_OR: Floats, scale: float, *, pool: Executor) -> Bytes:
    """Return the bytes of ``W + scale B A`` where ``content`` holds those of ``W``, row by row; ``pool`` shares the
    work.

    Example: with ``W`` = [[1, 2]], ``A`` = [[1, 1]], ``B`` = [[3]] and a scale of 0.5 these are the bytes of 2.5 and
    3.5.
    """
    num_rows, num_columns = b_OR.shape[0], a_RI.shape[1]
    out = np.empty_like(content)
    old, new = (each.reshape(num_rows, -1) for each in (content, out))
    scaled_OR = np.multiply(b_OR, np.float32(scale), dtype=np.float32)
    step = max(1, _BLOCK // max(1, num_columns))

    def rows(start: int) -> None:
        stop = min(num_rows, start + step)
        total = _widened(old[start:stop], dtype)
        product = np.empty_like(total)
        with np.errstate(over="ignore", invalid="ignore"):  # weights that are not finite are values like any other
            for a_I, b_O in zip(a_RI, scaled_OR[start:stop].T, strict=True):
                np.multiply(b_O[:, None], a_I[None, :], out=product)
                np.add(total, product, out=total)
        new[start:stop] = _narrowed(total, dtype)

    if not content.size:
        return out
    for _ in pool.map(rows, range(0, num_rows, step)):
        pass
    return out


def _widened(content: Bytes, dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (content.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return content.view("<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _narrowed(values: Floats, dtype: str) -> Bytes:
    if dtype == "float32":
        return values.astype("<f4").view(np.uint8)
    if dtype == "float16":
        return values.astype("<f2").view(np.uint8)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000  # the sum above would carry some of them over to zero
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype("<u2").view(np.uint8)
