"""Puts one version of the weights into every engine.

What it keeps true: engines sample either from the old version or from the new one, and go on sampling whatever
happens to the load, also when the publication is cancelled; a version is published when every target has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rollover.errors import EngineTimeout
from rollover.weights.base import WeightSource, WeightTarget
from rollover.weights.folders import WeightFolders
from rollover.weights.sources import FolderWeights, MemoryWeights

if TYPE_CHECKING:
    from torch import Tensor


class Publisher:
    """Publishes to all targets at once.

    Args:
        folders: through which weights travel to targets in other processes; without it they get the tensors.
        timeout_s: deadline of one publication; on expiry ``EngineTimeout`` names the targets it waited for.
    """

    def __init__(
        self, targets: Sequence[WeightTarget], *, folders: WeightFolders | None = None, timeout_s: float = 600.0
    ) -> None:
        self._targets = targets
        self._folders = folders
        self._timeout_s = timeout_s

    async def stage(self, version: int, weights: Mapping[str, Tensor]) -> WeightSource:
        """What ``publish`` takes. Targets go on sampling while it is made; ``weights`` must not change before it is
        published. Raises ``ResourceError`` when the disk is full."""
        if self._folders is None:
            return MemoryWeights(version, weights)
        return FolderWeights(version, await asyncio.to_thread(self._folders.write, version, weights))

    async def publish(self, version: int, source: WeightSource) -> None:
        """Raises ``EngineError`` when a target refuses the weights; each target has then been resumed."""
        loads = [asyncio.create_task(_load(target, version, source)) for target in self._targets]
        try:
            _, late = await asyncio.wait(loads, timeout=self._timeout_s)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        if late:
            names = ", ".join(repr(t) for t, load in zip(self._targets, loads, strict=True) if load in late)
            raise EngineTimeout(f"{names} did not load weights version {version} within {self._timeout_s:.0f} s")
        await asyncio.gather(*loads)


async def _load(target: WeightTarget, version: int, source: WeightSource) -> None:
    try:
        await target.pause()
        await target.load(version, source)
    finally:
        await target.resume()
