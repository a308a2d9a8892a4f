"""Applies one reward of a source to finished responses: deadlines, retries, and the checks that are late.

A scoring that raises or is late is retried, then fails with the reason. There are two exceptions. A function that has
not yet returned a valid result is the user's mistake, reported at the first sample. A built-in check against a known
answer that is late scores 0: a response that cannot be judged is not right, and excluding it would favour easy ones. It
would be late again, so it is not retried, and the same answer to the same row is not checked again. ``n`` checks of a
source take at most ``n / 10 + 6 + workers`` deadlines: once 6 more were late than a tenth of those in time, the
deadline is a tenth until the balance is restored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, NamedTuple

from rollover.environments.pool import WorkerPool
from rollover.environments.reward_value import MisshapenReward, RefusedReward, RewardValue
from rollover.environments.rewards.base import GroupReward, RemoteReward, Reward, RewardSample, RewardSpec
from rollover.environments.scoring import ScoringResult, score_once
from rollover.errors import DataError, RewardError

_SHORTER = 10
"""Divides the deadline once too many checks were late."""
_ALLOWANCE = 6 * _SHORTER


class Rating(NamedTuple):
    """The outcome of applying one reward: a value for each response, or the reason why there is none."""

    values: Sequence[RewardValue] = ()
    is_late: bool = False
    failure: RewardError | None = None


class Rater:
    """One reward of one source.

    Args:
        pool: where it runs; ``None`` for a reward that runs on the event loop (``workers = 0``).
    """

    def __init__(self, spec: RewardSpec, pool: WorkerPool | None) -> None:
        self.spec = spec
        self._pool = pool
        self._inline: Reward | GroupReward | None = spec.config.build(spec) if pool is None else None
        self._proved = False
        """True once the reward has returned a valid result."""
        self._late: set[tuple[str, str]] = set()
        """Row and judged part of the checks that were late."""
        self._allowance = _ALLOWANCE
        most = spec.config.most_at_once
        self._turn: AbstractAsyncContextManager[Any] = nullcontext() if most is None else asyncio.Semaphore(most)

    @property
    def used(self) -> Counter[str]:
        """Return what a reward that asks a server has cost so far."""
        return self._inline.used if isinstance(self._inline, RemoteReward) else Counter()

    async def close(self) -> None:
        if isinstance(self._inline, RemoteReward):
            await self._inline.close()

    async def rate(self, samples: Sequence[RewardSample], prompt_id: str) -> Rating:
        """Score responses to one prompt: one, or all of a group if the reward compares them.

        Raises:
            DataError: the reward function is wrong, and would fail for every other response too.
        """
        config, failure = self.spec.config, ""
        for num_retried in range(config.retries + 1):
            if num_retried:
                ready_at_s = self._inline.ready_at_s if isinstance(self._inline, RemoteReward) else 0.0
                wait_s = ready_at_s - asyncio.get_running_loop().time()
                await asyncio.sleep(max(wait_s, config.back_off_s(num_retried - 1)))
            try:
                values = await self._attempt(samples, row=prompt_id.rpartition("@")[0])
            except TimeoutError:
                if config.late_scores_zero:
                    return Rating([0.0], is_late=True)
                failure = f"timed out after {config.timeout_s:g} s (reward.timeout_s)"
            except RefusedReward as error:
                failure = str(error)
                if isinstance(error, MisshapenReward) and not self._proved:
                    raise DataError(self._told(failure, prompt_id)) from None
                break
            except RewardError as error:
                failure = str(error)
            else:
                self._proved = True
                return Rating(values)
        return Rating(failure=RewardError(self._told(failure, prompt_id)))

    async def _attempt(self, samples: Sequence[RewardSample], row: str) -> Sequence[RewardValue]:
        """Score once. Raises ``TimeoutError`` after the deadline, ``RewardError`` for anything that the reward raises,
        and ``DataError`` when a process finds that the rewards cannot be built."""
        config = self.spec.config
        if self._inline is not None:
            async with self._turn, asyncio.timeout(config.timeout_s):
                return (await score_once(self._inline, samples)).rewards()
        assert self._pool is not None
        job = {"reward": self.spec.key, "samples": [vars(sample) for sample in samples]}
        if not config.late_scores_zero:
            return ScoringResult(**await self._pool.run(job, lambda: config.timeout_s)).rewards()
        (sample,) = samples
        deadline_s = 0.0

        def begin() -> float:
            """Raise ``TimeoutError`` at once if the same was late before."""
            nonlocal deadline_s
            if self._late and (row, config.judged_part(sample)) in self._late:
                raise TimeoutError
            deadline_s = config.timeout_s * (1.0 if self._allowance >= _SHORTER else 1 / _SHORTER)
            return deadline_s

        try:
            reply = await self._pool.run(job, begin)
        except TimeoutError:
            if deadline_s == config.timeout_s:
                self._late.add((row, config.judged_part(sample)))
                self._allowance -= _SHORTER
            raise
        self._allowance = min(_ALLOWANCE, self._allowance + 1)
        return ScoringResult(**reply).rewards()

    def _told(self, failure: str, prompt_id: str) -> str:
        return f"reward {self.spec.config.label} of source {self.spec.source!r}: {failure} (prompt {prompt_id})"
