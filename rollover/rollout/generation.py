"""A generation call: one request for a sample's next tokens, from the request to its last chunk."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace

from rollover.clock import Clock
from rollover.engine.base import Chunk, GenerateRequest
from rollover.errors import EngineError
from rollover.rollout.actions import StartSample
from rollover.types import FinishReason, SampleId, SamplingParams, Segment, Trajectory

_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 0.1, 10.0


@dataclass(slots=True)
class OpenCall:
    """A sample's call, from the decision to make it."""

    request_id: str
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when we ask for its end."""

    async def rest(self, clock: Clock, seconds: float) -> None:
        """Wait so long, or until the call is stopped."""
        waiting = [asyncio.ensure_future(clock.sleep(seconds)), asyncio.ensure_future(self.stopped.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()


def back_off_s(num_failures: int) -> float:
    """Return how long to wait before the next call, after so many failures in a row."""
    return min(_FIRST_BACK_OFF_S * 2.0 ** min(num_failures - 1, 63), _MAX_BACK_OFF_S)


@dataclass(slots=True)
class OpenSegment:
    """Tokens of the current segment of one call that are not in the ledger yet."""

    start_s: float
    is_last: bool = False
    """Whether the call is over: its sample may be running again by now, in another call."""
    num_prefilled_tokens: int = 0
    policy_version: int = -1
    kv_version: int = -1
    engine: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def belongs(self, chunk: Chunk) -> bool:
        return not self.token_ids or (self.policy_version, self.kv_version, self.engine) == (
            chunk.policy_version,
            chunk.kv_version,
            chunk.engine,
        )

    def add(self, chunk: Chunk) -> None:
        self.policy_version, self.kv_version, self.engine = chunk.policy_version, chunk.kv_version, chunk.engine
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.num_prefilled_tokens += chunk.num_prefilled_tokens

    def closed(self, reason: FinishReason | None, end_s: float) -> Segment:
        """The record; this segment starts afresh behind it."""
        segment = Segment(
            policy_version=self.policy_version,
            kv_version=self.kv_version,
            token_ids=tuple(self.token_ids),
            rollout_logprobs=tuple(self.logprobs),
            finish_reason=reason,
            start_s=self.start_s,
            end_s=end_s,
            num_prefilled_tokens=self.num_prefilled_tokens,
            engine=self.engine,
        )
        self.start_s, self.num_prefilled_tokens, self.is_last = end_s, 0, reason is not None
        self.token_ids, self.logprobs = [], []
        return segment


def generation_request(
    trajectory: Trajectory, request_id: str, sampling: SamplingParams, seed: int, start: StartSample
) -> GenerateRequest:
    """Return what the engine is asked for: to go on behind the tokens that are there. ``seed`` is the run's."""
    sample_id = trajectory.sample_id
    if start.token_budget is not None:
        limit = min(sampling.max_new_tokens, trajectory.num_tokens + start.token_budget)
        sampling = replace(sampling, max_new_tokens=limit)
    return GenerateRequest(
        request_id=request_id,
        sample_key=f"{sample_id}.",
        prompt_key=f"{trajectory.prompt.prompt_id}.",
        prompt_ids=trajectory.prompt.token_ids,
        response_ids=trajectory.token_ids,
        params=sampling,
        seed=sample_seed(seed, sample_id),
    )


def reached_end(trajectory: Trajectory, sampling: SamplingParams) -> FinishReason | None:
    """Return why there is nothing left to decode: the engine or the process died between the last token and the news
    that it was the last."""
    last = next((s.token_ids[-1] for s in reversed(trajectory.segments) if s.token_ids), None)
    if last in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if trajectory.num_tokens >= sampling.max_new_tokens else None


def check_chunk(
    chunk: Chunk, sample_id: SampleId, request: GenerateRequest, num_tokens: int, start_version: int | None
) -> None:
    """Refuse a chunk that cannot be true. ``num_tokens``: response tokens including the chunk's.

    Raises:
        EngineError: it goes beyond what was asked for, or says that the response has ended where it cannot have, or is
            older than the weights in force when its group started.
    """
    limit, reason = request.params.max_new_tokens, chunk.finish_reason
    if num_tokens > limit:
        raise EngineError(f"the engine decoded {num_tokens} tokens for {sample_id}, asked for at most {limit}")
    if reason is FinishReason.LENGTH and num_tokens < limit:
        raise EngineError(f"the engine ended {sample_id} for its length after {num_tokens} tokens, asked for {limit}")
    if reason is FinishReason.STOP and num_tokens == len(request.response_ids):
        raise EngineError(f"the engine says that {sample_id} has come to its stop, without a token")
    if chunk.token_ids and start_version is not None and chunk.policy_version < start_version:
        raise EngineError(
            f"the engine labels tokens of {sample_id} with version {chunk.policy_version}, though"
            f" {start_version} was published before they were asked for"
        )


def sample_seed(seed: int, sample_id: SampleId) -> int:
    """The seed of a sample's noise: 63 bits, a function of the run's seed and the sample alone."""
    digest = hashlib.blake2b(f"{seed}/{sample_id.group}/{sample_id.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
