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
``_keep``             the next end of a lease   time
gateway               connections, frames       workers
====================  ========================  ==============================================================

What it keeps true: everything of the coordinator's; a chunk reaches its caller once; in pull mode nothing reaches one
between ``pause`` and ``resume``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import Any

from rollover.clock import Clock
from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.engine.logprob_check import LogprobCheck
from rollover.errors import EngineError, EngineMismatch
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.coordinator import Coordinator
from rollover.swarm.coordinator.effects import Changed, CheckLogprobs, Close, Deliver, Effect, Fail, Send
from rollover.swarm.coordinator.gateway import Connection, Gateway
from rollover.swarm.coordinator.status import StatusFile, swarm_status
from rollover.swarm.wire.messages import FromWorker, Goodbye, Head, Hello, ProtocolError, encode
from rollover.types import FinishReason
from rollover.weights.base import WeightSource

logger = logging.getLogger(__name__)

_PROMISE_S = 60.0
"""How long a place is kept for a call that was announced."""


Publish = Callable[[int, WeightSource], Head]
"""Given a version and its weights, writes blobs and a signed manifest and returns the new head; called in a thread."""


class SwarmEngine:
    """Implements ``Engine``, ``WeightTarget``, ``CallPlacement``, ``CheckedMembers`` and the gateway's ``Sessions``.

    Args:
        number_format: of the weights as they are published.
        check_source: raises ``EngineError`` for weights that do not fit the run's model.
        is_member: says whether the token of a worker, by name, is still valid.
        status: where the state of the swarm is written for people.

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
        is_member: Callable[[str], bool] = lambda name: True,
        status: StatusFile | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._config = config
        self._publish = publish
        self._is_member = is_member
        self._status = status
        self.gateway: Gateway | None = None
        """Opened with the first publication, closed with the engine."""
        self._clock = clock
        self._number_format = number_format
        self._check_source = check_source
        self._connections: dict[int, Connection] = {}
        self._outlets: dict[str, _Outlet] = {}
        self._used_ids: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._logprob_check: LogprobCheck | None = None
        self._checking: dict[str, asyncio.Task[None]] = {}
        self._held_back: list[GenerateRequest] | None = None
        """Calls that were opened while the engine stands still; ``None`` while it goes on."""
        self._num_decoded = 0
        self._num_reprefilled = 0
        self._expiring: asyncio.Task[None] | None = None
        self._is_closed = False

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
        """The address that workers are to join."""
        return "" if self.gateway is None else self.gateway.url

    async def start(self) -> None:
        """Let workers dial in, and end leases in time."""
        if self._expiring is None:
            self._expiring = asyncio.create_task(self._keep())
            if self.gateway is not None:
                await self.gateway.serve()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._flow()
        self._perform(self.coordinator.cut(list(self._outlets)))
        tasks = [task for task in (self._expiring, *self._checking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.gateway is not None:
            for lease in list(self._connections):
                self._send(lease, Goodbye(reason="the run has ended or was stopped", is_final=False))
            await self.gateway.close()

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
        held_back = 0 if self._held_back is None else len(self._held_back)
        return EngineStats(
            num_running=self.coordinator.num_running,
            num_waiting=self.coordinator.num_waiting + held_back,
            policy_version=self.coordinator.head.version,
            decoded_tokens=self._num_decoded,
            reprefilled_tokens=self._num_reprefilled,
        )

    # -- Engine -----------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]:
        """See ``Engine.generate``. Raises ``EngineError`` when the member is lost; the caller resumes elsewhere.

        ``only``: the member that is to decode it, also when it has not passed the log-prob check.
        """
        outlet = self._open_call(request, only)
        try:
            while True:
                item = await outlet.queue.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._outlets.pop(request.request_id, None) is not None and not outlet.is_over:
                self._held_back = self._held_back and [r for r in self._held_back if r is not request]
                self._perform(self.coordinator.cut([request.request_id]))

    def _open_call(self, request: GenerateRequest, only: str | None) -> _Outlet:
        call_id, limit = request.request_id, self.coordinator.run.max_context_tokens
        if self._is_closed:
            raise EngineError("the swarm is closed; generate came too late")
        if call_id in self._used_ids:
            raise EngineError(f"request id {call_id!r} was used before; each generation call needs its own")
        if len(request.response_ids) >= request.params.max_new_tokens:
            raise EngineError(f"{call_id} has {len(request.response_ids)} tokens and may have no more")
        if (needed := len(request.prompt_ids) + request.params.max_new_tokens) > limit:
            raise EngineError(f"{call_id} needs a context of {needed} tokens, the model's holds {limit}")
        self._used_ids.add(call_id)
        outlet = self._outlets[call_id] = _Outlet(self._came_out)
        if self._held_back is None or only is not None:
            self._perform(self.coordinator.opened(request, only=only))
        else:
            self._held_back.append(request)
        return outlet

    async def abort(self, request_ids: Collection[str]) -> None:
        """See ``Engine.abort``. Returns after ``abort_timeout_s`` at the latest: a call that its member does not hand
        over ends with what has arrived."""
        ids = [call_id for call_id in request_ids if call_id in self._outlets]
        outlets = [self._outlets[call_id] for call_id in ids]
        for outlet in outlets:
            outlet.flow()
        if self._held_back is not None:
            early = [request for request in self._held_back if request.request_id in ids]
            self._held_back = [request for request in self._held_back if request.request_id not in ids]
            for request in early:
                self._perform(self.coordinator.opened(request))
                self._perform(self.coordinator.cut([request.request_id]))
        self._perform(self.coordinator.aborted(ids))
        ends = [asyncio.ensure_future(outlet.ended.wait()) for outlet in outlets if not outlet.is_over]
        if ends:
            try:
                await asyncio.wait(ends, timeout=self._config.abort_timeout_s)
            finally:
                for end in ends:
                    end.cancel()
            self._perform(self.coordinator.cut(ids))

    # -- WeightTarget -----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stand still, as far as callers can see, in pull mode. In push-pull mode members decode on: that is the
        mode."""
        if self._is_closed:
            raise EngineError("the swarm is closed; pause came too late")
        if self._config.mode == "pull" and self._held_back is None:
            self._held_back = []
            for outlet in self._outlets.values():
                outlet.hold()

    async def load(self, version: int, source: WeightSource) -> None:
        """Publish weights. Workers load them each in its own time; in pull mode they get no call before."""
        if self._is_closed:
            raise EngineError("the swarm is closed; load came too late")
        if version < (current := self.coordinator.head.version):
            raise EngineError(f"the swarm: weights cannot go back from version {current} to {version}")
        source.manifest.require_full(version, self)
        self._check_source(source)
        if version > current or not self.coordinator.head.manifest:
            head = await asyncio.to_thread(self._publish, version, source)
            self._perform(self.coordinator.published(head))
        await self.start()

    async def resume(self) -> None:
        self._flow()

    def _flow(self) -> None:
        held_back, self._held_back = self._held_back, None
        for outlet in self._outlets.values():
            outlet.flow()
        for request in held_back or ():
            self._perform(self.coordinator.opened(request))

    # -- CallPlacement --------------------------------------------------------------------------------------------

    def room(self) -> int:
        """Return how many calls the members decode at the same time, all together."""
        return min(self._config.max_running, self.coordinator.max_running)

    def reserve(self, sample_key: str, least_version: int, max_new_tokens: int, *, num_waiting: int = 0) -> int | None:
        """See ``CallPlacement.reserve``."""
        if self._held_back is not None:
            return None
        until_s = self._clock.now_s() + _PROMISE_S
        return self.coordinator.reserve(
            sample_key, least_version, max_new_tokens, num_waiting=num_waiting, until_s=until_s
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever a call that could not be placed may be now."""
        self._listeners.append(listener)

    def journaled(self, tokens: Iterable[tuple[str, int]]) -> None:
        """The caller has written down the first so many tokens of these samples, by sample key."""
        for sample_key, num_tokens in tokens:
            self._perform(self.coordinator.journaled(sample_key, num_tokens))

    # -- Sessions ---------------------------------------------------------------------------------------------

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        effects = self.coordinator.connected(name, hello, self._clock.now_s())
        lease = self.coordinator.last_lease
        self._connections[lease] = connection
        self._perform(effects)
        return lease

    def received(self, lease: int, message: FromWorker) -> None:
        self._perform(self.coordinator.received(lease, message, self._clock.now_s()))

    def disconnected(self, lease: int) -> None:
        self._connections.pop(lease, None)
        self._perform(self.coordinator.disconnected(lease, self._clock.now_s()))

    async def _keep(self) -> None:
        """End leases in time, send away those whose token was revoked, and say how things are."""
        while True:
            self._perform(self.coordinator.expire(self._clock.now_s()))
            for listener in self._listeners:  # time alone may change who should get a call
                listener()
            for name, member in self.coordinator.members.items():
                if member.is_connected and not self._is_member(name):
                    self._perform(self.coordinator.distrust(name, "its token was revoked"))
            if self._status is not None:
                self._status.write(swarm_status(self.coordinator, self.url))
            await self._clock.sleep(min(2.0, self._config.lease_s / 4))

    # -- which members sample what they say -------------------------------------------------------------------

    def check_logprobs_with(self, check: LogprobCheck) -> None:
        """From now on a member gets calls under a version only once it has passed the log-prob check."""
        self._logprob_check = check

    async def check_logprobs(self, *, strict: bool = False) -> dict[str, EngineError]:
        """Check the members that wait for it, now that there is something to compare them with.

        Members are checked when they confirm a version, each in its own time, and those that fail are sent away then:
        this does not wait for them and finds nothing by itself.
        """
        for name, member in self.coordinator.members.items():
            if member.version is not None and member.checked_version != member.version:
                self._check(name, member.version)
        return {}

    def distrust(self, name: str, reason: str) -> None:
        """Send a member away for good. Raises ``EngineMismatch`` when no other is left."""
        self._perform(self.coordinator.distrust(name, reason))
        members = self.coordinator.members.values()
        if members and all(member.distrust for member in members):
            reasons = "; ".join(f"{member.name}: {member.distrust}" for member in members)
            raise EngineMismatch(f"no worker is left whose log-probs can be trusted: {reasons}")

    def _check(self, name: str, version: int) -> None:
        if self._logprob_check is None:
            return  # there will be one: ``check_logprobs`` begins then
        if (running := self._checking.pop(name, None)) is not None:
            running.cancel()
        self._checking[name] = asyncio.create_task(self._check_member(name, version))

    async def _check_member(self, name: str, version: int) -> None:
        assert self._logprob_check is not None
        try:
            await self._logprob_check(_OneMember(self, name), version)
        except EngineMismatch as e:
            logger.warning("%s is sent away: %s", name, e)
            self._perform(self.coordinator.distrust(name, str(e)))
        except EngineError as e:  # it was lost, or nothing is known yet to compare it with
            self.coordinator.members[name].last_error = str(e)
        else:
            self._perform(self.coordinator.checked(name, version))

    # -- effects ----------------------------------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect]) -> None:
        changed = False
        for effect in effects:
            match effect:
                case Send(lease, message):
                    self._send(lease, message)
                case Close(lease):
                    if (connection := self._connections.pop(lease, None)) is not None:
                        connection.close()
                case Deliver():
                    self._deliver(effect)
                case Fail(call_id, reason):
                    if (outlet := self._outlets.get(call_id)) is not None:
                        outlet.put(EngineError(reason))
                case CheckLogprobs(name, version):
                    self._check(name, version)
                case Changed(what):
                    logger.info("%s", what)
                    changed = True
        if changed:
            for listener in self._listeners:
                listener()

    def _send(self, lease: int, message: Any) -> None:
        connection = self._connections.get(lease)
        if connection is None:
            return
        try:
            connection.send(encode(lease, message))
        except ProtocolError as e:
            logger.error("a message to the worker of lease %d cannot be sent: %s", lease, e)
            connection.close()

    def _came_out(self, chunk: Chunk) -> None:
        self._num_decoded += len(chunk.token_ids)
        self._num_reprefilled += chunk.num_prefilled_tokens

    def _deliver(self, effect: Deliver) -> None:
        piece = effect.piece
        if (outlet := self._outlets.get(effect.call_id)) is not None:
            outlet.put(
                Chunk(
                    token_ids=piece.token_ids,
                    logprobs=piece.logprobs,
                    policy_version=piece.version,
                    kv_version=piece.kv_version,
                    finish_reason=piece.finish_reason,
                    num_prefilled_tokens=piece.num_prefilled_tokens,
                    engine=effect.member,
                )
            )


class _OneMember:
    """The swarm as an engine with one member, for the log-prob check."""

    def __init__(self, swarm: SwarmEngine, name: str) -> None:
        self._swarm = swarm
        self._name = name
        self.capabilities = swarm.capabilities
        self.stats, self.abort = swarm.stats, swarm.abort

    def __repr__(self) -> str:
        return self._name

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._swarm.generate(request, only=self._name)

    async def close(self) -> None:
        """Nothing was opened."""


class _Outlet:
    """The chunks that a caller has yet to take of its call."""

    def __init__(self, came_out: Callable[[Chunk], None]) -> None:
        self.queue: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()
        self._came_out = came_out
        self.ended = asyncio.Event()
        self.is_over = False
        self._held: list[Chunk | EngineError] | None = None

    def put(self, item: Chunk | EngineError) -> None:
        if isinstance(item, EngineError) or item.finish_reason is FinishReason.ABORT:
            self.flow()
        if self._held is not None:
            self._held.append(item)
            return
        self.queue.put_nowait(item)
        if isinstance(item, Chunk):
            self._came_out(item)
        if isinstance(item, EngineError) or item.finish_reason is not None:
            self.is_over = True
            self.ended.set()

    def hold(self) -> None:
        self._held = self._held or []

    def flow(self) -> None:
        held, self._held = self._held, None
        for item in held or ():
            self.put(item)
