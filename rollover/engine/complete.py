"""Whole responses, whatever befalls the engine: for callers that schedule nothing and want no partial ones."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace

from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.engine.ends import check_end, reached_end
from rollover.errors import CallDisplaced, EngineError, EnginesAway, EngineTimeout
from rollover.types import FinishReason

STALL_S = 900.0
"""Longest silence of a response, whatever the engine calls it."""
_MAX_FAILURES = 3
"""Failures in a row, without a token in between, that are retried."""
_FIRST_BACK_OFF_S = 0.1


async def complete(engine: Engine, request: GenerateRequest, *, stall_s: float = STALL_S) -> AsyncIterator[Chunk]:
    """Yield the chunks of a response up to its stop or limit. A call that fails, or that is stopped although the caller
    did not ask for it, is followed after a growing time by another that continues from its last token;
    ``request.request_id`` is their common beginning.

    Raises ``EngineError`` when calls fail or are stopped four times in a row without a token (being displaced does not
    count), or at once if all servers stay away; ``EngineTimeout`` when no token has come for ``stall_s``.
    """
    name = f"{request.request_id}{secrets.token_hex(8)}"
    ids = list(request.response_ids)
    failures = 0
    last: Chunk | None = None
    for number in itertools.count():
        if (
            last is not None and (reason := reached_end(request.params, ids)) is not None
        ):  # the engine died before it said so
            yield replace(
                last, token_ids=(), logprobs=(), kept=(), routes=(), finish_reason=reason, num_prefilled_tokens=0
            )
            return
        call = replace(request, request_id=f"{name}#{number}.", response_ids=tuple(ids))
        try:
            async with aclosing(_unstalled(engine, call, stall_s)) as chunks:
                async for chunk in chunks:
                    tail = chunk.token_ids or ids
                    num_tokens = len(ids) + len(chunk.token_ids)
                    check_end(call.request_id, call, chunk.finish_reason, num_tokens, tail[-1] if tail else None)
                    yield chunk
                    last = chunk
                    ids += chunk.token_ids
                    failures = 0 if chunk.token_ids else failures
                    if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        return
            raise EngineError(f"the engine stopped {call.request_id} after {len(ids)} tokens without being asked to")
        except CallDisplaced:
            pass
        except EngineError as e:
            failures += 1
            if failures > _MAX_FAILURES or isinstance(e, EnginesAway):
                raise
        await asyncio.sleep(_FIRST_BACK_OFF_S * 2.0 ** max(0, failures - 1))


async def _unstalled(engine: Engine, call: GenerateRequest, stall_s: float) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of one call. Raises ``EngineTimeout`` when no token has come for ``stall_s``."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + stall_s
    stream = engine.generate(call)
    try:
        while True:
            async with asyncio.timeout_at(deadline_s):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            if chunk.token_ids:
                deadline_s = loop.time() + stall_s
            yield chunk
    except EngineTimeout:
        raise
    except TimeoutError:
        raise EngineTimeout(f"the engine sent no token of {call.request_id} for {stall_s:g} s") from None
    finally:
        with suppress(EngineError):
            await stream.aclose()  # type: ignore[attr-defined]
