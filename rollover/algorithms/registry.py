"""The table of algorithms: GRPO, DAPO, GSPO, Dr.GRPO, RLOO, REINFORCE++ and CISPO differ in their settings.

The table is data and needs no torch. A row itself computes what needs no torch either: which groups it keeps, which
samples it trains, how it punishes length. The functions that compute its other settings are in ``advantages``,
``losses``, ``corrections`` and ``kl``. Every row corrects stale tokens as decoupled PPO does (arXiv 2110.00641). To add
an algorithm, add a row to ``ALGORITHMS``; to add an advantage or an objective, add a row to ``ADVANTAGES`` or
``OBJECTIVES``, and a function of the same name to ``advantages`` or ``losses``. The configuration, the trainer, the dry
run and the generated page need nothing else (``tests/algorithms/test_adding_an_algorithm.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from rollover.errors import DataError, nearest
from rollover.types import FinishReason, is_moderate


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRow:
    """Facts about an advantage that matter before one is computed."""

    compares: Literal["siblings", "batch", "history"]
    """The rewards that a reward is compared with: the rewards of its group, of the whole batch, or earlier ones."""
    divides: bool
    """True if it is divided by a deviation, so that ``advantage_eps`` and ``advantage_ddof`` have an effect."""
    by_component: bool = False
    """True if it compares the components of rewards rather than their sum."""
    by_turn: bool = False
    """True if each turn of an episode has an advantage of its own."""


_LEAST_REWARD = 1e-20
"""Size below which a reward counts as 0 in a comparison: the difference of two such rewards is 0 in float32."""
ADVANTAGES: dict[str, AdvantageRow] = {
    "group_std": AdvantageRow(compares="siblings", divides=True),
    "group_mean": AdvantageRow(compares="siblings", divides=False),
    "leave_one_out": AdvantageRow(compares="siblings", divides=False),
    "whitened": AdvantageRow(compares="batch", divides=True),
    "group_mean_whitened": AdvantageRow(compares="siblings", divides=True),
    "component_std": AdvantageRow(compares="siblings", divides=True, by_component=True),
    "turn_std": AdvantageRow(compares="siblings", divides=True, by_turn=True),
    "history": AdvantageRow(compares="history", divides=True),
}
"""The advantages by name; the function of that name in ``advantages`` computes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveRow:
    """Facts about an objective that matter before a loss is computed."""

    has_ratio: bool
    """True if it weights tokens by the ratio of two policies, which is clipped."""
    trains_ratio: bool = False
    """True if its gradient flows through the ratio: with one ratio per sample, each token moves the loss of all
    others."""
    has_dual_clip: bool = False
    """True if ``dual_clip`` has an effect."""


OBJECTIVES: dict[str, ObjectiveRow] = {
    "ppo_clip": ObjectiveRow(has_ratio=True, trains_ratio=True, has_dual_clip=True),
    "cispo": ObjectiveRow(has_ratio=True),
    "reinforce": ObjectiveRow(has_ratio=False),
}
"""The objectives by name; the function of that name in ``losses`` computes each."""

if TYPE_CHECKING:  # a type checker cannot make a literal of a table's keys
    Advantage = str
    Objective = str
else:
    Advantage = Literal[tuple(ADVANTAGES)]
    Objective = Literal[tuple(OBJECTIVES)]
RatioLevel = Literal["token", "sequence", "sequence_token"]
OldPolicy = Literal["proximal", "rollout"]
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "group-token-mean"
]
Correction = Literal["none", "mask_stale", "tis", "mis"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3", "k3_k2grad", "k1_unbiased", "k2_unbiased", "k3_unbiased"]
KlIn = Literal["loss", "reward"]
GroupFilter = Literal["none", "zero_signal"]
Weights = Mapping[str, Mapping[str, float]]
"""The weights of the rewards of each source, by their names."""
Compared = float | Mapping[str, float]
"""A reward, or its components by name."""

CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {
    "none": (0.0, math.inf),
    "mask_stale": (0.0, math.inf),
    "tis": (0.0, 2.0),
    "mis": (0.5, 5.0),
}
"""The bounds of a correction when none are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: the settings of an algorithm, which ``AlgorithmConfig`` explains one by one.

    Raises ``ValueError`` for a meaningless combination.

    Example: ``Algorithm(name="dr-grpo", advantage="group_mean", aggregation="seq-mean-token-sum-norm")`` is GRPO
    without the divisions by the group's deviation and by the response's length.
    """

    name: str
    paper: str = ""
    """The paper in which the algorithm was published."""
    advantage: Advantage
    advantage_eps: float = 1e-6
    advantage_ddof: int = 1
    objective: Objective = "ppo_clip"
    ratio_level: RatioLevel = "token"
    old: OldPolicy = "proximal"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    aggregation: Aggregation = "seq-mean-token-mean"
    correction: Correction = "tis"
    correction_level: CorrectionLevel = "token"
    correction_bounds: tuple[float, float] = CORRECTION_BOUNDS["tis"]
    guard: tuple[float, float] | None = None
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: KlIn = "loss"
    overlong_buffer: float = 0.0
    mask_truncated: bool = False
    group_filter: GroupFilter = "none"
    reward_weights: Weights = field(default_factory=dict, hash=False)
    """Given by the run that uses the row, not by the row."""
    turn_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Given by the run too: the weight of the rewards of turns in the reward of an episode, by source; 1 for others."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        if self.old == "rollout" and self.correction in ("tis", "mis"):
            raise ValueError(
                f"algorithm.correction {self.correction!r} with algorithm.old 'rollout' would count the "
                "distance to the sampling policy twice: set correction to 'none' or 'mask_stale', or old to "
                "'proximal'"
            )
        if self.group_filter != "none" and ADVANTAGES[self.advantage].by_turn:
            raise ValueError(
                f"algorithm.group_filter {self.group_filter!r} compares whole episodes, and advantage"
                f" {self.advantage!r} their turns: set group_filter to 'none'"
            )
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "algorithm.kl_estimator 'k1' in the loss has expected gradient 0 and regularises nothing: "
                "use 'k2', 'k3' or 'k1_unbiased', or set kl_in to 'reward'"
            )
        if self.kl_coef > 0 and self.kl_in == "reward" and (self.advantage != "whitened" or self.kl_estimator != "k1"):
            raise ValueError(
                "algorithm.kl_in 'reward' needs advantage 'whitened' and kl_estimator 'k1', got "
                f"advantage {self.advantage!r} and kl_estimator {self.kl_estimator!r}"
            )

    def settings(self) -> dict[str, Any]:
        """Return everything in the row that decides how the algorithm trains, by name."""
        return {
            key: value for key, value in asdict(self).items() if key not in ("paper", "reward_weights", "turn_weights")
        }

    @property
    def needs_ref(self) -> bool:
        """Return whether ``ref_logprobs`` must be computed."""
        return self.kl_coef > 0

    @property
    def needs_proximal(self) -> bool:
        """Return whether ``proximal_logprobs`` enter the loss. If not, the trainer may pass its detached current
        log-probs in their place; only metrics then use them."""
        ratio = OBJECTIVES[self.objective].has_ratio and self.old == "proximal"
        kl = self.kl_coef > 0 and self.kl_in == "reward"
        return ratio or kl or self.correction in ("tis", "mis") or self.guard is not None

    @property
    def ignores_staleness(self) -> bool:
        """Return whether tokens of older versions are trained as if the current policy had sampled them."""
        sees_rollout = self.old == "rollout" and OBJECTIVES[self.objective].has_ratio
        return self.correction == "none" and not sees_rollout

    def keeps_group(self, rewards_G: Sequence[Compared]) -> bool:
        """Return whether to train a group with these unshaped rewards. With ``group_filter = "zero_signal"``, DAPO's
        dynamic sampling (arXiv 2503.14476, section 3.2), it is trained iff what the advantage compares differs.

        Neither this nor ``trains_sample`` looks at completion time, so that neither prefers short responses.
        """
        if self.group_filter == "none":
            return True
        values: defaultdict[str, set[float]] = defaultdict(set)
        for reward in rewards_G:
            for name, value in (reward if isinstance(reward, Mapping) else {"": reward}).items():
                values[name].add(value if abs(value) >= _LEAST_REWARD else 0.0)
        return any(len(different) > 1 for different in values.values())

    def compared(self, source: str, reward: float, components: Mapping[str, float]) -> Compared:
        """Return what the advantage compares of a response: its reward, or the components that have a weight."""
        if not ADVANTAGES[self.advantage].by_component:
            return reward
        weights = self.reward_weights
        return {name: value for name, value in components.items() if component_weight(weights, source, name)}

    def trains_sample(self, finish_reason: FinishReason) -> bool:
        """Return whether the tokens of a sample with this finish reason have ``loss_mask`` 1."""
        return not (self.mask_truncated and finish_reason is FinishReason.LENGTH)

    def overlong_punishment(self, max_response_tokens: int, num_tokens: int) -> float:
        """Compute DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4) of a response of ``num_tokens``.

        With ``Lc = overlong_buffer * max_response_tokens`` it is 0 up to ``max - Lc`` tokens and falls linearly to -1
        at ``max``. A truncated response has ``max`` tokens; an episode may have fewer if the answer did not fit.
        """
        if self.overlong_buffer == 0:
            return 0.0
        buffer_tokens = self.overlong_buffer * max_response_tokens
        return -min(max((num_tokens - (max_response_tokens - buffer_tokens)) / buffer_tokens, 0.0), 1.0)


def component_weight(weights: Weights, source: str, component: str) -> float:
    """Return the weight of a component: of ``mine/style``, the weight of the reward ``mine``. Raises ``DataError`` if
    there is none."""
    reward = component.partition("/")[0]
    try:
        return weights[source][reward]
    except KeyError:
        raise DataError(
            f"the algorithm has no weight for reward {reward!r} of source {source!r}, whose components its advantage"
            f" compares: create it by algorithm(..., reward_weights={{{source!r}: {{{reward!r}: 1.0}}}})"
        ) from None


def _check_choices(row: Algorithm) -> None:
    for setting, hint in get_type_hints(Algorithm).items():
        choices, value = get_args(hint), getattr(row, setting)
        if choices and all(isinstance(c, str) for c in choices) and value not in choices:
            raise ValueError(f"algorithm.{setting} has no value {value!r}{nearest(str(value), choices)}")


def _check_ranges(row: Algorithm) -> None:
    low, high = row.correction_bounds
    guard_low, guard_high = row.guard or (0.0, math.inf)
    rules: tuple[tuple[str, bool, str], ...] = (
        ("advantage_eps", row.advantage_eps > 0, "be above 0"),
        ("advantage_ddof", row.advantage_ddof in (0, 1), "be 0 or 1"),
        ("clip_low", 0 <= row.clip_low <= 1, "lie in [0, 1]"),
        ("clip_high", row.clip_high >= 0, "be at least 0"),
        ("dual_clip", row.dual_clip == 0 or row.dual_clip > 1, "be above 1, or 0 for off"),
        ("correction_bounds", 0 <= low <= 1 <= high, "hold low <= 1 <= high"),
        ("guard", 0 <= guard_low <= 1 <= guard_high, "hold low <= 1 <= high"),
        ("kl_coef", row.kl_coef >= 0, "be at least 0"),
        ("overlong_buffer", 0 <= row.overlong_buffer <= 1, "lie in [0, 1]"),
    )
    for setting, holds, rule in rules:
        if not holds:
            raise ValueError(f"algorithm.{setting} must {rule}, got {getattr(row, setting)}")
    for setting, value in asdict(row).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(n, float) and n != math.inf and not is_moderate(n) for n in numbers):
            raise ValueError(f"algorithm.{setting} must be 0 or between 1e-30 and 1e30 in size, got {value}")


ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(name="grpo", paper="arXiv 2402.03300", advantage="group_std"),
        Algorithm(name="turn-grpo", advantage="turn_std"),
        Algorithm(
            name="dapo",
            paper="arXiv 2503.14476",
            advantage="group_std",
            clip_high=0.28,
            aggregation="token-mean",
            overlong_buffer=0.2,
            group_filter="zero_signal",
        ),
        Algorithm(
            name="gspo",
            paper="arXiv 2507.18071",
            advantage="group_std",
            ratio_level="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            correction_level="geometric",
        ),
        Algorithm(
            name="gspo-token",
            paper="arXiv 2507.18071, section 4.3",
            advantage="group_std",
            ratio_level="sequence_token",
            clip_low=3e-4,
            clip_high=4e-4,
            correction_level="geometric",
        ),
        Algorithm(
            name="dr-grpo",
            paper="arXiv 2503.20783",
            advantage="group_mean",
            aggregation="seq-mean-token-sum-norm",
        ),
        Algorithm(
            name="rloo",
            paper="arXiv 2402.14740",
            advantage="leave_one_out",
            objective="reinforce",
            aggregation="seq-mean-token-sum",
        ),
        Algorithm(
            name="reinforce++",
            paper="arXiv 2501.03262",
            advantage="whitened",
            advantage_ddof=0,
            aggregation="token-mean",
            kl_coef=0.01,
            kl_estimator="k1",
            kl_in="reward",
        ),
        Algorithm(
            name="reinforce++-baseline",
            paper="arXiv 2501.03262",
            advantage="group_mean_whitened",
            advantage_ddof=0,
            aggregation="token-mean",
            kl_coef=0.01,
            kl_estimator="k2",
        ),
        Algorithm(
            name="cispo",
            paper="arXiv 2506.13585",
            advantage="group_std",
            objective="cispo",
            clip_low=1.0,
            clip_high=4.0,
            aggregation="token-mean",
        ),
    )
}
