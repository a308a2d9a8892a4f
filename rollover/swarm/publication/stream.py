"""The stream of a publication: encoded tensors one after the other, cut into pieces, each a compressed blob."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import zstandard

from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.delta import Bytes
from rollover.swarm.publication.manifest import BlobRef, PublicationError

PIECE_BYTES = 32 * 2**20
"""Size of a blob before compression: small enough to be fetched again, large enough to be served fast."""
LEVEL = 1
_THREADS_FROM_BYTES = 4 * 2**20
"""A piece of such a size is compressed by all cores."""


def store(content: bytes, blobs: BlobFolder) -> BlobRef:
    """Compress a piece of the stream, or a file, into a blob. Raises ``ResourceError`` when the disk is full."""
    threads = -1 if len(content) >= _THREADS_FROM_BYTES else 0
    packed = zstandard.ZstdCompressor(level=LEVEL, threads=threads).compress(content)
    return BlobRef(digest=blobs.put(packed), num_bytes=len(packed), raw_bytes=len(content))


def restore(blob: BlobRef, blobs: BlobFolder) -> bytes:
    """Return what ``store`` compressed. Raises ``PublicationError``."""
    content = blobs.read(blob.digest)
    try:
        size = zstandard.frame_content_size(content)
        if size == blob.raw_bytes:
            return zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as e:
        raise PublicationError(f"blob {blob.digest} cannot be decompressed: {e}") from None
    raise PublicationError(f"blob {blob.digest} holds {size:,} bytes, the manifest says {blob.raw_bytes:,}")


class StreamWriter:
    """Cuts a stream of bytes into blobs."""

    def __init__(self, blobs: BlobFolder) -> None:
        self._folder = blobs
        self._rest = bytearray()
        self._blobs: list[BlobRef] = []
        self.num_bytes = 0
        self.wire_bytes = 0

    def append(self, content: memoryview) -> None:
        self.num_bytes += content.nbytes
        while content:
            part = content[: PIECE_BYTES - len(self._rest)]
            self._rest += part
            content = content[len(part) :]
            if len(self._rest) == PIECE_BYTES:
                self._cut()

    def finish(self) -> tuple[BlobRef, ...]:
        if self._rest:
            self._cut()
        return tuple(self._blobs)

    def _cut(self) -> None:
        self._blobs.append(store(bytes(self._rest), self._folder))
        self.wire_bytes += self._blobs[-1].num_bytes
        self._rest.clear()


class StreamReader:
    """The bytes that the blobs of a manifest make; one blob is in memory at a time."""

    def __init__(self, refs: Sequence[BlobRef], blobs: BlobFolder) -> None:
        self._refs, self._blobs = refs, blobs
        self._starts = list(accumulate((blob.raw_bytes for blob in refs), initial=0))
        self._number, self._piece = -1, np.empty(0, dtype=np.uint8)

    def read(self, start: int, num_bytes: int) -> Bytes:
        target, done = np.empty(num_bytes, dtype=np.uint8), 0
        while done < target.size:
            place = start + done
            number = bisect_right(self._starts, place) - 1
            if number != self._number:
                self._piece = np.frombuffer(restore(self._refs[number], self._blobs), dtype=np.uint8)
                self._number = number
            offset = place - self._starts[number]
            part = self._piece[offset : offset + target.size - done]
            target[done : done + part.size] = part
            done += part.size
        return target
