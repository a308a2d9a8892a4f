"""What must hold of a run of a swarm, whatever was done to it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollover.rollout.events import BatchConsumed, BatchTrained, GroupDropped, SampleFailed, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.types import Batch, SampleId, WasteCause
from tests import runs
from tests.swarm.chaos.judged import sent_away
from tests.swarm.chaos.record import SAMPLE, WireRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What was counted when every law held."""

    decoded_tokens: int
    acked_tokens: int
    """Told to be durable, of samples that are trained."""
    labelled_tokens: int
    """Seen on the wire as the journal has them."""
    untrusted_tokens: int
    """Dropped, since their member was sent away."""
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
    fates = fates_of_tokens(run)
    account = {"trained": tokens.trained, "wasted": tokens.wasted.total(), "live": tokens.live}
    assert fates == account, "the ledger and another fold of the journal count differently"
    assert tokens.decoded == fates.total() == sum(map(len, journaled.values())), "a decoded token is not in the account"
    assert not ledger.running, "a sample of a finished run is running"
    lags = [batch.step - v for batch in batches for t in batch.trajectories for v in t.policy_versions]
    assert all(0 <= lag <= bound for lag in lags), "a token is older than the bound, or newer than its step"
    assert {row["step"] for row in runs.rows(run)} == set(range(steps)), "a step has no metrics"
    check_nothing_is_trained_of_the_untrusted(run)
    return Held(
        decoded_tokens=tokens.decoded,
        acked_tokens=check_acknowledged(wire, journaled),
        labelled_tokens=check_labels(run, wire),
        untrusted_tokens=tokens.wasted[WasteCause.UNTRUSTED_ENGINE],
        max_lag=max(lags, default=0),
        mean_lag=sum(lags) / max(1, len(lags)),
        rewards=mean_rewards(batches),
    )


def mean_rewards(batches: Sequence[Batch]) -> tuple[float, ...]:
    return tuple(sum(t.reward or 0.0 for t in batch.trajectories) / len(batch.trajectories) for batch in batches)


def check_members(wire: WireRecord, liars: Collection[str] = ()) -> None:
    """Nobody honest is sent away."""
    final = [(member, goodbye.reason) for member, goodbye in wire.goodbyes if goodbye.is_final]
    final = [(member, reason) for member, reason in final if member not in liars]
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


def fates_of_tokens(run: Path) -> Counter[str]:
    """Count the tokens that are trained, wasted and live, from the journal alone and without the ledger."""
    decoded: Counter[SampleId] = Counter()
    failed, dropped, steps = set[SampleId](), set[int](), dict[int, int]()
    untrained = dict[int, int]()
    for _, event in read_events(run / "journal.sqlite"):
        match event:
            case SegmentEnded(sample_id=sample, segment=segment):
                decoded[sample] += len(segment.token_ids)
            case SampleFailed(sample_id=sample):
                failed.add(sample)
            case GroupDropped(group_id=group):
                assert group not in dropped and group not in steps, "a group was dropped twice, or after it was trained"
                dropped.add(group)
            case BatchConsumed(step=step, group_ids=groups):
                for group in groups:
                    assert group not in dropped and steps.setdefault(group, step) == step, "a group was trained twice"
            case BatchTrained(step=step, untrained=without):
                untrained[step] = sum(without.values())
    fates = Counter(trained=-sum(untrained.values()), wasted=sum(untrained.values()), live=0)
    for sample, num_tokens in decoded.items():
        is_wasted = sample in failed or sample.group in dropped
        fates["wasted" if is_wasted else "trained" if sample.group in steps else "live"] += num_tokens
    return fates


def check_labels(run: Path, wire: WireRecord) -> int:
    """Each token in the journal has the member and the version under which it went over the wire, at its position.
    Returns how many tokens these are."""
    lengths: Counter[str] = Counter()
    for _, event in read_events(run / "journal.sqlite"):
        if isinstance(event, SegmentEnded):
            segment, key = event.segment, f"{event.sample_id}."
            for token in segment.token_ids:
                label = (segment.engine, segment.policy_version, token)
                assert label in wire.labels[key, lengths[key]], f"token {lengths[key]} of {key} came otherwise: {label}"
                lengths[key] += 1
    return lengths.total()


def check_nothing_is_trained_of_the_untrusted(run: Path) -> None:
    """Once a member was sent away, no batch is selected that has tokens of it."""
    out, selected = sent_away(run), set[int]()
    used: dict[SampleId, set[str]] = defaultdict(set)
    for number, (_, event) in enumerate(read_events(run / "journal.sqlite")):
        match event:
            case SegmentEnded(sample_id=sample, segment=segment) if segment.token_ids:
                used[sample].add(segment.engine)
            case SampleFailed(sample_id=sample):
                used.pop(sample, None)
            case BatchConsumed(step=step, group_ids=groups) if step not in selected:
                selected.add(step)
                names = {name for sample, names in used.items() if sample.group in groups for name in names}
                wrong = names & {name for name, num_events in out if num_events <= number}
                assert not wrong, f"batch {step} was selected with tokens of {wrong}, which had been sent away"


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
