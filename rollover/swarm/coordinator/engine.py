"""The trainer's side of a swarm as an engine: calls go to workers that have dialled in, weights are published for them.

::

    generate ──▶ coordinator ──Assign──▶ worker                    load ──▶ publication: blobs, signed manifest
       ▲             │                     │                                     │ Head
       └──chunks─────┴──────Decoded────────┘                       worker ◀──────┘ fetches, changes, says Serving

====================  ========================  ==============================================================
task                  waits for                 is unblocked by
====================  ========================  ==============================================================
``generate``          its next chunk            tokens; its member's lease ended; an abort
``abort``             the calls' ends           their last tokens; ``abort_timeout_s``, then they are cut off
upkeep                the next turn             time
gateway               connections, frames       workers
====================  ========================  ==============================================================

Invariants: as in the coordinator; a chunk reaches its caller once; in pull mode no chunk reaches a caller between
``pause`` and ``resume``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping

from rollover.clock import Clock
from rollover.engine.base import Capabilities, Chunk, EngineStats, FirstCall, GenerateRequest
from rollover.engine.ends import check_limits
from rollover.errors import EngineError, RolloverError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.checks import MemberChecks
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.outlets import Outlet
from rollover.swarm.coordinator.shell import Shell
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.status.pages.listener import AdminListener
from rollover.swarm.coordinator.trust import Blocklist
from rollover.swarm.coordinator.upkeep import Upkeep
from rollover.swarm.wire.messages import Goodbye, Head
from rollover.weights.base import WeightPath, WeightSource

logger = logging.getLogger(__name__)

Publish = Callable[[int, WeightSource], Head]
"""Given a version and its weights, writes blobs and a signed manifest and returns the new head; called in a thread."""


class SwarmEngine:
    """Implements ``Engine`` and ``WeightTarget``.

    Args:
        number_format: of the weights as they are published.
        check_source: raises ``EngineError`` for weights that do not fit the run's model.
        valid_tokens: returns the hashes of the tokens that are valid now, by worker; without it, all are.
        board: shows people the state of the swarm.
        blocklist: records who was sent away for good; without it, a restart of the run forgets them.
    """

    takes: WeightPath = "memory"

    def __init__(
        self,
        config: SwarmConfig,
        coordinator: Coordinator,
        publish: Publish,
        clock: Clock,
        *,
        number_format: str,
        check_source: Callable[[WeightSource], None] = lambda source: None,
        valid_tokens: Callable[[], Mapping[str, str]] | None = None,
        board: StatusBoard | None = None,
        blocklist: Blocklist | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._config, self._publish, self._clock = config, publish, clock
        self._number_format, self._check_source = number_format, check_source
        for name, blocked in (blocklist.listed() if blocklist is not None else {}).items():
            coordinator.block(name, blocked.reason)
        self.admin: AdminListener | None = None
        """Serves the live page; closed with the engine."""
        self.gateway: Gateway | None = None
        """Opened with the first publication, closed with the engine."""
        self.board = board or StatusBoard()
        self.shell = Shell(coordinator, clock, self.board, blocklist)
        self._outlets = self.shell.outlets
        self.placement = SwarmPlacement(self.shell, max_running=config.max_running)
        self.checks = MemberChecks(self, self.shell)
        self._upkeep = Upkeep(self.shell, board=self.board, url=lambda: self.url, valid_tokens=valid_tokens)
        self._is_started = self._is_closed = False

    def __repr__(self) -> str:
        members = self.coordinator.members.values()
        connected = [member.name for member in members if member.is_connected]
        if connected:
            return f"the swarm of {', '.join(connected)}"
        where = f": start workers with rollover worker --join {self.url}" if self.url else ""
        return (
            f"the swarm, which no worker has joined{where}" if not members else "the swarm, whose workers are all away"
        )

    @property
    def url(self) -> str:
        """Return the address that workers are to join."""
        return "" if self.gateway is None else self.gateway.url

    async def start(self) -> None:
        """Let workers dial in, and end leases in time."""
        if self._is_started:
            return
        self._is_started = True
        self._upkeep.start(self._config.lease_s)
        if self.gateway is not None:
            self.gateway.serve()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self.resume()
        self.shell.perform(self.coordinator.cut(self._outlets.ids))
        await self.checks.close()
        await self._upkeep.close()
        if self.gateway is not None:
            stopped = Goodbye(reason="the run was stopped; it may be resumed later", is_final=False)
            ended = Goodbye(reason="the run has ended", is_final=True, has_ended=True)
            self.shell.connections.say_goodbye(ended if self.placement.has_ended else stopped)
            await self.gateway.close()
            try:
                self._upkeep.write_status()
            except (RolloverError, OSError) as e:
                logger.warning("the last status of the swarm could not be written: %s", e)
        if self.admin is not None:
            await self.admin.close()

    @property
    def capabilities(self) -> Capabilities:
        """Report what the connected members can do together."""
        each = [m.ready for m in self.coordinator.members.values() if m.ready is not None]
        return Capabilities(
            max_running=self._config.max_running,
            max_context_tokens=self.coordinator.run.max_context_tokens,
            in_flight_update=True,
            seeded=bool(each) and all(ready.seeded for ready in each),
            number_format=self._number_format,
        )

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.coordinator.num_running,
            num_waiting=self.coordinator.num_waiting + self._outlets.num_held_back,
            policy_version=self.coordinator.head.version,
            decoded_tokens=self._outlets.num_decoded,
            reprefilled_tokens=self._outlets.num_reprefilled,
        )

    async def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member is lost; the caller resumes elsewhere.

        ``only``: the member that is to decode it, even when it has not passed the log-prob check.
        """
        outlet = self._open_call(request, only)
        try:
            while True:
                chunk = await outlet.take()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            if self._outlets.close(request):
                self.shell.perform(self.coordinator.cut([request.request_id]))

    def _open_call(self, request: GenerateRequest, only: str | None) -> Outlet:
        self._refuse_if_over("generate")
        check_limits(request, self.coordinator.run.max_context_tokens, "the swarm")
        outlet = self._outlets.open(request)
        if only is not None or not self._outlets.hold_back(request):
            self.shell.perform(self.coordinator.opened(request, only=only))
        return outlet

    async def abort(self, request_ids: Collection[str]) -> None:
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest: a call that its member does not hand
        over ends with what has arrived."""
        outlets = {call_id: outlet for call_id in request_ids if (outlet := self._outlets.get(call_id)) is not None}
        for outlet in outlets.values():
            outlet.flow()
        for request in self._outlets.taken_back(outlets.keys()):
            self.shell.perform(self.coordinator.opened(request))
            self.shell.perform(self.coordinator.cut([request.request_id]))
        self.shell.perform(self.coordinator.aborted(outlets.keys()))
        ends = [asyncio.ensure_future(outlet.ended.wait()) for outlet in outlets.values() if not outlet.ended.is_set()]
        if ends:
            try:
                await asyncio.wait(ends, timeout=self._config.abort_timeout_s)
            finally:
                for end in ends:
                    end.cancel()
            self.shell.perform(self.coordinator.cut(outlets.keys()))

    async def pause(self) -> None:
        """Stop, as far as callers can see, in pull mode; in push-pull mode members continue to decode."""
        self._refuse_if_over("pause")
        if self._config.mode == "pull":
            self._outlets.hold()

    async def load(self, version: int, source: WeightSource) -> None:
        """Publish weights. Each worker loads them in its own time; in pull mode it gets no call before."""
        self._refuse_if_over("load")
        if version < (current := self.coordinator.head.version):
            raise EngineError(f"the swarm: weights cannot go back from version {current} to {version}")
        source.manifest.require_full(version, self)
        self._check_source(source)
        if version > current or not self.coordinator.head.manifest:
            head = await asyncio.to_thread(self._publish, version, source)
            self.shell.perform(self.coordinator.published(head, self._clock.now_s()))
        await self.start()

    async def resume(self) -> None:
        for request in self._outlets.flow():
            self.shell.perform(self.coordinator.opened(request))

    def _refuse_if_over(self, what: str) -> None:
        if self.shell.failure is not None:
            raise self.shell.failure
        if self._is_closed:
            raise EngineError(f"the swarm is closed; {what} came too late")


_PROMISE_S = 60.0
"""Seconds for which a place is kept for an announced call."""


class SwarmPlacement:
    """Implements ``CallPlacement``.

    Args:
        max_running: most calls that all members decode at the same time.
    """

    def __init__(self, shell: Shell, *, max_running: int) -> None:
        self._shell, self._coordinator, self._max_running = shell, shell.coordinator, max_running
        self.has_ended = False
        """The run is over, not only this process of it."""

    def room(self) -> int:
        return min(self._max_running, self._coordinator.max_running)

    def takes_one(self, call: FirstCall) -> bool:
        if self._shell.failure is not None:
            raise self._shell.failure
        return not self._shell.outlets.stands_still and self._coordinator.takes_one(call)

    def reserve(self, sample_key: str, call: FirstCall) -> int | None:
        if self._shell.outlets.stands_still:
            return None
        return self._coordinator.reserve(sample_key, call, until_s=self._shell.clock.now_s() + _PROMISE_S)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._shell.on_change.append(listener)

    def on_distrust(self, listener: Callable[[str], None]) -> None:
        """See ``CallPlacement.on_distrust``. The members that ``MemberChecks.distrust`` sends away are left out, since
        its caller knows them. The members that an earlier process has sent away are reported: it may have been killed
        before it did the rest."""
        self._shell.on_distrust.append(listener)
        for name in self._shell.blocklist.listed() if self._shell.blocklist is not None else ():
            listener(name)

    def run_ended(self) -> None:
        self.has_ended = True
        for member in self._coordinator.members.values():
            member.num_held = 0  # what they hold is of no use any more

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        for sample_key, num_tokens in tokens:
            self._shell.perform(self._coordinator.journaled(sample_key, num_tokens))
