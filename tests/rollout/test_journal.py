"""The journal: bit for bit, all or nothing, and a run that goes on from wherever it was cut."""

from __future__ import annotations

import copy
import functools
import os
import sqlite3
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.batch import Batch, WasteCause
from rollover.errors import DataError, ResourceError, RunError
from rollover.rollout.config import Limits
from rollover.rollout.events import (
    BatchConsumed,
    CheckpointSaved,
    Event,
    GroupDropped,
    GroupOpened,
    SampleScored,
    SampleStarted,
    SegmentEnded,
    VersionPublished,
)
from rollover.rollout.journal import Journal, read_events, restart
from rollover.rollout.ledger import Ledger
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment
from tests.rollout.kit import ON_FULL, ParityScorer, Rig, assert_trainable, content, lognormal, make_rig, play
from tests.rollout.test_ledger import state_of
from tests.rollout.test_statistics import numbers_of
from tests.segments import batch_of

# -- the file -----------------------------------------------------------------------------------------------

texts = st.text()
times = st.floats(0, 1e9)
sizes = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
token_ids = st.lists(sizes, max_size=20).map(tuple)
tokens = st.tuples(
    sizes, st.floats(width=32, allow_nan=False, max_value=0.0), st.binary(max_size=300), st.binary(max_size=300)
)


def segment_of(tokens: list[Any], **rest: Any) -> Segment:
    """``tokens``: id, log-prob, kept set and routes of each."""
    ids, logprobs, kept, routes = zip(*tokens, strict=True) if tokens else ((),) * 4
    return Segment(token_ids=ids, rollout_logprobs=logprobs, kept=kept, routes=routes, **rest)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("group_id", "group_size", "cursor", "step", "policy_version", "lost_tokens"), sizes),
    **dict.fromkeys(("time_s", "pause_s"), times),
    **dict.fromkeys(("reward", "shaping"), finite),
    "prompt": st.builds(
        Prompt,
        prompt_id=texts,
        token_ids=token_ids,
        text=texts,
        source=texts,
        columns=st.dictionaries(texts, json_values, max_size=3),
    ),
    "sample_id": st.builds(SampleId, sizes, st.integers(0, 10**6)),
    "segment": st.builds(
        segment_of,
        tokens=st.lists(tokens, max_size=20),
        policy_version=sizes,
        finish_reason=st.sampled_from([*FinishReason, None]),
        kv_version=sizes,
        start_s=times,
        end_s=times,
        num_prefilled_tokens=sizes,
        engine=texts,
    ),
    "observation": st.builds(
        Observation,
        token_ids=token_ids,
        text=texts,
        reward=st.none() | finite,
        end=st.sampled_from([*FinishReason, None]),
        start_s=times,
        end_s=times,
        state=texts,
        parent=st.none() | sizes,
    ),
    "components": st.dictionaries(texts, finite),
    "solved": st.none() | st.booleans(),
    "reason": texts,
    "cause": st.sampled_from(WasteCause),
    "prompt_returned": st.booleans(),
    "group_ids": st.lists(sizes).map(tuple),
    "untrained": st.dictionaries(st.sampled_from(WasteCause), sizes),
    "redo_from": st.none() | sizes,
}
events = st.one_of(*(st.builds(kind, **{name: FIELDS[name] for name in kind._fields}) for kind in get_args(Event)))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(events, min_size=1, max_size=6))
def test_every_event_comes_back_bit_for_bit(tmp_path_factory: Any, written: list[Event]) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    journal = Journal(path)
    journal.append(written)
    back = [event for _, event in journal.read()]
    assert back == written
    assert [repr(event) for event in back] == [repr(event) for event in written]  # -0.0, types
    assert [seq for seq, _ in read_events(path)] == list(range(1, len(written) + 1))
    journal.close()


def some_events(n: int) -> list[Event]:
    return [CheckpointSaved(time_s=float(i), step=i) for i in range(n)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """In a file, with two events."""
    made = Journal(tmp_path / "journal.sqlite")
    made.append(some_events(2))
    yield made
    made.close()


def test_a_used_journal_refuses_a_state_that_begins_anew(journal: Journal) -> None:
    journal.close()
    used = Journal(journal.path)
    assert (used.last_seq, used.last_time_s) == (2, 1.0)
    with pytest.raises(RunError, match=r"2 events of an earlier process.*restart\(journal, step=N"):
        used.append(some_events(1))
    with pytest.raises(RunError, match="2 events of an earlier process"):
        make_rig("april", journal=used)
    assert used.last_seq == 2
    restart(used, step=0, redo_round=False)
    used.append(some_events(1))
    assert used.last_seq == 4
    used.close()


def test_what_is_appended_together_is_there_together_or_not_at_all(journal: Journal) -> None:
    prompt = Prompt(prompt_id="p", token_ids=(1,), text="", source="s", columns={"no": {1, 2}})
    opened = GroupOpened(time_s=0.0, group_id=0, prompt=prompt, group_size=1, cursor=1)
    with pytest.raises(DataError, match=r"cannot hold a GroupOpened \(.*set.*\): versions, times and columns of"):
        journal.append([*some_events(1), opened])
    assert journal.last_seq == 2
    journal.append(some_events(1))  # and the file can still be written
    assert journal.last_seq == 3


def test_a_reader_sees_what_a_writer_has_appended_so_far(journal: Journal) -> None:
    reading = read_events(journal.path)
    assert next(reading)[0] == 1
    journal.append(some_events(1))
    assert len(list(reading)) == 1  # one snapshot
    assert len(list(read_events(journal.path))) == 3


def test_a_closed_journal_is_read_from_a_read_only_disk(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    reading = read_events(journal.path)
    assert next(reading)[0] == 1
    assert [path.name for path in journal.path.parent.iterdir()] == ["journal.sqlite"]
    assert len(list(reading)) == 1


def test_wrong_files_are_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("this is no journal, but long enough to look like a file of some sort" * 40)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE format (version INTEGER NOT NULL)")
        db.execute("INSERT INTO format VALUES (99)")
    db.close()
    empty = tmp_path / "empty.sqlite"
    sqlite3.connect(empty).execute("CREATE TABLE cats (name TEXT)").connection.close()
    for opened in (Journal, lambda path: list(read_events(path))):
        with pytest.raises(RunError, match=r"notes\.txt is not a journal"):
            opened(text)
        with pytest.raises(RunError, match=r"other\.sqlite has journal format 99, .* reads 3"):
            opened(other)
    with pytest.raises(RunError, match=r"empty\.sqlite is not a journal"):
        list(read_events(empty))
    with pytest.raises(RunError, match=r"missing\.sqlite does not exist"):
        list(read_events(tmp_path / "missing.sqlite"))
    with pytest.raises(ResourceError, match=r"cannot open .*is its folder there"):
        Journal(tmp_path / "no such folder" / "journal.sqlite")
    tmp_path.chmod(0o755)
    with pytest.raises(ResourceError, match="cannot open"):
        Journal(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755, "a folder keeps its permissions"


def test_a_full_disk_is_a_clear_error_and_writes_nothing(journal: Journal) -> None:
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ResourceError, match=r"journal\.sqlite.*full.*free some disk space"):
        journal.append(some_events(2000))
    assert journal.last_seq == 2
    journal._db.execute("PRAGMA max_page_count = 100000")
    journal.append(some_events(2000))
    assert journal.last_seq == 2002


def test_a_damaged_file_is_a_clear_error(journal: Journal) -> None:
    journal.append(some_events(5000))
    journal.close()
    with journal.path.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 4096 * 8)
    with pytest.raises(RunError, match="is not a journal"):
        list(read_events(journal.path))
    again = Journal(journal.path)
    with pytest.raises(RunError, match="is not a journal"):
        list(again.read())
    again.close()


def test_a_journal_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(Path(":memory:"))
    journal.append(some_events(3))
    journal.sync()
    assert journal.last_seq == 3 and list(tmp_path.iterdir()) == []
    journal.close()


# -- restarts -----------------------------------------------------------------------------------------------

STEPS = 5


def journal_of(written: Iterable[Event]) -> Journal:
    journal = Journal(Path(":memory:"))
    journal.append(list(written))
    return journal


def without_gradient(batch: Batch) -> dict[WasteCause, int]:
    """A loss that masks stale tokens, and finds nothing in the first of the fresh ones."""
    stale = sum(v < batch.step for t in batch.trajectories for v in t.policy_versions)
    counts = {WasteCause.MASKED_STALE: stale, WasteCause.ZERO_ADVANTAGE: min(5, batch.num_tokens - stale)}
    return {cause: n for cause, n in counts.items() if n}


def options(*, lockstep: bool) -> dict[str, Any]:
    training = {"train_s": 2.0, "checkpoint_every": 2, "untrained": without_gradient}
    limits, scorer = Limits(save_every_tokens=4), ParityScorer(1.5)
    sizes = {"length": lognormal(5, 1.0), "max_running": 10, "max_new_tokens": 40, "stream_interval_tokens": 3}
    return {"lockstep": lockstep, "limits": limits, "scorer": scorer, **training, **sizes}


@functools.cache
def whole_run(name: str, *, lockstep: bool = False) -> tuple[list[Event], dict[int, Batch]]:
    """A run that nothing interrupts."""
    rig, batches = play(STEPS, name, **options(lockstep=lockstep))
    assert_trainable(batches, rig)
    return rig.events, batches


def go_on(name: str, journal: Journal, step: int, *, redo: bool = False) -> tuple[Rig, dict[int, Batch]]:
    """A new process takes over: the ledger from the journal, a new engine with the weights of ``step``."""
    state = restart(journal, step=step, redo_round=redo)
    state.ledger.check()
    return play(STEPS, name, state=state, journal=journal, **options(lockstep=redo))


def checkpoints(written: list[Event]) -> list[int]:
    """Steps a checkpoint may stand at when ``written`` is all the journal has: the last one it knows, or one that was
    saved while the news of it was lost. That the batch before was trained is on record by then."""
    known = max((e.step for e in written if isinstance(e, CheckpointSaved)), default=0)
    ledger = Ledger(written)
    in_training = ledger.next_step - 1 not in ledger.untrained
    return sorted({known, max(known, ledger.next_step - in_training)})


def lineage(journal: Journal) -> list[Event]:
    return [event for _, event in journal.read(effective=True)]


def facts_of(ledger: Ledger) -> dict[str, Any]:
    """The state, with the number of the tokens that are in a batch instead of the tokens."""
    ledger = copy.deepcopy(ledger)
    for sample in (s for ids in ledger.batches.values() for i in ids for s in ledger.groups[i].samples):
        lengths = [range(len(segment.token_ids)) for segment in sample.segments]
        pairs = zip(sample.segments, lengths, strict=True)
        sample.segments = [s._replace(token_ids=n, rollout_logprobs=n) for s, n in pairs]
    return state_of(ledger)


def assert_conserved(journal: Journal, batches: dict[int, Batch], rig: Rig) -> None:
    """Over all processes: every prompt is somewhere, every group was trained at most once."""
    history = lineage(journal)
    state = RolloutState(history)
    ledger = state.ledger
    ledger.check()
    assert facts_of(ledger) == facts_of(rig.ledger)
    assert numbers_of(state.statistics) == numbers_of(rig.state.statistics)
    rows = {e.group_id: e.prompt.columns["row"] for e in history if isinstance(e, GroupOpened)}
    returned = Counter(rows[e.group_id] for e in history if isinstance(e, GroupDropped) and e.prompt_returned)
    held = Counter(rows.values()) - returned + Counter(p.columns["row"] for p in ledger.returned)
    assert held == Counter(range(ledger.cursor)), "a prompt was lost or admitted twice"
    final = {e.step: e.group_ids for e in history if isinstance(e, BatchConsumed)}
    ids = [i for group_ids in final.values() for i in group_ids]
    assert sorted(final) == list(range(STEPS)) and len(set(ids)) == len(ids)
    assert_trainable(batches, rig)
    forgetful = RolloutState(e for e in history if not isinstance(e, CheckpointSaved))
    expected: Counter[WasteCause] = Counter()
    for step in final:
        expected.update(without_gradient(batch_of(forgetful, step)))
    assert {cause: ledger.tokens.wasted[cause] for cause in expected} == dict(expected), "each batch counts once"
    assert ledger.tokens.trained == sum(batch_of(forgetful, s).num_tokens for s in final) - expected.total()


@pytest.mark.parametrize(
    ("name", "redo"),
    [
        *(pytest.param(name, False, id=name) for name in (*ON_FULL, "rollover")),
        *(pytest.param(name, True, id=f"{name}, again") for name in ("sync", "april", "april, drop_surplus")),
    ],
)
def test_a_run_goes_on_wherever_its_journal_was_cut(name: str, redo: bool) -> None:
    """What was handed out is handed out again. If the interrupted round is decoded again in lockstep (``redo``), all
    batches are those of a run that nothing interrupted."""
    written, whole = whole_run(name, lockstep=redo)
    stride = 1 if redo or name == "april" else 3
    for cut in range(0, len(written) + 1, stride):
        prefix = written[:cut]
        before = RolloutState(prefix)
        steps = checkpoints(prefix)
        step = steps[cut % len(steps)]
        known = whole if redo else {s: batch_of(before, s) for s in before.ledger.batches}
        expected = {s: content(batch) for s, batch in known.items() if s >= step}
        journal = journal_of(prefix)
        rig, batches = go_on(name, journal, step, redo=redo)
        assert set(batches) == set(range(step, STEPS))
        assert {s: content(batches[s]) for s in expected} == expected, f"cut behind event {cut}"
        assert_conserved(journal, batches, rig)
        journal.close()


@pytest.mark.parametrize(
    ("name", "redo"), [("april", False), ("april", True), ("bounded_async", False), ("oversample", False)]
)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_restart_of_a_restart_of_a_restart(name: str, redo: bool, data: st.DataObject) -> None:
    """Cut again and again, also while batches are being replayed; with ``redo`` the outcome is as without a cut."""
    written, whole = whole_run(name, lockstep=redo)
    batches: dict[int, Batch] = {}
    for _ in range(4):
        prefix = written[: data.draw(st.integers(0, len(written)))]
        journal = journal_of(prefix)
        step = data.draw(st.sampled_from(checkpoints(lineage(journal))))
        rig, batches = go_on(name, journal, step, redo=redo)
        assert_conserved(journal, batches, rig)
        written = [event for _, event in journal.read()]
        journal.close()
    if redo:
        assert all(content(batch) == content(whole[step]) for step, batch in batches.items())


def test_voided_tokens_are_counted_as_waste() -> None:
    written, _ = whole_run("april", lockstep=True)
    *_, round_before, last = (i for i, e in enumerate(written) if isinstance(e, BatchConsumed))
    prefix = written[:last]
    lost = sum(len(e.segment.token_ids) for e in prefix[round_before + 1 :] if isinstance(e, SegmentEnded))
    assert lost > 0
    journal = journal_of(prefix)
    for _ in range(3):  # restarting again loses nothing more
        ledger = restart(journal, step=STEPS - 1, redo_round=True).ledger
        assert ledger.tokens.wasted[WasteCause.FAILED] == lost
        assert ledger.tokens.decoded == Ledger(prefix).tokens.decoded
        ledger.check()
    journal.close()


def old_steps(num_steps: int, num_tokens: int, checkpoint: int) -> Iterator[Event]:
    """Steps of one sample, one step a version; ``checkpoint`` of them are saved."""
    segment = Segment(0, tuple(range(num_tokens)), (-0.5,) * num_tokens, FinishReason.STOP, 0, 0.0, 1.0)
    prompt = Prompt(prompt_id="p/0@0", token_ids=(1,), text="", source="p")
    for step in range(num_steps):
        sample_id = SampleId(step, 0)
        yield GroupOpened(time_s=step, group_id=step, prompt=prompt, group_size=1, cursor=step + 1)
        yield SampleStarted(step, sample_id, step)
        yield SegmentEnded(step, sample_id, segment._replace(policy_version=step, kv_version=step))
        yield SampleScored(step, sample_id, 1.0)
        yield BatchConsumed(time_s=step, step=step, group_ids=(step,))
        yield VersionPublished(time_s=step, policy_version=step + 1, pause_s=0.0)
        if step < checkpoint:
            yield CheckpointSaved(time_s=step, step=max(0, step - 100))  # an old one is kept


def peak_bytes(act: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_a_resume_does_not_grow_with_the_journal() -> None:
    journal = journal_of(old_steps(num_steps=200, num_tokens=2000, checkpoint=199))
    states: list[RolloutState] = []
    peak = peak_bytes(lambda: states.append(restart(journal, step=198, redo_round=False)))
    ledger = states[0].ledger
    assert [batch_of(states[0], s).num_tokens for s in ledger.replay] == [2000, 2000]
    assert batch_of(states[0], 199).trajectories[0].token_ids == tuple(range(2000))
    assert peak < 4 * 2**20, "400,000 tokens took 33 MB, of which two batches are live"
    journal.close()


def test_a_journal_that_lacks_an_event_is_refused() -> None:
    for kind in (GroupOpened, SampleStarted, SegmentEnded):
        written = [*old_steps(num_steps=3, num_tokens=4, checkpoint=0)]
        first = next(i for i, event in enumerate(written) if isinstance(event, kind))
        journal = journal_of([*written[:first], *written[first + 1 :]])
        with pytest.raises(RunError, match=r"does not follow from the events before it.*from a copy"):
            restart(journal, step=0, redo_round=False)
        journal.close()


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    written, _ = whole_run("sync")
    journal = journal_of(written)
    for step in (STEPS + 1, 1):  # from the future; from before the last checkpoint
        with pytest.raises(RunError, match=f"does not fit a checkpoint at step {step}"):
            restart(journal, step=step, redo_round=False)
    assert journal.last_seq == len(written)
    journal.close()
