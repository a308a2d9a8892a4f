"""Who runs: a state machine over waiting and running sequences and their cache blocks. Torch-free.

States: ``waiting`` (no cache held) -> ``running`` (prefilling, then decoding) -> gone, its cache freed or
parked. A running sequence goes back to waiting when it is preempted or its cache must be computed again.

What it keeps true:

* Sequences start in order of arrival, except that siblings wait for the first of them to prefill their
  prompt.
* Memory is bounded by the block pool and nothing deadlocks: when it runs out, kept prefixes are evicted, then
  the youngest running sequence is preempted; the pool holds one sequence of full length, so the oldest always
  goes on. A sequence starts only if one spare block per running sequence is left, lest it be preempted at
  once.
* A block with more than one holder is never written: siblings share full blocks and copy the last, partial
  one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np

from rollover.engine.embedded.block_manager import BlockManager, CachedPrefix
from rollover.engine.embedded.sequence import Sequence

BlockCopy = tuple[int, int]
"""Source and destination block. All copies of one list are made at once, before anything else is written."""


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """The next ``num_tokens`` uncached tokens of a sequence, from ``start``."""

    sequence: Sequence
    start: int
    num_tokens: int


class SequenceScheduler:
    """``policy_version`` is the version of the weights that compute what is cached from now on; ``max_gaps`` how
    many blocks decoding may read over in vain before those in use are brought together."""

    def __init__(
        self, blocks: BlockManager, *, max_running: int, prefill_chunk_tokens: int, max_gaps: int = 16
    ) -> None:
        self.blocks = blocks
        self.max_running, self.prefill_chunk_tokens, self.max_gaps = max_running, prefill_chunk_tokens, max_gaps
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []
        self.policy_version = 0
        self._drifted = False
        self.num_preempted = 0
        self.prefilled_tokens = 0
        self.reprefilled_tokens = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def admit(self) -> list[BlockCopy]:
        """Start waiting sequences while there is room; what must be copied before they prefill or decode."""
        copies: list[BlockCopy] = []
        if not self.waiting:
            return copies
        prefilling = {s.request.prompt_key for s in self.running if s.num_cached < s.num_prompt - 1}
        index = 0
        while index < len(self.waiting) and len(self.running) < self.max_running:
            sequence = self.waiting[index]
            if self._waits_for_sibling(sequence, prefilling):
                index += 1
            elif self._start(sequence, copies):
                self.running.append(self.waiting.pop(index))
                if sequence.num_cached < sequence.num_prompt - 1:
                    prefilling.add(sequence.request.prompt_key)
            else:
                break
        return copies

    def next_prefill(self) -> list[PrefillSlice]:
        """Slices to prefill together: padded to the longest they stay within ``prefill_chunk_tokens``."""
        slices: list[PrefillSlice] = []
        longest = 0
        for sequence in [s for s in self.running if len(s.token_ids) - 1 > s.num_cached]:
            num_tokens = min(sequence.num_missing, self.prefill_chunk_tokens)
            longest = max(longest, num_tokens)
            if longest * (len(slices) + 1) > self.prefill_chunk_tokens:
                break
            slices.append(PrefillSlice(sequence, sequence.num_cached, num_tokens))
        return slices

    def prefilled(self, slices: list[PrefillSlice]) -> list[BlockCopy]:
        """Account for computed slices; what must be copied to keep finished prompts for their siblings."""
        copies: list[BlockCopy] = []
        for piece in slices:
            sequence, end = piece.sequence, piece.start + piece.num_tokens
            self.prefilled_tokens += piece.num_tokens
            self.reprefilled_tokens += max(0, min(end, sequence.high_water) - piece.start)
            if not sequence.num_sampled:
                sequence.num_prefilled_response += max(0, end - max(piece.start, sequence.num_prompt))
            sequence.num_cached = end
            sequence.high_water = max(sequence.high_water, end)
            if piece.start < sequence.num_prompt - 1 <= end:
                self._keep_prompt(sequence, copies)
        return copies

    def next_decode(self) -> list[Sequence]:
        """Running sequences that can decode, each with room for its last token; preempts to make that
        room."""
        size = self.blocks.block_size
        full = [s for s in self.running if len(s.blocks) * size < len(s.token_ids) == s.num_cached + 1]
        for sequence in sorted(full, key=lambda s: s.arrival):
            while sequence.blocks and len(sequence.blocks) * size < sequence.num_tokens:
                if new := self.blocks.allocate(1):
                    sequence.blocks += new
                else:
                    self._back_to_waiting(max(self.running, key=lambda s: s.arrival))
                    self.num_preempted += 1
        return [s for s in self.running if len(s.token_ids) == s.num_cached + 1]

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit behind its last one into its last block. When it can decode, that block is its own."""
        return len(sequence.blocks) * self.blocks.block_size - sequence.num_tokens

    def compact(self) -> list[BlockCopy]:
        """Bring the blocks that one running sequence alone holds to the front of the pool when they have drifted
        apart, since decoding reads the pool up to the last of them; what must be copied first."""
        if not self._drifted or not self.running:
            return []
        self._drifted = False
        num_users = np.bincount(np.concatenate([s.block_table for s in self.running]))
        own = np.flatnonzero(num_users == 1)
        if not len(own) or own[-1] <= len(own) + max(self.max_gaps, len(own) // 8):
            return []
        front = np.arange(1, len(own) + 1)
        pairs = list(zip(own[own > len(own)].tolist(), np.setdiff1d(front, own).tolist(), strict=True))
        held = [target for _, target in pairs if self.blocks.refs[target]]
        new = self.blocks.swap(pairs)
        for sequence in self.running:
            sequence.rename_blocks(new)
        return [*pairs, *((target, new[target]) for target in held)]

    def remove(self, sequence: Sequence, *, park: bool) -> None:
        """Take it out, waiting or running. Parked, its cache stays under its sample key until the room is
        needed."""
        if sequence not in self.running:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._drifted = True
        kept = self.blocks.num_for(sequence.num_cached) if park else 0
        self.blocks.release(sequence.blocks[kept:])
        if kept:
            prefix = CachedPrefix(
                token_ids=tuple(sequence.token_ids[: sequence.num_cached]),
                blocks=tuple(sequence.blocks[:kept]),
                kv_version=sequence.kv_version,
            )
            self.blocks.keep("parked", sequence.request.sample_key, prefix)
        sequence.forget_cache()

    def update(self, policy_version: int, *, recompute: bool) -> None:
        """The weights changed. Prompts are never shared across versions; the rest is kept or dropped."""
        self.policy_version = policy_version
        self.blocks.drop_all("prompt")
        if recompute:
            self.blocks.drop_all("parked")
            for sequence in list(self.running):
                self._back_to_waiting(sequence)

    def reset(self) -> None:
        """Forget every sequence and everything kept."""
        for sequence in list(self.running):
            self._back_to_waiting(sequence)
        self.waiting.clear()
        self.blocks.drop_all("prompt")
        self.blocks.drop_all("parked")

    def check(self) -> None:
        """Assert the invariants of blocks and sequences."""
        self.blocks.check([s.blocks for s in self.running])
        for sequence in self.running:
            assert len(sequence.blocks) * self.blocks.block_size >= sequence.num_cached
            assert sequence.num_missing >= 0
        assert all(not s.blocks and not s.num_cached for s in self.waiting)

    def _waits_for_sibling(self, sequence: Sequence, prefilling: set[str]) -> bool:
        return (
            sequence.request.prompt_key in prefilling and self.blocks.get("parked", sequence.request.sample_key) is None
        )

    def _start(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """Give it blocks for all its tokens, reusing a parked or prompt prefix; False and no change without
        room."""
        blocks, request = self.blocks, sequence.request
        wanted = sequence.token_ids[:-1]
        parked, prompt = blocks.get("parked", request.sample_key), blocks.get("prompt", request.prompt_key)
        prefix, num_cached, whole = None, 0, 0
        if parked and (num_cached := parked.num_shared(wanted)):
            prefix = parked
            last = parked.blocks[blocks.num_for(num_cached) - 1]
            whole = blocks.num_for(num_cached) - (blocks.refs[last] > 1)
        elif prompt and (num_cached := prompt.num_shared(wanted)):
            prefix, whole = prompt, num_cached // blocks.block_size
        held = list(prefix.blocks[: blocks.num_for(num_cached)]) if prefix else []
        blocks.share(held)
        needed = blocks.num_for(sequence.num_tokens) - whole
        if blocks.num_available() < needed + len(self.running):
            blocks.release(held)
            return False
        new = blocks.allocate(needed)
        assert new is not None, "num_available promised what allocate could not give"
        reused, partial = held[:whole], held[whole:]
        if partial:
            copies.append((partial[0], new[0]))
            blocks.release(partial)
        blocks.drop("parked", request.sample_key)
        sequence.blocks, sequence.num_cached = reused + new, num_cached
        self._drifted = True
        sequence.kv_version = prefix.kv_version if prefix else self.policy_version
        return True

    def _keep_prompt(self, sequence: Sequence, copies: list[BlockCopy]) -> None:
        """Keep the prompt's prefix for siblings; without a free block, only its full blocks."""
        size = self.blocks.block_size
        num_full, rest = divmod(sequence.num_prompt - 1, size)
        shared = sequence.blocks[:num_full]
        self.blocks.share(shared)
        num_tokens = num_full * size
        if rest and self.blocks.num_free and (new := self.blocks.allocate(1)):
            copies.append((sequence.blocks[num_full], new[0]))
            shared, num_tokens = [*shared, *new], sequence.num_prompt - 1
        if shared:
            prefix = CachedPrefix(tuple(sequence.token_ids[:num_tokens]), tuple(shared), sequence.kv_version)
            self.blocks.keep("prompt", sequence.request.prompt_key, prefix)

    def _back_to_waiting(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drifted = True
        self.blocks.release(sequence.blocks)
        sequence.forget_cache()
        self.add(sequence)
