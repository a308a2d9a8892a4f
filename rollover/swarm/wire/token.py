"""The token with which a worker joins: its name, a secret, and the key of the publisher whose weights it trusts.

Invariants: the secret is in no message and no ``repr``; the coordinator stores a hash, from which the token
cannot be made again; two hashes are compared in a time that does not depend on where they differ.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.errors import ConfigError
from rollover.privacy import HIDDEN

TOKEN_VARIABLE = "ROLLOVER_SWARM_TOKEN"
"""The environment variable that may hold the token in place of a file."""
_FORM = re.compile(
    r"rw1\.(?P<name>[A-Za-z0-9][A-Za-z0-9_-]{0,63})\.(?P<secret>[A-Za-z0-9_-]{32,128})\.(?P<key>[0-9a-f]{64})"
)
_MAX_BYTES = 4096
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerToken:
    """A token in its parts; ``text`` is what the worker keeps and sends.

    Example: ``WorkerToken.make("laptop", key).text`` is ``"rw1.laptop.<secret>.<64 hexadecimal digits>"``.
    """

    name: str
    """The name under which the worker is a member of the swarm."""
    secret: str = field(repr=False)
    publisher: str
    """The publisher's public Ed25519 key, in hexadecimal."""

    @classmethod
    def make(cls, name: str, publisher: Ed25519PublicKey) -> WorkerToken:
        """Create a new token with a random secret. Raises ``ConfigError`` for a name that cannot be one."""
        raw = publisher.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        token = cls(name=name, secret=secrets.token_urlsafe(_SECRET_BYTES), publisher=raw.hex())
        if _FORM.fullmatch(token.text) is None:
            raise ConfigError(f"{name!r} cannot be a worker's name: use up to 64 letters, digits, '_' and '-'")
        return token

    @classmethod
    def parse(cls, text: str) -> WorkerToken:
        """Invert ``text``. Raises ``ConfigError``, which does not repeat what was given."""
        if (match := _FORM.fullmatch(text.strip())) is None:
            raise ConfigError(
                f"this is not a worker's token: {len(text.strip())} characters that do not read"
                " 'rw1.NAME.SECRET.KEY'; copy the whole line that rollover workers printed"
            )
        return cls(name=match["name"], secret=match["secret"], publisher=match["key"])

    @property
    def text(self) -> str:
        return f"rw1.{self.name}.{self.secret}.{self.publisher}"

    @property
    def publisher_key(self) -> Ed25519PublicKey:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.publisher))

    @property
    def hash(self) -> str:
        """Return what the coordinator stores: a plain SHA-256, since 256 random bits cannot be searched."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        return f"rw1.{self.name}.{HIDDEN}"


def member_of(text: str, hashes: Mapping[str, str]) -> str | None:
    """Return the name of the worker whose token this is; ``None`` when it is not a known one's.

    Args:
        hashes: ``WorkerToken.hash`` by name, of the tokens that are valid.
    """
    if len(text) > _MAX_BYTES or (match := _FORM.fullmatch(text)) is None:
        return None
    seen = hashlib.sha256(text.encode()).hexdigest()
    return match["name"] if hmac.compare_digest(seen, hashes.get(match["name"], "")) else None


def read_token(file: Path | None, environment: Mapping[str, str]) -> WorkerToken:
    """Read the worker's token from a file that its owner alone can read, or else from ``ROLLOVER_SWARM_TOKEN``.

    Raises ``ConfigError`` saying which of them is wrong, and how to fix it.
    """
    if file is None:
        if not (text := environment.get(TOKEN_VARIABLE, "").strip()):
            raise ConfigError(
                f"a worker needs its token: name the file that holds it with --token-file, or set {TOKEN_VARIABLE}"
            )
        return _parse(text, TOKEN_VARIABLE)
    return _parse(_read_private(file), str(file))


def _parse(text: str, place: str) -> WorkerToken:
    try:
        return WorkerToken.parse(text)
    except ConfigError as e:
        raise ConfigError(f"{place}: {e}") from None


def _read_private(file: Path) -> str:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not hold us up
    except OSError as e:
        raise ConfigError(f"{file}: the worker's token cannot be read: {e.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{file}: it is not a file; a worker's token is one line of text in a file")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{file}: users other than its owner can read it; restrict it with chmod 600 {file}")
        return os.read(descriptor, _MAX_BYTES).decode(errors="replace")
    finally:
        os.close(descriptor)
