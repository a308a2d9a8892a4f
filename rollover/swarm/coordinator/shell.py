"""The shell around the coordinator: passes events and the time to it, and carries out the effects that it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from rollover.clock import Clock
from rollover.errors import CallDisplaced, EngineError
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.effects import (
    Changed,
    CheckLogprobs,
    Deliver,
    Effect,
    Fail,
    Send,
    SentAway,
    ServesAnew,
)
from rollover.swarm.coordinator.outlets import Outlets
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.trust import Blocklist
from rollover.swarm.wire.messages import FromCoordinator, FromWorker, Goodbye, Hello, ProtocolError, encode

logger = logging.getLogger(__name__)


Refusal = Literal["login", "protocol", "frame"]
"""The reason of a refusal: a token that is unknown or revoked, another protocol, a frame that breaks the protocol."""


class Connection(Protocol):
    """The sending side of one worker's connection."""

    def send(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


class Connections:
    """The connections of members, by lease; a message to a lease without a connection is not sent."""

    def __init__(self) -> None:
        self._open: dict[int, Connection] = {}

    def add(self, lease: int, connection: Connection) -> None:
        self._open[lease] = connection

    def forget(self, lease: int) -> None:
        self._open.pop(lease, None)

    def send(self, lease: int, message: FromCoordinator) -> None:
        connection = self._open.get(lease)
        if connection is None:
            return
        try:
            connection.send(encode(lease, message))
        except ProtocolError as e:
            logger.error("a message to the worker of lease %d cannot be sent: %s", lease, e)
            connection.close()
        if isinstance(message, Goodbye):
            self.forget(lease)
            connection.close()

    def say_goodbye(self, goodbye: Goodbye) -> None:
        """Send all members away."""
        for lease in list(self._open):
            self.send(lease, goodbye)


class Shell:
    """Takes the messages of workers from the gateway, and carries out what the coordinator makes of them.

    Args:
        board: shows members' changes of weights.
        blocklist: records who was sent away for good; without it, a restart of the run forgets them.
    """

    def __init__(self, coordinator: Coordinator, clock: Clock, board: StatusBoard, blocklist: Blocklist | None) -> None:
        self.coordinator, self.clock, self.blocklist = coordinator, clock, blocklist
        self._board = board
        self.connections, self.outlets = Connections(), Outlets()
        self.begin_check: Callable[[str, int], None] = lambda name, version: None
        """Checks the log-probs of a member under a version."""
        self.on_change: list[Callable[[], None]] = []
        """Called if a call that could not be placed may be placed now."""
        self.on_distrust: list[Callable[[str], None]] = []
        """Called with the name of each member that is sent away for good."""
        self.failure: Exception | None = None
        """A mistake in the code, after which leases might never end: everything raises it from then on."""

    def connected(self, name: str, hello: Hello, connection: Connection) -> int:
        """Return the lease under which the messages of this connection are then ``received``."""
        effects = self.coordinator.connected(name, hello, self.clock.now_s())
        lease = self.coordinator.last_lease
        self.connections.add(lease, connection)
        self.perform(effects)
        return lease

    def received(self, lease: int, message: FromWorker) -> None:
        self.perform(self.coordinator.received(lease, message, self.clock.now_s()))

    def fenced(self, message: FromWorker) -> None:
        """Count a message under a lease that is not its connection's, and ignore it."""
        self.coordinator.fenced(message)

    def disconnected(self, lease: int) -> None:
        self.connections.forget(lease)
        self.perform(self.coordinator.disconnected(lease, self.clock.now_s()))

    def refused(self, cause: Refusal) -> None:
        """Count a client, or a frame of a worker, that the gateway has refused."""
        self.coordinator.counters[f"refused_{cause}s"] += 1

    def perform(self, effects: Iterable[Effect]) -> None:
        has_changed = False
        for effect in effects:
            match effect:
                case Send(lease, message):
                    self.connections.send(lease, message)
                case Deliver(call_id, chunk):
                    self.outlets.put(call_id, chunk)
                case Fail(call_id, reason, is_displaced):
                    self.outlets.put(call_id, CallDisplaced(reason) if is_displaced else EngineError(reason))
                case CheckLogprobs(name, version):
                    self.begin_check(name, version)
                case SentAway(name):
                    self.block(effect)
                    for listener in self.on_distrust:
                        listener(name)
                case ServesAnew(name, serving):
                    self._board.changed(name, serving)
                case Changed(what, is_warning):
                    logger.log(logging.WARNING if is_warning else logging.INFO, "%s", what)
                    has_changed = True
        if has_changed:
            self.changed()

    def changed(self) -> None:
        """Notify those who may place calls now."""
        for listener in self.on_change:
            listener()

    def block(self, sent_away: SentAway) -> None:
        """Report who was sent away, and record it beyond the end of this process."""
        logger.warning("%s is sent away: %s", sent_away.member, sent_away.reason)
        if self.blocklist is not None:
            self.blocklist.remember(sent_away.member, sent_away.reason)

    def crash(self, error: Exception) -> None:
        """End all calls and refuse new ones with a mistake in the code, so that the run ends with it."""
        self.failure = error
        for call_id in self.outlets.ids:
            self.outlets.put(call_id, error)
        self.changed()
