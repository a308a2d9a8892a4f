"""A call between its assignment and its end."""

from __future__ import annotations

import asyncio

from rollover.engine.base import GenerateRequest
from rollover.swarm.wire.messages import unpack_ids
from rollover.swarm.worker.held_stream import HeldStream
from rollover.types import SamplingParams


class OpenCall:
    """A call that is decoded, or waits to be.

    Example: ``OpenCall(stream)`` of a held stream; ``request_id`` is ``None`` until the engine has it.
    """

    def __init__(self, stream: HeldStream) -> None:
        self.stream = stream
        self.task: asyncio.Task[None] | None = None
        self.request_id: str | None = None
        """Id of the engine's current generation call for it."""
        self.begun_s = 0.0
        """Time at which the engine received that call."""
        self.is_aborted = False
        self.is_interrupted = False
        """The engine was asked to stop it, for a while."""

    def request(self) -> GenerateRequest:
        """Return the generation call that continues after the decoded tokens. Raises ``ValueError`` and
        ``ProtocolError`` for an assignment that makes none."""
        assign = self.stream.assign
        params = SamplingParams(
            max_new_tokens=assign.max_new_tokens,
            temperature=assign.temperature,
            top_p=assign.top_p,
            top_k=assign.top_k,
            stop_token_ids=assign.stop_token_ids,
            stop_strings=assign.stop_strings,
        )
        return GenerateRequest(
            request_id=assign.call_id,
            sample_key=assign.sample_key,
            prompt_key=assign.prompt_key,
            prompt_ids=unpack_ids(assign.prompt_ids),
            response_ids=self.stream.response_ids,
            params=params,
            seed=assign.seed,
            least_version=assign.least_version,
        )
