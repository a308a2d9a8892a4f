"""A batch of trajectories as tensors, split into the mini-batches of its optimizer steps.

Invariants: samples and tokens have one order (the order of the shuffled groups) in every tensor of a batch, rows
refer to it by index, and denominators count the whole mini-batch whatever its split into rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollover.algorithms.batch import Denominators, TokenBatch
from rollover.algorithms.registry import ADVANTAGES, Algorithm, Weights, component_weight
from rollover.batch import Group
from rollover.errors import ConfigError
from rollover.trainer.balancing import assign_rows
from rollover.trainer.context import ContextGroup
from rollover.trainer.packing import PackedRow, TrainingSample, num_positions, pack, rows_of, shared
from rollover.trainer.world import ALONE, World
from rollover.types import SampleId, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """``B`` samples with ``T`` sampled tokens in all."""

    paths: tuple[TrainingSample, ...]
    """The sequences to compute, ``P`` in all: a sample has several if its turns form a tree."""
    sample_P: Tensor
    share_P: Tensor
    """Weight of a path's mean in its sample's mean: the path's share of the tokens or, if one ratio counts for all of
    a sequence, an equal one."""
    sample_ids: tuple[SampleId, ...]
    samples_per_group: tuple[int, ...]
    paths_per_group: tuple[int, ...]
    rewards_B: Tensor
    """Rewards as scored, float64."""
    lengths_B: Tensor
    """Number of sampled tokens of each sample."""
    limited_B: Tensor
    """Number of tokens of each sample that its limit counts."""
    group_B: Tensor
    baseline_B3: Tensor | None
    """``Baseline`` of each sample, if samples are groups of their own."""
    components_2BK: Tensor | None
    """Components of the rewards and their weights, if the algorithm compares them (``ComponentRewards``)."""
    turns_BK: Tensor | None
    """Rewards of the turns (``TurnRewards``), if the algorithm compares turns."""
    turn_T: Tensor | None
    sample_T: Tensor
    rollout_logprobs_T: Tensor
    staleness_T: Tensor
    loss_mask_T: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.sample_T)

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        algorithm: Algorithm,
        *,
        step: int,
        device: torch.device,
        replays_routes: bool = False,
    ) -> BatchTensors:
        """Build the tensors of a batch. ``step`` is the batch's: tokens sampled by version ``step`` have staleness 0.
        ``replays_routes``: with the routes that were recorded."""
        trajectories = [t for g in groups for t in g.trajectories]
        lengths = np.array([t.num_tokens for t in trajectories])
        masks, rewards = [], []
        for t in trajectories:
            assert t.reward is not None and t.finish_reason is not None, f"sample {t.sample_id} is not scored"
            rewards.append(t.reward)
            masks.append(float(algorithm.trains_sample(t.finish_reason)))
        paths = [TrainingSample.all_of(t, replays_routes=replays_routes) for t in trajectories]
        num_paths = [len(of_sample) for of_sample in paths]
        if algorithm.ratio_level == "token":
            shares = [path.num_sampled / n for of_sample, n in zip(paths, lengths, strict=True) for path in of_sample]
        else:
            shares = np.repeat(1 / np.array(num_paths), num_paths).tolist()
        versions_T = np.array([v for t in trajectories for v in t.policy_versions], dtype=np.int64)
        assert (versions_T <= step).all(), f"the batch of step {step} has tokens of a later version"
        sizes = [len(g.trajectories) for g in groups]
        by_turn = ADVANTAGES[algorithm.advantage].by_turn

        def put(values: object, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device)

        return cls(
            paths=tuple(path for of_sample in paths for path in of_sample),
            sample_P=put(np.repeat(np.arange(len(paths)), num_paths), torch.int64),
            share_P=put(shares, torch.float32),
            sample_ids=tuple(t.sample_id for t in trajectories),
            samples_per_group=tuple(sizes),
            paths_per_group=tuple(sum(part) for part in np.split(num_paths, np.cumsum(sizes)[:-1])),
            rewards_B=put(rewards, torch.float64),
            lengths_B=put(lengths, torch.int64),
            limited_B=put([t.limited_tokens for t in trajectories], torch.int64),
            group_B=put(np.repeat(np.arange(len(sizes)), sizes), torch.int64),
            baseline_B3=put([g.baseline for g in groups], torch.float64) if groups[0].baseline else None,
            components_2BK=put(_components(trajectories, algorithm.reward_weights), torch.float64)
            if ADVANTAGES[algorithm.advantage].by_component
            else None,
            turns_BK=put(_turn_rewards(trajectories, algorithm.turn_weights), torch.float64) if by_turn else None,
            turn_T=put([k for t in trajectories for k, turn in enumerate(t.turns) for _ in turn], torch.int64)
            if by_turn
            else None,
            sample_T=put(np.repeat(np.arange(len(trajectories)), lengths), torch.int64),
            rollout_logprobs_T=put([p for t in trajectories for p in t.rollout_logprobs], torch.float32),
            staleness_T=put(step - versions_T, torch.int64),
            loss_mask_T=put(np.repeat(masks, lengths), torch.float32),
        )


def _components(trajectories: Sequence[Trajectory], weights: Weights) -> np.ndarray[Any, Any]:
    """Return the components of each sample and their weights, ``[2, B, K]``, with NaN and 0 for those it lacks."""
    names = sorted({name for t in trajectories for name in t.components})
    table = np.full((2, len(trajectories), len(names)), np.nan)
    table[1] = 0
    for row, t in enumerate(trajectories):
        for name, value in t.components.items():
            table[:, row, names.index(name)] = value, component_weight(weights, t.prompt.source, name)
    return table


def _turn_rewards(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> np.ndarray[Any, Any]:
    """Return the reward of each turn, ``[B, K]``, with NaN for turns that a sample lacks: what the environment gave,
    times its weight in the sample's reward. What that has beyond this was earned by all of it, and counts for its last
    turn. An opening, in which nothing was sampled, is no turn to compare."""
    table = np.full((len(trajectories), max(max(len(t.turns), 1) for t in trajectories)), np.nan)
    for row, t in enumerate(trajectories):
        given = [weights.get(t.prompt.source, 1.0) * (observation.reward or 0.0) for observation in t.observations]
        rewards = (given + [0.0] * len(t.turns))[: max(len(t.turns), 1)]
        assert t.reward is not None
        rewards[-1] += t.reward - sum(given)
        table[row, : len(rewards)] = rewards
        if t.has_opening and len(rewards) > 1:
            table[row, 0] = np.nan
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstants:
    """Values that are computed once for a batch, under the weights at the start of its step."""

    proximal_logprobs_T: Tensor
    ref_logprobs_T: Tensor | None
    advantages_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The part of a batch that one optimizer step trains: some of the batch's groups, packed."""

    rows: tuple[PackedRow, ...]
    """Rows of this rank."""
    padding: tuple[PackedRow, ...] = ()
    """Passes whose results do not count, made because other ranks have more rows."""
    num_positions: int
    """Input positions of the rows of all ranks."""
    denominators: Denominators
    first_group: int

    def token_batch(
        self,
        data: BatchTensors,
        constants: StepConstants,
        row: PackedRow,
        trainer_logprobs_T: Tensor,
        *,
        as_proximal: bool,
    ) -> TokenBatch:
        """Return the tokens of one row, with the row's log-probs under the trainer. ``as_proximal``: use those as the
        proximal ones too."""
        paths = torch.tensor(row.samples_B, device=data.group_B.device)
        proximal_T, ref_T = constants.proximal_logprobs_T, constants.ref_logprobs_T
        return TokenBatch(
            trainer_logprobs_T=trainer_logprobs_T,
            proximal_logprobs_T=trainer_logprobs_T.detach() if as_proximal else proximal_T[row.token_T],
            rollout_logprobs_T=data.rollout_logprobs_T[row.token_T],
            ref_logprobs_T=None if ref_T is None else ref_T[row.token_T],
            advantages_T=constants.advantages_T[row.token_T],
            loss_mask_T=data.loss_mask_T[row.token_T],
            staleness_T=data.staleness_T[row.token_T],
            is_only_choice_T=None if row.kept is None else row.kept.counts_T == 1,
            sample_T=row.sample_T,
            group_B=data.group_B[data.sample_P[paths]] - self.first_group,
            share_B=data.share_P[paths],
        )


def shuffled(groups: Sequence[Group], num: int, *, seed: int, step: int) -> tuple[Group, ...]:
    """Return the groups in the order in which they go to ``num`` mini-batches: a permutation fixed by (seed, step),
    since the order of a batch follows completion and would put short responses into the first mini-batch."""
    if num > len(groups):
        raise ConfigError(
            f"trainer.mini_batches is {num} but the batch has only {len(groups)} groups: lower it or train more groups"
        )
    if num == 1:
        return tuple(groups)
    return tuple(groups[i] for i in np.random.default_rng((seed, step)).permutation(len(groups)))


def split(
    data: BatchTensors,
    num: int,
    *,
    budget: int,
    max_response_tokens: int,
    world: World = ALONE,
    context: ContextGroup | None = None,
    quadratic: float = 0.0,
    shares_prompts: bool = True,
) -> tuple[MiniBatch, ...]:
    """Split a batch into ``num`` mini-batches of whole groups, as equal in groups as possible, packed into rows of
    ``budget`` tokens. Each rank of ``world`` gets its own rows, and the ranks of a ``context`` the same ones.
    ``quadratic``: see ``balancing.family_cost``; ``shares_prompts``: see ``pack``."""
    sizes = np.array(data.paths_per_group)
    ends = np.cumsum(sizes)
    lengths_P = np.array([path.num_sampled for path in data.paths])
    minis = []
    for groups in np.array_split(np.arange(len(sizes)), num):
        members = range(int(ends[groups[0]] - sizes[groups[0]]), int(ends[groups[-1]]))
        per_group = tuple(int(lengths_P[ends[g] - sizes[g] : ends[g]].sum()) for g in groups)
        rows, padding, positions = rows_of_rank(
            data.paths,
            members,
            budget=budget,
            world=world,
            context=context,
            quadratic=quadratic,
            device=data.group_B.device,
            shares_prompts=shares_prompts,
        )
        minis.append(
            MiniBatch(
                rows=rows,
                padding=padding,
                num_positions=positions,
                denominators=Denominators(
                    num_tokens=sum(per_group),
                    num_samples=sum(data.samples_per_group[g] for g in groups),
                    num_groups=len(groups),
                    tokens_per_group=per_group,
                    max_response_tokens=max_response_tokens,
                ),
                first_group=int(groups[0]),
            )
        )
    return tuple(minis)


def rows_of_rank(
    samples: Sequence[TrainingSample],
    members: Sequence[int],
    *,
    budget: int,
    world: World,
    context: ContextGroup | None,
    quadratic: float,
    device: torch.device,
    shares_prompts: bool,
) -> tuple[tuple[PackedRow, ...], tuple[PackedRow, ...], int]:
    """Return this rank's rows, its padding, and the input positions of all ranks (see ``balancing``). Ranks that share
    rows get the same ones."""
    if world.size == 1:
        rows = pack(samples, budget, members=members, device=device, shares_prompts=shares_prompts)
        return rows, (), sum(len(row.input_ids_N) for row in rows)
    number, each = (world.rank, 1) if context is None else (context.number, context.size)
    assigned = assign_rows(samples, members, budget=budget, num_ranks=world.size // each, quadratic=quadratic)
    own = assigned[number]
    positions = sum(num_positions(samples, part) for rank in assigned for row in rank.rows for part in row)
    rows, padding = (
        tuple(shared(row, context) for row in rows_of(samples, chosen, device=device))
        for chosen in (own.rows, [own.padding])
    )
    return rows, padding * own.num_padding, positions
