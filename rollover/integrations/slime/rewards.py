"""Rewards computed by slime: its hooks and its reward models, on its own event loop.

slime's reward models keep connections that belong to the event loop on which they were opened, and its evaluation uses
the same ones. So rewards are computed on slime's loop, where a blocking function does not hold up decoding either.

What it keeps true: a scored sample is kept with everything that a reward function has written on it until its batch is
handed out. One that was scored before a restart is judged again only if its reward is a table, of which the journal has
one number, or if hooks have changed it. The reward in the journal remains valid.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from rollover.errors import DataError, RewardError
from rollover.integrations.slime.host import JudgesSamples, Sample
from rollover.types import SampleId, Trajectory


class SlimeScorer:
    """Implements ``Scorer`` with slime's rewards.

    Args:
        respond: converts a trajectory to slime's sample.
        judge: called on ``loop``.
        timeout_s: longest wait for a reward.

    Example: ``await scorer.score(trajectory)`` is 1.0, and ``scorer.take(trajectory.sample_id)`` is slime's sample.
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
        self._args = args
        self._respond = respond
        self._judge = judge
        self._loop = loop
        self._timeout_s = timeout_s
        self._scored: dict[SampleId, Sample] = {}

    async def score(self, trajectory: Trajectory) -> float:
        """Return the reward of a response.

        Raises:
            RewardError: none came in time, or it is not a number.
            DataError: slime has no such reward model.
        """
        sample = await self._score(trajectory)
        self._scored[trajectory.sample_id] = sample
        return _value(sample, self._args)

    async def take(self, trajectory: Trajectory) -> Sample:
        """Return slime's sample of a scored trajectory and stop keeping it. Raises like ``score`` if it has to be
        judged again."""
        assert trajectory.reward is not None, f"{trajectory.sample_id} was not scored"
        if (sample := self._scored.pop(trajectory.sample_id, None)) is not None:
            return sample
        reward_key = getattr(self._args, "reward_key", None)
        if not reward_key and not getattr(self._args, "rollout_sample_hook_path", None):
            sample = self._respond(trajectory)
            sample.reward = trajectory.reward
            return sample
        sample = await self._score(trajectory)
        sample.reward = {**sample.reward, reward_key: trajectory.reward} if reward_key else trajectory.reward
        return sample

    def forget(self, group_id: int) -> None:
        """Delete the samples of a group that was dropped."""
        for sample_id in [i for i in self._scored if i.group == group_id]:
            del self._scored[sample_id]

    async def _score(self, trajectory: Trajectory) -> Sample:
        sample = self._respond(trajectory)
        done = asyncio.run_coroutine_threadsafe(_judged(self._judge, sample), self._loop)
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                scored = await asyncio.wrap_future(done)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RewardError(f"its reward took longer than {self._timeout_s:g} s (reward_timeout_s)") from None
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
