"""verl's replicas as an engine: called through its plain client, and aborted directly.

verl's client for partial rollouts resumes a stopped response by itself, so its tokens could not be kept; the plain
client returns them. An aborted replica is closed: calls that reach it afterwards wait until ``resume_generation`` opens
it, and another abort does not end them. verl's synchronous trainer never opens its replicas, so ``abort`` does. Each
answer names the training step of the weights that sampled it.

Invariants: a token has the version that its replica names, which is the rollout's; a call ends when verl
says so, or at a deadline; outside ``abort`` no replica is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollover.engine.base import Capabilities, Chunk, EngineStats, GenerateRequest
from rollover.errors import EngineError, EngineTimeout
from rollover.types import FinishReason

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _MAX_WAIT_S = 0.1, 2.0


class GeneratesTokens(Protocol):
    """The part of verl's ``LLMServerClient`` that is used."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any: ...


class StopsCalls(Protocol):
    """The part of verl's ``RolloutReplica`` that is used. After ``abort_all_requests`` every call that its servers had
    is over, and new ones wait for ``resume_generation``."""

    async def abort_all_requests(self) -> Any: ...

    async def resume_generation(self) -> Any: ...


class VerlReplicas:
    """Implements ``Engine`` over verl's replicas.

    Args:
        max_context_tokens: prompt and response together.
    """

    def __init__(
        self,
        client: GeneratesTokens,
        replicas: Sequence[StopsCalls],
        *,
        max_running: int,
        max_context_tokens: int,
        response_timeout_s: float,
        abort_timeout_s: float,
    ) -> None:
        self.capabilities = Capabilities(
            max_running=max_running, max_context_tokens=max_context_tokens, number_format="unknown"
        )
        self._client = client
        self._replicas = tuple(replicas)
        self._response_timeout_s = response_timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._version = 0
        self._global_steps: int | None = None
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._stats = EngineStats(num_running=0, num_waiting=0, policy_version=0)

    def __repr__(self) -> str:
        return f"the {len(self._replicas)} replicas of verl"

    async def begin(self, *, version: int, global_steps: int) -> None:
        """Register ``version`` as the version of the weights of verl's step ``global_steps``."""
        assert not self._calls, "weights change between rollouts alone"
        self._version, self._global_steps = version, global_steps

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Implement ``Engine.generate``, with one chunk, since answers arrive whole."""
        if self._global_steps is None:
            raise EngineError(f"{request.request_id} came before the first weights")
        task = self._calls[request.request_id] = asyncio.ensure_future(self._ask(request))
        try:
            chunk: Chunk = await asyncio.shield(task)
        finally:
            del self._calls[request.request_id]
            task.cancel()
        yield chunk

    async def _ask(self, request: GenerateRequest) -> Chunk:
        params, name = request.params, request.request_id
        inputs = [*request.prompt_ids, *request.response_ids]
        asked = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
            "max_tokens": params.max_new_tokens - len(request.response_ids),
            "stop_token_ids": list(params.stop_token_ids),
        }
        try:
            async with asyncio.timeout(self._response_timeout_s):
                output = await self._client.generate(name, prompt_ids=inputs, sampling_params=asked)
        except TimeoutError:
            raise EngineTimeout(
                f"{self!r} did not answer {name} within {self._response_timeout_s:g} s (response_timeout_s)"
            ) from None
        except Exception as error:
            raise EngineError(f"{self!r} failed at {name}: {type(error).__name__}: {error}") from error
        return self._chunk(request, output)

    def _chunk(self, request: GenerateRequest, output: Any) -> Chunk:
        name, ids = request.request_id, tuple(map(int, output.token_ids))
        logprobs = tuple(min(float(p), 0.0) for p in output.log_probs or ())
        if len(ids) != len(logprobs):
            raise EngineError(f"{name}: {len(ids)} tokens came with {len(logprobs)} log-probs")
        if ids and (label := output.extra_fields.get("global_steps")) != self._global_steps:
            raise EngineError(
                f"{name}: weights of step {label} sampled its tokens, and weights of step {self._global_steps} are due"
            )
        self._count(len(request.prompt_ids), len(request.response_ids), len(ids))
        return Chunk(
            token_ids=ids,
            logprobs=logprobs,
            policy_version=self._version,
            kv_version=self._version,
            finish_reason=_finish_reason(request, ids, output.stop_reason),
            num_prefilled_tokens=len(request.response_ids),
        )

    def _count(self, num_prompt: int, num_response: int, num_decoded: int) -> None:
        stats = self._stats
        self._stats = replace(
            stats,
            decoded_tokens=stats.decoded_tokens + num_decoded,
            prefilled_tokens=stats.prefilled_tokens + num_prompt + num_response,
            reprefilled_tokens=stats.reprefilled_tokens + num_response,
        )

    async def abort(self, request_ids: Collection[str]) -> None:
        """Implement ``Engine.abort``. All calls of the replicas end, and callers retry calls that were not meant to
        end. The replicas take calls again when this returns.

        A call may reach its replica after the abort, and then waits there: each round opens the replicas to admit such
        calls, and the next one ends them.

        Raises:
            EngineTimeout: some calls did not end within ``abort_timeout_s``.
            EngineError: a replica failed to stop, or to resume.
        """
        wait_s = _FIRST_WAIT_S
        try:
            async with asyncio.timeout(self._abort_timeout_s) as deadline:
                while open_calls := self._open(request_ids):
                    await asyncio.gather(*(replica.abort_all_requests() for replica in self._replicas))
                    await asyncio.wait(open_calls, timeout=wait_s)
                    await asyncio.gather(*(replica.resume_generation() for replica in self._replicas))
                    if late_calls := self._open(request_ids):
                        await asyncio.wait(late_calls, timeout=_FIRST_WAIT_S)  # admit them before the next abort
                    wait_s = min(2 * wait_s, _MAX_WAIT_S)
        except Exception as error:
            if deadline.expired():
                num_open, longest_s = len(self._open(request_ids)), self._abort_timeout_s
                raise EngineTimeout(
                    f"{self!r} did not hand over {num_open} calls within {longest_s:g} s (abort_timeout_s)"
                ) from None
            raise EngineError(f"{self!r} could not be stopped: {type(error).__name__}: {error}") from error

    def _open(self, request_ids: Collection[str]) -> list[asyncio.Task[Any]]:
        return [self._calls[i] for i in request_ids if i in self._calls and not self._calls[i].done()]

    def stats(self) -> EngineStats:
        return replace(self._stats, num_running=len(self._calls), policy_version=self._version)

    async def close(self) -> None:
        """End all calls on this side."""
        for task in self._calls.values():
            task.cancel()


def _finish_reason(request: GenerateRequest, ids: Sequence[int], stop_reason: str | None) -> FinishReason:
    """Return the finish reason, from ``aborted`` or ``completed`` of verl's vLLM, or ``abort``, ``stop`` or ``length``
    of its SGLang."""
    last = ids[-1] if ids else None
    if last in request.params.stop_token_ids:
        return FinishReason.STOP
    if len(request.response_ids) + len(ids) >= request.params.max_new_tokens:
        return FinishReason.LENGTH
    if stop_reason in ("aborted", "abort"):
        return FinishReason.ABORT
    raise EngineError(
        f"{request.request_id}: ended for the reason {stop_reason!r} at token {last}, which is neither a stop token nor"
        " the last that was asked for"
    )
