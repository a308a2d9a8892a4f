"""The run that a server belongs to, shown by a label on the server and a lock on this machine.

A server's weights carry a label that clients set and read. Ours names the run and the version, and says when the run
has given the server back::

    rollover:RUN:VERSION              in use, or left by a run that was killed
    rollover:RUN:VERSION:free         given back
    rollover:RUN:VERSION:asleep       without the memory of weights and cache, which the trainer has
    rollover:RUN:VERSION:cacheless    without the memory of the cache; either may be followed by ":free"

Invariants: a run takes no server that another live run uses, so no two runs ever load weights into one. A run
on this machine is alive while it holds the lock on the server's address (flock: it ends with the process, however that
ends). Whether a run on another machine is alive cannot be known, so its servers stay its own until it gives them back
or a user frees them by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from rollover import locks
from rollover.errors import EngineError, parse_json

Part = Literal["weights", "cache"]
"""The parts of a server that take memory."""

_LABEL = re.compile(r"rollover:([^:]+):(\d{1,15})(:asleep|:cacheless)?(:free)?")
_ASLEEP: dict[tuple[Part, ...], str] = {(): "", ("cache",): ":cacheless", ("weights", "cache"): ":asleep"}
_MAX_NOTE_BYTES = 1000


class Ownership:
    """One run's use of one server.

    Example: ``Ownership("r1").label(7)`` is ``"rollover:r1:7"``, and its ``owner`` for run ``"r2"`` is ``"r1"``.

    Args:
        run: the run's name among all runs.
        predecessor: a run that had the server before and is known to be over.
        lock: descriptor of the lock on this machine, if there is one.
    """

    def __init__(self, run: str, *, predecessor: str = "", lock: int | None = None) -> None:
        assert ":" not in run, run
        self.run = run
        self._predecessor = predecessor
        self._lock = lock

    @classmethod
    def on_this_machine(cls, url: str, run: str, folder: Path | None = None) -> Self:
        """Take the lock of a server's address.

        Args:
            folder: of locks, that for temporary files when left out.

        Raises ``EngineError`` naming the run of this machine that has it.
        """
        name = hashlib.blake2b(url.rstrip("/").lower().encode(), digest_size=8).hexdigest()
        file = (folder or Path(tempfile.gettempdir())) / f"rollover-server-{name}.lock"
        descriptor = _opened(file)
        held = _note(descriptor)
        try:
            locks.take(descriptor)
        except BlockingIOError:
            raise EngineError(
                f"{url} is in use by run {held.get('run', '?')} ({held.get('by', 'another process')}):"
                " wait for it, or give this run another server (engine.urls)"
            ) from None
        _write(descriptor, {"run": run, "by": f"pid {os.getpid()} on {socket.gethostname()}"})
        return cls(run, predecessor=str(held.get("run", "")), lock=descriptor)

    def label(self, version: int, *, asleep: Collection[Part] = (), free: bool = False) -> str:
        """Return the label of our weights of a version, on a server that has given ``asleep`` memory back."""
        return f"rollover:{self.run}:{version}{_ASLEEP[tuple(asleep)]}" + ":free" * free

    @staticmethod
    def asleep(label: str) -> tuple[Part, ...]:
        """Read what a server with this label has given back, whichever run has asked it to."""
        found = _LABEL.fullmatch(label)
        suffix = (found and found[3]) or ""
        return next(parts for parts, written in _ASLEEP.items() if written == suffix)

    def version(self, label: str) -> int | None:
        """Read the version of our weights from a label; ``None`` when they are not ours."""
        found = _LABEL.fullmatch(label)
        return int(found[2]) if found is not None and found[1] == self.run else None

    def owner(self, label: str) -> str | None:
        """Name the other run that a server with this label belongs to; ``None`` when it is free or ours."""
        found = _LABEL.fullmatch(label)
        if found is None or found[4] or found[1] in (self.run, self._predecessor):
            return None
        return found[1]

    def release(self) -> None:
        """Let others on this machine have the server. Does nothing the second time."""
        if self._lock is not None:
            locks.release(self._lock)
            self._lock = None


def how_to_free(url: str, key_env: str | None) -> str:
    """Give the command that a user types to take a server from a run that is over. ``key_env``: the environment
    variable with its API key."""
    body = '{"new_version": "free", "abort_all_requests": false}'
    key = "" if key_env is None else f' -H "Authorization: Bearer ${key_env}"'
    return f"curl -X POST {url}/update_weight_version{key} -H 'Content-Type: application/json' -d '{body}'"


def _opened(file: Path) -> int:
    """Open a lock file: not inherited, no link followed, another user's only to read."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:
        return os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise EngineError(f"{file}, the lock of a server, cannot be opened: {error.strerror}") from None


def _note(descriptor: int) -> dict[str, Any]:
    try:
        note = parse_json(os.pread(descriptor, _MAX_NOTE_BYTES, 0))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _write(descriptor: int, note: dict[str, str]) -> None:
    """Write who holds the lock, unless the file is another user's: that one keeps its content."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
    except OSError:
        return
