"""A call of the swarm as the coordinator follows it, and what can be true of its tokens."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.ends import check_end
from rollover.errors import EngineError
from rollover.kept_codec import check_kept
from rollover.routes import check_routes
from rollover.swarm.wire.messages import Adopt, Assign, Decoded, ProtocolError, pack_ids, unpack_ids, unpack_logprobs
from rollover.token_bytes import split_bytes
from rollover.types import FinishReason

_LOGPROB_SLACK = 1e-4
"""Largest value above 0 to which rounding may take a log-prob."""


class OutOfOrder(ProtocolError):
    """Messages of a worker do not follow each other as they should: its connection ends, and it may come back."""


class SwarmCall:
    """A call, with the member that has it."""

    def __init__(self, request: GenerateRequest, least_version: int, *, is_directed: bool = False) -> None:
        self.request = request
        self.is_directed = is_directed
        """It is for one member, to examine that member: its length says nothing about responses."""
        self.least_version = least_version
        self.start = len(request.response_ids)
        self.position = self.start
        """Position after the last token that came out."""
        self.finish_reason: FinishReason | None = None
        """Reason for which it ended, once its end has come out."""
        self.member: str | None = None
        self.held_as = ""
        """The id under which its member held it when it was told to continue it; empty if it was assigned."""
        self.is_aborted = False
        self.waits_since_s = 0.0
        self.heard_s = 0.0
        """Time of its last token; before the first, time at which its member got it."""
        self._prefix = hashlib.sha256(pack_ids(request.response_ids))
        self._version = 0
        """The version of the last token that came out."""
        self._last_token: int | None = None
        self.refused_end = ""
        """The reason why its member cannot have reached the end that it claims; empty while there is none."""

    @property
    def limit(self) -> int:
        return self.request.params.max_new_tokens

    @property
    def due_version(self) -> int | None:
        """Return the version at whose publication a training step waits for the response, if one will."""
        return self.request.due_version

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def came_out(self, offset: int, chunk: Chunk) -> Chunk:
        """Record the tokens from position ``offset`` on, and return what is to be delivered: all, but without the end
        if that is refused. Raises ``OutOfOrder`` if they do not follow the last ones, and ``ProtocolError`` for
        versions that go back."""
        version = chunk.policy_version
        if offset != self.position:
            raise OutOfOrder(f"it sent tokens from position {offset} on, but those from {self.position} are next")
        if chunk.token_ids and version < self._version:
            raise ProtocolError(
                f"it sent tokens of version {version} after tokens of version {self._version} in one response"
            )
        self._version = max(self._version, version)
        self.position += len(chunk.token_ids)
        self._prefix.update(pack_ids(chunk.token_ids))
        if chunk.token_ids:
            self._last_token = chunk.token_ids[-1]
        try:
            check_end(self.request.request_id, self.request, chunk.finish_reason, self.position, self._last_token)
            if chunk.finish_reason is FinishReason.ABORT and not self.is_aborted:
                raise EngineError(
                    f"it stopped {self.request.request_id} after {self.position} tokens without being asked to"
                )
        except EngineError as error:
            self.refused_end = str(error)
            return replace(chunk, finish_reason=None)
        self.finish_reason = chunk.finish_reason
        return chunk

    def assignment(self, call_id: str, sample_key: str) -> Assign:
        """Return the message that gives the call to a member. ``sample_key``: by which the member knows the sample."""
        request, params = self.request, self.request.params
        return Assign(
            call_id=call_id,
            sample_key=sample_key,
            prompt_key=request.prompt_key,
            prompt_ids=pack_ids(request.prompt_ids),
            response_ids=pack_ids(request.response_ids),
            max_new_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            returns_kept=params.returns_kept,
            returns_routes=params.returns_routes,
            stop_token_ids=params.stop_token_ids,
            stop_strings=params.stop_strings,
            seed=request.seed,
            least_version=self.least_version,
        )

    def adoption(self, held: str, call_id: str) -> Adopt:
        """Return the message with which a member continues what it holds of the call."""
        prefix = self._prefix.copy().hexdigest()
        return Adopt(held=held, call_id=call_id, offset=self.position, prefix=prefix)

    def ending(self, version: int) -> Chunk:
        """Return the end of a call that is cut off here."""
        end, member = FinishReason.ABORT, self.member or ""
        return Chunk(
            token_ids=(), logprobs=(), policy_version=version, kv_version=version, finish_reason=end, engine=member
        )


def checked_chunk(message: Decoded, call: SwarmCall, *, newest: int, vocab_size: int, keeps_kv: bool) -> Chunk:
    """Return the tokens of a message. Raises ``ProtocolError`` for what cannot be true.

    Args:
        newest: the newest version.
        keeps_kv: the member says that its tokens may attend to caches of older weights.
    """
    ids, logprobs = unpack_ids(message.token_ids), unpack_logprobs(message.logprobs)
    if len(ids) != len(logprobs):
        raise ProtocolError(f"it sent {len(ids)} tokens with {len(logprobs)} log-probs, but each token has one")
    if ids and not 0 <= message.version <= newest:
        raise ProtocolError(f"it sent tokens of version {message.version}, but the newest version is {newest}")
    if ids and message.version < call.least_version:
        raise ProtocolError(
            f"it sent tokens of version {message.version} for a call that needs version"
            f" {call.least_version} or a newer one"
        )
    if ids and not 0 <= message.kv_version <= message.version:
        raise ProtocolError(
            f"it sent tokens of version {message.version} with a cache of version {message.kv_version}, which is"
            " impossible"
        )
    if ids and message.kv_version < message.version and not keeps_kv:
        raise ProtocolError(
            f"it sent tokens of version {message.version} with a cache of version {message.kv_version}, but says that"
            " its engine keeps no caches of older weights"
        )
    if max(ids, default=0) >= vocab_size:
        raise ProtocolError(f"it sent token {max(ids)}, but the vocabulary has {vocab_size} tokens")
    if not (math.isfinite(sum(logprobs)) and max(logprobs, default=0.0) <= _LOGPROB_SLACK):  # a NaN makes the sum one
        raise ProtocolError("it sent a log-prob that is not a finite number of at most 0")
    kept: tuple[bytes, ...] = ()
    routes: tuple[bytes, ...] = ()
    try:
        if call.request.params.returns_kept:
            kept = split_bytes(message.kept, len(ids))
            check_kept(kept, ids, vocab_size)
        if call.request.params.returns_routes:
            routes = split_bytes(message.routes, len(ids))
            check_routes(routes, len(ids))
    except ValueError as e:
        raise ProtocolError(f"it sent tokens without what the call wants: {e}") from None
    if message.offset < 0 or message.offset + len(ids) > call.limit:
        raise ProtocolError(
            f"it sent tokens up to position {message.offset + len(ids)}, but the call ends at {call.limit}"
        )
    return Chunk(
        token_ids=ids,
        logprobs=logprobs,
        policy_version=message.version,
        kv_version=message.kv_version,
        finish_reason=None if message.finish_reason is None else FinishReason(message.finish_reason),
        num_prefilled_tokens=min(message.num_prefilled_tokens, call.start) if message.offset <= call.start else 0,
        engine=call.member or "",
        kept=kept,
        routes=routes,
    )
