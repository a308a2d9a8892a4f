"""The workers that may join a run, and the workers sent away: tables by name, in files which commands change as the
run goes on.

Invariants: no token can be made from the file of tokens, which only its owner can read; a token that was revoked opens
nothing from the next request on; a worker that was found to lie stays out, even if the trainer is restarted, until the
user readmits it with ``rollover workers RUN --trust NAME``.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.errors import ConfigError, RolloverError, RunError
from rollover.privacy import make_private
from rollover.swarm.publication.blobs import replace_file
from rollover.swarm.wire.token import WorkerToken, member_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK_TIMEOUT_S = 10.0
"""Longest wait for another command to write the table, which takes milliseconds."""


class SharedTable(Generic[T]):
    """The rows of ``file``, as they are now, even when another process has changed them.

    Args:
        kind: of a row.
        remedy: what to do about a file that cannot be read.
    """

    def __init__(self, file: Path, kind: type[T], *, remedy: str) -> None:
        self._file, self._kind, self._remedy = file, kind, remedy
        self._stamp: tuple[int, int] | None = None
        self._rows: dict[str, T] = {}

    def rows(self) -> Mapping[str, T]:
        """Return the rows by name; none if there is no file. Raises ``RunError`` for a file that cannot be read."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return {}
        if (stamp := (status.st_mtime_ns, status.st_ino)) != self._stamp:
            self._rows, self._stamp = self._read(), stamp
        return self._rows

    @contextmanager
    def changing(self) -> Iterator[dict[str, T]]:
        """Yield the rows to be changed, and write them at the end, at once and durably; write nothing if the work
        raises.

        Raises ``RunError`` for a file that cannot be read or is kept locked, ``ResourceError`` on a full disk.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock")
        make_private(lock)
        with lock.open("wb") as held:
            self._lock(held)
            self._stamp = None
            rows = dict(self.rows())
            yield rows
            content = msgspec.json.format(msgspec.json.encode({"workers": rows}), indent=1) + b"\n"
            replace_file(self._file, content, is_private=True)
            self._stamp = None

    def _lock(self, held: BinaryIO) -> None:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise RunError(
                        f"{held.name} has been locked for {_LOCK_TIMEOUT_S:g} s: another rollover command that changes"
                        " the workers does not end; stop it"
                    ) from None
                time.sleep(0.05)

    def _read(self) -> dict[str, T]:
        try:
            found: Any = msgspec.json.decode(self._file.read_bytes())
            return {str(name): msgspec.convert(row, self._kind) for name, row in found["workers"].items()}
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise RunError(f"{self._file} cannot be read ({e}): {self._remedy}") from None


class Credentials:
    """The tokens of a run's workers, in ``file``."""

    def __init__(self, file: Path) -> None:
        self._table = SharedTable(file, str, remedy="delete it and give the workers new tokens")

    def add(self, name: str, publisher: Ed25519PublicKey) -> WorkerToken:
        """Create a token for a new worker. Raises ``ConfigError`` for a name that is taken or cannot be one."""
        with self._table.changing() as hashes:
            if name in hashes:
                raise ConfigError(f"{name!r} already has a token: revoke it first, or choose another name")
            token = WorkerToken.make(name, publisher)
            hashes[name] = token.hash
        return token

    def revoke(self, name: str) -> None:
        """Refuse the token of a worker from now on. Raises ``ConfigError`` when there is none."""
        with self._table.changing() as hashes:
            if hashes.pop(name, None) is None:
                raise ConfigError(f"no worker of this run is called {name!r}; there are: {', '.join(hashes) or 'none'}")

    def hashes(self) -> Mapping[str, str]:
        """Return the hashes of the valid tokens by name, as the file has them now."""
        return self._table.rows()

    def member_of(self, authorization: str | None) -> str | None:
        """Return the name of the worker that sent an ``Authorization`` header, ``None`` when it may not join."""
        scheme, _, text = (authorization or "").partition(" ")
        return member_of(text.strip(), self.hashes()) if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedWorker:
    """A worker that was sent away."""

    reason: str
    time_s: float
    """Seconds since 1970, when it was sent away."""


class Blocklist:
    """The blocked workers of a run by name, in ``sent_away.json`` of the swarm's folder."""

    def __init__(self, folder: Path) -> None:
        remedy = "delete it, and workers that were sent away may join again"
        self._table = SharedTable(folder / "sent_away.json", BlockedWorker, remedy=remedy)
        self._known = {*self.listed()}

    def listed(self) -> Mapping[str, BlockedWorker]:
        """Return the blocked workers, as the file has them now."""
        return self._table.rows()

    def add(self, name: str, reason: str) -> None:
        """Block a worker from now on. Raises ``ResourceError`` on a full disk, and ``RunError`` for a
        file that cannot be read."""
        with self._table.changing() as rows:
            rows[name] = BlockedWorker(reason=reason, time_s=time.time())
        self._known.add(name)

    def remember(self, name: str, reason: str) -> None:
        """Block a worker from now on; if that cannot be recorded, warn that a restart forgets it."""
        try:
            self.add(name, reason)
        except (RolloverError, OSError) as e:
            logger.warning("%s may join again when the run is restarted: %s", name, e)

    def readmit(self, name: str) -> None:
        """Let a worker come back. Raises ``ConfigError`` when it was not sent away."""
        with self._table.changing() as rows:
            if rows.pop(name, None) is None:
                raise ConfigError(f"{name!r} was not sent away; members sent away: {', '.join(sorted(rows)) or 'none'}")

    def readmitted(self) -> set[str]:
        """Return the workers that were removed from the file since the last call."""
        before, self._known = self._known, {*self.listed()}
        return before - self._known
