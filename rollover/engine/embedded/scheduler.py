"""Decides who runs: a state machine over waiting and running sequences and their cache blocks. Torch-free.

States: ``waiting`` (no block held) -> ``running`` (prefilling, then decoding) -> gone, finished or parked. A running
sequence goes back to waiting when it is preempted or its cache must be computed again. What a sequence leaves behind
stays cached until its blocks are evicted (``block_manager``), and whoever starts takes what it finds of its prefix.

Invariants:

* Sequences start in order of arrival, except that one waits while a running one prefills the next block of its prefix,
  or the rest of its prompt.
* Memory is bounded by the block pool and nothing deadlocks: when it runs out, cached blocks without a reference are
  evicted, then the youngest running sequence is preempted; the pool holds one sequence of full length, so the oldest
  always continues. A sequence starts only if one spare block per running sequence is left, lest it be preempted at
  once.
* A block with more than one reference is full and never written: a tail block that is shared in part is copied.
* Cache computed under older weights is found by the samples alone that were open or parked when the weights changed,
  and by these only under ``kv_on_update = "keep"``.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from rollover.engine.embedded.block_manager import BlockCopy, BlockManager, CachedPrefix, Key, block_key, root_key
from rollover.engine.embedded.sequence import Chain, Sequence


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """The next ``num_tokens`` uncached tokens of a sequence, from ``start``.

    Example:
        A fresh prompt of 300 tokens of which a system prompt of 128 is cached, in chunks of 100:
        ``PrefillSlice(sequence, start=128, num_tokens=100)``, then ``start=228, num_tokens=71``.
    """

    sequence: Sequence
    start: int
    num_tokens: int


class SequenceScheduler:
    """Admits, prefills, decodes and preempts sequences.

    Args:
        isolate_prompts: let samples of the same prompt alone share cache, and only what prompts and parked samples
            left: what is found for a prompt then does not depend on which other prompts came before.
    """

    def __init__(
        self, blocks: BlockManager, *, max_running: int, prefill_chunk_tokens: int, isolate_prompts: bool = False
    ) -> None:
        self.blocks = blocks
        self.max_running, self.prefill_chunk_tokens = max_running, prefill_chunk_tokens
        self.isolate_prompts = isolate_prompts
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []
        self.policy_version = 0
        """The version of the weights that compute what is cached from now on."""
        self._epoch = 0
        """The number of weight updates so far, including updates that did not change the version."""
        self._left_chains: dict[str, Chain] = {}
        """The chains of samples that were parked or preempted, by sample key, the latest last."""
        self.num_preempted = 0
        self.prefilled_tokens = 0
        self.reprefilled_tokens = 0
        self.cached_tokens = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def admit(self) -> list[BlockCopy]:
        """Start waiting sequences while there is room, and give what must be copied before they prefill or decode."""
        copies: list[BlockCopy] = []
        if not self.waiting or len(self.running) == self.max_running:
            return copies
        prefilling = {key for s in self.running for key in self._keys_to_prefill(s)}
        index = 0
        while index < len(self.waiting) and len(self.running) < self.max_running:
            sequence = self.waiting[index]
            prefix = self._find(sequence)
            if self._is_being_prefilled(sequence, prefix, prefilling):
                index += 1
            elif self._start(sequence, prefix, copies):
                self.running.append(self.waiting.pop(index))
                prefilling.update(self._keys_to_prefill(sequence))
            else:
                break
        return copies

    def next_prefill(self) -> list[PrefillSlice]:
        """Choose slices to prefill together: padded to the longest they stay within ``prefill_chunk_tokens``."""
        slices: list[PrefillSlice] = []
        longest = 0
        for sequence in [s for s in self.running if len(s.token_ids) - 1 > s.num_cached_tokens]:
            num_tokens = min(sequence.num_missing, self.prefill_chunk_tokens)
            longest = max(longest, num_tokens)
            if longest * (len(slices) + 1) > self.prefill_chunk_tokens:
                break
            slices.append(PrefillSlice(sequence, sequence.num_cached_tokens, num_tokens))
        return slices

    def prefilled(self, slices: list[PrefillSlice]) -> None:
        """Account for computed slices, and let others find them."""
        for piece in slices:
            sequence, end = piece.sequence, piece.start + piece.num_tokens
            self.prefilled_tokens += piece.num_tokens
            self.reprefilled_tokens += max(0, min(end, sequence.high_water) - piece.start)
            if not sequence.num_sampled:
                sequence.num_prefilled_response += max(0, end - max(piece.start, sequence.num_prompt))
            sequence.num_cached_tokens = end
            sequence.high_water = max(sequence.high_water, end)
            self._cache_full_blocks(sequence)
            self._cache_tail(sequence)

    def next_decode(self) -> list[Sequence]:
        """Give the running sequences that can decode, each with room for its last token; preempt to make that room."""
        size = self.blocks.block_size
        full = [s for s in self.running if len(s.block_table) * size < len(s.token_ids) == s.num_cached_tokens + 1]
        for sequence in sorted(full, key=lambda s: s.arrival):
            self._cache_full_blocks(sequence)
            while sequence.block_table and len(sequence.block_table) * size < sequence.num_tokens:
                if new := self.blocks.allocate(1):
                    sequence.block_table += new
                else:
                    self._back_to_waiting(max(self.running, key=lambda s: s.arrival))
                    self.num_preempted += 1
        return [s for s in self.running if len(s.token_ids) == s.num_cached_tokens + 1]

    def remove(self, sequence: Sequence, *, park: bool) -> None:
        """Take it out, waiting or running. Its cache can be found until the room is needed; the cache of a finished
        response, which fewer ask for, is evicted before the cache of parked samples and prompts."""
        if sequence not in self.running:
            self.waiting.remove(sequence)
        elif park:
            self._leave_unfinished(sequence)
        else:
            num_prompt = self.blocks.num_for(sequence.num_prefilled_prompt)
            prompt, response = sequence.block_table[:num_prompt], sequence.block_table[num_prompt:]
            self._stop_running(sequence)
            if self.isolate_prompts:
                self.blocks.forget(response)
            self.blocks.release(response, evict_first=True)
            self.blocks.release(prompt)

    def update(self, policy_version: int, *, recompute: bool) -> None:
        """Record new weights. A fresh sample finds nothing that older weights computed; a sample that was open or
        parked keeps what it had, or loses it."""
        self.policy_version = policy_version
        self._epoch += 1
        if recompute:
            self._forget_everything()
        for sequence in self.running:
            if not sequence.num_cached_tokens:
                self._begin_chain(sequence, self._fresh_chain(sequence))

    def reset(self) -> None:
        self._forget_everything()
        self.waiting.clear()

    def _find(self, sequence: Sequence) -> CachedPrefix:
        """Find what is cached of what it must prefill: in the chain that its sample left, or else in a fresh one."""
        sample, fresh = sequence.request.sample_key, self._fresh_chain(sequence)
        for chain in (self._left_chains.get(sample, fresh), fresh):
            self._begin_chain(sequence, chain)
            prefix = self.blocks.find(sequence.block_keys, sequence.token_ids[:-1])
            if prefix.num_tokens or chain == fresh:
                break
            del self._left_chains[sample]  # nothing is left of it
        return prefix

    def _fresh_chain(self, sequence: Sequence) -> Chain:
        sharers = sequence.request.prompt_key if self.isolate_prompts else None
        return Chain(root_key(self._epoch, sharers), self.policy_version)

    def _begin_chain(self, sequence: Sequence, chain: Chain) -> None:
        if sequence.chain == chain:
            return
        sequence.chain, sequence.block_keys = chain, [chain.root]
        self.blocks.extend_keys(sequence.block_keys, sequence.token_ids, sequence.num_tokens - 1)
        num_full, rest = divmod(sequence.num_prefilled_prompt, self.blocks.block_size)
        end = sequence.token_ids[sequence.num_prefilled_prompt - rest : sequence.num_prefilled_prompt]
        sequence.prompt_key = block_key(sequence.block_keys[num_full], end)

    def _keys_to_prefill(self, sequence: Sequence) -> list[Key]:
        """Return the keys of the full blocks that it is about to prefill, and of its whole prompt."""
        if not sequence.num_missing:
            return []
        keys = sequence.block_keys[sequence.num_cached_blocks + 1 :]
        return [*keys, sequence.prompt_key] if sequence.num_cached_tokens < sequence.num_prefilled_prompt else keys

    def _is_being_prefilled(self, sequence: Sequence, prefix: CachedPrefix, prefilling: set[Key]) -> bool:
        next_keys = sequence.block_keys[len(prefix.blocks) + 1 : len(prefix.blocks) + 2]
        if prefix.num_tokens < sequence.num_prefilled_prompt:
            next_keys.append(sequence.prompt_key)
        return not prefilling.isdisjoint(next_keys)

    def _start(self, sequence: Sequence, prefix: CachedPrefix, copies: list[BlockCopy]) -> bool:
        """Give it blocks for all its tokens, beginning with the blocks of ``prefix``; without room, False and no
        change."""
        blocks, num_blocks, spare = self.blocks, self.blocks.num_for(sequence.num_tokens), len(self.running)
        taken = blocks.take(prefix, num_blocks, spare)
        if taken is None and not self.running:  # a tail to copy may be one block too many
            prefix = CachedPrefix(prefix.blocks, len(prefix.blocks) * blocks.block_size)
            taken = blocks.take(prefix, num_blocks, spare)
        if taken is None:
            return False
        block_table, to_copy = taken
        copies += to_copy
        sequence.start(prefix, block_table)
        self.cached_tokens += prefix.num_tokens
        self._left_chains.pop(sequence.request.sample_key, None)
        return True

    def _cache_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the full blocks that have been computed since it was called last."""
        size, keys, token_ids = self.blocks.block_size, sequence.block_keys, sequence.token_ids
        num_full = sequence.num_cached_tokens // size
        self.blocks.extend_keys(keys, token_ids, num_full * size)
        for i in range(sequence.num_cached_blocks, num_full):
            self.blocks.cache(sequence.block_table[i], keys[i], token_ids[i * size : (i + 1) * size], keys[i + 1])
        sequence.num_cached_blocks = num_full

    def _cache_tail(self, sequence: Sequence) -> None:
        """Let others find what has been computed of its last block, which is not full."""
        num_full, rest = divmod(sequence.num_cached_tokens, self.blocks.block_size)
        if rest:
            tail = sequence.token_ids[sequence.num_cached_tokens - rest : sequence.num_cached_tokens]
            self.blocks.cache(sequence.block_table[num_full], sequence.block_keys[num_full], tail)

    def _stop_running(self, sequence: Sequence) -> None:
        """Let others find all that it has computed; its blocks are the caller's to release."""
        self.running.remove(sequence)
        self._cache_full_blocks(sequence)
        self._cache_tail(sequence)
        sequence.forget_cache()

    def _leave_unfinished(self, sequence: Sequence) -> None:
        """Release its blocks, and remember where its sample finds them, even under later weights."""
        block_table, sample = sequence.block_table, sequence.request.sample_key
        self._stop_running(sequence)
        self.blocks.release(block_table)
        self._left_chains.pop(sample, None)
        self._left_chains[sample] = sequence.chain
        if len(self._left_chains) > self.blocks.num_blocks:
            del self._left_chains[next(iter(self._left_chains))]

    def _back_to_waiting(self, sequence: Sequence) -> None:
        self._leave_unfinished(sequence)
        self.add(sequence)

    def _forget_everything(self) -> None:
        for sequence in list(self.running):
            self._back_to_waiting(sequence)
        self.blocks.forget_all()
        self._left_chains.clear()
