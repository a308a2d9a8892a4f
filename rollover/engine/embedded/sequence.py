"""An open call as the scheduler sees it: its tokens, how many of them are cached, and what is not yet streamed.

``num_cached_tokens`` counts the leading tokens whose keys and values lie in the blocks of ``block_table``. A sequence
can decode when exactly its last token is missing: decoding computes that one and samples the next. So a fresh prompt is
prefilled up to its last token, a resumed rollout whose cache is still there needs no prefill at all, and both decode
alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded.block_manager import CachedPrefix, Key
from rollover.types import FinishReason


class Chain(NamedTuple):
    """The place where the keys of a sequence's blocks begin, and the oldest weights that computed any block."""

    root: Key
    kv_version: int


class Sequence:
    """Holds the state of one call. Mutable, owned by the core."""

    def __init__(self, request: GenerateRequest, arrival: int) -> None:
        params = request.params
        self.request = request
        self.arrival = arrival
        self.token_ids: list[int] = [*request.prompt_ids, *request.response_ids]
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = self.num_prompt + params.max_new_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.block_table: list[int] = []
        self.num_cached_tokens = 0
        self.num_cached_blocks = 0
        """Leading full blocks that others can find."""
        self.chain = Chain(b"", 0)
        self.block_keys: list[Key] = []
        """The root of the chain and the keys of the full blocks, as far as they have been needed."""
        self.prompt_key: Key = b""
        """The key of a block that ends where the prefill of the prompt does, before its last token."""
        self.high_water = len(self.token_ids) - 1 if request.response_ids else 0
        """Tokens that were cached at some time, here or in an earlier generation call."""
        self.num_sampled = 0
        self.num_prefilled_response = 0
        """Response tokens prefilled before the first one was sampled; the first chunk reports them."""
        self._table: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[float] = []
        self._pending_kept: list[bytes] = []
        self._pending_routes: list[bytes] = []
        self._pending_kv_version = math.inf
        """Version of the oldest weights whose cache they attended to: it may be gone by the time of the flush."""

    @property
    def block_table_array(self) -> NDArray[np.int64]:
        """Return ``block_table`` as an array, which is made again only when the table is longer."""
        if len(self._table) != len(self.block_table):
            self._table = np.array(self.block_table, dtype=np.int64)
        return self._table

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        return len(self.token_ids) - 1 - self.num_cached_tokens

    @property
    def num_prefilled_prompt(self) -> int:
        """Return the number of tokens of the prompt that prefill computes: all but the last one, which is decoded."""
        return self.num_prompt - 1

    @property
    def response_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        return len(self._pending_ids)

    def start(self, prefix: CachedPrefix, block_table: list[int]) -> None:
        """Give it these blocks, the first of which hold ``prefix``."""
        self.block_table, self._table = block_table, self._table[:0]
        self.num_cached_tokens, self.num_cached_blocks = prefix.num_tokens, len(prefix.blocks)

    def append(self, token_id: int, logprob: float) -> None:
        """Append a token that was sampled from its last one, which is computed with that."""
        self.num_cached_tokens += 1
        self.num_sampled += 1
        if self.high_water < self.num_cached_tokens:
            self.high_water = self.num_cached_tokens
        self.token_ids.append(token_id)
        self._pending_ids.append(token_id)
        self._pending_kv_version = min(self._pending_kv_version, self.chain.kv_version)
        self._pending_logprobs.append(logprob)

    def keep(self, kept_set: bytes) -> None:
        """Append the kept set of the token that is appended next."""
        self._pending_kept.append(kept_set)

    def keep_route(self, route: bytes) -> None:
        """Append the route of the token that is appended next."""
        self._pending_routes.append(route)

    def forget_cache(self) -> None:
        self.block_table, self._table, self.num_cached_tokens, self.num_cached_blocks = [], self._table[:0], 0, 0

    def flush(self, policy_version: int, reason: FinishReason | None = None) -> Chunk:
        """Give what has not been streamed yet as a chunk."""
        chunk = Chunk(
            token_ids=tuple(self._pending_ids),
            logprobs=tuple(self._pending_logprobs),
            policy_version=policy_version,
            kv_version=int(min(self._pending_kv_version, self.chain.kv_version)),
            finish_reason=reason,
            num_prefilled_tokens=self.num_prefilled_response,
            kept=tuple(self._pending_kept),
            routes=tuple(self._pending_routes),
        )
        self._pending_ids, self._pending_logprobs, self._pending_kept, self._pending_routes = [], [], [], []
        self._pending_kv_version, self.num_prefilled_response = math.inf, 0
        return chunk
