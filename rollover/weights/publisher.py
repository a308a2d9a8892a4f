"""Weight publishing: a version of the weights goes to an engine, which samples from the old version or from the new one
and continues sampling whatever happens to the load, even when publishing is cancelled."""

from __future__ import annotations

import asyncio

from rollover.errors import EngineError, EngineTimeout
from rollover.weights.base import WeightSource, WeightTarget
from rollover.weights.buckets import as_served
from rollover.weights.folders import WeightFolders
from rollover.weights.sending import SentByHolder


class Publisher:
    """Publishes weights to an engine, which may be a pool of several.

    Args:
        folders: writes weights for a target that needs a folder; any other gets the tensors.
        timeout_s: deadline of ``publish``; on expiry an ``EngineTimeout`` names the target.
    """

    def __init__(self, target: WeightTarget, *, folders: WeightFolders | None = None, timeout_s: float = 600.0) -> None:
        self._target = target
        self._folders = folders
        self._timeout_s = timeout_s

    @property
    def sends(self) -> bool:
        """Return whether the processes that hold the weights send them, so that none needs to have all."""
        return self._target.takes == "group"

    async def stage(self, source: WeightSource) -> WeightSource:
        """Return the source to ``publish``: ``source`` itself, or the folder written from it if the target needs one.

        The target continues sampling while the folder is written; the weights must not change before they are
        published. Raises ``ResourceError`` when the disk is full.
        """
        needs_folder = self._target.takes == "folder" or (self.sends and not isinstance(source, SentByHolder))
        if source.folder is not None or not needs_folder:
            return source
        if self._folders is None:
            raise EngineError(
                f"{self._target!r} loads weights from a folder, but the publisher has no place to write one"
            )
        return await asyncio.to_thread(self._folders.write, source)

    def num_bytes(self, staged: WeightSource) -> int:
        """Return how much each engine is given: of weights that are sent, in the number formats of its model."""
        specs = staged.manifest.tensors
        if isinstance(staged, SentByHolder) and self.sends and self._folders is not None:
            specs = tuple(as_served(specs, self._folders.formats.dtypes))
        return sum(spec.num_bytes for spec in specs)

    async def publish(self, source: WeightSource) -> None:
        """Load ``source`` into the target, which has then been resumed. Raises its ``EngineError``, or
        ``EngineTimeout`` when it is late."""
        target, version = self._target, source.manifest.version
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                try:
                    await target.pause()
                    await target.load(version, source)
                finally:
                    await target.resume()
        except EngineError:
            raise
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"{target!r} did not load weights version {version} within {self._timeout_s:.0f} s"
            raise EngineTimeout(message) from None
