"""The engine of a run inside TRL and its feed: opened from the settings, and given the trainer's weights.

What it keeps true: an engine that loads weights from folders finds each version in one, written while samples decode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollover.clock import SystemClock
from rollover.engine.base import Capabilities
from rollover.engine.open import EngineSetup, TrainedEngine, open_engine
from rollover.hf.raw_tensors import untied
from rollover.integrations.feed import Deadlines, Feed, FeedParts, ScoredByHost
from rollover.integrations.hosted import HostedConfig, check_capabilities
from rollover.integrations.record import HostedRun
from rollover.rollout.events import Event
from rollover.rollout.scheduler import Source
from rollover.weights.base import WeightSource
from rollover.weights.folders import WeightFolders
from rollover.weights.publisher import Publisher
from rollover.weights.sources import MemoryWeights


class HostedEngine:
    """The engine and its feed, open.

    Args:
        folder: of the model, for the engine to open.
        make_source: returns the prompts, given the engine's capabilities.
        stop_token_ids: tokens that end a response.
        step: how many batches the trainer's checkpoint includes.
        prepare: called with the engine before it is used.
        observer: called on the feed's thread after each event.

    Example: ``hosted.publish(7, source)`` lets the engine sample from version 7, and ``hosted.feed.batch(7)`` is the
    batch that this version trains.

    Raises:
        RolloverError: the engine cannot be opened; the message says what to do.
    """

    def __init__(
        self,
        config: HostedConfig,
        run: HostedRun,
        *,
        folder: Path,
        make_source: Callable[[Capabilities], Source],
        stop_token_ids: tuple[int, ...],
        step: int = 0,
        prepare: Callable[[TrainedEngine], None] = lambda engine: None,
        observer: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._config = config
        self._run = run
        self._folder = folder
        self._make_source = make_source
        self._stop_token_ids = stop_token_ids
        self._prepare = prepare
        self._folders: WeightFolders | None = None
        timeout_s = config.engine.publication_timeout_s
        self.feed = Feed(
            self._open_parts,
            config.rollout,
            journal=run.journal,
            step=step,
            seed=config.seed,
            deadlines=Deadlines(
                update_timeout_s=2 * timeout_s
            ),  # the publisher's own deadline comes first, and names the server
            observer=observer,
        )
        self._publisher = Publisher([self.engine], folders=self._folders, timeout_s=timeout_s)
        """Created in this thread, used on the feed's."""

    @property
    def engine(self) -> TrainedEngine:
        engine: Any = self.feed.parts.engine
        opened: TrainedEngine = engine
        return opened

    def publish(self, version: int, source: WeightSource, loaded: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let the engine sample from ``source`` from now on. Raises like ``Feed.publish``.

        Args:
            loaded: awaited on the feed's event loop once the engine has the weights, before it samples from them.
        """
        if self._folders is not None:  # while samples may still be decoding, since it can take a while
            tensors = dict(source.tensors())
            source = MemoryWeights(version, tensors, folder=self._folders.write(version, tensors))

        async def load() -> None:
            await self._publisher.publish_to_all(source)
            if loaded is not None:
                await loaded()

        self.feed.publish(version, load)

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        config, folder = self._config.engine, self._folder
        if (root := config.weights_root(self._run.path / "weights", self._run.identity)) is not None:
            if config.unties_first:
                folder = untied(folder, root / "initial")
            self._folders = WeightFolders(root, like=folder)
        setup = EngineSetup(folder=folder, run=self._run.identity, logs=self._run.path / "logs", clock=SystemClock())
        engine = await open_engine(config, setup)
        try:
            check_capabilities(self._config, engine.capabilities)
            self._prepare(engine)
            yield FeedParts(
                engine=engine,
                source=self._make_source(engine.capabilities),
                scorer=ScoredByHost(),
                stop_token_ids=self._stop_token_ids,
            )
        finally:
            await engine.close()
