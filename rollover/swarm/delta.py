"""The overwrite encoding: which elements of a tensor differ from an older version of it, and what they are now.

Tensors are compared and written as bits, so NaN and -0.0 are values like any other. A change of weights is small, and
the receiver has the old value; so of a new value only its place among its neighbours is sent: the residue that singles
it out of the values nearest to the old one. Whoever has the new value already finds that it is the nearest one with
this residue, so that applying an encoding twice gives the same as once.

A tensor is cut into segments of ``SEGMENT`` elements. A segment is a header (bytes per element, low bytes per gap,
number of changes) and planes, each compressed by itself, since a Huffman code fits one distribution::

    gaps      unchanged elements before each change, divided by 256 ** low bytes; 255 means 255 and more to come
    lows      the low bytes of the gaps, where gaps are long: they hardly compress
    classes   two bits per change: how near the new value is to the old one
    residues  one plane per class: the value's rank among all values of the format, modulo 3, 16, 256 or all

What it keeps true: decoding never writes outside of the tensor, and never takes memory beyond a small multiple of the
tensor's own, whatever it is given. An encoding for other weights decodes to wrong values, which the digest of the
result finds out.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollover.swarm.manifest import PublicationError

Bits = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]

SEGMENT = 2**23
"""Elements of a segment: 8 million keep the memory of decoding bounded, and tables of codes a per mille of it."""
_HEADER = struct.Struct("<BBI")
_LENGTH = struct.Struct("<I")
_PLAIN = 1 << 31
"""Marks the length of a plane that compression would not make smaller."""
_LEVEL = 1
_NUM_CLASSES = 4
_LONG_GAP = 512
"""Mean gap from which on a gap has a low byte of its own, and times 256 a second one."""
_TRIT = 0
_CLASS_BITS = {1: (_TRIT, 4, 8, 8), 2: (_TRIT, 4, 8, 16), 4: (8, 16, 24, 32), 8: (16, 32, 48, 64)}
"""Bits of the residue in each class by bytes per element, ``_TRIT`` for a residue modulo 3."""
_TRITS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)
"""Five residues modulo 3 make a byte of 243 values."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """Return what turns ``old`` into ``new``, both the bytes of a tensor of ``item_bytes`` per element; ``b""`` when
    they are equal.

    Example: for a bfloat16 tensor of which 1 element in 100 moved to a neighbouring value, about 11 bits per change.
    """
    assert old.nbytes == new.nbytes
    before, after = old.view(_UNSIGNED[item_bytes]), new.view(_UNSIGNED[item_bytes])
    parts = [_encode_segment(before[i : i + SEGMENT], after[i : i + SEGMENT]) for i in range(0, before.size, SEGMENT)]
    return b"".join(parts) if any(len(part) > _HEADER.size for part in parts) else b""


def apply(old: Bytes, encoded: bytes | memoryview, item_bytes: int) -> Bytes:
    """Return the new bytes of a tensor; ``old`` stays as it is, and is returned itself when nothing changes.

    Raises:
        PublicationError: ``encoded`` is no encoding of a tensor of this size.
    """
    if not encoded:
        return old
    new = old.copy()
    values = new.view(_UNSIGNED[item_bytes])
    rest = memoryview(encoded)
    try:
        for start in range(0, values.size, SEGMENT):
            rest = _apply_segment(values[start : start + SEGMENT], rest)
    except (struct.error, zstandard.ZstdError) as e:
        raise PublicationError(f"an encoded tensor is damaged: {e}") from None
    if rest:
        raise PublicationError(f"an encoded tensor has {len(rest):,} bytes too many")
    return new


def _encode_segment(old: Bits, new: Bits) -> bytes:
    places = np.flatnonzero(old != new)
    item_bytes = old.itemsize
    if not places.size:
        return _HEADER.pack(item_bytes, 0, 0)
    gaps = np.diff(places, prepend=-1) - 1
    num_low = _num_low_bytes(old.size, places.size)
    planes = [_escaped(gaps >> (8 * num_low))]
    planes += [((gaps >> (8 * i)) & 255).astype(np.uint8) for i in range(num_low)]
    ranks, changed = _ranks(new[places]), _ranks(old[places])
    classes = _classes(changed, ranks)
    planes.append(_packed(classes))
    for number, bits in enumerate(_CLASS_BITS[item_bytes]):
        planes.append(_pack_residues(ranks[classes == number], bits))
    return _HEADER.pack(item_bytes, num_low, places.size) + b"".join(map(_compressed, planes))


def _apply_segment(values: Bits, encoded: memoryview) -> memoryview:
    """Overwrite what has changed in ``values`` and return the rest of ``encoded``."""
    item_bytes, num_low, num_changes = _HEADER.unpack_from(encoded)
    if item_bytes != values.itemsize or num_low > 3 or num_changes > values.size:
        raise PublicationError(
            f"an encoded tensor changes {num_changes:,} elements of {item_bytes} bytes with gaps of {num_low} bytes, in"
            f" a segment of {values.size:,} elements of {values.itemsize}"
        )
    rest = encoded[_HEADER.size :]
    if not num_changes:
        return rest
    max_bytes = num_changes + values.size // (255 << (8 * num_low)) + 1
    escaped, rest = _next_plane(rest, max_bytes)
    gaps = _unescaped(escaped, num_changes) << (8 * num_low)
    for i in range(num_low):
        low, rest = _next_plane(rest, num_changes, exactly=True)
        gaps |= low.astype(np.int64) << (8 * i)
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= values.size:
        raise PublicationError(f"an encoded tensor changes element {places[-1]:,} of {values.size:,}")
    packed, rest = _next_plane(rest, -(-num_changes // 4), exactly=True)
    classes = _unpacked(packed, num_changes)
    ranks = _ranks(values[places])
    for number, bits in enumerate(_CLASS_BITS[item_bytes]):
        of_class = classes == number
        plane, rest = _next_plane(rest, _residue_bytes(int(of_class.sum()), bits), exactly=True)
        ranks[of_class] = _nearest(ranks[of_class], plane, bits)
    values[places] = _unranked(ranks)
    return rest


# -- where: gaps between changes ------------------------------------------------------------------------------------


def _num_low_bytes(size: int, num_changes: int) -> int:
    mean_gap = size / num_changes
    return 0 if mean_gap < _LONG_GAP else 1 if mean_gap < _LONG_GAP * 256 else 2


def _escaped(numbers: NDArray[np.int64]) -> Bytes:
    """Numbers as bytes, 255 standing for 255 and more to come."""
    ends = np.cumsum(numbers // 255 + 1) - 1
    escaped = np.full(int(ends[-1]) + 1, 255, dtype=np.uint8)
    escaped[ends] = numbers % 255
    return escaped


def _unescaped(escaped: Bytes, num_numbers: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(escaped != 255)
    if ends.size != num_numbers or ends[-1] != escaped.size - 1:
        raise PublicationError(f"an encoded tensor has {ends.size:,} gaps before {num_numbers:,} changes")
    return np.diff(np.cumsum(escaped, dtype=np.int64)[ends], prepend=0)


# -- what: ranks, classes and residues --------------------------------------------------------------------------------


def _ranks(bits: Bits) -> Bits:
    """The rank of each value among all values of its format, from the most negative up; -0.0 is just below 0.0."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    ranks: Bits = np.where(bits & sign, ~bits, bits | sign)
    return ranks


def _unranked(ranks: Bits) -> Bits:
    sign = ranks.dtype.type(1 << (8 * ranks.itemsize - 1))
    bits: Bits = np.where(ranks & sign, ranks ^ sign, ~ranks)
    return bits


def _classes(old: Bits, new: Bits) -> Bytes:
    """The first class, for each element, in which the residue of the new rank singles it out."""
    distance = (new - old).view(f"i{old.itemsize}").astype(np.int64)
    classes = np.full(old.size, _NUM_CLASSES - 1, dtype=np.uint8)
    for number, bits in reversed(list(enumerate(_CLASS_BITS[old.itemsize][:-1]))):
        low, high = (-1, 1) if bits == _TRIT else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        near = (low <= distance) & (distance <= high)
        if bits == _TRIT:  # 3 does not divide the number of values, so their ends do not meet
            near &= (new > old) == (distance > 0)
        classes[near] = number
    return classes


def _nearest(ranks: Bits, plane: Bytes, bits: int) -> Bits:
    """The ranks nearest to ``ranks`` that have the residues in ``plane``."""
    residues = _unpack_residues(plane, ranks.size, bits, ranks.dtype)
    if bits == _TRIT:
        step = (residues.astype(np.int8) - (ranks % 3).astype(np.int8) + 4) % 3 - 1
        return ranks + step.astype(ranks.dtype)
    if bits == 8 * ranks.itemsize:
        return residues
    modulus, half = ranks.dtype.type(1 << bits), ranks.dtype.type(1 << (bits - 1))
    return ranks + ((residues - ranks + half) % modulus - half)


def _residue_bytes(num_residues: int, bits: int) -> int:
    return -(-num_residues // 5) if bits == _TRIT else -(-num_residues * bits // 8)


def _pack_residues(ranks: Bits, bits: int) -> Bytes:
    if bits == _TRIT:
        trits = np.zeros(-(-ranks.size // 5) * 5, dtype=np.uint8)
        trits[: ranks.size] = ranks % 3
        packed: Bytes = (trits.reshape(-1, 5) * _TRITS).sum(axis=1, dtype=np.uint8)
        return packed
    if bits == 4:
        nibbles = np.zeros(ranks.size + ranks.size % 2, dtype=np.uint8)
        nibbles[: ranks.size] = ranks & 15
        return (nibbles[::2] | nibbles[1::2] << 4).astype(np.uint8)
    octets = ranks.astype(ranks.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, ranks.itemsize)
    return np.ascontiguousarray(octets[:, : bits // 8].T).reshape(-1)


def _unpack_residues(plane: Bytes, num_residues: int, bits: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    if bits == _TRIT:
        return (plane[:, None] // _TRITS % 3).reshape(-1)[:num_residues].astype(dtype)
    if bits == 4:
        return np.stack((plane & 15, plane >> 4), axis=1).reshape(-1)[:num_residues].astype(dtype)
    octets = np.zeros((num_residues, dtype.itemsize), dtype=np.uint8)
    octets[:, : bits // 8] = plane.reshape(bits // 8, num_residues).T
    residues: Bits = octets.view(dtype.newbyteorder("<")).reshape(-1).astype(dtype)
    return residues


def _packed(classes: Bytes) -> Bytes:
    """Four classes a byte, so that the code of a byte can spend less than a bit on each."""
    quads = np.zeros(-(-classes.size // 4) * 4, dtype=np.uint8)
    quads[: classes.size] = classes
    return (quads[::4] | quads[1::4] << 2 | quads[2::4] << 4 | quads[3::4] << 6).astype(np.uint8)


def _unpacked(packed: Bytes, num_classes: int) -> Bytes:
    return np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[:num_classes]


# -- planes ---------------------------------------------------------------------------------------------------------


def _compressed(plane: Bytes) -> bytes:
    content = plane.tobytes()
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
    if len(packed) < len(content):
        return _LENGTH.pack(len(packed)) + packed
    return _LENGTH.pack(len(content) | _PLAIN) + content


def _next_plane(encoded: memoryview, max_bytes: int, *, exactly: bool = False) -> tuple[Bytes, memoryview]:
    """Return the first plane, which has at most ``max_bytes`` or exactly these, and the rest of ``encoded``."""
    (length,) = _LENGTH.unpack_from(encoded)
    end = _LENGTH.size + (length & ~_PLAIN)
    content = encoded[_LENGTH.size : end]
    if end > len(encoded):
        raise PublicationError(f"an encoded tensor ends {end - len(encoded):,} bytes early")
    size = len(content) if length & _PLAIN else zstandard.frame_content_size(content)
    if not 0 <= size <= max_bytes or (exactly and size != max_bytes):
        raise PublicationError(f"an encoded tensor has a plane of {size:,} bytes where {max_bytes:,} are expected")
    plane = content if length & _PLAIN else zstandard.ZstdDecompressor().decompress(content)
    if len(plane) != size:
        raise PublicationError(f"an encoded tensor has a plane of {len(plane):,} bytes that says it has {size:,}")
    return np.frombuffer(plane, dtype=np.uint8), encoded[end:]
