"""Alarms: what a person should look at before training on, in words, computed from a run's metrics alone.

Invariants: an alarm is raised by several steps together, never by one; a run that has not measured a quantity raises no
alarm about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rollover.algorithms import Algorithm
from rollover.algorithms.registry import ADVANTAGES
from rollover.report.metrics import MetricRow, series

RECENT = 10
"""Newest steps over which a quantity is averaged."""
_FEWEST = 5
"""Steps that must have measured it."""
EARLY = 3
_MANY = 100
"""Steps and responses after which one and the same reward for all of them is told."""
_LOW_ENTROPY = 0.05
"""Nats per token below which responses are nearly copies of one another."""
_MISSING_SURPRISE = 0.2
"""Share of the entropy by which tokens may be less surprising than the policy; batches of right answers alone stay
below a tenth (docs/engines.md)."""

_FEWEST_FAILED = 5
"""Samples that must have failed before their number or their lengths say anything."""

_LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "response/truncated",
        lambda share: share > 0.5,
        "{value:.0%} of the recent responses are cut at rollout.max_new_tokens: the answer at their end is never"
        " written. Raise the limit, or read under Samples whether they end at all.",
    ),
    (
        "prompt/repeated",
        lambda share: share >= 0.5,
        "{value:.0%} of the rows of a batch have the same prompt as another row: the chat template may drop the"
        " question. Read the prompts under Samples.",
    ),
    (
        "ess/token",
        lambda share: share < 0.3,
        "the effective sample size is {value:.0%} of the tokens: the policy is far from the weights that sampled them."
        " Lower rollout.max_staleness or the learning rate, and check the drift of the engine.",
    ),
)
"""(metric, condition on its mean over the recent steps, text)."""
_EPISODES_CUT = (
    "{value:.0%} of the recent responses end at a limit (rollout.max_new_tokens, environment.max_turn_tokens, max_turns"
    " or turn_timeout_s): what would follow is never done. Raise it, or read under Samples whether they end at all."
)


def alarms(rows: Sequence[MetricRow], algorithm: Algorithm | None = None, *, filtered: float = 0.0) -> tuple[str, ...]:
    """Return the alarms of a run, each a sentence with its numbers and what to look at.

    Args:
        rows: the rows of ``metrics.jsonl``, of which training steps count.
        algorithm: the algorithm of a ``rollover train``; ``None`` inside another trainer.
        filtered: the share of the decoded tokens that ``algorithm.group_filter`` dropped.
    """
    found = [_signal(rows, algorithm, filtered), _entropy(rows), _surprise(rows), _failures(rows), _long_failures(rows)]
    for metric, is_wrong, text in _LIMITS:
        value = _recent(rows, metric)
        if value is not None and is_wrong(value):
            cuts_episodes = metric == "response/truncated" and _recent(rows, "episode/turns") is not None
            found.append((_EPISODES_CUT if cuts_episodes else text).format(value=value))
    return tuple(alarm for alarm in found if alarm)


def _signal(rows: Sequence[MetricRow], algorithm: Algorithm | None, filtered: float) -> str | None:
    """Look for rewards that teach nothing because all, or all of a group, are equal. Advantages tell whether they teach
    if the algorithm compares more than the rewards of a group; if not, these may be for the length alone."""
    advice = "Read responses under Samples: is a right answer recognised?"
    if filtered > 0.9:
        return (
            f"{filtered:.0%} of the decoded tokens were dropped by algorithm.group_filter, because the rewards of"
            f" their groups are equal. {advice}"
        )
    rewards, spreads, shares = (
        _values(rows, f"reward/{name}")[-RECENT:] for name in ("mean", "std", "groups_with_signal")
    )
    is_one = len({*rewards}) == 1 and not any((*spreads, *shares))
    is_early = is_one and sum(_values(rows, "rollout/batch_samples")) >= _MANY
    if len(rewards) < (EARLY if is_early else _FEWEST):
        return None
    steps = f"the last {len(rewards)} steps"
    row = ADVANTAGES[algorithm.advantage if algorithm else "group_std"]
    has_advantages = any(_values(rows, "advantage/abs_mean")[-RECENT:])
    teaches_parts = has_advantages and (row.by_component or row.by_turn)
    if is_one and not teaches_parts:
        causes = " Often the reward expects a form that no response has, or compares with the wrong column or type."
        if algorithm:
            causes += " A dry run (`rollover train CONFIG --dry-run`) says what the reference answers score."
        value = rewards[-1]
        return f"every reward of {steps} is {value:g}: rewards teach nothing. {advice}{causes * (value <= 0)}"
    if teaches_parts or (has_advantages and row.compares != "siblings"):
        return None
    if not shares or (share := fmean(shares)) >= 0.1:
        return None
    if share > 0:
        level = "easy" if fmean(rewards) > 0.5 else "hard"
        return (
            f"{1 - share:.0%} of the groups of {steps} have equal rewards, {fmean(rewards):.2f} on average: the prompts"
            f" are too {level}, or the reward tells no responses apart. {advice}"
        )
    return f"all rewards within a group of {steps} are equal: rewards teach nothing. {advice}"


def _entropy(rows: Sequence[MetricRow]) -> str | None:
    """Look for an entropy that fell to almost nothing from twice the limit or more."""
    found = series(rows, "step", "entropy")
    means = [
        (step, fmean(v for _, _, v in found[max(0, i - _FEWEST + 1) : i + 1])) for i, (step, _, _) in enumerate(found)
    ]
    if len(means) < _FEWEST or means[-1][1] >= _LOW_ENTROPY:
        return None
    high = [i for i, (_, mean) in enumerate(means) if mean >= 2 * _LOW_ENTROPY]
    if not high:
        return None
    begin, before = means[high[-1]]
    end = next(step for step, mean in means[high[-1] :] if mean < _LOW_ENTROPY)
    return (
        f"entropy fell below {_LOW_ENTROPY} in {end - begin} steps: from {before:.2f} at step {begin} to"
        f" {means[-1][1]:.3f} now. Responses to a prompt become copies of one another, and groups lose their signal."
        " A larger algorithm.clip_high, a KL term or a lower learning rate keeps more of it."
    )


def _surprise(rows: Sequence[MetricRow]) -> str | None:
    """Look for tokens that are less surprising than the policy that should have sampled them. If the run asked for
    truncated sampling (``kept/mass``), they should be."""
    entropy, surprise = _recent(rows, "entropy"), _recent(rows, "surprise")
    if entropy is None or surprise is None or _recent(rows, "kept/mass") is not None:
        return None
    if entropy - surprise < max(_LOW_ENTROPY, _MISSING_SURPRISE * entropy):
        return None
    return (
        f"trained tokens are less surprising than the policy: {surprise:.2f} against an entropy of {entropy:.2f} nats."
        " An engine that draws from a part of the distribution does this: look for top_k, top_p, min_p or a"
        " temperature in its settings, and in whatever changes requests on the way to it."
    )


def _failures(rows: Sequence[MetricRow]) -> str | None:
    """Look for many failures, beyond the count that the first step began with."""
    num_failed = _values(rows, "rollout/failed_samples")[-RECENT - 1 :]
    num_steps = len(num_failed) - 1
    num_trained = sum(_values(rows, "rollout/batch_samples")[-num_steps:])
    if num_steps < _FEWEST - 1 or not num_trained:
        return None
    failed = num_failed[-1] - num_failed[0]
    if failed < max(_FEWEST_FAILED, 0.1 * (failed + num_trained)):
        return None
    return (
        f"{failed:.0f} samples failed in the last {num_steps} steps, and {num_trained:.0f} were trained. The closing"
        " numbers and the end of the report list the reasons under failed samples."
    )


def _long_failures(rows: Sequence[MetricRow]) -> str | None:
    """Look for failures that befall long responses, as time-outs do: what is left to train is shorter."""
    trained, num_failed = _recent(rows, "response/mean_tokens"), _values(rows, "rollout/failed_samples")
    if trained is None or num_failed[-1:] < [_FEWEST_FAILED]:
        return None
    failed = _values(rows, "rollout/failed_mean_tokens")[-1]
    if failed < 1.5 * trained:
        return None
    return (
        f"{num_failed[-1]:.0f} samples have failed, with {failed:.0f} tokens on average, and trained ones have"
        f" {trained:.0f}: long responses are left out. If they were late, raise environment.turn_timeout_s or"
        " reward.timeout_s (inside slime, miles and verl, reward_timeout_s)."
    )


def _recent(rows: Sequence[MetricRow], name: str) -> float | None:
    """Return the mean over the recent steps, or None if too few have measured it."""
    values = _values(rows, name)
    return fmean(values[-RECENT:]) if len(values) >= _FEWEST else None


def _values(rows: Sequence[MetricRow], name: str) -> list[float]:
    return [v for _, _, v in series(rows, "step", name)]
