"""The worker's engine: opened on the first weights that are fetched, and given all later ones.

Invariants: the engine samples from the version that ``serves`` says, whatever happens to a load; it resumes
after every pause. An engine takes no weights back, so for an earlier version, which a run that began again at an older
checkpoint asks for, it is opened again.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

from rollover.clock import Clock
from rollover.engine.background import within
from rollover.engine.kind import OpenedEngine
from rollover.errors import EngineError, RolloverError
from rollover.hf.raw_tensors import untied
from rollover.swarm.publication.fetched import FetchedWeights
from rollover.swarm.wire.messages import MAX_RUNNING, Head, Ready
from rollover.swarm.worker.calls import WorkerCalls
from rollover.swarm.worker.config import WorkerConfig
from rollover.weights.base import WeightSource
from rollover.weights.sources import FolderWeights

_KEPT = 2
"""Copies that stay: the engine may still be reading the one before the newest."""
OpenEngine = Callable[[Path], Awaitable[OpenedEngine]]
"""Opens an engine on a model folder, whose weights it serves as version 0."""


class EngineBroken(RolloverError):
    """The worker's engine cannot be used any more, and so neither can the worker."""


class EngineHost:
    """Holds the engine and changes its weights.

    Args:
        name: the worker's.
        work: a folder for model folders.
        announce: called with what the engine now serves and the seconds of the pause, before a token that was sampled
            from it could be sent.
    """

    def __init__(
        self,
        config: WorkerConfig,
        calls: WorkerCalls,
        clock: Clock,
        *,
        open_on: OpenEngine,
        name: str,
        work: Path,
        announce: Callable[[FetchedWeights, float], None],
    ) -> None:
        self._config, self._calls, self._clock = config, calls, clock
        self._open_on, self._name, self._work, self._announce = open_on, name, work, announce
        self._probes = itertools.count()
        self.opened: OpenedEngine | None = None
        self.serves: Head | None = None
        self.is_switching = False
        """The engine is being opened or given weights; heartbeats do not wait for it."""
        self.holds_tokens_back = False
        """Tokens may come from weights that have not been announced."""

    async def probe(self) -> None:
        """Return when the engine's loop has come round once more.

        The embedded engine takes an abort, here of a call that does not exist, between two iterations: a loop that
        hangs does not answer. Servers are probed by their pool, all the time, and it fails calls that get no token in
        time; if no server is up, this waits for a server. While weights change there is nothing to see; that has a
        deadline of its own.

        Raises ``EngineBroken`` when the engine does not answer by its own deadline, or all its calls fail.
        """
        if (broken := self._calls.health.broken) is not None:
            raise EngineBroken(broken)
        if self.opened is None or self.is_switching:
            return
        try:
            if self.opened.until_up is not None:
                await self._until_up(self.opened.until_up)
            await self.opened.engine.abort((f"heartbeat~{next(self._probes)}.",))
        except EngineError as e:
            raise EngineBroken(f"the engine no longer answers: {e}") from e

    async def _until_up(self, until_up: Callable[[], Awaitable[None]]) -> None:
        """Wait as long as the servers may be away, and as long as a restarted server may take to start."""
        starting_s = self._config.engine.start_timeout_s
        since_s = self._clock.now_s()
        while True:
            try:
                return await until_up()
            except EngineError:
                if self._clock.now_s() - since_s >= starting_s:
                    raise

    async def take(self, fetched: FetchedWeights) -> None:
        """Have the engine serve ``fetched``.

        Raises:
            EngineBroken: no engine can be opened on them, or it does not resume.
            RolloverError: the weights do not fit, or were not loaded in time, and the old ones are in force; or the
                engine has others than it says, and is not used again.
        """
        head = Head(version=fetched.version, manifest=fetched.digest)
        self.is_switching = True
        opens = self.opened is None or self._goes_back(head)
        try:
            # A server that has died is started again on the folder on which it was opened, which therefore stays.
            root = self._folders / "opened" if opens else self._folders
            source = await asyncio.to_thread(self._source_for_engine, fetched, root)
            if opens:
                await self._reopen(head, fetched, source)
            else:
                await self._replace(head, fetched, source)
        finally:
            self.is_switching = self.holds_tokens_back = False

    def ready(self) -> Ready | None:
        """Return what the engine can do now; ``None`` while no engine serves."""
        if self.opened is None or self.serves is None:
            return None
        capabilities = self.opened.engine.capabilities
        return Ready(
            max_running=min(capabilities.max_running, MAX_RUNNING),
            max_context_tokens=capabilities.max_context_tokens,
            seeded=capabilities.seeded,
            number_format=capabilities.number_format,
            gives_kept=self._config.engine.declared.gives_kept,
            gives_routes=self._config.engine.declared.gives_routes,
            keeps_kv=self._config.engine.declared.keeps_kv,
        )

    @property
    def _folders(self) -> Path:
        """Return the folder of model folders, which servers on other machines must see under the same path."""
        own = self._work / "weights"
        return self._config.engine.weights_root(own, f"worker-{self._name}") or own

    def _goes_back(self, head: Head) -> bool:
        return self.serves is not None and head.version < self.serves.version

    async def close(self) -> None:
        if self.opened is not None:
            opened, self.opened = self.opened, None
            with suppress(EngineError):
                await opened.engine.close()

    async def _replace(self, head: Head, fetched: FetchedWeights, source: WeightSource) -> None:
        assert self.opened is not None
        opened = self.opened
        keeps_calls = opened.engine.capabilities.in_flight_update
        started_s = self._clock.now_s()
        async with nullcontext() if keeps_calls else self._calls.stopped():
            await self._load(opened, head, source)
            self._served(opened, head, fetched, self._clock.now_s() - started_s)

    async def _reopen(self, head: Head, fetched: FetchedWeights, source: WeightSource) -> None:
        """Open the engine for the first time, or again."""
        if self.opened is not None:
            if self._goes_back(head):
                self._calls.fail_all(f"the run went back to version {head.version}")
            await self.close()
        self.serves = None
        try:
            if (folder := source.folder) is None:
                folder = await asyncio.to_thread(fetched.write_folder, self._folders / "opened")
            self.opened = opened = await self._open_on(folder)
        except RolloverError as e:
            raise EngineBroken(f"the engine cannot be opened: {e}") from e
        started_s = self._clock.now_s()
        if head.version > 0:
            await self._load(opened, head, source)
        self._served(opened, head, fetched, self._clock.now_s() - started_s)

    async def _load(self, opened: OpenedEngine, head: Head, source: WeightSource) -> None:
        limit_s = max(self._config.update_timeout_s, self._config.engine.update_timeout_s or 0.0)
        late = f"{opened.engine!r} did not load weights version {head.version} within {limit_s:g} s"
        before = opened.engine.stats().policy_version
        self.holds_tokens_back = True
        try:
            async with within(limit_s, late), _paused(opened):
                await opened.weights.load(head.version, source)
        except EngineError:  # a load that is given up may go on in the engine, which then resumes after it
            if opened.engine.stats().policy_version == before:
                raise

    def _served(self, opened: OpenedEngine, head: Head, fetched: FetchedWeights, pause_s: float) -> None:
        self.serves = head
        self._announce(fetched, pause_s)
        self.holds_tokens_back = False
        self._calls.serve(opened.engine, head.version)

    def _source_for_engine(self, fetched: FetchedWeights, root: Path) -> WeightSource:
        """Return the weights as the engine takes them: servers read a folder, some without a tied matrix."""
        engine = self._config.engine
        if engine.weights_root(root, self._name) is None:
            return fetched
        folder = fetched.write_folder(root)
        copies = root / "untied"
        if not engine.unties_first or (copy := untied(folder, copies / folder.name)) == folder:
            return fetched
        for old in sorted(copies.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            with suppress(OSError):
                shutil.rmtree(old)
        return FolderWeights(fetched.version, copy)


@asynccontextmanager
async def _paused(opened: OpenedEngine) -> AsyncIterator[None]:
    try:
        await opened.weights.pause()
        yield
    finally:
        try:
            await opened.weights.resume()
        except EngineError as e:
            raise EngineBroken(f"the engine was paused for new weights and cannot be resumed: {e}") from e
