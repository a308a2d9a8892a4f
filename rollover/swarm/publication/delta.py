"""The difference encoding: which elements of a tensor differ from an older version of it, and by how much.

Tensors are compared as bits, so NaN and -0.0 are values like any other. A change of weights is small: so what is sent
of a new value is how many values of the number format lie between it and the old one, which the receiver has.

A tensor is cut into segments of ``SEGMENT`` elements. A segment is a header (bytes per element, number of changes) and
planes of one byte per change, each compressed by itself, since a Huffman code fits one distribution::

    gaps         unchanged elements before each change: four planes, the lowest byte first
    differences  rank of the new value less the old one's: a plane for each byte of an element, likewise

Invariants: decoding never writes outside of the tensor, and never takes memory beyond a small multiple of the
tensor's own, whatever it is given. An encoding for other weights decodes to wrong values, which the digest of the
result finds out.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollover.swarm.publication.manifest import PublicationError

Bits = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]

SEGMENT = 2**23
"""Elements of a segment: 8 million keep the memory of decoding bounded, and tables of codes a per mille of it."""
_GAP = np.dtype("<u4")
_LEVEL = 1


def encode(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """Return what turns ``old`` into ``new``, both the bytes of a tensor of ``item_bytes`` per element; ``b""`` when
    they are equal.
    """
    assert old.nbytes == new.nbytes
    before, after = old.view(f"u{item_bytes}"), new.view(f"u{item_bytes}")
    parts = [_encode_segment(before[i : i + SEGMENT], after[i : i + SEGMENT]) for i in range(0, before.size, SEGMENT)]
    return b"".join(parts) if any(part != _unchanged(item_bytes) for part in parts) else b""


def apply(old: Bytes, encoded: bytes | memoryview, item_bytes: int) -> Bytes:
    """Return the new bytes of a tensor; ``old`` stays as it is, and is returned itself when nothing changes.

    Raises:
        PublicationError: ``encoded`` is no encoding of a tensor of this size.
    """
    if not encoded:
        return old
    new = old.copy()
    values = new.view(f"u{item_bytes}")
    rest = memoryview(encoded)
    try:
        for start in range(0, values.size, SEGMENT):
            rest = _apply_segment(values[start : start + SEGMENT], rest)
    except (IndexError, zstandard.ZstdError) as e:
        raise PublicationError(f"an encoded tensor is damaged: {e}") from None
    if rest:
        raise PublicationError(f"an encoded tensor has {len(rest):,} bytes too many")
    return new


def _unchanged(item_bytes: int) -> bytes:
    """Return the encoding of a segment without changes."""
    return bytes([item_bytes, 0])


def _encode_segment(old: Bits, new: Bits) -> bytes:
    places = np.flatnonzero(old != new)
    if not places.size:
        return _unchanged(old.itemsize)
    gaps = (np.diff(places, prepend=-1) - 1).astype(_GAP)
    steps = _folded(_ranks(new[places]) - _ranks(old[places]))
    return b"".join((bytes([old.itemsize]), _varint(places.size), *_planes(gaps), *_planes(steps)))


def _apply_segment(values: Bits, encoded: memoryview) -> memoryview:
    """Change what has changed in ``values`` and return the rest of ``encoded``."""
    num_changes, rest = _next_varint(encoded[1:])
    if encoded[0] != values.itemsize or num_changes > values.size:
        raise PublicationError(
            f"an encoded tensor changes {num_changes:,} elements of {encoded[0]} bytes in a segment of"
            f" {values.size:,} elements of {values.itemsize}"
        )
    if not num_changes:
        return rest
    gaps, rest = _next_planes(rest, num_changes, _GAP)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if places[-1] >= values.size:
        raise PublicationError(f"an encoded tensor changes element {places[-1]:,} of {values.size:,}")
    steps, rest = _next_planes(rest, num_changes, values.dtype)
    values[places] = _unranked(_ranks(values[places]) + _unfolded(steps))
    return rest


# -- by how much: ranks and their differences -------------------------------------------------------------------------


def _ranks(bits: Bits) -> Bits:
    """Return the rank of each value in its format, from the most negative up; -0.0 is just below 0.0."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    ranks: Bits = np.where(bits & sign, ~bits, bits | sign)
    return ranks


def _unranked(ranks: Bits) -> Bits:
    sign = ranks.dtype.type(1 << (8 * ranks.itemsize - 1))
    bits: Bits = np.where(ranks & sign, ranks ^ sign, ~ranks)
    return bits


def _folded(differences: Bits) -> Bits:
    """Write differences modulo the number of values so that near ones are small: 0, -1, 1, -2 become 0, 1, 2, 3."""
    signed = differences.view(f"i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _unfolded(folded: Bits) -> Bits:
    one = folded.dtype.type(1)
    differences: Bits = (folded >> one) ^ (~(folded & one) + one)
    return differences


# -- planes ---------------------------------------------------------------------------------------------------------


def _planes(numbers: Bits) -> list[bytes]:
    """Encode the lowest byte of all numbers, then the next, each after its length, whose lowest bit says whether it is
    compressed; zeros are an empty plane."""
    octets = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, numbers.itemsize)
    return [_plane(octets[:, i].tobytes() if octets[:, i].any() else b"") for i in range(numbers.itemsize)]


def _plane(content: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content) if content else content
    if len(packed) < len(content):
        return _varint(len(packed) << 1 | 1) + packed
    return _varint(len(content) << 1) + content


def _next_planes(encoded: memoryview, count: int, dtype: np.dtype[np.unsignedinteger]) -> tuple[Bits, memoryview]:
    """Return ``count`` numbers and the rest of ``encoded``."""
    octets = np.zeros((count, dtype.itemsize), dtype=np.uint8)
    for i in range(dtype.itemsize):
        length, rest = _next_varint(encoded)
        content, encoded = rest[: length >> 1], rest[length >> 1 :]
        if length:
            octets[:, i] = _plane_of(content, count, length)
    return octets.view(dtype.newbyteorder("<")).reshape(-1).astype(dtype, copy=False), encoded


def _plane_of(content: memoryview, count: int, length: int) -> Bytes:
    if len(content) < length >> 1:
        raise PublicationError(f"an encoded tensor ends {(length >> 1) - len(content):,} bytes early")
    size = zstandard.frame_content_size(content) if length & 1 else len(content)
    if size != count:
        raise PublicationError(f"an encoded tensor has a plane of {size:,} bytes where {count:,} are expected")
    plane = zstandard.ZstdDecompressor().decompress(content) if length & 1 else content
    if len(plane) != size:
        raise PublicationError(f"an encoded tensor has a plane of {len(plane):,} bytes that says it has {size:,}")
    return np.frombuffer(plane, dtype=np.uint8)


def _varint(number: int) -> bytes:
    """Encode a number with seven bits a byte, the lowest first; the highest bit says that more follow."""
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes([*octets, number])


def _next_varint(encoded: memoryview) -> tuple[int, memoryview]:
    number = 0
    for i in range(5):
        number |= (encoded[i] & 127) << 7 * i
        if encoded[i] < 128:
            return number, encoded[i + 1 :]
    raise PublicationError("an encoded tensor has a number of more than 35 bits")
