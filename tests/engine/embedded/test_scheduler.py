"""The scheduler's state machine under any order of calls, aborts, swaps and memory pressure. No torch."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.engine.embedded.block_manager import BlockManager
from rollover.engine.embedded.scheduler import SequenceScheduler
from rollover.engine.embedded.sequence import Sequence
from tests.engine.contract import request
from tests.engine.embedded.harness import check

BLOCK = 4
MAX_CONTEXT = 40


class Machine:
    """A scheduler whose model samples token 1, and a shadow cache that knows which token lies where: each block holds
    the prefix that was written to it and the version of the weights, so reading another sequence's token, or one that older
    weights computed and that it did not keep on purpose, is an error."""

    def __init__(self, num_blocks: int, max_running: int, chunk: int) -> None:
        self.scheduler = SequenceScheduler(
            BlockManager(num_blocks, BLOCK), max_running=max_running, prefill_chunk_tokens=chunk
        )
        self.content: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.open: dict[str, Sequence] = {}
        self.arrivals = 0
        self.prompts: dict[str, int] = {}
        self.oldest: dict[str, int] = {}
        """By sample: the version under which it was added first, or the last one whose update lost all caches."""
        self.finished: list[str] = []
        self.attended: dict[str, int] = {}
        """By request: the oldest version whose cache its tokens were drawn over."""

    def add(self, prompt: int, length: int, response: tuple[int, ...], name: str | None = None) -> None:
        prompt_ids = tuple(2 if i < 6 else (prompt + i) % 50 + 2 for i in range(1 + prompt % 11))
        name = name or f"s{self.arrivals}"
        self.prompts[name] = prompt
        limit = max(len(response) + 1, min(length, MAX_CONTEXT - len(prompt_ids)))
        self.start(name, prompt_ids, limit, response)

    def start(self, name: str, prompt: tuple[int, ...], limit: int, response: tuple[int, ...] = ()) -> Sequence:
        req = request(name, call=self.arrivals, prompt_ids=prompt, response_ids=response, max_new_tokens=limit)
        self.open[req.request_id] = sequence = Sequence(req, self.arrivals)
        self.oldest.setdefault(name, self.scheduler.policy_version)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def update(self, *, recompute: bool) -> None:
        version = self.scheduler.policy_version + 1
        self.scheduler.update(version, recompute=recompute)
        if recompute:
            self.oldest = dict.fromkeys(self.oldest, version)
        check(self.scheduler)

    def copy(self, copies: list[tuple[int, int]]) -> None:
        read = [(d, [self.content.get((s, o)) for o in range(BLOCK)]) for s, d in copies]
        for destination, cells in read:
            for offset, cell in enumerate(cells):
                if cell is not None:
                    self.content[destination, offset] = cell

    def write(self, sequence: Sequence, position: int) -> None:
        block = self.scheduler.blocks.blocks[sequence.block_table[position // BLOCK]]
        assert block.ref_count == 1, "wrote to a shared block"
        assert position % BLOCK >= len(block.token_ids), "wrote over what others can find"
        self.content[block.index, position % BLOCK] = (
            tuple(sequence.token_ids[: position + 1]),
            self.scheduler.policy_version,
        )

    def read(self, sequence: Sequence, num_tokens: int) -> None:
        for p in range(num_tokens):
            token_ids, version = self.content[sequence.block_table[p // BLOCK], p % BLOCK]
            assert token_ids == tuple(sequence.token_ids[: p + 1]), "read a token that is not its own"
            oldest = sequence.chain.kv_version
            assert oldest <= version, "read what older weights computed"
            assert oldest >= self.oldest[sequence.request.sample_key], "kept a cache that the sample never had"

    def step(self) -> None:
        scheduler = self.scheduler
        self.copy(scheduler.admit())
        slices = scheduler.next_prefill()
        for piece in slices:
            for p in range(piece.start, piece.start + piece.num_tokens):
                self.write(piece.sequence, p)
            self.read(piece.sequence, piece.start + piece.num_tokens)
        scheduler.prefilled(slices)
        self.copy(scheduler.admit())
        ready = scheduler.next_decode()
        for sequence in ready:
            self.write(sequence, sequence.num_cached_tokens)
            self.read(sequence, sequence.num_tokens)
            seen = [self.content[sequence.block_table[p // BLOCK], p % BLOCK][1] for p in range(sequence.num_tokens)]
            request_id = sequence.request.request_id
            self.attended[request_id] = min(self.attended.get(request_id, seen[0]), *seen)
            sequence.append(1, 0.0)
            if sequence.num_tokens == sequence.max_tokens:
                self.finished.append(sequence.request.request_id)
                self.end(sequence, park=False)
        assert len(scheduler.running) <= scheduler.max_running
        check(scheduler)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.open:
                return
            self.step()
        raise AssertionError("some call never finished")

    def end(self, sequence: Sequence, *, park: bool) -> None:
        del self.open[sequence.request.request_id]
        given = sequence.flush(self.scheduler.policy_version)
        assert given.kv_version <= self.attended.get(sequence.request.request_id, given.kv_version)
        self.scheduler.remove(sequence, park=park)
        check(self.scheduler)


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 14), st.integers(1, 30)),
    st.tuples(st.just("step"), st.integers(1, 6), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("update"), st.booleans(), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(OPERATIONS, max_size=40), st.integers(MAX_CONTEXT // BLOCK + 1, 30), st.integers(1, 6), st.integers(1, 24)
)
def test_every_call_finishes_reads_only_its_own_cache_and_leaks_no_block(
    operations: list[tuple[Any, ...]], num_blocks: int, max_running: int, chunk: int
) -> None:
    machine = Machine(num_blocks, max_running, chunk)
    for kind, a, b in operations:
        if kind == "add":
            machine.add(a, b, ())
        elif kind == "step":
            for _ in range(a):
                machine.step()
        elif kind == "abort" and machine.open:
            sequence = list(machine.open.values())[a % len(machine.open)]
            machine.end(sequence, park=True)
            response = tuple(sequence.response_ids)
            if b:  # the sample comes back
                machine.add(
                    machine.prompts[sequence.request.sample_key],
                    sequence.request.params.max_new_tokens,
                    response,
                    sequence.request.sample_key,
                )
        elif kind == "update":
            machine.update(recompute=a)
    machine.finish()
    assert machine.scheduler.blocks.num_used == 0
    assert machine.scheduler.blocks.num_available == num_blocks - 1


def test_the_youngest_is_preempted_and_goes_back_to_its_place() -> None:
    machine = Machine(num_blocks=11, max_running=3, chunk=64)
    for prompt in (3, 4, 5):  # prompts of 4, 5 and 6 tokens
        machine.add(prompt, 30, ())
    while not machine.scheduler.num_preempted:
        machine.step()
    assert [s.arrival for s in machine.scheduler.running] == [0, 1]
    machine.add(6, 5, ())
    assert [s.arrival for s in machine.scheduler.waiting] == [2, 3]
    machine.finish()
    assert machine.finished.index("s2#2") > machine.finished.index("s0#0")


def test_a_sequence_without_any_cache_begins_with_the_new_weights() -> None:
    machine = Machine(num_blocks=30, max_running=4, chunk=4)
    early, late = machine.start("a", tuple(range(2, 12)), 9), machine.start("b", tuple(range(20, 30)), 9)
    machine.step()
    assert (early.num_cached_tokens, late.num_cached_tokens, len(machine.scheduler.running)) == (4, 0, 2)
    machine.update(recompute=False)
    assert (early.chain.kv_version, late.chain.kv_version) == (0, 1)
    machine.finish()


def test_a_tail_is_not_copied_where_there_is_no_block_for_the_copy() -> None:
    machine = Machine(num_blocks=MAX_CONTEXT // BLOCK + 1, max_running=4, chunk=64)
    prompt = tuple(range(2, 41))
    machine.start("a", prompt, 1)
    machine.finish()
    machine.start("b", (*prompt[:37], 60, 61), 1)
    machine.finish()
    assert machine.scheduler.cached_tokens == 36, "nine full blocks; the tenth is evicted"
