"""Place an engine server on the cluster, start it, look after it, and place it again when it or its node is gone.

::

    start ──▶ its keeper (an actor), where there is room ──▶ the server ──▶ answers /health ──▶ looked at every few
      ▲                                                                                            seconds
      └──────────── gone: the keeper does not answer in time, or says that the server has exited ◀────┘

Invariants: every call to the cluster has a deadline; a place on a node is taken by a keeper alone, which ends with this
process; a place is given back before another is asked for; the API key travels to the node in a call of Ray and to the
server in its environment, never in a command line, name or log.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.cluster.engine_actor import EngineKeeper, Look
from rollover.cluster.files import SharedFiles
from rollover.cluster.nodes import Resources, actor_options, written
from rollover.engine.background import BackgroundTasks, within
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.http.client import HTTPClient, api_key
from rollover.engine.servers.start.places import ServerProgram
from rollover.errors import EngineError, EngineTimeout, is_full
from rollover.privacy import make_private

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_PROCESS_S = 30.0
"""Maximum wait for the process of a keeper that has a place, which imports Rollover, to start."""
_ANSWER_S = 30.0
"""Maximum wait for a small task of a keeper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """Holds the settings that all engine servers of a run share."""

    prefix: str
    """Prefix of the names of keepers, which distinguishes this run's from the keepers of others."""
    placement_timeout_s: float
    logs: Path
    shared: Sequence[tuple[SharedFiles, str]]
    """Files that the node of every server must see, each with advice for the user if a node does not."""


class ClusterServer:
    """Implements ``StartedServer``.

    Args:
        resources: what it takes of a node.
    """

    def __init__(
        self, number: int, program: ServerProgram, config: ServerConfig, resources: Resources, terms: EngineTerms
    ) -> None:
        self._name = f"engine-{number}"
        self.client = HTTPClient(f"http://{self._name}.invalid", config, name=self._name)
        self._program = program
        self._config = config
        self._resources = dict(resources)
        self._terms = terms
        self._key = api_key(config) if config.api_key_env is not None else None
        self._keeper: Any = None
        """Handle of the actor."""
        self._host = ""
        """Address of the keeper's node."""
        self._log_at = 0
        self._log = terms.logs / f"{self._name}.log"
        self._tasks = BackgroundTasks()

    async def start(self) -> None:
        """See ``StartedServer.start``. Raises ``EngineTimeout`` when the cluster has no place for it in time."""
        await self._end()
        try:
            await self._find_place()
            await self._launch()
            await self._until_ready()
        except BaseException:
            await self._end()
            raise
        self._tasks.start(self._look_on())

    async def gone(self) -> bool:
        """See ``StartedServer.gone``: a keeper that does not answer counts, since its server could not be stopped."""
        if self._keeper is None:
            return True
        try:
            return (await self._look()).exited
        except EngineError:
            return True

    async def stop(self) -> None:
        await self._end()

    # -- from a place to a server that answers -------------------------------------------------------------------

    async def _find_place(self) -> None:
        """Start a keeper wherever there is room. Raises ``EngineTimeout`` when there is none in time."""
        import ray

        options = {
            **actor_options(self._resources),
            "name": f"{self._terms.prefix}-{self._name}-{secrets.token_hex(4)}",
            "max_restarts": 0,  # started again by us, who know its weights
        }
        keeper: Any = ray.remote(EngineKeeper).options(**options).remote(stop_timeout_s=self._config.stop_timeout_s)
        limit_s = self._terms.placement_timeout_s
        try:
            self._host = await self._ask(keeper.where.remote(), "say its address", limit_s + _PROCESS_S)
        except BaseException as e:
            await asyncio.to_thread(ray.kill, keeper)
            if not isinstance(e, EngineTimeout):
                raise
            free = ray.available_resources()
            left = written({key: free.get(key, 0.0) for key in self._resources})
            raise EngineTimeout(
                f"{self._name} found no place within {limit_s:g} s (cluster.placement_timeout_s): it needs"
                f" {written(self._resources)} on one node, and free on all nodes together are {left}"
            ) from None
        self._keeper = keeper

    async def _launch(self) -> None:
        host = self._host
        for files, remedy in self._terms.shared:
            if not await self._ask(self._keeper.sees.remote(files), "look for files"):
                raise files.refusal(f"{host}, the place of {self._name},", remedy)
        port = await self._ask(self._keeper.port.remote(), "find a port")
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        program, key = self._program, None
        env = {**program.env, **self._config.launch_env}
        if program.key_env is not None:
            key = self._key or secrets.token_urlsafe(32)
            env[program.key_env] = key
        self.client.move(url, key)
        self._log_at = 0
        launching = self._keeper.launch.remote(program.command_at(host, port), env, python=sys.executable)
        await self._ask(launching, "start its server")

    async def _until_ready(self) -> None:
        limit_s = self._config.launch_timeout_s
        late = f"{self._name} at {self.client.url} did not answer within {limit_s:g} s (engine.launch_timeout_s)"
        async with within(limit_s, f"{late}; its log is {self._log}"):
            while True:
                with suppress(EngineError):
                    await self.client.call("GET", "/health", timeout_s=self._config.health_timeout_s)
                    return
                look = await self._look()
                if look.exited:
                    raise EngineError(f"{self._name}, the server did not start: {look.story}")
                await asyncio.sleep(_POLL_S)

    # -- while it runs -------------------------------------------------------------------------------------------

    async def _look_on(self) -> None:
        """Fetch the log until it is gone."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            with suppress(EngineError):
                await self._look()

    async def _look(self) -> Look:
        log_at = self._log_at
        look: Look = await self._ask(self._keeper.look.remote(log_at), "answer", self._config.health_timeout_s)
        if log_at == self._log_at:  # no other look has written it meanwhile
            self._log_at += len(look.log)
            if look.log:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                make_private(self._log)  # servers print their arguments
                with self._log.open("ab") as file:
                    file.write(look.log)
        return look

    async def _end(self) -> None:
        """Stop the server and give its place back; return when both are done or their deadlines have passed."""
        import ray

        await self._tasks.cancel()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            with suppress(EngineError):
                await self._ask(keeper.stop.remote(), "stop", self._config.stop_timeout_s + 5.0)
            await asyncio.to_thread(ray.kill, keeper)

    async def _ask(self, answer: Any, what: str, limit_s: float = _ANSWER_S) -> Any:
        """Wait for an answer of the keeper. Raises ``EngineError`` when it is lost or its disk is full,
        ``EngineTimeout`` when it is late."""
        import ray

        future = asyncio.wrap_future(answer.future())
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError:
            raise EngineTimeout(f"{self._name} on the cluster did not {what} within {limit_s:g} s") from None
        except ray.exceptions.RayError as e:
            if isinstance(cause := getattr(e, "cause", None), Exception) and is_full(cause):
                raise EngineError(
                    f"{self._name} on the cluster could not {what}: the disk of its node is full; free its temporary"
                    " folder, or set TMPDIR for ray start"
                ) from None
            first = str(e).strip().splitlines() or [type(e).__name__]
            raise EngineError(f"{self._name} on the cluster is lost: {first[0]}") from None
