"""The shell around the coordinator: passes events and the time to it, and carries out the effects that it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rollover.clock import Clock
from rollover.errors import CallDisplaced, EngineError
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
from rollover.swarm.coordinator.outlets import Outlets
from rollover.swarm.coordinator.status.weight_log import WeightLog
from rollover.swarm.coordinator.transports.base import Connection, Refusal
from rollover.swarm.coordinator.trust.blocklist import Blocklist
from rollover.swarm.wire.messages import FromCoordinator, FromWorker, Goodbye, Hello, ProtocolError, encode

logger = logging.getLogger(__name__)


class Connections:
    """The connections of members, by lease; a message to a lease without a connection is not sent.

    Example: ``connections.send(3, Abort(call_ids=("a#1.",)))``
    """

    def __init__(self) -> None:
        self._open: dict[int, Connection] = {}

    def add(self, lease: int, connection: Connection) -> None:
        self._open[lease] = connection

    def forget(self, lease: int) -> None:
        """Record that the connection of a lease is gone."""
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

    def close(self, lease: int) -> None:
        """End the connection of a lease after everything that was sent."""
        if (connection := self._open.pop(lease, None)) is not None:
            connection.close()

    def say_goodbye(self, goodbye: Goodbye) -> None:
        """Send all members away; the owner of the connections closes them."""
        for lease in list(self._open):
            self.send(lease, goodbye)


class Shell:
    """Implements the gateway's ``Sessions``.

    Args:
        weight_log: records members' changes of weights.
        blocklist: records who was sent away for good; without it, a restart of the run forgets them.

    Example: ``shell.perform(coordinator.expire(clock.now_s()))`` sends a goodbye to each worker whose lease has ended.
    """

    def __init__(
        self, coordinator: Coordinator, clock: Clock, weight_log: WeightLog, blocklist: Blocklist | None
    ) -> None:
        self.coordinator, self.clock, self.blocklist = coordinator, clock, blocklist
        self._weight_log = weight_log
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
        effects = self.coordinator.connected(name, hello, self.clock.now_s())
        lease = self.coordinator.last_lease
        self.connections.add(lease, connection)
        self.perform(effects)
        return lease

    def received(self, lease: int, message: FromWorker) -> None:
        self.perform(self.coordinator.received(lease, message, self.clock.now_s()))

    def fenced(self, message: FromWorker) -> None:
        self.coordinator.fenced(message)

    def disconnected(self, lease: int) -> None:
        self.connections.forget(lease)
        self.perform(self.coordinator.disconnected(lease, self.clock.now_s()))

    def refused(self, cause: Refusal) -> None:
        self.coordinator.counters[f"refused_{cause}s"] += 1

    def perform(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in order."""
        has_changed = False
        for effect in effects:
            match effect:
                case Send(lease, message):
                    self.connections.send(lease, message)
                case Close(lease):
                    self.connections.close(lease)
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
                    self._weight_log.changed(name, serving)
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
