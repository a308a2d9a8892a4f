"""One open call as the scheduler sees it: its tokens, how many of them are cached, and what is not yet
streamed.

``num_cached`` counts the leading tokens whose keys and values lie in ``blocks``. A sequence can decode when
exactly its last token is missing: decoding computes that one and samples the next. So a fresh prompt is
prefilled up to its last token, a resumed rollout that kept its cache needs no prefill at all, and both
decode alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import Chunk, GenerateRequest
from rollover.types import FinishReason


class Sequence:
    """Mutable, owned by the core."""

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        params = request.params
        self.request = request
        self.arrival = arrival
        self.token_ids: list[int] = [*request.prompt_ids, *request.response_ids]
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = self.num_prompt + params.max_new_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.blocks: list[int] = []
        self.num_cached = 0
        self.kv_version = 0
        self.high_water = len(self.token_ids) - 1 if request.response_ids else 0
        """Tokens that were cached at some time, here or in an earlier generation call."""
        self.num_sampled = 0
        self.num_prefilled_response = 0
        """Response tokens prefilled before the first one was sampled; the first chunk reports them."""
        self._table: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[float] = []

    @property
    def block_table(self) -> NDArray[np.int64]:
        """``blocks`` as an array, made anew only when there are more of them."""
        if len(self._table) != len(self.blocks):
            self._table = np.array(self.blocks, dtype=np.int64)
        return self._table

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Tokens to prefill before it can decode."""
        return len(self.token_ids) - 1 - self.num_cached

    @property
    def response_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        return len(self._pending_ids)

    def append(self, token_id: int, logprob: float) -> None:
        """Its last token has been computed and this one sampled from it."""
        self.num_cached += 1
        self.num_sampled += 1
        if self.high_water < self.num_cached:
            self.high_water = self.num_cached
        self.token_ids.append(token_id)
        self._pending_ids.append(token_id)
        self._pending_logprobs.append(logprob)

    def rename_blocks(self, new: Mapping[int, int]) -> None:
        """Blocks have been swapped; those not in ``new`` stayed."""
        self.blocks, self._table = [new.get(block, block) for block in self.blocks], self._table[:0]

    def forget_cache(self) -> None:
        self.blocks, self.num_cached, self._table = [], 0, self._table[:0]

    def flush(self, policy_version: int, reason: FinishReason | None = None) -> Chunk:
        """What has not been streamed yet, as a chunk."""
        chunk = Chunk(
            token_ids=tuple(self._pending_ids),
            logprobs=tuple(self._pending_logprobs),
            policy_version=policy_version,
            kv_version=self.kv_version,
            finish_reason=reason,
            num_prefilled_tokens=self.num_prefilled_response,
        )
        self._pending_ids, self._pending_logprobs, self.num_prefilled_response = [], [], 0
        return chunk
