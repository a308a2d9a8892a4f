"""Metrics of a batch, the ledger and the engine: pure functions, with the names of ``metrics.jsonl``."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

from rollover.batch import Batch, Drift
from rollover.rollout.lag import BatchLag, LagSummary
from rollover.rollout.ledger import Ledger
from rollover.types import FinishReason


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Compute rewards, lengths and staleness of the batch that one step trains.

    A token's staleness is the step minus the version that sampled it; ``staleness/mean`` and ``staleness/p95``
    weigh every token alike; ``staleness/group_mean`` is the mean over groups of the mean of their tokens, and
    ``staleness/head_mean`` is the lag of their oldest tokens.
    ``response/truncated`` is the share of the samples that end at a limit; of an episode, that of its turns too.
    ``prompt/repeated`` is the share of the rows of the dataset whose prompt another row of the batch has too, without
    the rows whose prompt an environment writes. Groups of one response have no ``reward/groups_with_signal``.
    """
    rewards = [t.reward for t in batch.trajectories if t.reward is not None]
    lengths = [t.num_tokens for t in batch.trajectories]
    lag = LagSummary.of([BatchLag.of(batch)])
    signals = [len(set(g.rewards_G)) > 1 for g in batch.groups]
    has_siblings = len(lengths) > len(signals)
    prompts = [g.prompt for g in batch.groups if g.prompt.token_ids]
    rows = {prompt.prompt_id.partition("@")[0]: (prompt.token_ids, prompt.text) for prompt in prompts}
    return {
        **({"prompt/repeated": 1 - len(set(rows.values())) / len(rows)} if rows else {}),
        **_parts_of_rewards(batch),
        **_episodes(batch),
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        **({"reward/groups_with_signal": statistics.fmean(signals)} if has_siblings else {}),
        "response/mean_tokens": statistics.fmean(lengths),
        "rollout/batch_samples": len(lengths),
        "response/max_tokens": max(lengths),
        "response/truncated": statistics.fmean(t.finish_reason is FinishReason.LENGTH for t in batch.trajectories),
        "staleness/mean": lag.token,
        "staleness/group_mean": lag.group,
        "staleness/p95": float(lag.p95),
        "staleness/max": lag.max,
        "staleness/head_mean": lag.head,
        "staleness/off_policy_tokens": lag.off_policy_fraction,
        "rollout/resumes_per_sample": statistics.fmean(t.num_resumes for t in batch.trajectories),
    }


def _episodes(batch: Batch) -> dict[str, float]:
    """Return the means over episodes of their turns, of the rows that train them, of the tokens that they observed
    after their prompts, and of the time in which their environments acted; nothing if no turn has ended."""
    sources = {t.prompt.source for t in batch.trajectories if t.num_turns}
    episodes = [t for t in batch.trajectories if t.prompt.source in sources]  # some may be cut in their first turn
    observed = [sum(len(o.token_ids) for o in t.observations[int(t.has_opening) :]) for t in episodes]
    if not episodes:
        return {}
    return {
        "episode/turns": statistics.fmean(len(t.turns) - t.has_opening for t in episodes),
        "episode/rows": statistics.fmean(len(t.paths) for t in episodes),
        "episode/observed_tokens": statistics.fmean(observed),
        "episode/environment_s": statistics.fmean(sum(o.end_s - o.start_s for o in t.observations) for t in episodes),
    }


def _parts_of_rewards(batch: Batch) -> dict[str, float]:
    """Return the mean of each component, and reward and pass rate by source if there are components or several
    sources. A component that a response does not have does not count."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for t in batch.trajectories:
        for name, value in t.components.items():
            values[f"reward/component/{name}"].append(value)
    if values or len({t.prompt.source for t in batch.trajectories}) > 1:
        for t in batch.trajectories:
            if t.reward is not None:
                values[f"reward/source/{t.prompt.source}"].append(t.reward)
            if t.solved is not None:
                values[f"pass_rate/source/{t.prompt.source}"].append(t.solved)
    return {name: statistics.fmean(found) for name, found in sorted(values.items())}


def ledger_metrics(ledger: Ledger) -> dict[str, float]:
    """Return the token account so far, and the work in flight.

    ``rollout/starvation_age`` is the age in versions of the oldest group that has started and was not consumed.
    ``rollout/failed_mean_tokens`` is the mean length of the samples that have failed, if there are any.
    """
    tokens = ledger.tokens
    starts = [*ledger.starts_of_open, *ledger.starts_of_ready]
    return {
        "rollout/decoded_tokens": tokens.decoded,
        "rollout/trained_tokens": tokens.trained,
        "rollout/live_tokens": tokens.live,
        "rollout/reprefilled_tokens": tokens.reprefilled,
        "rollout/failed_samples": ledger.num_failed,
        **({"rollout/failed_mean_tokens": ledger.num_failed_tokens / n} if (n := ledger.num_failed) else {}),
        "rollout/parked_samples": len(ledger.parked),
        "rollout/unconsumed_groups": ledger.num_unconsumed,
        "rollout/starvation_age": ledger.next_step - min(starts, default=ledger.next_step),
        **{f"rollout/wasted_tokens/{cause}": count for cause, count in sorted(tokens.wasted.items())},
    }


def drift_metrics(drift: Mapping[str, Drift]) -> dict[str, float]:
    """Return the mean distance of recorded log-probs from the trainer's, in nats, by engine if there are several."""
    return {f"drift/{name}" if name else "drift": found.mean_abs for name, found in drift.items()}
