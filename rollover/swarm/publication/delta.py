"""The overwrite encoding: which elements of a tensor differ from an older version of it, and what they are now.

Tensors are compared and written as bits, so NaN and -0.0 are values like any other. A change of weights is small, and
the receiver has the old value; so of a new value only its place among its neighbours is sent: the residue that singles
it out of the values nearest to the old one. Whoever has the new value already finds that it is the nearest one with
this residue, so that applying an encoding twice gives the same as once.

A tensor is cut into segments of ``SEGMENT`` elements. A segment is a header (bytes per element, how gaps are written,
number of changes) and planes, each compressed by itself, since a Huffman code fits one distribution::

    gaps      unchanged elements before each change; in one of two ways, whichever is smaller
      bytes     high byte, 255 meaning 255 and more to come; then a plane for each low byte, where gaps are long
      bits      a Golomb-Rice code of k bits: quotients in unary, then remainders; for few changes, as it has no table
    classes   two bits per change: how near the new value is to the old one
    residues  one plane per class: the value's rank among all values of the format, modulo 3, 16, 256 or all

Invariants: decoding never writes outside of the tensor, and never takes memory beyond a small multiple of the
tensor's own, whatever it is given. An encoding for other weights decodes to wrong values, which the digest of the
result finds out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard
from numpy.typing import NDArray

from rollover.swarm.publication.manifest import PublicationError

Bits = NDArray[np.unsignedinteger]
Bytes = NDArray[np.uint8]
Gaps = NDArray[np.int64]

SEGMENT = 2**23
"""Elements of a segment: 8 million keep the memory of decoding bounded, and tables of codes a per mille of it."""
_RICE = 0x80
"""Marks gaps that are written as bits; else, the number of low bytes is."""
_MAX_GAP_CODE = 31
_LEVEL = 1
_NUM_CLASSES = 4
_LONG_GAP = 512
"""Mean gap from which on a gap has a low byte of its own, and times 256 a second one."""
_TRIT = 0
_CLASS_BITS = {1: (_TRIT, 4, 8, 8), 2: (_TRIT, 4, 8, 16), 4: (8, 16, 24, 32), 8: (16, 32, 48, 64)}
"""Bits of the residue in each class by bytes per element, ``_TRIT`` for a residue modulo 3."""
_TRITS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)
"""Five residues modulo 3 make a byte of 243 values."""
_THREADS = min(8, os.cpu_count() or 1)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    """Return what turns ``old`` into ``new``, both the bytes of a tensor of ``item_bytes`` per element; ``b""`` when
    they are equal.

    Example: for a bfloat16 tensor of which 1 element in 100 moved to a neighbouring value, about 11 bits per change.
    """
    assert old.nbytes == new.nbytes
    before, after = old.view(_UNSIGNED[item_bytes]), new.view(_UNSIGNED[item_bytes])
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
    values = new.view(_UNSIGNED[item_bytes])
    rest = memoryview(encoded)
    try:
        for start in range(0, values.size, SEGMENT):
            rest = _apply_segment(values[start : start + SEGMENT], rest)
    except (IndexError, zstandard.ZstdError) as e:
        raise PublicationError(f"an encoded tensor is damaged: {e}") from None
    if rest:
        raise PublicationError(f"an encoded tensor has {len(rest):,} bytes too many")
    return new


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


def _unchanged(item_bytes: int) -> bytes:
    """Return the encoding of a segment without changes."""
    return bytes([item_bytes, 0, 0])


def _encode_segment(old: Bits, new: Bits) -> bytes:
    places = np.flatnonzero(old != new)
    if not places.size:
        return _unchanged(old.itemsize)
    gap_code, parts = _encode_gaps(np.diff(places, prepend=-1) - 1, old.size)
    ranks, before = _ranks(new[places]), _ranks(old[places])
    classes = _classes(before, ranks)
    parts.append(_plane(_packed(classes)))
    for number, bits in enumerate(_CLASS_BITS[old.itemsize]):
        parts.append(_plane(_pack_residues(ranks[classes == number], bits)))
    return bytes([old.itemsize, gap_code]) + _varint(places.size) + b"".join(parts)


def _apply_segment(values: Bits, encoded: memoryview) -> memoryview:
    """Overwrite what has changed in ``values`` and return the rest of ``encoded``."""
    item_bytes, gap_code = encoded[0], encoded[1]
    num_changes, rest = _next_varint(encoded[2:])
    if item_bytes != values.itemsize or num_changes > values.size or gap_code & ~_RICE > _MAX_GAP_CODE:
        raise PublicationError(
            f"an encoded tensor changes {num_changes:,} elements of {item_bytes} bytes with gaps in the code {gap_code}"
            f" in a segment of {values.size:,} elements of {values.itemsize}"
        )
    if not num_changes:
        return rest
    gaps, rest = _next_gaps(rest, gap_code, num_changes, values.size)
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


def _encode_gaps(gaps: Gaps, size: int) -> tuple[int, list[bytes]]:
    """Return how the gaps in ``size`` elements are written, and the planes."""
    mean_gap = size / gaps.size
    num_low = 0 if mean_gap < _LONG_GAP else 1 if mean_gap < _LONG_GAP * 256 else 2
    parts = [_plane(_escaped(gaps >> 8 * num_low))]
    parts += [_plane((gaps >> 8 * i & 255).astype(np.uint8)) for i in range(num_low)]
    num_bits = max(0, int(mean_gap * math.log(2)).bit_length() - 1)
    quotients = gaps >> num_bits
    if (gaps.size * (1 + num_bits) + int(quotients.sum())) // 8 + 2 >= sum(map(len, parts)):
        return num_low, parts
    ends: Bytes = np.zeros(gaps.size + int(quotients.sum()), dtype=np.uint8)
    ends[np.cumsum(quotients + 1) - 1] = 1
    remainders = (gaps[:, None] >> np.arange(num_bits) & 1).astype(np.uint8)
    return _RICE | num_bits, [_plane(np.packbits(ends)), _plane(np.packbits(remainders))]


def _next_gaps(encoded: memoryview, gap_code: int, num_gaps: int, size: int) -> tuple[Gaps, memoryview]:
    """Return the gaps, whose sum is not checked, and the rest of ``encoded``."""
    if gap_code & _RICE:
        num_bits = gap_code & ~_RICE
        unary, rest = _next_plane(encoded, (num_gaps + (size >> num_bits)) // 8 + 1)
        remainders, rest = _next_plane(rest, -(-num_gaps * num_bits // 8), exactly=True)
        quotients = np.diff(_all(np.flatnonzero(np.unpackbits(unary)), num_gaps), prepend=-1) - 1
        rows = np.unpackbits(remainders, count=num_gaps * num_bits).reshape(num_gaps, num_bits)
        return (quotients << num_bits) + rows @ (1 << np.arange(num_bits)), rest
    max_bytes = num_gaps + size // (255 << 8 * gap_code) + 1
    escaped, rest = _next_plane(encoded, max_bytes)
    ends = _all(np.flatnonzero(escaped != 255), num_gaps)
    gaps = np.diff(np.cumsum(escaped, dtype=np.int64)[ends], prepend=0) << 8 * gap_code
    for i in range(gap_code):
        low, rest = _next_plane(rest, num_gaps, exactly=True)
        gaps |= low.astype(np.int64) << 8 * i
    return gaps, rest


def _escaped(numbers: Gaps) -> Bytes:
    """Encode numbers as bytes, 255 standing for 255 and more to come."""
    ends = np.cumsum(numbers // 255 + 1) - 1
    escaped = np.full(int(ends[-1]) + 1, 255, dtype=np.uint8)
    escaped[ends] = numbers % 255
    return escaped


def _all(ends: Gaps, num_gaps: int) -> Gaps:
    if ends.size != num_gaps:
        raise PublicationError(f"an encoded tensor has {ends.size:,} gaps before {num_gaps:,} changes")
    return ends


# -- what: ranks, classes and residues --------------------------------------------------------------------------------


def _ranks(bits: Bits) -> Bits:
    """Return the rank of each value among all values of its format, from the most negative up; -0.0 is just below
    0.0."""
    sign = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    ranks: Bits = np.where(bits & sign, ~bits, bits | sign)
    return ranks


def _unranked(ranks: Bits) -> Bits:
    sign = ranks.dtype.type(1 << (8 * ranks.itemsize - 1))
    bits: Bits = np.where(ranks & sign, ranks ^ sign, ~ranks)
    return bits


def _classes(old: Bits, new: Bits) -> Bytes:
    """Return the first class, for each element, in which the residue of the new rank singles it out."""
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
    """Return the ranks nearest to ``ranks`` that have the residues in ``plane``."""
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
    """Pack four classes into a byte, so that the code of a byte can spend less than a bit on each."""
    quads = np.zeros(-(-classes.size // 4) * 4, dtype=np.uint8)
    quads[: classes.size] = classes
    return (quads[::4] | quads[1::4] << 2 | quads[2::4] << 4 | quads[3::4] << 6).astype(np.uint8)


def _unpacked(packed: Bytes, num_classes: int) -> Bytes:
    return np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[:num_classes]


# -- planes ---------------------------------------------------------------------------------------------------------


def _plane(plane: Bytes) -> bytes:
    """Encode a plane after its length, whose lowest bit says whether it is compressed."""
    content = plane.tobytes()
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content) if content else content
    if len(packed) < len(content):
        return _varint(len(packed) << 1 | 1) + packed
    return _varint(len(content) << 1) + content


def _next_plane(encoded: memoryview, max_bytes: int, *, exactly: bool = False) -> tuple[Bytes, memoryview]:
    """Return the first plane, which has at most ``max_bytes`` or exactly these, and the rest of ``encoded``."""
    length, rest = _next_varint(encoded)
    content = rest[: length >> 1]
    if len(content) < length >> 1:
        raise PublicationError(f"an encoded tensor ends {(length >> 1) - len(content):,} bytes early")
    size = zstandard.frame_content_size(content) if length & 1 else len(content)
    if not 0 <= size <= max_bytes or (exactly and size != max_bytes):
        raise PublicationError(f"an encoded tensor has a plane of {size:,} bytes where {max_bytes:,} are expected")
    plane = zstandard.ZstdDecompressor().decompress(content) if length & 1 else content
    if len(plane) != size:
        raise PublicationError(f"an encoded tensor has a plane of {len(plane):,} bytes that says it has {size:,}")
    return np.frombuffer(plane, dtype=np.uint8), rest[length >> 1 :]


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
