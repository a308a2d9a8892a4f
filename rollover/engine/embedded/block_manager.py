"""Whose key-value cache lies in which block. Pure bookkeeping; the tensors are in ``attention``.

What it keeps true: every block is either free or held by at least one holder (a running sequence or a kept
prefix), and ``refs`` counts the holders. Block 0 is nobody's: its keys and values stay zero, and unused
entries of block tables point at it. Running sequences come first: ``allocate`` evicts kept prefixes, least
recently used first, until it can serve, and gives ``None`` only when running sequences hold everything.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

NULL_BLOCK = 0

Kind = Literal["parked", "prompt"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The cache of ``token_ids``, kept after its sequence stopped (parked) or for siblings to come
    (prompt)."""

    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    kv_version: int
    """Oldest weights that computed any of it."""

    def num_shared(self, token_ids: Sequence[int]) -> int:
        """Leading tokens of ``token_ids`` that it holds: all that fit, or 0 if they differ anywhere."""
        n = min(len(self.token_ids), len(token_ids))
        return n if self.token_ids[:n] == tuple(token_ids[:n]) else 0


class BlockManager:
    """Blocks ``1 .. num_blocks - 1``, lowest free one first so that those in use stay close together."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = [0] * num_blocks
        self.num_evicted = 0
        self._free = list(range(1, num_blocks))  # a sorted list is a heap
        self._kept: OrderedDict[tuple[Kind, str], CachedPrefix] = OrderedDict()

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def num_available(self) -> int:
        """Free blocks and those that evicting every kept prefix would free."""
        kept: dict[int, int] = {}
        for prefix in self._kept.values():
            for block in prefix.blocks:
                kept[block] = kept.get(block, 0) + 1
        return len(self._free) + sum(self.refs[block] == n for block, n in kept.items())

    def allocate(self, n: int) -> list[int] | None:
        """``n`` blocks with one holder each, or ``None`` and nothing changed but evictions."""
        while len(self._free) < n and self._evict_one():
            pass
        if len(self._free) < n:
            return None
        blocks = [heapq.heappop(self._free) for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is free"
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each."""
        for block in blocks:
            assert self.refs[block] > 0, f"block {block} is free"
            self.refs[block] -= 1
            if self.refs[block] == 0:
                heapq.heappush(self._free, block)

    def keep(self, kind: Kind, key: str, prefix: CachedPrefix) -> None:
        """Take over the caller's hold on ``prefix.blocks``."""
        self.drop(kind, key)
        self._kept[kind, key] = prefix

    def get(self, kind: Kind, key: str) -> CachedPrefix | None:
        """Look, and count it as used."""
        prefix = self._kept.get((kind, key))
        if prefix is not None:
            self._kept.move_to_end((kind, key))
        return prefix

    def drop(self, kind: Kind, key: str) -> None:
        if prefix := self._kept.pop((kind, key), None):
            self.release(prefix.blocks)

    def drop_all(self, kind: Kind) -> None:
        for key in [key for k, key in self._kept if k == kind]:
            self.drop(kind, key)

    def swap(self, pairs: Sequence[tuple[int, int]]) -> dict[int, int]:
        """The two blocks of each pair exchange holders and contents; the new number of each. Whoever else knows
        these blocks by number must rename them."""
        new = dict(pairs) | {b: a for a, b in pairs}
        for a, b in pairs:
            self.refs[a], self.refs[b] = self.refs[b], self.refs[a]
        self._free = sorted(new.get(block, block) for block in self._free)
        for key, prefix in self._kept.items():
            if not new.keys().isdisjoint(prefix.blocks):
                self._kept[key] = replace(prefix, blocks=tuple(new.get(block, block) for block in prefix.blocks))
        return new

    def _evict_one(self) -> bool:
        """Drop the least recently used prefix that frees a block."""
        for (kind, key), prefix in self._kept.items():
            if any(self.refs[block] == 1 for block in prefix.blocks):
                self.drop(kind, key)
                self.num_evicted += 1
                return True
        return False

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert that ``refs`` is what the sequences and the kept prefixes hold, and nothing leaks."""
        refs = [0] * self.num_blocks
        for blocks in [*holders, *(p.blocks for p in self._kept.values())]:
            for block in blocks:
                refs[block] += 1
        assert refs == self.refs, "block reference counts are wrong"
        assert sorted(self._free) == [b for b in range(1, self.num_blocks) if refs[b] == 0], "blocks leak"
