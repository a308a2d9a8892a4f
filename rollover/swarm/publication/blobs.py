"""A folder of blobs: files that never change, each named by the SHA-256 of its content.

Any static web server can serve it. A blob is written under a hidden name, flushed and renamed, so that a file with a
digest for a name is whole; what a killed process leaves half-written is deleted when the folder is opened next. A
download that was cut off is another matter: it stays under its own hidden name, to be continued.

Invariants: what is read under a digest has this digest; no name from outside becomes a path unless it is a
digest; a full disk is one ``ResourceError``, and leaves nothing half.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollover.errors import ResourceError, is_full
from rollover.swarm.publication.manifest import DIGEST, PublicationError, digest_of

_NEW, _PARTIAL = ".new-", ".partial-"


class BlobFolder:
    """The blobs in ``root``, which is made when it is missing. One process writes, any number read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with space_on(root, "a folder of blobs"):
            root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"{_NEW}*"):
            leftover.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        """Return where the blob is, or would be. Raises ``PublicationError`` when ``digest`` is none."""
        return self.root / _checked(digest)

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def put(self, content: bytes) -> str:
        """Store a blob, durably, and return its name. One that is there already is not written again, unless it is
        damaged.

        Raises ``ResourceError`` when the disk is full.
        """
        digest = digest_of(content)
        if self._holds(digest):
            return digest
        with space_on(self.root, f"blob {digest}"):
            descriptor, name = tempfile.mkstemp(prefix=_NEW, dir=self.root)
            try:
                with open(descriptor, "wb") as file:
                    os.fchmod(file.fileno(), 0o644)  # a web server may run as another user
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(name, self.path(digest))
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
            flush_folder(self.root)
        return digest

    def read(self, digest: str) -> bytes:
        """Return a blob's content. A damaged blob is deleted.

        Raises ``PublicationError`` when it is not there, or its content is not what its name says.
        """
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise PublicationError(f"blob {digest} is not in {self.root}") from None
        if (found := digest_of(content)) != digest:
            path.unlink(missing_ok=True)
            raise PublicationError(f"blob {digest} has content other than its name says ({found}) and was deleted")
        return content

    def keep(self, digests: Collection[str]) -> None:
        """Delete every blob and every cut-off download but these."""
        wanted = {_checked(digest) for digest in digests}
        for name in os.listdir(self.root):
            digest = name.removeprefix(_PARTIAL)
            if DIGEST.fullmatch(digest) and digest not in wanted:
                (self.root / name).unlink(missing_ok=True)

    # -- downloads --------------------------------------------------------------------------------------------------

    def partial(self, digest: str) -> Path:
        """Return where a download of the blob is written; what is there already may be continued."""
        return self.root / f"{_PARTIAL}{_checked(digest)}"

    def accept(self, digest: str) -> None:
        """Make a finished download the blob, or delete it.

        Raises ``PublicationError`` when its content is not what the name says, ``ResourceError`` on a full disk.
        """
        partial = self.partial(digest)
        try:
            with space_on(self.root, f"blob {digest}"):
                with partial.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                    if found == digest:
                        os.fsync(file.fileno())
                if found != digest:
                    partial.unlink(missing_ok=True)
                    raise PublicationError(f"what was sent as blob {digest} has the digest {found}")
                os.rename(partial, self.path(digest))
                flush_folder(self.root)
        except FileNotFoundError:  # the thread of a fetch that was given up has accepted or deleted it meanwhile
            if digest not in self:
                raise PublicationError(f"what was sent as blob {digest} was damaged") from None

    def _holds(self, digest: str) -> bool:
        if digest not in self:
            return False
        with suppress(PublicationError):
            self.read(digest)
            return True
        return False


def flush_folder(folder: Path) -> None:
    """Make renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(name: str, flags: int) -> int:
    descriptor = os.open(name, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # a file that a killed process left may be readable
    return descriptor


def replace_file(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a small file durably and at once: it has the old content or the new one. ``is_private``: only its owner can
    read it, at any time.

    Raises ``ResourceError`` when the disk is full; the old content is then intact.
    """
    beside = path.with_name(f"{_NEW}{path.name}")
    with space_on(path.parent, path.name):
        try:
            with open(beside, "wb", opener=_private if is_private else None) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise PublicationError(f"{digest[:80]!r} is not a blob name, which has 64 hexadecimal digits")
    return digest


@contextmanager
def space_on(folder: Path, what: str) -> Iterator[None]:
    """Turn a full disk into the message that says so."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise ResourceError(
            f"no space left on the disk of {str(folder)!r}: {what} was not written, and what was"
            " there is intact; free some space"
        ) from error
