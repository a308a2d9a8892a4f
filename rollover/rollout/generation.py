"""A generation call: one request for a sample's next tokens, from the decision to make it to its last chunk.

A call that fails raises ``EngineError``; ``rollover.rollout.retries`` decides whether and when the sample is tried
again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from rollover.clock import Clock, wait_for_any
from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.engine.ends import check_end, reached_end
from rollover.errors import EngineError
from rollover.kept_codec import check_kept
from rollover.rollout.actions import StartSample
from rollover.rollout.ledger import Ledger
from rollover.routes import check_routes
from rollover.types import FinishReason, SampleId, SamplingParams, Segment, Trajectory


@dataclass(slots=True, kw_only=True)
class SampleCall:
    """One call, which turns the engine's chunks into segments for the ledger.

    Example: a call decodes 300 tokens, 256 of them before the weights change. With ``save_every_tokens=1000``::

        async for segment in call.segments():   # 256 tokens of version 3 with ``finish_reason=None``,
            ...                                 # then 44 of version 4 with ``FinishReason.STOP``
    """

    request_id: str
    start: StartSample
    back_off_s: float
    """Seconds to wait before asking the engine."""
    engine: Engine
    ledger: Ledger
    """Read for the tokens that the sample has; the caller records the segments."""
    sampling: SamplingParams
    seed: int
    """The run's seed."""
    clock: Clock
    turn_limit: int | None = None
    """Largest number of tokens of a turn, if the sample is an episode."""
    max_staleness: int
    """The sample is trained at the latest in the step that begins this many versions after its group has started."""
    save_every_tokens: int
    """A segment ends after this many tokens at the latest."""
    is_journaled: bool = False
    """True if the engine is told when tokens have been journaled."""
    on_tokens: Callable[[SampleId], None]
    """Called whenever the engine has decoded tokens, before the segment ends."""
    task: asyncio.Task[None] = field(init=False)
    """The caller's task that consumes its segments."""
    is_over: bool = False
    """True if its last segment was handed out: the sample may be running again by now, in another call."""
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _chunks: list[Chunk] = field(default_factory=list)
    """Chunks of the current segment, which began at ``_start_s``."""
    _num_open_tokens: int = 0
    _last_chunk: Chunk | None = None
    _start_s: float = 0.0

    def stop(self) -> None:
        """Expect the engine to abort the call from now on; a call that is waiting for a retry ends by itself."""
        self._stopped.set()

    async def segments(self) -> AsyncIterator[Segment]:
        """Yield each segment when it ends. The engine continues decoding once the next one is requested.

        Raises:
            EngineError: the call failed. ``cut_off`` returns the tokens that were not yet handed out.
        """
        self._start_s = self.clock.now_s()
        sample_id = self.start.sample_id
        trajectory = self.ledger.sample(sample_id).trajectory
        turn_ids, sampling = trajectory.turn_ids, turn_sampling(trajectory, self.sampling, self.turn_limit)
        reason = FinishReason.TURN if is_begun_by_environment(trajectory) else reached_end(sampling, turn_ids)
        if reason is None and await self._is_stopped_in_back_off():
            reason = FinishReason.ABORT
        if reason is not None:
            yield self._end_segment(reason)
            return
        start_version = self.ledger.groups[sample_id.group].start_version
        request = generation_request(
            trajectory,
            self.request_id,
            sampling,
            self.seed,
            self.start,
            least_version=start_version or 0,
            due_version=None if start_version is None else start_version + self.max_staleness,
            is_journaled=self.is_journaled,
        )
        num_tokens, last_token = len(turn_ids), None
        try:
            async for chunk in self.engine.generate(request):
                num_tokens += len(chunk.token_ids)
                last_token = chunk.token_ids[-1] if chunk.token_ids else last_token
                check_chunk(chunk, sample_id, request, num_tokens, last_token, start_version)
                if chunk.token_ids:
                    self.on_tokens(sample_id)
                reason = chunk.finish_reason
                if unasked := reason is FinishReason.ABORT and not self._stopped.is_set():
                    reason = None
                if reason is FinishReason.LENGTH and num_tokens < sampling.max_new_tokens:
                    reason = FinishReason.ABORT  # the sample is parked at the limit of this call
                if self._num_open_tokens and _origin(chunk) != _origin(self._chunks[-1]):
                    yield self._end_segment(None)
                self._chunks.append(chunk)
                self._last_chunk = chunk
                self._num_open_tokens += len(chunk.token_ids)
                if reason is not None or self._num_open_tokens >= self.save_every_tokens:
                    yield self._end_segment(reason)
                if unasked:
                    raise EngineError(
                        f"the engine stopped {sample_id} after {num_tokens} tokens without being asked to"
                    )
            if not self.is_over:
                raise EngineError(f"the engine ended the stream of {sample_id} without a finish reason")
        except EngineError:
            if not self.is_over:  # otherwise it failed after the end of the response
                raise

    def cut_off(self) -> Segment:
        """Return the last segment of a call that failed or was cancelled: the tokens that had arrived."""
        return self._end_segment(FinishReason.ABORT)

    async def _is_stopped_in_back_off(self) -> bool:
        """Wait for the call's back-off, or until it is stopped; return whether it was stopped."""
        if not self.back_off_s:
            return False
        await wait_for_any(self.clock, self.back_off_s, self._stopped)
        return self._stopped.is_set()

    def _end_segment(self, reason: FinishReason | None) -> Segment:
        """Return the current segment and begin the next one."""
        if reason is FinishReason.STOP and self.turn_limit is not None:
            reason = FinishReason.TURN
        chunks, last, published = self._chunks, self._last_chunk, self.ledger.policy_version
        segment = Segment(
            policy_version=last.policy_version if last else published,
            kv_version=last.kv_version if last else published,
            token_ids=tuple(t for c in chunks for t in c.token_ids),
            rollout_logprobs=tuple(p for c in chunks for p in c.logprobs),
            finish_reason=reason,
            start_s=self._start_s,
            end_s=self.clock.now_s(),
            num_prefilled_tokens=sum(c.num_prefilled_tokens for c in chunks),
            engine=last.engine if last else "",
            kept=tuple(k for c in chunks for k in c.kept),
            routes=tuple(r for c in chunks for r in c.routes),
        )
        self._chunks, self._num_open_tokens, self._start_s = [], 0, segment.end_s
        self.is_over = reason is not None
        return segment


def _origin(chunk: Chunk) -> tuple[int, int, str]:
    """Return the properties that all tokens of a segment share."""
    return chunk.policy_version, chunk.kv_version, chunk.engine


def is_begun_by_environment(trajectory: Trajectory) -> bool:
    """Return whether the environment writes the prompt and has yet to do so: the first turn is empty, and what answers
    it is the prompt."""
    return not trajectory.prompt.token_ids and not trajectory.observations


def turn_sampling(trajectory: Trajectory, sampling: SamplingParams, turn_limit: int | None) -> SamplingParams:
    """Return the settings of the turn that goes on: its limit is the limit of a turn, and what is left of the
    response's for an episode, whose observations count too. In a tree of turns, the response's limit holds for each
    path, and for all that is sampled."""
    if turn_limit is None:
        return sampling
    path = len(trajectory.before(len(trajectory.observations))) - len(trajectory.prompt.token_ids)
    used = max(path, trajectory.num_tokens - len(trajectory.turn_ids))
    return replace(sampling, max_new_tokens=min(turn_limit, sampling.max_new_tokens - used))


def generation_request(
    trajectory: Trajectory,
    request_id: str,
    sampling: SamplingParams,
    seed: int,
    start: StartSample,
    *,
    least_version: int = 0,
    due_version: int | None = None,
    is_journaled: bool = False,
) -> GenerateRequest:
    """Return a request to continue after the tokens so far. Engines know no episodes: in its later turns, what came
    before the turn is the prompt. ``seed`` is the run's, and ``sampling`` the turn's."""
    sample_id, turn, turn_ids = trajectory.sample_id, len(trajectory.observations), trajectory.turn_ids
    if start.token_budget is not None:
        limit = min(sampling.max_new_tokens, len(turn_ids) + start.token_budget)
        sampling = replace(sampling, max_new_tokens=limit)
    return GenerateRequest(
        request_id=request_id,
        sample_key=sample_key(sample_id, turn),
        prompt_key=f"{trajectory.prompt.prompt_id}.",
        prompt_ids=trajectory.before(turn),
        response_ids=turn_ids,
        params=sampling,
        seed=sample_seed(seed, sample_id, turn),
        least_version=least_version,
        due_version=due_version,
        is_journaled=is_journaled,
    )


def check_chunk(
    chunk: Chunk,
    sample_id: SampleId,
    request: GenerateRequest,
    num_tokens: int,
    last_token: int | None,
    start_version: int | None,
) -> None:
    """Refuse an impossible chunk. ``num_tokens``: response tokens including the chunk's; ``last_token``: the last one
    that this call has decoded.

    Raises:
        EngineError: it goes beyond the request, says that the response has ended where it cannot have, is older than
            the weights in force when its group started, or lacks the kept sets or routes that were asked for.
    """
    limit = request.params.max_new_tokens
    if num_tokens > limit:
        raise EngineError(f"the engine decoded {num_tokens} tokens for {sample_id}, but at most {limit} were requested")
    check_end(sample_id, request, chunk.finish_reason, num_tokens, last_token)
    if chunk.token_ids and start_version is not None and chunk.policy_version < start_version:
        raise EngineError(
            f"the engine labels tokens of {sample_id} with version {chunk.policy_version}, though"
            f" {start_version} was published before they were asked for"
        )
    try:
        if request.params.returns_kept:
            check_kept(chunk.kept, chunk.token_ids)
        if request.params.returns_routes:
            check_routes(chunk.routes, len(chunk.token_ids))
    except ValueError as e:
        raise EngineError(f"the engine sent tokens of {sample_id} without what was asked for: {e}") from e


def sample_key(sample_id: SampleId, turn: int = 0) -> str:
    """Return the name by which an engine knows a sample, the same for all its calls in one turn."""
    return f"{sample_id}.{turn}." if turn else f"{sample_id}."


def sample_seed(seed: int, sample_id: SampleId, turn: int = 0) -> int:
    """Derive the seed of a sample's noise: 63 bits, a function of only the run's seed, the sample and its turn."""
    name = f"{seed}/{sample_id.group}/{sample_id.index}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
