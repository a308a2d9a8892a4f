"""A swarm whose caller says which member decodes a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from rollover.engine.base import Capabilities, Chunk, Engine, GenerateRequest


class DirectedEngine(Engine, Protocol):
    """An engine whose caller may say which member decodes a call.

    Example: ``swarm.generate(request, only="laptop")`` is decoded by the laptop or not at all.
    """

    def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]: ...


class OneMember:
    """The swarm as an engine with one member.

    Example: ``OneMember(swarm, "laptop").generate(request)`` is decoded by the laptop or not at all.
    """

    def __init__(self, swarm: DirectedEngine, name: str) -> None:
        self._swarm = swarm
        self._name = name
        self.stats, self.abort = swarm.stats, swarm.abort

    def __repr__(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return self._swarm.capabilities

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._swarm.generate(request, only=self._name)

    async def close(self) -> None:
        """Do nothing, since nothing was opened."""
