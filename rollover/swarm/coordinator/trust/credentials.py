"""The workers that may join a run: a file of names and hashes of their tokens, which commands change as the run goes
on.

What it keeps true: no token can be made from the file; a token that was revoked opens nothing from the next request on.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.errors import ConfigError, RunError
from rollover.privacy import make_private
from rollover.swarm.publication.blobs import replace_file
from rollover.swarm.wire.token import WorkerToken, member_of


class Credentials:
    """The tokens of a run's workers, in ``file``.

    Example: ``Credentials(run / "swarm/workers.json").add("laptop", key).text`` is the one time that the token is
    shown.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._hashes: dict[str, str] = {}

    def add(self, name: str, publisher: Ed25519PublicKey) -> WorkerToken:
        """Make out a token for a new worker. Raises ``ConfigError`` for a name that is taken or cannot be one."""
        with self._alone():
            hashes = dict(self.hashes())
            if name in hashes:
                raise ConfigError(f"{name!r} has a token already: revoke it first, or take another name")
            token = WorkerToken.make(name, publisher)
            self._write({**hashes, name: token.hash})
        return token

    def revoke(self, name: str) -> None:
        """Refuse the token of a worker from now on. Raises ``ConfigError`` when there is none."""
        with self._alone():
            hashes = dict(self.hashes())
            if hashes.pop(name, None) is None:
                raise ConfigError(f"no worker of this run is called {name!r}; there are: {', '.join(hashes) or 'none'}")
            self._write(hashes)

    def hashes(self) -> Mapping[str, str]:
        """Return the hashes of the valid tokens by name, as the file has them now."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        if (stamp := (status.st_mtime_ns, status.st_ino)) != self._stamp:
            self._hashes, self._stamp = _parsed(self._file), stamp
        return self._hashes

    def member_of(self, authorization: str | None) -> str | None:
        """Return the name of the worker that sent an ``Authorization`` header, ``None`` when it may not join."""
        scheme, _, text = (authorization or "").partition(" ")
        return member_of(text.strip(), self.hashes()) if scheme.lower() == "bearer" else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from changing the file between reading and writing it."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock")
        make_private(lock)
        with lock.open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            self._stamp = None
            yield

    def _write(self, hashes: Mapping[str, str]) -> None:
        replace_file(self._file, json.dumps({"workers": hashes}, indent=1).encode() + b"\n")
        make_private(self._file)
        self._stamp = None


def _parsed(file: Path) -> dict[str, str]:
    try:
        found: Any = json.loads(file.read_text())
        return {str(name): str(digest) for name, digest in found["workers"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{file} cannot be read ({e}): delete it and give the workers new tokens") from None
