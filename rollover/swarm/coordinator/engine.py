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

What it keeps true: everything of the coordinator's; a chunk reaches its caller once; in pull mode nothing reaches one
between ``pause`` and ``resume``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Mapping

from rollover.clock import Clock
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.logprob_check import LogprobCheck
from rollover.errors import CallDisplaced, EngineError, EngineMismatch, RolloverError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.connections import Connections
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import (
    Changed,
    CheckLogprobs,
    Close,
    Deliver,
    Effect,
    Fail,
    Send,
    SentAway,
    ServesAnew,
)
from rollover.swarm.coordinator.outlets import Outlet, Outlets
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.status.pages.listener import AdminListener
from rollover.swarm.coordinator.status.snapshot import swarm_status
from rollover.swarm.coordinator.status.weight_log import WeightLog
from rollover.swarm.coordinator.transports.base import Connection, Refusal, Transport
from rollover.swarm.coordinator.trust.checks import MemberChecks
from rollover.swarm.coordinator.trust.outcasts import Outcasts
from rollover.swarm.coordinator.upkeep import Upkeep
from rollover.swarm.wire.messages import FromWorker, Goodbye, Head, Hello
from rollover.weights.base import WeightSource

logger = logging.getLogger(__name__)

_PROMISE_S = 60.0
"""Seconds for which a place is kept for an announced call."""


Publish = Callable[[int, WeightSource], Head]
"""Given a version and its weights, writes blobs and a signed manifest and returns the new head; called in a thread."""


class SwarmEngine:
    """Implements ``Engine``, ``WeightTarget``, ``CallPlacement``, ``CheckedMembers``, ``ReportsMetrics``,
    ``WatchesSteps`` and a transport's ``Sessions``.

    Args:
        number_format: of the weights as they are published.
        check_source: raises ``EngineError`` for weights that do not fit the run's model.
        valid_names: returns the workers whose token is valid now; without it, all are.
        board: where the state of the swarm is shown to people.
        weight_log: where publications, and members' changes to them, are recorded.
        outcasts: where it is written down who was sent away for good; without, a restart of the run forgets them.

    Example: ``room()`` is 0 before the first worker has joined, 16 when one with room for 16 has.
    """

    needs_folder = False

    def __init__(
        self,
        config: SwarmConfig,
        coordinator: Coordinator,
        publish: Publish,
        clock: Clock,
        *,
        number_format: str,
        check_source: Callable[[WeightSource], None] = lambda source: None,
        valid_names: Callable[[], Container[str]] | None = None,
        board: StatusBoard | None = None,
        weight_log: WeightLog | None = None,
        outcasts: Outcasts | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._config = config
        self._publish = publish
        self._weight_log = weight_log or WeightLog()
        self._board = board
        self._outcasts = outcasts
        for name, outcast in (outcasts.listed() if outcasts is not None else {}).items():
            coordinator.outcast(name, outcast.reason)
        self.admin: AdminListener | None = None
        """Serves the live page; closed with the engine."""
        self.gateway: Transport | None = None
        """Opened with the first publication, closed with the engine."""
        self._clock = clock
        self._number_format = number_format
        self._check_source = check_source
        self._connections = Connections()
        self._outlets = Outlets()
        self._checks = MemberChecks(self, coordinator, self._perform, clock)
        self._listeners: list[Callable[[], None]] = []
        self._distrust_listeners: list[Callable[[str], None]] = []
        self._upkeep = Upkeep(
            coordinator,
            clock,
            perform=self._perform,
            proceed=self._tell_listeners,  # time alone may change who should get a call
            write_status=self._write_status,
            crashed=self._crashed,
            valid_names=valid_names,
            outcasts=outcasts,
        )
        self._is_started = False
        self._is_closed = False
        self._failure: Exception | None = None
        """A mistake in the code, after which leases might never end: everything raises it from then on."""
        self._has_ended = False
        """The run is over, not only this process of it."""

    def __repr__(self) -> str:
        members = self.coordinator.members.values()
        connected = [member.name for member in members if member.is_connected]
        if connected:
            return f"the swarm of {', '.join(connected)}"
        where = f": start workers with rollover worker --join {self.gateway.url}" if self.gateway is not None else ""
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
            await self.gateway.serve()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._flow()
        self._perform(self.coordinator.cut(self._outlets.ids))
        await self._checks.close()
        await self._upkeep.close()
        if self.gateway is not None:
            stopped = Goodbye(reason="the run was stopped; it may be resumed later", is_final=False)
            ended = Goodbye(reason="the run has ended", is_final=True, has_ended=True)
            self._connections.say_goodbye(ended if self._has_ended else stopped)
            await self.gateway.close()
            try:
                self._write_status()
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

    def take_metrics(self) -> dict[str, float]:
        """See ``ReportsMetrics``."""
        return self._weight_log.take_metrics()

    # -- Engine -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member is lost; the caller resumes elsewhere.

        ``only``: the member that is to decode it, even when it has not passed the log-prob check.
        """
        outlet = self._open_call(request, only)
        try:
            async for chunk in outlet:
                yield chunk
        finally:
            if self._outlets.close(request):
                self._perform(self.coordinator.cut([request.request_id]))

    def _open_call(self, request: GenerateRequest, only: str | None) -> Outlet:
        call_id, limit = request.request_id, self.coordinator.run.max_context_tokens
        self._refuse_if_over("generate")
        if len(request.response_ids) >= request.params.max_new_tokens:
            raise EngineError(
                f"{call_id} already has {len(request.response_ids)} tokens, of at most {request.params.max_new_tokens}"
            )
        if (needed := len(request.prompt_ids) + request.params.max_new_tokens) > limit:
            raise EngineError(f"{call_id} needs a context of {needed} tokens, but the model's holds {limit}")
        outlet = self._outlets.open(request)
        if only is not None or not self._outlets.hold_back(request):
            self._perform(self.coordinator.opened(request, only=only))
        return outlet

    async def abort(self, request_ids: Collection[str]) -> None:
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest: a call that its member does not hand
        over ends with what has arrived."""
        outlets = {call_id: outlet for call_id in request_ids if (outlet := self._outlets.get(call_id)) is not None}
        for outlet in outlets.values():
            outlet.flow()
        for request in self._outlets.taken_back(outlets.keys()):
            self._perform(self.coordinator.opened(request))
            self._perform(self.coordinator.cut([request.request_id]))
        self._perform(self.coordinator.aborted(outlets.keys()))
        ends = [asyncio.ensure_future(outlet.ended.wait()) for outlet in outlets.values() if not outlet.ended.is_set()]
        if ends:
            try:
                await asyncio.wait(ends, timeout=self._config.abort_timeout_s)
            finally:
                for end in ends:
                    end.cancel()
            self._perform(self.coordinator.cut(outlets.keys()))

    # -- WeightTarget -----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop, as far as callers can see, in pull mode. In push-pull mode members continue to decode: that is the
        mode."""
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
            self._perform(self.coordinator.published(head, self._clock.now_s()))
        await self.start()

    async def resume(self) -> None:
        self._flow()

    def _refuse_if_over(self, what: str) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise EngineError(f"the swarm is closed; {what} came too late")

    def _flow(self) -> None:
        for request in self._outlets.flow():
            self._perform(self.coordinator.opened(request))

    # -- CallPlacement --------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Return how many calls the members decode at the same time, all together."""
        return min(self._config.max_running, self.coordinator.max_running)

    def takes_one(
        self, least_version: int, max_new_tokens: int, *, num_waiting: int = 0, max_staleness: int | None = None
    ) -> bool:
        """See ``CallPlacement.takes_one``."""
        if self._failure is not None:
            raise self._failure
        if self._outlets.stands_still:
            return False
        return self.coordinator.takes_one(
            least_version, max_new_tokens, num_waiting=num_waiting, max_staleness=max_staleness
        )

    def reserve(
        self,
        sample_key: str,
        least_version: int,
        max_new_tokens: int,
        *,
        num_waiting: int = 0,
        max_staleness: int | None = None,
    ) -> int | None:
        """See ``CallPlacement.reserve``."""
        if self._outlets.stands_still:
            return None
        until_s = self._clock.now_s() + _PROMISE_S
        return self.coordinator.reserve(
            sample_key,
            least_version,
            max_new_tokens,
            num_waiting=num_waiting,
            max_staleness=max_staleness,
            until_s=until_s,
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever a call that could not be placed may be now."""
        self._listeners.append(listener)

    def on_distrust(self, listener: Callable[[str], None]) -> None:
        """See ``CallPlacement.on_distrust``. Members that ``distrust`` sends away are not among them: its caller
        knows. Those that an earlier process has sent away are, since it may have been killed before it did the rest."""
        self._distrust_listeners.append(listener)
        for name in self._outcasts.listed() if self._outcasts is not None else ():
            listener(name)

    def run_ended(self) -> None:
        """Have ``close`` say to the workers that they need not come back."""
        self._has_ended = True
        for member in self.coordinator.members.values():
            member.num_held = 0  # what they hold is of no use to anybody

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Record that the caller has written down the first ``num_tokens`` tokens of each of these samples, given by
        sample key."""
        for sample_key, num_tokens in tokens:
            self._perform(self.coordinator.journaled(sample_key, num_tokens))

    # -- Sessions ---------------------------------------------------------------------------------------------

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        effects = self.coordinator.connected(name, hello, self._clock.now_s())
        lease = self.coordinator.last_lease
        self._connections.add(lease, connection)
        self._perform(effects)
        return lease

    def received(self, lease: int, message: FromWorker) -> None:
        self._perform(self.coordinator.received(lease, message, self._clock.now_s()))

    def fenced(self, message: FromWorker) -> None:
        self.coordinator.counters.refuse(message)

    def disconnected(self, lease: int) -> None:
        self._connections.forget(lease)
        self._perform(self.coordinator.disconnected(lease, self._clock.now_s()))

    def refused(self, cause: Refusal) -> None:
        self.coordinator.counters.turned_away[cause] += 1

    def step_ended(self, step: int, metrics: Mapping[str, float]) -> None:
        """See ``WatchesSteps``: show the user how the run is doing."""
        if self._board is not None:
            self._board.step_ended(step, metrics)

    # -- upkeep -----------------------------------------------------------------------------------------------

    def _write_status(self) -> None:
        if self._board is not None:
            self._board.write(swarm_status(self.coordinator, self.url))

    def _crashed(self, error: Exception) -> None:
        """End all calls and refuse new ones with a mistake in the code, so that the run ends with it."""
        self._failure = error
        for call_id in self._outlets.ids:
            self._outlets.fail(call_id, error)
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    # -- which members sample what they say -------------------------------------------------------------------

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """Give a member calls under a version only once it has passed the log-prob check, from now on."""
        self._checks.check_with(check)

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the members that wait for it, now that there is something to compare them with.

        Members are checked when they confirm a version, each in its own time, and those that fail are sent away then:
        this does not wait for them and finds nothing by itself.
        """
        self._checks.begin_all()
        return {}

    def distrust(self, name: str, reason: str) -> None:
        """Send a member away for good. Raises ``EngineMismatch`` when no other is left."""
        effects = self.coordinator.distrust(name, reason)
        for effect in effects:
            if isinstance(effect, SentAway):
                self._remember(effect)
            else:
                self._perform([effect])
        members = self.coordinator.members.values()
        if members and all(member.distrust for member in members):
            reasons = "; ".join(f"{member.name}: {member.distrust}" for member in members)
            raise EngineMismatch(f"no worker is left whose log-probs can be trusted: {reasons}")

    def _remember(self, sent_away: SentAway) -> None:
        """Remember beyond the end of this process who was sent away."""
        if self._outcasts is not None:
            self._outcasts.remember(sent_away.member, sent_away.reason)

    # -- effects ----------------------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect]) -> None:
        changed = False
        for effect in effects:
            match effect:
                case Send(lease, message):
                    self._connections.send(lease, message)
                case Close(lease):
                    self._connections.close(lease)
                case Deliver():
                    self._outlets.deliver(effect)
                case Fail(call_id, reason, is_displaced):
                    self._outlets.fail(call_id, CallDisplaced(reason) if is_displaced else EngineError(reason))
                case CheckLogprobs(name, version):
                    self._checks.begin(name, version)
                case SentAway(name, reason):
                    logger.warning("%s is sent away: %s", name, reason)
                    self._remember(effect)
                    for tell in self._distrust_listeners:
                        tell(name)
                case ServesAnew(name, serving):
                    self._weight_log.changed(name, serving)
                case Changed(what, is_warning):
                    logger.log(logging.WARNING if is_warning else logging.INFO, "%s", what)
                    changed = True
        if changed:
            self._tell_listeners()
