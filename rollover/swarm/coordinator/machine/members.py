"""The members of a swarm, as the coordinator knows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rollover.swarm.coordinator.machine.placing.rule import MemberFacts, pause_s
from rollover.swarm.wire.messages import PROTOCOL, Heartbeat, HeldCall, Hello, ProtocolError, Ready, Serving

_MOST_TOKENS_PER_S, _MOST_REPORTED = 1e6, 1e15
"""Highest speed of a call that is believed, and highest figure that a heartbeat may give."""
_LOOK_S = 1.0
"""Shortest time over which tokens that arrive say how fast a member is."""
_SLACK = 2.0
"""Factor by which the speed that a member reports may exceed that with which its tokens arrive: it does not count the
time that its engine stands still, and a message may be late."""
_KEPT = 0.7
"""Weight that a measurement of a member's speed keeps when the next one comes."""
_MAX_SAID = 4096


def brief(text: str) -> str:
    """Return what a worker has said, cut to 4,096 characters: a frame has room for millions, which would be kept,
    logged, and searched for secrets every time that the member is shown."""
    return text[:_MAX_SAID]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The run that a swarm works for."""

    run_id: str
    run_epoch: int
    """The number of this start of the run: 1 for the first."""
    vocab_size: int
    max_context_tokens: int
    returns_kept: bool = False
    """Its calls want the kept sets of their tokens."""
    returns_routes: bool = False
    """Its calls want the routes of their tokens."""


@dataclass(slots=True)
class SwarmMember:
    """One worker, from its first connection to the end of the run."""

    name: str
    lease: int = 0
    """Its current lease; 0 when it has none."""
    is_connected: bool = False
    heard_s: float = 0.0
    """Time at which it was last heard from."""
    ready: Ready | None = None
    """Capabilities of its engine, once it is open."""
    declared: Ready | None = None
    """The last that it has said of its engine, whatever has become of it since."""
    version: int | None = None
    """The version that its engine has confirmed."""
    checked_version: int | None = None
    """The version for which it has passed the log-prob check last."""
    served: dict[int, str] = field(default_factory=dict)
    """Versions it has confirmed, with the digest of each manifest: what its tokens may claim."""
    calls: set[str] = field(default_factory=set)
    last_heartbeat: int = 0
    """The highest number of a heartbeat of this connection."""
    reserved: dict[str, float] = field(default_factory=dict)
    """Sample keys that were promised a place, and until when."""
    held: dict[str, HeldCall] = field(default_factory=dict)
    """Calls that it offers to resume, by id."""
    has_lapsed: bool = False
    """Its last lease has ended without a word, and it has not been back."""
    is_late: bool = False
    """It had lost its lease when it came back: what it offers is late."""
    prepare_s: float | None = None
    """Time that it took to fetch weights, the last time."""
    pause_s: float | None = None
    """Time that its engine stood still for them."""
    wire_bytes: int = 0
    """Bytes that it fetched for them."""
    call_tokens_per_s: float | None = None
    _decoding: tuple[float, float] = (0.0, 0.0)
    """Tokens per second, and the calls that shared them, summed over its heartbeats with older ones for less."""
    _looked: tuple[float, Mapping[str, int]] = (0.0, MappingProxyType({}))
    """Time at which its calls were last looked at, and the positions that they had reached."""
    _shown: tuple[float, int] = (math.inf, 0)
    """Tokens per second with which each call grew from one look to the next, and all its tokens until then."""
    tokens_per_s: float = 0.0
    num_held: int = 0
    is_full: bool = False
    """It stands still until some of the tokens that it holds are acknowledged."""
    num_decoded: int = 0
    distrust: str = ""
    """Reason for which it gets no more calls."""
    is_revoked: bool = False
    """Its token was revoked; a worker with a new token of the same name may join."""
    last_error: str = ""
    """The reason for which it does less than it should, or was lost."""
    num_failures: int = 0
    """Calls that failed at it, one trial after the other, since it decoded a token."""
    failed_samples: set[str] = field(default_factory=set)
    """Keys of the samples of all calls that failed at it since it decoded a token."""
    is_set_aside: bool = False
    """It gets no calls, since one has failed."""
    set_aside_until_s: float = 0.0

    def refusal(self, hello: Hello) -> str:
        """Return why a worker that says this of itself is refused; empty when it is not."""
        if PROTOCOL not in hello.protocols:
            spoken = ", ".join(map(str, hello.protocols)) or "none"
            return (
                f"this run speaks version {PROTOCOL} of the swarm protocol, but the worker"
                f" ({brief(hello.software)}) speaks {spoken}: install the same version of Rollover on both"
                " sides"
            )
        return f"{self.name!r} is no longer trusted: {self.distrust}" if self.distrust else ""

    @property
    def num_running(self) -> int:
        """Return the number of calls that it has or was promised."""
        return len(self.calls) + len(self.reserved)

    def serves(self, *, checked: bool) -> int | None:
        """Return the version under which it may get calls now; ``checked``: only if the check has passed."""
        able = self.is_connected and self.ready is not None and not self.distrust
        return self.version if able and (not checked or self.checked_version == self.version) else None

    def loaded(self, serving: Serving) -> None:
        """Record how long new weights took to load; a message that repeats a version says nothing of that. Raises
        ``ProtocolError`` for what cannot be true."""
        if not all(0 <= figure < math.inf for figure in (serving.prepare_s, serving.pause_s, serving.wire_bytes)):
            raise ProtocolError(
                f"it reports that it fetched {serving.wire_bytes} bytes of weights in {serving.prepare_s:g} s and stood"
                f" still for {serving.pause_s:g} s, which is impossible"
            )
        if serving.prepare_s:
            self.prepare_s, self.pause_s, self.wire_bytes = serving.prepare_s, serving.pause_s, serving.wire_bytes

    def facts(self, *, checked: bool) -> MemberFacts | None:
        """Return the member as the placing rule sees it; ``None`` while it may get no calls."""
        if (version := self.serves(checked=checked)) is None or self.ready is None:
            return None
        return MemberFacts(
            version=version,
            num_running=self.num_running,
            max_running=0 if self.is_set_aside else 1 if self.num_failures else self.ready.max_running,
            tokens_per_s=self.call_tokens_per_s,
            prepare_s=self.prepare_s,
        )

    def failed_a_call(self, sample_key: str, reason: str, now_s: float) -> None:
        """Record that a call has failed here: it is set aside, each time for twice as long."""
        self.last_error = reason
        self.failed_samples.add(sample_key)
        if not self.is_set_aside:  # else the call was given to it before
            self.is_set_aside, self.set_aside_until_s = True, now_s + pause_s(self.num_failures)
            self.num_failures += 1

    def recovered(self) -> None:
        """Record that it decodes: it gets as many calls as before."""
        self.num_failures, self.is_set_aside = 0, False
        self.failed_samples.clear()
        self.forget_error()

    def forget_error(self) -> None:
        """Record that it does what it could not do, unless its calls fail."""
        if not self.num_failures:
            self.last_error = ""

    def beaten(self, beat: Heartbeat, positions: Mapping[str, int], now_s: float) -> None:
        """Record what a heartbeat says about the member itself. ``positions``: where its calls are.
        Raises ``ProtocolError`` for what cannot be true."""
        if not (0 <= beat.tokens_per_s <= _MOST_REPORTED and 0 <= beat.mean_running <= _MOST_REPORTED):
            raise ProtocolError(
                f"it reports a speed of {beat.tokens_per_s:g} tokens/s over {beat.mean_running:g} calls, which is"
                " impossible"
            )
        self._look(positions, now_s, is_first=not self.last_heartbeat)
        self.last_heartbeat = beat.number
        self.num_held, self.is_full = beat.num_held, beat.is_full
        self.is_set_aside = self.is_set_aside and now_s < self.set_aside_until_s
        self.measured(beat.tokens_per_s, beat.mean_running)

    def measured(self, tokens_per_s: float, mean_running: float) -> None:
        """Record what a heartbeat says about its speed: the tokens per second of all its calls, and how many
        calls shared them. A heartbeat of a time in which little was decoded counts for little."""
        self.tokens_per_s = tokens_per_s
        if mean_running > 0:
            believed = min(tokens_per_s, _MOST_TOKENS_PER_S * mean_running)
            self._decoding = (_KEPT * self._decoding[0] + believed, _KEPT * self._decoding[1] + mean_running)
        if self._decoding[1]:
            self.call_tokens_per_s = min(self._decoding[0] / self._decoding[1], _SLACK * self._shown[0]) or None

    def _look(self, positions: Mapping[str, int], now_s: float, *, is_first: bool) -> None:
        """Record how far its calls have come since the last look. Those that it had all the time show how fast it
        is, a token for each more or less; if there are none, tokens that have arrived show that it decodes."""
        since_s, before = self._looked
        if not is_first and now_s - since_s < _LOOK_S:
            return
        if not is_first and (both := positions.keys() & before.keys()):
            num_tokens = sum(positions[call_id] - before[call_id] + 1 for call_id in both)
            self._shown = num_tokens / (len(both) * (now_s - since_s)), self.num_decoded
        elif self.num_decoded > self._shown[1]:
            self._shown = math.inf, self.num_decoded
        self._looked = now_s, positions

    def found_slow(self, tokens_per_s: float) -> None:
        """Record that a call has shown it to be no faster than this."""
        if self.call_tokens_per_s is None or self.call_tokens_per_s > tokens_per_s:
            weight = self._decoding[1] or 1.0
            self._decoding, self.call_tokens_per_s = (tokens_per_s * weight, weight), tokens_per_s


COUNTERS = (
    "fenced",
    "late_tokens",
    "adopted_calls",
    "late_accepted",
    "expired_leases",
    "moved_calls",
    "out_of_order",
    "workers_sent_away",
    "refused_logins",
    "refused_protocols",
    "refused_frames",
)
"""The counts of all that the protocol absorbs; the metrics explain each."""
