"""Checks of a call's limits, and of how its response ended: an engine may report an end that is impossible."""

from __future__ import annotations

from collections.abc import Sequence

from rollover.engine.base import GenerateRequest
from rollover.errors import EngineError
from rollover.types import FinishReason, SamplingParams


def check_limits(request: GenerateRequest, max_context_tokens: int, engine: object) -> None:
    """Raise ``EngineError`` for a request without a token left to decode, or of more tokens than ``engine`` holds."""
    name, num_decoded, most = request.request_id, len(request.response_ids), request.params.max_new_tokens
    if num_decoded >= most:
        raise EngineError(
            f"request {name!r} has no budget left: its response has {num_decoded} tokens of at most {most}"
        )
    if (size := len(request.prompt_ids) + most) > max_context_tokens:
        raise EngineError(
            f"request {name!r}: prompt and response may reach {size} tokens, but {engine} takes {max_context_tokens};"
            " give it a longer context"
        )


def check_end(
    name: object, call: GenerateRequest, reason: FinishReason | None, num_tokens: int, last_token: int | None
) -> None:
    """Refuse the end of a call that cannot have come. ``num_tokens`` and ``last_token`` are the response's at that
    point.

    Where a call has stop strings, its last token alone does not tell whether one is complete, so any is believed.

    Raises:
        EngineError: the call ended for its length before its limit, or with a stop but without a token, or at a token
            that is none of the stop tokens that it names.
    """
    limit = call.params.max_new_tokens
    if reason is FinishReason.LENGTH and num_tokens < limit:
        raise EngineError(
            f"the engine ended {name} for its length after {num_tokens} tokens, but {limit} were requested"
        )
    if reason is FinishReason.STOP and num_tokens == len(call.response_ids):
        raise EngineError(f"the engine says that {name} reached a stop token, but sent no token")
    stops = call.params.stop_token_ids
    if reason is FinishReason.STOP and stops and not call.params.stop_strings and last_token not in stops:
        raise EngineError(
            f"the engine says that {name} stopped at token {last_token}, but its stop tokens are {sorted(stops)}"
        )


def reached_end(params: SamplingParams, ids: Sequence[int]) -> FinishReason | None:
    """Return why nothing is left to decode after the response ``ids``: the engine or the process died between the last
    token and the news that it was the last. ``None`` while something is."""
    if ids and ids[-1] in params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(ids) >= params.max_new_tokens else None
