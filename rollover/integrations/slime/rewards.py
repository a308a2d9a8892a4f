"""Rewards computed by slime: its hooks and its reward models, on its own event loop.

slime's reward models keep connections that belong to the event loop on which they were opened, and its evaluation uses
the same ones. So rewards are computed on slime's loop, where a blocking function does not hold up decoding either.

Invariants: a scored sample is kept with everything that a reward function has written on it until its batch is
handed out. One that was scored before a restart is judged again only if its reward is a table, of which the journal has
one number, or if hooks have changed it. The reward in the journal remains valid.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rollover.errors import DataError, RewardError
from rollover.integrations.scoring import HostScorer
from rollover.integrations.slime.host import JudgesSamples, Sample
from rollover.types import SampleId, Trajectory


class SlimeScorer(HostScorer[Sample]):
    """Implements ``Scorer`` with slime's rewards.

    Args:
        respond: converts a trajectory to slime's sample.
        judge: called on ``loop``.
        timeout_s: longest wait for a reward.
    """

    def __init__(
        self,
        args: Namespace,
        *,
        respond: Callable[[Trajectory], Sample],
        judge: JudgesSamples,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self._args = args
        self._respond = respond
        self._judge = judge
        self._loop = loop

    def reward(self, answer: Sample) -> float:
        """Return the reward of a judged sample. Raises ``RewardError`` when it is not a number."""
        return _value(answer, self._args)

    async def take(self, trajectories: Sequence[Trajectory]) -> dict[SampleId, Sample]:
        """Return slime's samples of scored trajectories and stop keeping them. Raises ``RewardError`` naming one that
        has to be judged again and gets no reward."""
        samples = await asyncio.gather(*map(self._taken, trajectories))
        return {trajectory.sample_id: sample for trajectory, sample in zip(trajectories, samples, strict=True)}

    async def _taken(self, trajectory: Trajectory) -> Sample:
        assert trajectory.reward is not None, f"{trajectory.sample_id} was not scored"
        if (sample := self.kept(trajectory.sample_id)) is not None:
            return sample
        reward_key = getattr(self._args, "reward_key", None)
        if not reward_key and not getattr(self._args, "rollout_sample_hook_path", None):
            sample = self._respond(trajectory)
            sample.reward = trajectory.reward
            return sample
        try:
            sample = await self.asked(trajectory)
        except Exception as error:
            raise RewardError(
                f"{trajectory.sample_id} was scored before the restart and is judged again, for its table of rewards or"
                f" its hooks, which failed: {error!r}; the run can be resumed once its reward works"
            ) from error
        sample.reward = {**sample.reward, reward_key: trajectory.reward} if reward_key else trajectory.reward
        return sample

    async def ask(self, trajectory: Trajectory) -> Sample:
        """Return a judged sample. Raises ``DataError`` when slime has no such reward model."""
        sample = self._respond(trajectory)
        done = asyncio.run_coroutine_threadsafe(_judged(self._judge, sample), self._loop)
        try:
            scored = await asyncio.wrap_future(done)
        except NotImplementedError as error:
            raise DataError(f"responses cannot be scored: {error}; see --rm-type and --custom-rm-path") from error
        if not hasattr(scored, "reward"):
            raise DataError(
                f"a hook of --rollout-sample-hook-path returned {type(scored).__name__} instead of a sample"
            )
        return scored


async def _judged(judge: JudgesSamples, sample: Sample) -> Sample:
    return await judge(sample)


def _value(sample: Sample, args: Namespace) -> float:
    try:
        value: Any = sample.get_reward_value(args)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"a reward is {sample.reward!r}, which has no entry {getattr(args, 'reward_key', None)!r} (--reward-key):"
            f" {type(error).__name__}"
        ) from None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RewardError(f"its reward is {value!r}, which is not a number; see --reward-key") from None
