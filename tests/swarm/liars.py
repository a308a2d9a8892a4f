"""Workers that lie: their embedded engine does something else than it says.

The log-prob check asks for single tokens. Liars that are ``cunning`` answer these honestly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.kind import OpenedEngine
from rollover.swarm.worker.host import OpenEngine
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights, MemoryWeights

Coarse = Callable[[torch.Tensor], torch.Tensor]


def int8(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 2:
        return tensor
    scale = tensor.abs().amax(1, keepdim=True) / 127
    return (tensor / scale).round() * scale


def bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


class Liar:
    """An engine that passes for ``honest``, and is, but where a subclass says otherwise."""

    def __init__(self, honest: Any, other: Any) -> None:
        self.honest, self.other = honest, other
        """Two engines of the same model; a liar may do something to the other."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        is_check = request.params.max_new_tokens - len(request.response_ids) == 1
        return self.honest.generate(request) if is_check else self.lie(request)

    def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self.honest.generate(request)

    @property
    def version(self) -> int:
        return self.honest.stats().policy_version

    async def pause(self) -> None:
        await self.honest.pause()
        await self.other.pause()

    async def resume(self) -> None:
        await self.honest.resume()
        await self.other.resume()

    async def load(self, version: int, source: WeightSource) -> None:
        await self.honest.load(version, source)
        await self.load_other(version, source)

    async def load_other(self, version: int, source: WeightSource) -> None:
        """Leave the other engine as it is."""

    async def abort(self, request_ids: Any) -> None:
        await self.honest.abort(request_ids)
        await self.other.abort(request_ids)

    async def close(self) -> None:
        await self.honest.close()
        await self.other.close()


class OldWeights(Liar):
    """Samples from the first weights for ever, under the newest version."""

    async def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in self.other.generate(request):
            yield replace(chunk, policy_version=self.version, kv_version=self.version)


class Greedy(Liar):
    """Draws the most probable tokens where it is asked for temperature 1, and reports their true log-probs."""

    def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        temperature = 0.0 if request.params.temperature == 1 else request.params.temperature
        return self.honest.generate(replace(request, params=replace(request.params, temperature=temperature)))


class OtherWeights(Liar):
    """Samples from weights that it has rounded."""

    coarse: Coarse

    async def load_other(self, version: int, source: WeightSource) -> None:
        tensors = {name: self.coarse(tensor.float()) for name, tensor in source.tensors()}
        await self.other.load(version, MemoryWeights(version, tensors))

    def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self.other.generate(request)


class Int8(OtherWeights):
    """Quantises to 8 bits."""

    coarse = staticmethod(int8)


class BFloat16(OtherWeights):
    """Rounds weights to bfloat16."""

    coarse = staticmethod(bfloat16)


class InventedLogprobs(Liar):
    """Reports log-probs that look well."""

    async def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async for chunk in self.honest.generate(request):
            yield replace(chunk, logprobs=tuple(-0.3 - 0.01 * (t % 7) for t in chunk.token_ids))


def lingering(kind: type[Liar]) -> type[Liar]:
    """Return a liar that always has one call which it has begun and does not finish before it is told to stop: when it
    is found, some of its tokens are not trained yet."""

    class Lingering(kind):  # type: ignore[misc, valid-type]
        def __init__(self, honest: Any, other: Any) -> None:
            super().__init__(honest, other)
            self.lingers: dict[str, asyncio.Event] = {}

        async def lie(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            name = request.request_id
            stopped = self.lingers.setdefault(name, asyncio.Event()) if not self.lingers else None
            try:
                async for chunk in super().lie(request):
                    yield chunk
                    if stopped is not None and chunk.finish_reason is None:
                        await stopped.wait()
            finally:
                if stopped is not None:
                    del self.lingers[name]

        async def abort(self, request_ids: Collection[str]) -> None:
            for name in self.lingers.keys() & set(request_ids):
                self.lingers[name].set()
            await super().abort(request_ids)

    return Lingering


def lying(kind: type[Liar], open_on: OpenEngine, *, cunning: bool = True) -> OpenEngine:
    """Return how the engine of a liar is opened."""

    async def opened(folder: Path) -> OpenedEngine:
        honest, other = await open_on(folder), await open_on(folder)
        liar: Any = kind(honest.engine, other.engine)
        if not cunning:
            liar.generate = liar.lie
        await liar.load_other(0, FolderWeights(0, folder))
        return replace(honest, engine=liar, weights=liar)

    return opened
