"""A generation call: its stream of chunks, and what has been decoded of its response."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.ends import check_end
from rollover.engine.servers.http.client import Patience
from rollover.engine.stop_strings import StopStrings
from rollover.errors import EngineError
from rollover.kept_codec import check_kept
from rollover.routes import check_routes
from rollover.types import FinishReason

_LOGPROB_TOLERANCE = 1e-3
"""Rounding may put the log-prob of a certain token this much above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens and the end that one event of a server's stream adds to a call."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    label: str | None = None
    """The label of the weights that sampled these tokens, if the server says so; else they are those in force."""
    kv_label: str | None = None
    """The label of the oldest weights that computed the cache which these tokens attended to, where the server says
    so."""
    num_held_tokens: int = 0
    """Tokens that have arrived and are held back until the server says which weights sampled them."""
    num_cached_tokens: int = 0
    """Tokens of the call's input that the server had in its cache."""
    num_prefilled_tokens: int | None = None
    """Response tokens that it computed again to start the call, if it says so; in the first delta only."""
    kept: tuple[bytes, ...] = ()
    """Kept set of each token, if the request wants them."""
    routes: tuple[bytes, ...] = ()
    """Route of each token, if the request wants them."""


class GenerationCall:
    """One open call. Its stream gets exactly one last item, a chunk with a finish reason or an exception, and every
    token on it was checked.
    """

    def __init__(
        self, request: GenerateRequest, patience: Patience, vocab_size: int, stop_strings: StopStrings | None
    ) -> None:
        self.request = request
        self.patience = patience
        self.stream: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.reader: asyncio.Task[None] | None = None
        self.sent = False
        """True once the server may know of it."""
        self.asked_to_stop = False
        """True once its end has been asked for here."""
        self.is_displaced = False
        """True once all calls of the server are stopped for the sake of others: it can continue at once."""
        self.kv_version = -1
        """The version under which it was sent."""
        self.label = ""
        """The label of the weights under which it was sent; keys the server's prefix cache."""
        self.response = list(request.response_ids)
        self._vocab_size = vocab_size
        self._stop_strings = stop_strings
        """Finds stop strings, if the request has any."""
        self._num_prefilled_tokens = len(request.response_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_input_tokens(self) -> int:
        """Return the number of tokens that were sent to be prefilled."""
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    def send(self, version: int, label: str) -> None:
        self.sent, self.kv_version, self.label = True, version, label

    def take(self, delta: Delta, version: int, *, kv_kept: bool, kv_version: int | None = None) -> int:
        """Put a delta on the stream, up to the token that completes a stop string.

        Args:
            kv_kept: the call keeps the cache that it has had since it was sent, over all weights that came.
            kv_version: version of the oldest weights which computed the cache, if it is known.

        Returns how many tokens were taken. Raises ``EngineError`` when the delta cannot be true; none of its tokens is
        taken then.
        """
        self._check(delta)
        if delta.num_prefilled_tokens is not None:
            self._num_prefilled_tokens = delta.num_prefilled_tokens
        num_cached_tokens = max(0, delta.num_cached_tokens - len(self.request.prompt_ids))
        self._num_prefilled_tokens = max(0, self._num_prefilled_tokens - num_cached_tokens)
        before, reason, stops = len(self.response), delta.finish_reason, self._stop_strings
        for token in delta.token_ids:
            self.response.append(token)
            if stops is not None and stops.complete(self.response, self.request.params.stop_strings):
                reason = FinishReason.STOP
                break
        count = len(self.response) - before
        if count or reason is not None:
            if kv_version is None:
                kv_version = min(self.kv_version, version) if kv_kept else version
            taken = Delta(
                token_ids=delta.token_ids[:count],
                logprobs=delta.logprobs[:count],
                finish_reason=reason,
                kept=delta.kept[:count],
                routes=delta.routes[:count],
            )
            self._put(taken, version, kv_version)
        return count

    def abort(self, version: int) -> None:
        """End without another token, unless it has ended."""
        if not self.ended.is_set():
            kv_version = min(self.kv_version, version) if self.sent else version
            self._put(Delta(finish_reason=FinishReason.ABORT), version, kv_version)

    def fail(self, error: Exception) -> None:
        """End with ``error``, unless it has ended."""
        if not self.ended.is_set():
            self.stream.put_nowait(error)
            self.ended.set()

    def _put(self, delta: Delta, version: int, kv_version: int) -> None:
        self.stream.put_nowait(
            Chunk(
                token_ids=delta.token_ids,
                logprobs=tuple(min(p, 0.0) for p in delta.logprobs),
                policy_version=version,
                kv_version=kv_version,
                finish_reason=delta.finish_reason,
                num_prefilled_tokens=self._num_prefilled_tokens if self.sent else 0,
                kept=delta.kept,
                routes=delta.routes,
            )
        )
        self._num_prefilled_tokens = 0
        if delta.finish_reason is not None:
            self.ended.set()

    def _check(self, delta: Delta) -> None:
        name, params = self.request.request_id, self.request.params
        if len(delta.token_ids) != len(delta.logprobs):
            raise EngineError(f"{name}: {len(delta.token_ids)} tokens came with {len(delta.logprobs)} log-probs")
        for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
            if not 0 <= token < self._vocab_size:
                raise EngineError(f"{name}: token {token} is outside the vocabulary of {self._vocab_size}")
            if not (math.isfinite(logprob) and logprob <= _LOGPROB_TOLERANCE):
                raise EngineError(f"{name}: token {token} has the log-prob {logprob}, not a finite one up to 0")
        try:
            if params.returns_kept:
                check_kept(delta.kept, delta.token_ids, self._vocab_size)
            if params.returns_routes:
                check_routes(delta.routes, len(delta.token_ids))
        except ValueError as e:
            raise EngineError(f"{name}: {e}") from None
        total = len(self.response) + len(delta.token_ids)
        if total > params.max_new_tokens:
            raise EngineError(f"{name}: {total} tokens came, but at most {params.max_new_tokens} were requested")
        last = [*self.response[-1:], *delta.token_ids][-1:]
        check_end(name, self.request, delta.finish_reason, total, last[0] if last else None)
        if delta.finish_reason is FinishReason.STOP and not (params.stop_token_ids or params.stop_strings):
            raise EngineError(f"the server says that {name} stopped at token {last[0]}, but its stop tokens are none")
