"""The workers that may join a run: a file of names and hashes of their tokens, which commands change as the run goes
on.

Invariants: no token can be made from the file; a token that was revoked opens nothing from the next request on;
only the owner can read the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rollover.errors import ConfigError
from rollover.swarm.coordinator.trust.shared_table import SharedTable
from rollover.swarm.wire.token import WorkerToken, member_of


class Credentials:
    """The tokens of a run's workers, in ``file``.

    Example: ``Credentials(run / "swarm/workers.json").add("laptop", key).text`` is the one time that the token is
    shown.
    """

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
