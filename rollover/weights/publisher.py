"""Weight publishing: one version of the weights goes to every target independently.

A target samples either from the old version or from the new one, and continues sampling whatever happens to the load,
even when the publication is cancelled. The publisher knows which version each target has and reports per target; the
caller decides what the failure of some means.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.adapters import AdapterSource
from rollover.weights.base import WeightSource, WeightTarget
from rollover.weights.folders import WeightFolders
from rollover.weights.sending import SentByHolder
from rollover.weights.sources import MemoryWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The outcome of publishing one version to one target.

    Example: ``Publication(target="http://b", version=7, error=EngineTimeout(...), elapsed_s=600.0)`` says that the
    server b did not load version 7 in time; it continues with the version before.
    """

    target: str
    version: int
    error: EngineError | None
    """The reason why the target did not take the weights; ``None`` when it has them."""
    elapsed_s: float


class Publisher:
    """Publishes weights to all targets at once and keeps each target's version.

    Args:
        folders: writes weights for targets that need a folder; the others get the tensors.
        timeout_s: deadline of one publication; on expiry an ``EngineTimeout`` names the target it waited for.
    """

    def __init__(
        self, targets: Sequence[WeightTarget], *, folders: WeightFolders | None = None, timeout_s: float = 600.0
    ) -> None:
        self._targets = tuple(targets)
        self._folders = folders
        self._timeout_s = timeout_s
        self._versions: list[int | None] = [None] * len(self._targets)

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Return the version that each target loaded last, in the order of the targets; ``None`` before the first."""
        return tuple(self._versions)

    @property
    def sends(self) -> bool:
        """Return whether all targets receive weights from the processes that hold them, so that no process needs to
        have all of them."""
        return all(target.takes == "group" for target in self._targets)

    async def stage(self, source: WeightSource) -> WeightSource:
        """Return the source to ``publish``: ``source`` itself, or with a folder if a target needs one.

        Targets continue sampling while the folder is written; the weights must not change before they are published.
        Raises ``ResourceError`` when the disk is full.
        """
        is_sent = isinstance(source, SentByHolder)
        by_folder = ("folder",) if is_sent else ("folder", "group")
        needy = [target for target in self._targets if target.takes in by_folder]
        if source.folder is not None or not needy:
            return source
        if self._folders is None:
            names = ", ".join(map(repr, needy))
            raise EngineError(f"{names} loads weights from a folder, but the publisher has no place to write one")
        if isinstance(source, AdapterSource):
            folder = await asyncio.to_thread(self._folders.write_adapters, source)
            return AdapterSource(source.manifest.version, source.adapters, folder=folder)
        version, tensors = source.manifest.version, dict(source.tensors())
        folder = await asyncio.to_thread(self._folders.write, version, tensors)
        return MemoryWeights(version, tensors, folder=folder)

    async def publish(self, source: WeightSource) -> tuple[Publication, ...]:
        """Load ``source`` into every target, and report in the order of the targets. Each has then been resumed.

        An ``EngineError`` of a target is reported, not raised.
        """
        loads = [asyncio.create_task(self._load(index, source)) for index in range(len(self._targets))]
        try:
            await asyncio.wait(loads)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        return tuple(load.result() for load in loads)

    async def publish_to_all(self, source: WeightSource) -> None:
        """Publish to targets that all must have the weights.

        Raises ``EngineTimeout`` naming all targets that were late, or else the first target's ``EngineError``.
        """
        failed = [publication for publication in await self.publish(source) if publication.error is not None]
        if late := [publication for publication in failed if isinstance(publication.error, _Late)]:
            raise EngineTimeout(_late([publication.target for publication in late], late[0].version, self._timeout_s))
        for publication in failed:
            assert publication.error is not None
            raise publication.error

    async def _load(self, index: int, source: WeightSource) -> Publication:
        target, version, started_s = self._targets[index], source.manifest.version, time.perf_counter()
        error: EngineError | None = None
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await _replace(target, source)
            self._versions[index] = version
        except EngineError as e:
            error = e
        except TimeoutError:
            if not deadline.expired():
                raise
            error = _Late(_late([repr(target)], version, self._timeout_s))
        elapsed_s = time.perf_counter() - started_s
        return Publication(target=repr(target), version=version, error=error, elapsed_s=elapsed_s)


class _Late(EngineTimeout):
    """A target did not load the weights by the publisher's deadline."""


def _late(targets: Sequence[str], version: int, timeout_s: float) -> str:
    return f"{', '.join(targets)} did not load weights version {version} within {timeout_s:.0f} s"


async def _replace(target: WeightTarget, source: WeightSource) -> None:
    try:
        await target.pause()
        await target.load(source.manifest.version, source)
    finally:
        await target.resume()
