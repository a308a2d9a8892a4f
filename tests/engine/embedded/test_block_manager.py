"""Which blocks are shared, kept and evicted, against a model that remembers all that was ever computed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from rollover.engine.embedded.block_manager import BlockManager, CachedPrefix, Key, block_key, root_key
from tests.engine.embedded.harness import check_blocks

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)
"""Of a vocabulary so small that prefixes are common."""


class Holder:
    """A block table and the tokens computed in it."""

    def __init__(self, root: Key, token_ids: tuple[int, ...], table: list[int]) -> None:
        self.root, self.token_ids, self.table = root, token_ids, table


class BlocksMachine(RuleBasedStateMachine):
    """``written`` is what each block really holds: the root and all tokens up to its end. ``order`` lists the evictable
    blocks, next one first, by the rules alone."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=13, block_size=SIZE)
        self.tables: list[Holder] = []
        self.written: dict[int, tuple[Key, tuple[int, ...]]] = {}
        self.finished: list[int] = []
        self.recent: list[int] = []
        self.most_used = 0
        """Blocks that were referenced at once, whenever some were released."""

    def keys(self, root: Key, token_ids: tuple[int, ...]) -> list[Key]:
        keys = [root]
        self.blocks.extend_keys(keys, token_ids, len(token_ids))
        assert len(keys) == 1 + len(token_ids) // SIZE
        return keys

    @rule(target=holders, token_ids=TOKENS, root=st.sampled_from([root_key(0), root_key(1)]), spare=st.integers(0, 2))
    def start(self, token_ids: tuple[int, ...], root: Key, spare: int) -> object:
        """Take what is cached, and blocks for the rest, as the scheduler does."""
        blocks = self.blocks
        prefix = blocks.find(self.keys(root, token_ids), token_ids)
        assert prefix.num_tokens == self.longest_cached(root, token_ids)
        for place, index in enumerate(prefix.blocks):
            assert self.written[index] == (root, token_ids[: (place + 1) * SIZE])
        if prefix.tail is not None:
            held = self.written[prefix.tail]
            assert held[0] == root and held[1][: prefix.num_tokens] == token_ids[: prefix.num_tokens]
        takes_over = prefix.tail is not None and self.takes_over(prefix)
        held = [*prefix.blocks, *([] if prefix.tail is None else [prefix.tail])]
        num_new = blocks.num_for(len(token_ids)) - len(prefix.blocks) - takes_over
        is_room = blocks.num_available - sum(not blocks.blocks[index].ref_count for index in held) >= num_new + spare
        evicted = self.next_evicted(num_new, held) if is_room else []
        taken = blocks.take(prefix, blocks.num_for(len(token_ids)), spare)
        assert (taken is not None) == is_room
        if taken is None:
            return multiple()
        table, copies = taken
        for index in (*held, *evicted):
            self.leave_queues(index)
        self.will_release(*table, *held)
        if prefix.tail is not None and not takes_over:
            assert copies == [(prefix.tail, table[len(prefix.blocks)])]
            self.enter_queue(prefix.tail, self.recent)
        else:
            assert not copies and table[: len(held)] == held
        holder = Holder(root, token_ids, table)
        self.tables.append(holder)
        for place in range(len(prefix.blocks), len(holder.table)):
            assert blocks.blocks[holder.table[place]].ref_count == 1, "a shared block is written"
            self.written[holder.table[place]] = (root, token_ids[: (place + 1) * SIZE])
        return holder

    def takes_over(self, prefix: CachedPrefix) -> bool:
        """Nobody holds the tail, and it holds nothing but what is wanted."""
        assert prefix.tail is not None
        tail, num_wanted = self.blocks.blocks[prefix.tail], prefix.num_tokens - len(prefix.blocks) * SIZE
        return tail.ref_count == 0 and len(tail.token_ids) == num_wanted

    def next_evicted(self, n: int, held: list[int]) -> list[int]:
        """What must go so that ``n`` blocks are empty."""
        num_empty = sum(not (block.ref_count or block.key) for block in self.blocks.blocks[1:])
        order = [index for index in (*self.finished, *self.recent) if index not in held]
        return order[: max(0, n - num_empty)]

    def longest_cached(self, root: Key, token_ids: tuple[int, ...]) -> int:
        """By a look at every block that can be found: the full blocks that lead on from the root, then the best tail."""
        cached = [
            (self.written[b.index][0], self.written[b.index][1][: self.start_of(b.index) + len(b.token_ids)])
            for b in self.blocks.blocks
            if b.key
        ]
        num_full = 0
        while num_full + SIZE <= len(token_ids) and (root, token_ids[: num_full + SIZE]) in cached:
            num_full += SIZE
        best = num_full
        for other, held in cached:
            if other == root and num_full < len(held) <= num_full + SIZE and held[:num_full] == token_ids[:num_full]:
                pairs = zip(held[num_full:], token_ids[num_full:], strict=False)
                shared = next(
                    (i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(token_ids)) - num_full
                )
                best = max(best, num_full + shared)
        return best

    def start_of(self, index: int) -> int:
        return (len(self.written[index][1]) - 1) // SIZE * SIZE

    @rule(holder=holders, tail=st.booleans())
    def cache(self, holder: Holder, tail: bool) -> None:
        keys = self.keys(holder.root, holder.token_ids)
        for place, key in enumerate(keys[1:]):
            part = holder.token_ids[place * SIZE : (place + 1) * SIZE]
            self.blocks.cache(holder.table[place], keys[place], part, key)
        if tail and (rest := len(holder.token_ids) % SIZE):
            self.blocks.cache(holder.table[-1], keys[-1], holder.token_ids[-rest:])

    @rule(holder=holders, token=st.integers(0, 1))
    def decode(self, holder: Holder, token: int) -> None:
        if not len(holder.token_ids) % SIZE:
            if not self.blocks.num_available:
                assert self.blocks.allocate(1) is None
                return
            evicted = self.next_evicted(1, [])
            holder.table += self.blocks.allocate(1) or []
            for index in evicted:
                self.leave_queues(index)
        assert self.blocks.blocks[holder.table[-1]].ref_count == 1, "a shared block is written"
        holder.token_ids += (token,)
        self.written[holder.table[-1]] = (holder.root, holder.token_ids)

    @rule(holder=consumes(holders), finished=st.booleans(), forgets=st.booleans())
    def end(self, holder: Holder, finished: bool, forgets: bool) -> None:
        self.will_release()
        self.tables.remove(holder)
        if forgets:
            self.blocks.forget(holder.table)
        self.blocks.release(holder.table, evict_first=finished)
        for index in reversed(holder.table):
            self.enter_queue(index, self.finished if finished else self.recent)
        del self.finished[: max(0, len(self.finished) - self.most_used)]

    @rule()
    def forget_all(self) -> None:
        self.blocks.forget_all()
        self.finished, self.recent = [], []

    def will_release(self, *also: int) -> None:
        used = {index for holder in self.tables for index in holder.table}
        self.most_used = max(self.most_used, len(used | {*also}))

    def enter_queue(self, index: int, queue: list[int]) -> None:
        block = self.blocks.blocks[index]
        if block.key and not block.ref_count:
            queue.append(index)

    def leave_queues(self, index: int) -> None:
        for queue in (self.finished, self.recent):
            if index in queue:
                queue.remove(index)

    @invariant()
    def is_consistent(self) -> None:
        check_blocks(self.blocks, [holder.table for holder in self.tables])
        assert self.blocks.num_used == len({index for holder in self.tables for index in holder.table})

    @invariant()
    def holds_what_it_says(self) -> None:
        for block in self.blocks.blocks:
            if block.key:
                root, token_ids = self.written[block.index]
                keys, start = self.keys(root, token_ids), self.start_of(block.index)
                assert block.parent == keys[start // SIZE]
                assert block.token_ids == token_ids[start : start + len(block.token_ids)]

    @invariant()
    def evicts_unreferenced_blocks_in_order(self) -> None:
        assert [b.index for b in self.blocks._evict_first] == self.finished
        assert [b.index for b in self.blocks._evictable] == self.recent


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_the_key_stands_for_the_whole_prefix() -> None:
    assert block_key(block_key(b"a", (1, 2)), (3, 4)) != block_key(block_key(b"a", (1, 3)), (3, 4))
    assert block_key(b"a", (1, 2)) != block_key(b"a", (1, 2, 0)) != block_key(b"b", (1, 2, 0))
    assert root_key(1, "x") == root_key(1, "x") != root_key(2, "x")


def test_a_block_is_released_no_more_often_than_it_is_held() -> None:
    blocks = BlockManager(num_blocks=5, block_size=SIZE)
    table = blocks.allocate(1) or []
    with pytest.raises(AssertionError, match="not referenced"):
        blocks.release([*table, *table])
