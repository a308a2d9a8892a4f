"""A decoding replica under virtual time: all running samples advance together, one token per iteration.

Invariants: a call that is not stopped decodes exactly as many tokens as requested; time only moves forward; the running
samples' caches fit into the capacity, unless a single one exceeds it.

Progress is fluid between events: ``iterations`` grows at the rate of the current batch, and a call that joins takes
part from the next whole iteration.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rollover.sim.scenario import ReplicaModel
from rollover.types import SampleId

_EPSILON = 1e-6
"""Tolerance in iterations, far below one token."""


@dataclass(slots=True)
class Call:
    """One generation call: a sample decodes until it ends, reaches its limit or is aborted.

    Example: ``Call(sample_id=SampleId(7, 2), prompt=7, prompt_tokens=150, response_tokens=300, num_tokens=212,
    is_whole=True, start_s=4.0, policy_version=5)`` resumes a sample after 300 tokens and ends it with 512.
    """

    sample_id: SampleId
    prompt: int
    """Number of the prompt, shared by siblings."""
    prompt_tokens: int
    response_tokens: int
    """Number of response tokens when the call began, with those that an environment has answered."""
    num_tokens: int
    """Number of tokens to decode until it ends."""
    is_whole: bool
    """True if the response ends with this call, and its cache is not needed any more."""
    start_s: float
    policy_version: int
    kv_version: int = 0
    num_prefilled_tokens: int = 0
    """Number of response tokens whose cache was recomputed."""
    is_turn: bool = False
    """True if a turn of an episode ends with this call."""
    num_reported: int = 0
    """Number of tokens that left in earlier segments of this call."""
    num_decoded: int = 0
    """Number of tokens of this call decoded before ``joined_at``."""
    joined_at: int = 0
    """Iteration at which it last began to decode."""
    ends_at: int = -1
    """Iteration at which it ends; -1 while it does not decode."""

    @property
    def context_tokens(self) -> int:
        """Return the number of cached tokens once ``num_decoded`` are decoded."""
        return self.prompt_tokens + self.response_tokens + self.num_decoded


class Replica:
    """One replica; ``model`` says how fast it is."""

    def __init__(self, model: ReplicaModel, index: int = 0) -> None:
        self.model = model
        self.index = index
        self._is_bounded = model.kv_tokens < math.inf
        self._capacity = model.max_running if model.max_running < 2**31 else model.b0
        """Number of samples by which loads are divided when replicas are compared."""
        self.iterations = 0.0
        self.prefilled_tokens = 0
        self.num_preempted = 0
        self.sample_s = 0.0
        """Integral of the number of running samples over time."""
        self.calls: dict[SampleId, Call] = {}
        """Running and queued."""
        self._now_s = 0.0
        self._stall_s = 0.0
        self._prefilled_at_s = -1.0
        """Time of the last prefill."""
        self._running: dict[SampleId, Call] = {}
        self._queue: deque[Call] = deque()
        """Calls that wait for room."""
        self._ends: list[tuple[int, int, Call]] = []
        self._num_pushed = 0
        self._base_tokens = 0.0
        """Cache of the running samples at iteration 0, if they had always run."""
        self._kept: OrderedDict[SampleId, tuple[int, int]] = OrderedDict()
        """Caches of parked samples, least recently used first: tokens, and the oldest version in them."""
        self._kept_tokens = 0
        self._siblings: Counter[int] = Counter()
        """Calls by prompt: it is prefilled for the first of them."""

    # -- time ------------------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Decode up to ``now_s``."""
        elapsed_s = now_s - self._now_s
        if elapsed_s <= 0:
            return
        self._now_s = now_s
        num_running = len(self._running)
        self.sample_s += num_running * elapsed_s
        stalled_s = min(self._stall_s, elapsed_s)
        self._stall_s -= stalled_s
        if num_running:
            self.iterations += (elapsed_s - stalled_s) / self.model.iteration_s(num_running)

    def stall(self, seconds: float) -> None:
        self._stall_s += seconds

    def next_s(self) -> float:
        """Return the time of the next event here that needs attention."""
        if not self._running:
            return math.inf
        ends = self._ends
        while ends[0][2].ends_at != ends[0][0]:  # it was preempted since
            heapq.heappop(ends)
        until = min(ends[0][0], self._full_at())
        ahead = max(0.0, until - self.iterations)
        return self._now_s + self._stall_s + ahead * self.model.iteration_s(len(self._running))

    def _full_at(self) -> float:
        """Return the iteration at which the cache is full."""
        if not self._is_bounded or (len(self._running) == 1 and not self._kept):
            return math.inf
        return (self.model.kv_tokens - self._kept_tokens - self._base_tokens) / len(self._running)

    def finished(self) -> list[Call]:
        """Remove and return the calls that have decoded all requested tokens. Makes room first if the cache is full."""
        done: list[Call] = []
        ends = self._ends
        while ends and ends[0][0] <= self.iterations + _EPSILON:
            end, _, call = heapq.heappop(ends)
            if call.ends_at == end:
                self._leave(call, call.num_tokens)
                del self.calls[call.sample_id]
                if not call.is_whole:
                    self._keep(call)
                done.append(call)
        while self._is_bounded and self._running and self._full_at() <= self.iterations + _EPSILON:
            self._make_room()
        if self._queue:
            self._admit()
        return done

    # -- calls -----------------------------------------------------------------------------------------------

    @property
    def occupancy(self) -> float:
        return len(self.calls) / self._capacity

    def can_resume(self, sample_id: SampleId) -> bool:
        """Return whether the sample's cache is still here, and a place for it."""
        return sample_id in self._kept and len(self.calls) < self.model.max_running

    def add(self, call: Call) -> None:
        self.calls[call.sample_id] = call
        self._queue.append(call)
        self._admit()

    def stop(self) -> list[Call]:
        """Stop all calls at the last whole token. Their caches are kept as long as there is room."""
        stopped = list(self.calls.values())
        for call in self._running.values():
            call.num_decoded = self.num_decoded(call)
            call.ends_at = -1
            self._keep(call)
        for place in (self.calls, self._running, self._queue, self._ends, self._siblings):
            place.clear()
        self._base_tokens = 0.0
        while self._kept_tokens > self.model.kv_tokens:
            self._forget(next(iter(self._kept)))
        return stopped

    def num_decoded(self, call: Call) -> int:
        """Return the number of tokens that the call has decoded so far."""
        if call.ends_at < 0:
            return call.num_decoded
        since = math.floor(self.iterations + _EPSILON) - call.joined_at
        return min(call.num_tokens, call.num_decoded + max(0, since))

    def progress(self) -> Iterator[tuple[Call, int]]:
        """Yield all calls with their tokens so far."""
        iterations = math.floor(self.iterations + _EPSILON)
        for call in self.calls.values():
            if call.ends_at >= iterations > call.joined_at:  # most: decoding, and not about to end
                yield call, call.num_decoded + iterations - call.joined_at
            else:
                yield call, self.num_decoded(call)

    def recompute(self, policy_version: int) -> None:
        """Drop every cache for new weights; running samples have theirs computed again and stay."""
        self._kept.clear()
        self._kept_tokens = 0
        for call in self._running.values():
            response = call.response_tokens + self.num_decoded(call)
            call.num_prefilled_tokens += response
            call.kv_version = policy_version
            self.prefill(response)
        self.prefill(sum({c.prompt: c.prompt_tokens for c in self._running.values()}.values()))

    def prefill(self, num_tokens: int) -> None:
        if num_tokens and self._prefilled_at_s != self._now_s:
            self._prefilled_at_s = self._now_s
            self._stall_s += self.model.prefill_call_s
        self.prefilled_tokens += num_tokens
        self._stall_s += num_tokens / self.model.prefill_tokens_per_s

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.model.max_running:
            call = self._queue[0]
            needed = 0 if call.sample_id in self._kept else call.context_tokens
            if self._is_bounded and self._running and self._used() + needed + len(self._running) > self.model.kv_tokens:
                if not self._kept:
                    return
                self._forget(next(iter(self._kept)))
                continue
            self._queue.popleft()
            self._prefill_for(call)
            self._join(call)

    def _used(self) -> float:
        return self._base_tokens + len(self._running) * self.iterations + self._kept_tokens

    def _prefill_for(self, call: Call) -> None:
        if call.sample_id in self._kept:
            num_cached, call.kv_version = self._kept[call.sample_id]
            self.prefill(call.context_tokens - num_cached)  # what the environment has answered
            self._forget(call.sample_id)
            return
        call.kv_version = call.policy_version
        response = call.response_tokens + call.num_decoded
        call.num_prefilled_tokens += response
        has_sibling = self._siblings[call.prompt] > 0
        self.prefill(response if has_sibling else response + call.prompt_tokens)

    def _join(self, call: Call) -> None:
        self._stall_s += self.model.call_s
        call.joined_at = math.ceil(self.iterations - _EPSILON)
        call.ends_at = call.joined_at + call.num_tokens - call.num_decoded
        self._running[call.sample_id] = call
        self._siblings[call.prompt] += 1
        if self._is_bounded:
            self._base_tokens += call.context_tokens - call.joined_at
        self._num_pushed += 1
        heapq.heappush(self._ends, (call.ends_at, self._num_pushed, call))

    def _leave(self, call: Call, num_decoded: int) -> None:
        """Take the call out of the running ones, with ``num_decoded`` tokens."""
        del self._running[call.sample_id]
        self._siblings[call.prompt] -= 1
        if self._is_bounded:
            self._base_tokens -= call.context_tokens - call.joined_at
        call.num_decoded = num_decoded
        call.ends_at = -1

    def _make_room(self) -> None:
        """Make room in a full cache: drop a parked one, else let the youngest call wait; it is prefilled again
        later."""
        if self._kept:
            self._forget(next(iter(self._kept)))
            return
        youngest = next(reversed(self._running.values()))
        self._leave(youngest, self.num_decoded(youngest))
        self._queue.appendleft(youngest)
        self.num_preempted += 1

    def _keep(self, call: Call) -> None:
        self._kept[call.sample_id] = (call.context_tokens, call.kv_version)
        self._kept_tokens += call.context_tokens

    def _forget(self, sample_id: SampleId) -> None:
        self._kept_tokens -= self._kept.pop(sample_id)[0]
