"""The prefix cache: which block holds which tokens, and which is evicted. Bookkeeping alone; the tensors are in
``kv_cache``.

A block is *cached* when others may find it by its key, the hash of the key of the block before it and of its own token
ids. A key therefore stands for everything up to the end of its block. The first key of such a chain is a root, one for
each thing that must not be shared (versions of the weights, say), so nothing of another root is ever found. Parking a
sample is releasing its blocks, resuming it is finding them again; a system prompt is found by whoever begins with it.

Invariants:

* Every block is in one place: referenced (``ref_count`` block tables hold it), evictable (cached and unreferenced) or
  empty. Block 0 is never handed out: its keys and values stay zero, and unused entries of block tables point at it.
* No two blocks have the same key, and what a cached block is said to hold is never overwritten.
* Unreferenced blocks alone are evicted, one at a time and when no block is empty: blocks of finished responses first,
  then the least recently used; of a prefix, the later block before the earlier one. Finished responses keep no more
  blocks than were ever referenced at once, so that memory which was never needed is not touched for them.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockCopy = tuple[int, int]
"""Source and destination block. All copies of one list are made at once, before anything else is written."""
Key = bytes
"""16 bytes of BLAKE2b: two prefixes never have the same one."""


def root_key(*parts: object) -> Key:
    """Return the first key of the chains that may share blocks."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def block_key(parent: Key, token_ids: Sequence[int]) -> Key:
    """Return the key of a block with these tokens after the block with key ``parent``."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Block:
    """A block of the cache. ``key`` is ``None`` unless the block is cached; then its first tokens are ``token_ids``,
    and it follows the block with key ``parent``.

    Example:
        The second block of the prefix ``1 .. 6``, in blocks of 4 tokens and not referenced: ``Block(index=5,
        ref_count=0, key=block_key(k, (5, 6)), parent=k, token_ids=(5, 6))``, where ``k`` is the key of the first one.
    """

    index: int
    ref_count: int = 0
    key: Key | None = None
    parent: Key = b""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix of some tokens: full blocks, and a tail block of which the first tokens fit.

    Example:
        With blocks of 4 tokens, ten of which are cached: ``CachedPrefix(blocks=(3, 7), num_tokens=10, tail=5)``. Blocks
        3 and 7 are shared as they are; block 5, of which the first two tokens fit, is copied before it is written to.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    tail: int | None = None


class BlockManager:
    """Manages blocks ``1 .. num_blocks - 1``, lowest empty one first so that those in use stay close together."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.blocks = [Block(index) for index in range(num_blocks)]
        self.num_evicted = 0
        self._most_used = 0
        self._empty = list(range(1, num_blocks))  # a sorted list is a heap
        self._evict_first: OrderedDict[Block, None] = OrderedDict()
        self._evictable: OrderedDict[Block, None] = OrderedDict()  # least recently used first
        self._cached: dict[Key, Block] = {}
        self._followers: dict[Key, list[Block]] = {}  # of the same parent, in the order of their tokens

    @property
    def num_available(self) -> int:
        """Return the number of blocks that ``allocate`` can give: the empty ones, and others that it may evict."""
        return len(self._empty) + len(self._evict_first) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def extend_keys(self, keys: list[Key], token_ids: Sequence[int], num_tokens: int) -> None:
        """Append to ``keys``, which begins with a root, the keys of further full blocks of ``num_tokens``."""
        size = self.block_size
        for end in range(len(keys) * size, num_tokens + 1, size):
            keys.append(block_key(keys[-1], token_ids[end - size : end]))

    def find(self, keys: Sequence[Key], token_ids: Sequence[int]) -> CachedPrefix:
        """Find the longest cached prefix of ``token_ids``; ``keys`` are a root and the keys of their full blocks."""
        blocks: list[int] = []
        for key in keys[1:]:
            if (block := self._cached.get(key)) is None:
                break
            blocks.append(block.index)
        start = len(blocks) * self.block_size
        tail, num_shared = self._longest_match(keys[len(blocks)], tuple(token_ids[start : start + self.block_size]))
        return CachedPrefix(tuple(blocks), start + num_shared, tail.index if tail else None)

    def take(self, prefix: CachedPrefix, num_blocks: int, spare: int) -> tuple[list[int], list[BlockCopy]] | None:
        """Give a block table of ``num_blocks`` whose first ones hold ``prefix``, and the copies that this needs;
        ``None``, and nothing changed, unless ``spare`` blocks are then left. A tail that is not referenced, with no
        token beyond those wanted, is taken over instead of copied."""
        tail = [] if prefix.tail is None else [prefix.tail]
        held, num_tail_tokens = [*prefix.blocks, *tail], prefix.num_tokens - len(prefix.blocks) * self.block_size
        copied = [i for i in tail if self.blocks[i].ref_count or len(self.blocks[i].token_ids) > num_tail_tokens]
        num_new = num_blocks - len(held) + len(copied)
        if self.num_available - sum(not self.blocks[i].ref_count for i in held) < num_new + spare:
            return None
        self.share(held)
        new = self.allocate(num_new)
        assert new is not None, "num_available promised what allocate could not give"
        self.release(copied)
        return held[: len(held) - len(copied)] + new, [(i, new[0]) for i in copied]

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each; each is referenced or cached."""
        for index in blocks:
            block = self.blocks[index]
            assert block.ref_count or block.key, f"block {index} is empty"
            if block.ref_count == 0:
                del (self._evict_first if block in self._evict_first else self._evictable)[block]
            block.ref_count += 1

    def allocate(self, n: int) -> list[int] | None:
        """Give ``n`` blocks with one reference each, evicting as many as are missing. ``None``, and nothing changed,
        when too many are referenced."""
        if self.num_available < n:
            return None
        while len(self._empty) < n:
            self._evict_one()
        indices = [heapq.heappop(self._empty) for _ in range(n)]
        for index in indices:
            self.blocks[index].ref_count = 1
        return indices

    def release(self, blocks: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop one reference to each. Cached blocks stay until they are evicted, the last of these first."""
        self._most_used = max(self._most_used, self.num_used)
        for index in reversed(blocks):
            block = self.blocks[index]
            assert block.ref_count > 0, f"block {index} is not referenced"
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.key is None:
                heapq.heappush(self._empty, index)
            else:
                (self._evict_first if evict_first else self._evictable)[block] = None
        while len(self._evict_first) > self._most_used:
            self._evict_one()

    def cache(self, index: int, parent: Key, token_ids: Sequence[int], key: Key | None = None) -> None:
        """Let others find a referenced block: it holds ``token_ids`` and follows the block with key ``parent``. These
        begin with the tokens that it was said to hold before. Where another block holds the same, that one is found."""
        block, key = self.blocks[index], key or block_key(parent, token_ids)
        if block.key == key:
            return
        self._forget(block)
        if key not in self._cached:
            block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
            self._cached[key] = block
            followers = self._followers.setdefault(parent, [])
            followers.insert(bisect_left(followers, block.token_ids, key=_token_ids), block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Hide the blocks among these that have one reference; they are empty once it is dropped."""
        for index in blocks:
            if self.blocks[index].ref_count == 1:
                self._forget(self.blocks[index])

    def forget_all(self) -> None:
        """Hide all blocks; those without a reference are empty."""
        for block in list(self._cached.values()):
            self._forget(block)
        self._empty = sorted([*self._empty, *(b.index for b in (*self._evict_first, *self._evictable))])
        self._evict_first.clear()
        self._evictable.clear()

    def _longest_match(self, parent: Key, token_ids: tuple[int, ...]) -> tuple[Block | None, int]:
        """Return the block after ``parent`` that begins with most of ``token_ids``, and with how many. It is next to
        where they would stand in the sorted list."""
        followers = self._followers.get(parent, [])
        place = bisect_left(followers, token_ids, key=_token_ids)
        best: tuple[Block | None, int] = None, 0
        for block in followers[max(0, place - 1) : place + 1]:
            if (num_shared := _num_shared(block.token_ids, token_ids)) > best[1]:
                best = block, num_shared
        return best

    def _evict_one(self) -> None:
        block, _ = (self._evict_first or self._evictable).popitem(last=False)
        self._forget(block)
        heapq.heappush(self._empty, block.index)
        self.num_evicted += 1

    def _forget(self, block: Block) -> None:
        if block.key is None:
            return
        del self._cached[block.key]
        followers = self._followers[block.parent]
        del followers[bisect_left(followers, block.token_ids, key=_token_ids)]
        if not followers:
            del self._followers[block.parent]
        block.key, block.parent, block.token_ids = None, b"", ()


def _token_ids(block: Block) -> tuple[int, ...]:
    return block.token_ids


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the leading tokens that are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
