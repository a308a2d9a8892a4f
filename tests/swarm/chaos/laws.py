"""What must hold of a run of a swarm, whatever was done to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollover.batch import Batch
from rollover.rollout.events import SegmentEnded
from rollover.rollout.journal import read_events
from tests import runs
from tests.swarm.chaos.record import SAMPLE, WireRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was counted when every law held."""

    decoded_tokens: int
    acked_tokens: int
    """Told to be durable, of samples that are trained."""
    max_lag: int
    mean_lag: float
    rewards: tuple[float, ...]
    """Mean of each step's batch."""


def check_laws(run: Path, steps: int, bound: int, wire: WireRecord) -> Held:
    """Raises ``AssertionError`` that says which law does not hold."""
    batches, ledger = runs.batches(run), runs.ledger(run)
    assert [batch.step for batch in batches] == list(range(steps)), "a step is missing"
    groups = [group.group_id for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)), "a group was trained twice"
    tokens, journaled = ledger.tokens, responses(run)
    assert tokens.decoded == sum(map(len, journaled.values())), "a token that was decoded is not in the account"
    assert not ledger.running, "a sample of a finished run is running"
    lags = [batch.step - v for batch in batches for t in batch.trajectories for v in t.policy_versions]
    assert all(0 <= lag <= bound for lag in lags), "a token is older than the bound, or newer than its step"
    assert {row["step"] for row in runs.rows(run)} == set(range(steps)), "a step has no metrics"
    return Held(
        decoded_tokens=tokens.decoded,
        acked_tokens=check_acknowledged(wire, journaled),
        max_lag=max(lags, default=0),
        mean_lag=sum(lags) / max(1, len(lags)),
        rewards=mean_rewards(batches),
    )


def mean_rewards(batches: Sequence[Batch]) -> tuple[float, ...]:
    return tuple(sum(t.reward or 0.0 for t in batch.trajectories) / len(batch.trajectories) for batch in batches)


def check_members(wire: WireRecord) -> None:
    """Nobody honest is sent away."""
    final = [(member, goodbye.reason) for member, goodbye in wire.goodbyes if goodbye.is_final]
    wrong = [(member, reason) for member, reason in final if "trust" in reason or "another process" in reason]
    assert not wrong, "an honest member was sent away"


def check_acknowledged(wire: WireRecord, journaled: Mapping[str, Sequence[int]]) -> int:
    """Nothing is lost that a worker was told to be durable: the journal has these very tokens. Returns how many."""
    most: dict[str, int] = defaultdict(int)
    for call_id, call in wire.calls.items():
        if not SAMPLE.fullmatch(call.sample_key):
            continue
        response = journaled.get(call.sample_key, ())
        assert call.num_acked <= len(response), f"{call_id}: {call.num_acked} tokens acknowledged, {len(response)} kept"
        for position in range(call.num_acked):
            assert call.tokens.get(position, response[position]) == response[position], f"{call_id}, {position}"
        most[call.sample_key] = max(most[call.sample_key], call.num_acked)
    return sum(most.values())


def responses(run: Path) -> dict[str, list[int]]:
    """Tokens of every sample that were ever written down, by sample key."""
    found: dict[str, list[int]] = defaultdict(list)
    for _, event in read_events(run / "journal.sqlite"):
        if isinstance(event, SegmentEnded):
            found[f"{event.sample_id}."] += event.segment.token_ids
    return found


def sampled(run: Path) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return what each step was trained on, in order: sample, tokens, versions."""
    return [
        (str(t.sample_id), tuple(t.token_ids), tuple(t.policy_versions))
        for batch in runs.batches(run)
        for t in batch.trajectories
    ]
