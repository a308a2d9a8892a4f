"""The publisher's Ed25519 key: made once, kept in a file that its owner alone can read; its public half as text."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from rollover.errors import RunError
from rollover.privacy import make_private
from rollover.swarm.manifest import PublicationError

_KEY_BYTES = 32


def open_key(file: Path) -> Ed25519PrivateKey:
    """Return the key in ``file``, which is made when it is missing. A crash leaves no half of a key.

    Raises ``RunError`` when the file holds no key: workers know the publisher by it, so it is never made anew.
    """
    if not file.exists():
        beside = file.with_name(f".new-{file.name}")
        beside.unlink(missing_ok=True)
        make_private(beside)
        with beside.open("wb") as stream:
            stream.write(Ed25519PrivateKey.generate().private_bytes_raw())
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(beside, file)
    make_private(file)
    content = file.read_bytes()
    if len(content) != _KEY_BYTES:
        raise RunError(
            f"{file} holds {len(content)} bytes, a publisher's key has {_KEY_BYTES}; bring the file back, or delete it"
            " and give every worker a new token"
        )
    return Ed25519PrivateKey.from_private_bytes(content)


def public_text(key: Ed25519PublicKey) -> str:
    """Return a public key as 43 letters of base64url, for a worker's token."""
    return base64.urlsafe_b64encode(key.public_bytes_raw()).decode().rstrip("=")


def public_key(text: str) -> Ed25519PublicKey:
    """Return the key that ``public_text`` wrote. Raises ``PublicationError``."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(f"{text}=", altchars=b"-_", validate=True))
    except (ValueError, binascii.Error):
        raise PublicationError("the publisher's key in the worker's token is damaged; copy the token again") from None
