"""The publisher's Ed25519 key: made once, kept in a file that its owner alone can read."""

from __future__ import annotations

import hmac
import os
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rollover.errors import RunError
from rollover.privacy import make_private

_KEY_BYTES = 32


def open_key(file: Path) -> Ed25519PrivateKey:
    """Return the key in ``file``, which is made when it is missing. A crash leaves no half of a key, and of two
    processes that make it at the same time, both return the same.

    Raises ``RunError`` when the file holds no key: workers know the publisher by it, so it is never made again.
    """
    if not file.exists():
        _make(file)
    make_private(file)
    content = file.read_bytes()
    if len(content) != _KEY_BYTES:
        raise RunError(
            f"{file} holds {len(content)} bytes, but a publisher's key has {_KEY_BYTES}; restore"
            " the file, or delete it and give every worker a new token"
        )
    return Ed25519PrivateKey.from_private_bytes(content)


def secret_of(key: Ed25519PrivateKey, purpose: str) -> bytes:
    """Return 32 bytes that only the owner of a publisher's key can derive, the same in each process of the run."""
    return hmac.digest(key.private_bytes_raw(), purpose.encode(), sha256)


def _make(file: Path) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=file.parent)  # for its owner alone
    try:
        with open(descriptor, "wb") as stream:
            stream.write(Ed25519PrivateKey.generate().private_bytes_raw())
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)
