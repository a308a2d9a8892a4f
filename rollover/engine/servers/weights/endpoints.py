"""The calls by which a server takes weights and gives memory back; each kind of server implements them.

An endpoint knows no policy version and no other run: weights are named by a label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.transfer import Receiver


class WeightEndpoint(Protocol):
    """The calls by which a server takes weights and says which ones it has. Each method raises ``EngineError``.

    Example: ``await weights.send("rollover:run-1:7", source, keeps_kv=False)``; then ``await weights.label()`` is
    ``"rollover:run-1:7"``.
    """

    async def send(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Replace the weights of a paused server and set the label. ``source`` is a model folder; or, where the server
        takes adapters, one of adapters for the model that it is to serve as version 0, on which no call is open. No
        later call finds cached blocks of older
        weights; with ``keeps_kv`` the paused calls keep theirs. Servers that can show more than a label are checked."""
        ...

    async def label(self) -> str:
        """Read the label of the weights that the server has."""
        ...

    async def set_label(self, label: str) -> None:
        """Change the label; the weights stay."""
        ...

    async def receiver(self, label: str, *, keeps_kv: bool) -> Receiver:
        """Return how the paused server receives weights with this label in one group with other servers; nothing is
        changed yet. Only for servers that do not read folders."""
        ...

    async def settle(self, label: str, *, keeps_kv: bool) -> None:
        """Do what remains once all tensors are there: set the label, keep later calls off blocks of older weights."""
        ...


class MemoryEndpoint(Protocol):
    """The calls by which a server gives memory back and takes it again. Each method raises ``EngineError``.

    Example: ``await memory.release()``; then ``await memory.take("weights")``, weights are loaded, and ``await
    memory.take("cache")``.
    """

    async def check(self) -> None:
        """See that the server was started so that it can do this; the message of an ``EngineError`` says how to."""
        ...

    async def release(self) -> None:
        """Give back the memory of weights and cache. The server stands still and has no calls."""
        ...

    async def take(self, part: Part) -> None:
        """Take the memory of a part again, the weights before the cache. What was in it is lost."""
        ...
