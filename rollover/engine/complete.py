"""One whole response, whatever befalls the engine: for callers that schedule nothing and want no partial ones."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.errors import EngineError
from rollover.types import FinishReason

_MAX_FAILURES = 3
"""In a row, without a token in between."""


async def complete(engine: Engine, request: GenerateRequest) -> AsyncIterator[Chunk]:
    """The chunks of a response up to its stop or limit. A call that fails or is stopped is followed by another that
    goes on from its last token; ``request.request_id`` is their common beginning.

    Raises ``EngineError`` when calls fail four times in a row without a token.
    """
    name = f"{request.request_id}{secrets.token_hex(4)}"
    ids = list(request.response_ids)
    failures = 0
    last: Chunk | None = None
    for hop in itertools.count():
        if last is not None and (reason := _reached_end(request, ids)) is not None:  # the engine died before it said so
            yield replace(last, token_ids=(), logprobs=(), finish_reason=reason, num_prefilled_tokens=0)
            return
        try:
            async for chunk in engine.generate(replace(request, request_id=f"{name}#{hop}.", response_ids=tuple(ids))):
                yield chunk
                last = chunk
                ids += chunk.token_ids
                failures = 0 if chunk.token_ids else failures
                if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return
        except EngineError:
            failures += 1
            if failures > _MAX_FAILURES:
                raise


def _reached_end(request: GenerateRequest, ids: list[int]) -> FinishReason | None:
    if ids and ids[-1] in request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= request.params.max_new_tokens else None
