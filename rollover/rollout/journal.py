"""The journal: every event of a run, append-only, in one SQLite file.

Invariants: after a crash at any moment the file holds a prefix of the events that happened, so the
fold of the file is a state that the run really was in. Events appended in one call are there together or not at all.
Log-probabilities and token ids are restored bit for bit.
"""

from __future__ import annotations

import json
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rollover.batch import WasteCause
from rollover.errors import DataError, ResourceError, RunError, parse_json
from rollover.privacy import make_private
from rollover.rollout.events import (
    BatchConsumed,
    BatchSkipped,
    BatchTrained,
    Event,
    GroupDropped,
    GroupOpened,
    Observed,
    Restarted,
    SampleFailed,
    SampleScored,
    SegmentEnded,
)
from rollover.rollout.state import RolloutState
from rollover.token_bytes import join_bytes, split_bytes
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment

FORMAT_VERSION = 3
_READABLE = (1, 2, FORMAT_VERSION)
"""Format 1 has no kept sets, and format 2 no observations."""
_IN_MEMORY = Path(":memory:")
"""SQLite's name for a database without a file."""
_KINDS: dict[str, type] = {cls.__name__: cls for cls in get_args(Event)}
_TOKEN_BYTES = 8
"""Bytes of a token and its log-prob in a blob."""
_BESIDE = ("kept", "routes")
"""Fields of a segment that are bytes beside its tokens, in the order of a blob."""
_ALL = "TRUE"
"""The condition in SQL that every event meets."""
_LATER: dict[type, tuple[str, ...]] = {SampleScored: ("components", "solved"), SampleFailed: ("cause",)}
"""Fields that are written only when they say something: journals of earlier versions do not have them."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _encode(event: Event) -> tuple[str, str, bytes]:
    """Encode an event as (kind, JSON body, blob); the blob holds a segment's token ids (int32), log-probs (float32),
    kept sets and routes (``join_bytes``), and the body the sizes of the last two; or an observation's token ids."""
    body, blob = event._asdict(), b""
    if isinstance(event, GroupOpened):
        body["prompt"] = {name: getattr(event.prompt, name) for name in event.prompt.__slots__}  # asdict copies tokens
    if isinstance(event, SegmentEnded):
        segment = body["segment"] = event.segment._asdict()
        blob = array("i", segment.pop("token_ids")).tobytes() + array("f", segment.pop("rollout_logprobs")).tobytes()
        for name in _BESIDE:
            if joined := join_bytes(segment.pop(name)):
                blob += joined
                segment[f"{name}_bytes"] = len(joined)
    if isinstance(event, Observed):
        observation = body["observation"] = event.observation._asdict()
        blob = array("i", observation.pop("token_ids")).tobytes()
        for name in ("state", "parent"):
            if observation[name] == event.observation._field_defaults[name]:
                del observation[name]
    for name in _LATER.get(type(event), ()):
        if body[name] == event._field_defaults[name]:
            del body[name]
    kind = type(event).__name__
    try:
        return kind, _to_json(body), blob
    except TypeError as e:
        raise DataError(
            f"the journal cannot hold a {kind} ({e}): versions, times and columns of prompts must be Python's own"
            " numbers, texts, lists and dictionaries"
        ) from None


def _decode(kind: str, body: str, blob: bytes | int) -> Event:
    """Decode an event; ``blob`` is the size of the blob if its tokens are left out."""
    fields: dict[str, Any] = parse_json(body)
    if "sample_id" in fields:
        fields["sample_id"] = SampleId(*fields["sample_id"])
    match kind:
        case GroupOpened.__name__:
            prompt = fields["prompt"]
            fields["prompt"] = Prompt(**{**prompt, "token_ids": tuple(prompt["token_ids"])})
        case SegmentEnded.__name__:
            fields["segment"] = _decode_segment(fields["segment"], blob)
        case Observed.__name__:
            fields["observation"] = _decode_observation(fields["observation"], blob)
        case GroupDropped.__name__ | SampleFailed.__name__ if "cause" in fields:
            fields["cause"] = WasteCause(fields["cause"])
        case BatchConsumed.__name__:
            fields["group_ids"] = tuple(fields["group_ids"])
        case BatchTrained.__name__:
            fields["untrained"] = {WasteCause(cause): count for cause, count in fields["untrained"].items()}
    event: Event = _KINDS[kind](**fields)
    return event


def _decode_segment(fields: dict[str, Any], blob: bytes | int) -> Segment:
    reason = fields.pop("finish_reason")
    finish_reason = None if reason is None else FinishReason(reason)
    sizes = {name: fields.pop(f"{name}_bytes", 0) for name in _BESIDE}
    size = blob if isinstance(blob, int) else len(blob)
    left_out = range((size - sum(sizes.values())) // _TOKEN_BYTES)
    if isinstance(blob, int):
        return Segment(token_ids=left_out, rollout_logprobs=left_out, finish_reason=finish_reason, **fields)
    middle, end = 4 * len(left_out), _TOKEN_BYTES * len(left_out)
    start = end
    for name, num_bytes in sizes.items():
        fields[name] = split_bytes(blob[start : start + num_bytes], len(left_out))
        start += num_bytes
    return Segment(
        token_ids=tuple(array("i", blob[:middle])),
        rollout_logprobs=tuple(array("f", blob[middle:end])),
        finish_reason=finish_reason,
        **fields,
    )


def _decode_observation(fields: dict[str, Any], blob: bytes | int) -> Observation:
    end = fields.pop("end")
    ids = range(blob // 4) if isinstance(blob, int) else tuple(array("i", blob))
    return Observation(token_ids=ids, end=None if end is None else FinishReason(end), **fields)


class Journal:
    """One writer's handle on the file. Opening an existing file continues after its last event.

    Examples:
        The events of a scheduler are written down and read again:

        >>> journal, events = Journal(Path(":memory:")), []
        >>> engine = Capabilities(max_running=1, max_context_tokens=64)
        >>> sync = strategy("sync", engine, rollout_batch_size=1, group_size=2)
        >>> state = RolloutState()
        >>> scheduler = Scheduler(strategy=sync, source=None, state=state, max_running=1, emit=events.append)
        >>> scheduler.published(0, 1.5, pause_s=0.0)
        >>> journal.append(events)
        >>> journal.last_seq, journal.last_time_s
        (1, 1.5)

    Raises:
        RunError: the file is not a journal, or of another format version; or ``append`` is called although the file
            holds the events of an earlier process that ``restart`` has not taken over.
        ResourceError: the disk is full; nothing of that call was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path != _IN_MEMORY:
                beside = [file for end in ("-wal", "-shm") if (file := Path(f"{path}{end}")).exists()]
                for file in (path, *beside):
                    make_private(file)
            # The driver and the loop share one event loop; a checkpoint may be written from a worker thread.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            # NORMAL survives the death of the process. A power cut may cost the last events that were not synced, and
            # then the fold is an earlier state of the run.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS events"
                " (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, blob BLOB NOT NULL)"
            )
            _check_format(self._db, path, create=True)
            self._select = partial(_select, self._db, path)
            self._is_known = self.last_seq == 0
            """True if no event of an earlier process was left unread."""
        except (sqlite3.OperationalError, OSError) as e:
            raise ResourceError(f"cannot open {path}: {e}; is its folder there, writable and not full?") from e
        except sqlite3.DatabaseError as e:
            raise RunError(f"{path} is not a journal ({e}); move it away or use another run directory") from e

    def check_taken_over(self) -> None:
        """Raise ``RunError`` if the file holds events that nobody has read: a state that begins anew does not fit."""
        if not self._is_known:
            raise RunError(
                f"{self.path} holds {self.last_seq:,} events of an earlier process, which a fresh RolloutState() would"
                " not continue: take the state from restart(journal, step=N, redo_round=False), or use a new file"
            )

    def append(self, events: Sequence[Event]) -> None:
        """Write all of ``events``, or none. They survive the death of the process and, after ``sync``, even a power
        cut."""
        self.check_taken_over()
        rows = [_encode(event) for event in events]
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO events (kind, body, blob) VALUES (?, ?, ?)", rows)
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as e:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise ResourceError(f"cannot write {self.path}: {e}; free some disk space, then --resume the run") from e

    def sync(self) -> None:
        """Force everything that was appended to the disk, so that a power cut cannot take it back.

        This takes from a tenth of a millisecond to some ten milliseconds, depending on the disk, so it is done only
        before anything relies on the events: a checkpoint that includes them, a worker that deletes its tokens.

        Raises:
            ResourceError: the disk reports an error.
        """
        if self.path == _IN_MEMORY:
            return
        try:
            # SQLite has synced the events that have left this log for the database. The database itself must not be
            # opened here: closing a descriptor of it would drop SQLite's locks.
            _sync(Path(f"{self.path}-wal"))
            _sync(self.path.parent)
        except OSError as e:
            raise ResourceError(
                f"cannot write {self.path} to the disk: {e}; check the disk, then --resume the run"
            ) from e

    @property
    def last_seq(self) -> int:
        """Return the sequence number of the newest event; 0 when there is none."""
        (seq,) = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()
        return int(seq)

    @property
    def last_time_s(self) -> float:
        """Return the run clock at the newest event; 0 when there is none."""
        row = self._db.execute("SELECT body FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        return 0.0 if row is None else float(parse_json(row[0])["time_s"])

    def read(self, *, effective: bool = False) -> Iterator[tuple[int, Event]]:
        """Yield (sequence number, event) from the first event to the newest. With ``effective``, leave out the events
        that a restart declared void."""
        yield from self._select(_ALL, _voids(self._select) if effective else ())
        self._is_known = True

    def close(self) -> None:
        self._db.close()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Void(NamedTuple):
    """The events between two sequence numbers, which a restart declared void. Facts about the batch that was consumed
    before them remain: decoding the next round again does not train that batch again."""

    redo_from: int
    restarted: int

    def holds(self, seq: int, kind: str) -> bool:
        return self.redo_from < seq < self.restarted and kind not in _LASTING


_LASTING = (BatchTrained.__name__, BatchSkipped.__name__)


def _voids(select: Callable[[str], Iterable[tuple[int, Event]]]) -> list[_Void]:
    restarts = ((seq, event) for seq, event in select("kind = 'Restarted'") if isinstance(event, Restarted))
    return [_Void(event.redo_from, seq) for seq, event in restarts if event.redo_from is not None]


def _select(
    db: sqlite3.Connection,
    path: Path,
    where: str,
    voids: Sequence[_Void] = (),
    needs_tokens: Callable[[int], bool] = lambda group: True,
) -> Iterator[tuple[int, Event]]:
    """Yield the events that are not void. The tokens of groups that do not need them are not read: ranges of the same
    length stand in for them."""
    try:
        for seq, kind, body, size in db.execute(
            f"SELECT seq, kind, body, LENGTH(blob) FROM events WHERE {where} ORDER BY seq"
        ):
            if any(void.holds(seq, kind) for void in voids):
                continue
            event = _event(path, seq, kind, body, size)
            if isinstance(event, SegmentEnded | Observed) and needs_tokens(event.sample_id.group):
                (blob,) = db.execute("SELECT blob FROM events WHERE seq = ?", (seq,)).fetchone()
                event = _event(path, seq, kind, body, blob)
            yield seq, event
    except sqlite3.DatabaseError as e:
        raise RunError(f"{path} is not a journal: {e}") from e


def _event(path: Path, seq: int, kind: str, body: str, blob: bytes | int) -> Event:
    try:
        return _decode(kind, body, blob)
    except (ValueError, KeyError, TypeError) as e:
        raise RunError(
            f"{path}, event {seq}: not an event of this version ({e!r}); bring the file back from a copy,"
            " or start a new run from the newest checkpoint"
        ) from e


def _check_format(db: sqlite3.Connection, path: Path, *, create: bool) -> None:
    row = db.execute("SELECT version FROM format").fetchone()
    if row is None and create:
        db.execute("INSERT INTO format VALUES (?)", (FORMAT_VERSION,))
    elif row is None or row[0] not in _READABLE:
        found = None if row is None else row[0]
        raise RunError(
            f"{path} has journal format {found}, this version of Rollover reads {FORMAT_VERSION};"
            " open the run with the version that wrote it"
        )
    elif create and row[0] != FORMAT_VERSION:
        db.execute("UPDATE format SET version = ?", (FORMAT_VERSION,))


def read_events(
    path: Path, *, effective: bool = False, tokens: bool | Callable[[int], bool] = True
) -> Iterator[tuple[int, Event]]:
    """Yield (sequence number, event) from a journal that another process may be writing.

    Args:
        effective: leave out the events that a restart declared void.
        tokens: read token ids and log-probs, of all groups or of those chosen; otherwise ranges of the same length
            stand in for them.

    Raises:
        RunError: there is no such file, or it is not a journal.
    """
    if not path.is_file():
        raise RunError(f"{path} does not exist; is {path.parent} the directory of a run?")
    is_closed = not path.with_name(f"{path.name}-wal").exists()
    fixed = "&immutable=1" if is_closed and not os.access(path.parent, os.W_OK) else ""  # needs no file beside it
    try:
        db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro{fixed}", uri=True, isolation_level=None)
        try:
            db.execute("BEGIN")  # one snapshot
            _check_format(db, path, create=False)
            needs_tokens = tokens if callable(tokens) else lambda group: bool(tokens)
            select = partial(_select, db, path)
            yield from select(_ALL, _voids(select) if effective else (), needs_tokens)
        finally:
            db.close()
    except sqlite3.DatabaseError as e:
        raise RunError(f"{path} is not a journal: {e}") from e


def restart(journal: Journal, *, step: int, redo_round: bool, skip_batch: int | None = None) -> RolloutState:
    """Take over a run whose trainer's checkpoint is at ``step``, and journal that.

    Examples:
        A run that was stopped before its first batch:

        >>> state = restart(Journal(Path(":memory:")), step=0, redo_round=False)
        >>> state.ledger.next_step
        0

    Args:
        redo_round: discard everything decoded since the last batch was consumed, so that a deterministic run decodes it
            again exactly as it would have.
        skip_batch: the step whose batch is to be skipped, now and whenever it is replayed.

    Raises:
        RunError: the checkpoint is newer than the journal, its batches are no longer there, or ``skip_batch`` is not
            among the steps whose batches are handed out again.
    """
    voids = _voids(journal._select)
    last_batch, settled = _settled(journal, voids, step, redo_round=redo_round)
    void = journal._select(f"seq > {last_batch}", voids, lambda group: False) if redo_round else ()
    event = Restarted(
        time_s=journal.last_time_s,
        step=step,
        redo_from=last_batch if redo_round else None,
        lost_tokens=sum(_num_tokens(lost) for _, lost in void),
    )
    if redo_round:
        voids.append(_Void(last_batch, journal.last_seq + 1))
    state = RolloutState()
    for seq, earlier in journal._select(_ALL, voids, lambda group: group not in settled):
        try:
            state.apply(earlier)
        except (AssertionError, LookupError) as e:
            raise RunError(
                f"{journal.path}, event {seq}: does not follow from the events before it ({e!r}); bring the file back"
                " from a copy, or start a new run from the newest checkpoint"
            ) from e
    journal._is_known = True
    ledger = state.ledger
    if step > ledger.next_step or any(s not in ledger.batches for s in range(step, ledger.next_step)):
        raise RunError(
            f"{journal.path} knows the batches of steps {sorted(ledger.batches)} up to step {ledger.next_step}, which"
            f" does not fit a checkpoint at step {step}; resume from another one, or start a new run from it"
        )
    state.apply(event)
    taken: list[Event] = [event]
    if skip_batch is not None:
        if skip_batch not in ledger.replay:
            there = ", ".join(map(str, ledger.replay))
            raise RunError(
                f"{journal.path}: there is no batch of step {skip_batch} to skip; since the checkpoint at step {step},"
                + (f" the batches of steps {there} were collected" if there else " none was collected")
            )
        taken.append(BatchSkipped(time_s=event.time_s, step=skip_batch))
        state.apply(taken[-1])
    journal.append(taken)
    return state


def _settled(journal: Journal, voids: Sequence[_Void], step: int, *, redo_round: bool) -> tuple[int, set[int]]:
    """Return the sequence number of the last batch, and the groups whose tokens are not needed again: those dropped or
    in a batch before ``step``."""
    last_batch, settled, dropped = 0, set[int](), set[int]()
    for seq, event in journal._select("kind IN ('BatchConsumed', 'GroupDropped')", voids):
        match event:
            case BatchConsumed(step=consumed, group_ids=group_ids):
                last_batch = seq
                settled.update(dropped, group_ids if consumed < step else ())
                dropped.clear()
            case GroupDropped(group_id=group_id):
                dropped.add(group_id)  # unless the round is decoded again
    return last_batch, settled if redo_round else settled | dropped


def _num_tokens(event: Event) -> int:
    match event:
        case SegmentEnded(segment=segment):
            return len(segment.token_ids)
        case Restarted(lost_tokens=lost_tokens):
            return lost_tokens
        case _:
            return 0
