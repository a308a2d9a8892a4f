"""Scores finished trajectories off the critical path.

``score`` blocks the event loop only for verifiers that the user declared cheap (``workers = 0``); everything else runs
in killable processes under a deadline. A scoring that raises or is late is retried, then fails only its sample, with
the reason. There are two exceptions. A function that has not yet returned a valid result is the user's mistake,
reported at the first sample. A built-in check against a known answer that is late scores 0: a response that cannot be
judged is not right, and excluding it would favour easy ones. It would be late again, so it is not retried, and the same
answer to the same row is not checked again. ``n`` checks of a source take at most ``n / 10 + 6 + workers`` deadlines:
once 6 more were late than a tenth of those in time, the deadline is a tenth until the balance is restored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollover.environments.pool import WorkerPool
from rollover.environments.reward_value import MisshapenReward, RefusedReward
from rollover.environments.rewards.base import Reward, RewardSample, RewardSpec
from rollover.environments.scoring import ScoringResult, score_once
from rollover.errors import DataError, RewardError
from rollover.hf.tokenizer import Tokenizer
from rollover.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerStats:
    """Counts since the scorer was created.

    Example: 3 responses scored and a response that failed after a retry are ``ScorerStats(num_scored=3, num_failed=1,
    num_retried=1)``.
    """

    num_scored: int = 0
    num_retried: int = 0
    num_failed: int = 0
    num_late: int = 0
    """Number of late checks against a known answer, whose response counts as wrong; included in ``num_scored``."""
    busy_s: float = 0.0
    """Time that trajectories spent being scored, summed over them, including waits for a free process."""


_SHORTER = 10
"""Divides the deadline once too many checks were late."""
_ALLOWANCE = 6 * _SHORTER


class RewardScorer:
    """Scores the responses to the prompts of all sources of a run: an environment with one turn. Belongs to one event
    loop; ``close`` it there.

    Example: with ``ExactConfig()`` for its source, the trajectory ``"<answer>42</answer>"`` to a prompt whose answer is
    42 scores 1.0, and ``stats.num_scored`` becomes 1.

    Raises ``DataError`` at once when a reward function is missing or has a wrong signature.
    """

    def __init__(self, specs: Sequence[RewardSpec], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specs = {spec.source: spec for spec in specs}
        self._inline: dict[str, Reward] = {}
        for spec in specs:
            spec.config.check(spec)
            if spec.config.workers == 0:
                self._inline[spec.source] = spec.config.build(spec)
        pooled = [spec for spec in specs if spec.config.workers > 0]
        self._pool = WorkerPool(pooled, max(s.config.workers for s in pooled)) if pooled else None
        self._stats = ScorerStats()
        self._proved: set[str] = set()
        """Sources whose reward has returned a valid result once."""
        self._late: set[tuple[str, str]] = set()
        """Row and judged part of the checks that were late."""
        self._allowances = dict.fromkeys(self._specs, _ALLOWANCE)

    @property
    def stats(self) -> ScorerStats:
        return self._stats

    @property
    def num_processes(self) -> int:
        """Return the number of reward processes that are alive now."""
        return self._pool.num_processes if self._pool is not None else 0

    def pass_score(self, source: str) -> float:
        """Return the lowest reward at which a response of this source counts as solved."""
        return self._specs[source].config.pass_score

    async def score(self, trajectory: Trajectory) -> float:
        """Score a finished trajectory.

        Raises:
            RewardError: it could not be scored, after the last retry; with the reason.
            DataError: the reward function is wrong, and would fail for every other trajectory too.
        """
        spec, prompt_id = self._specs[trajectory.prompt.source], trajectory.prompt.prompt_id
        started_s = time.perf_counter()
        num_retried, late, failure = 0, False, ""
        for num_retried in range(spec.config.retries + 1):
            late = False
            try:
                reward = await self._attempt(spec, self._sample(trajectory), row=prompt_id.rpartition("@")[0])
            except TimeoutError:
                late, failure = True, f"timed out after {spec.config.timeout_s:g} s (reward.timeout_s)"
                if spec.config.late_scores_zero:
                    break
            except RefusedReward as error:
                failure = str(error)
                if isinstance(error, MisshapenReward) and spec.source not in self._proved:
                    raise DataError(_told(spec, failure, trajectory)) from None
                break
            except RewardError as error:
                failure = str(error)
            else:
                self._proved.add(spec.source)
                self._count(num_scored=1, num_retried=num_retried, busy_s=time.perf_counter() - started_s)
                return reward
        busy_s = time.perf_counter() - started_s
        if late and spec.config.late_scores_zero:
            self._count(num_scored=1, num_late=1, num_retried=num_retried, busy_s=busy_s)
            return 0.0
        self._count(num_failed=1, num_retried=num_retried, busy_s=busy_s)
        raise RewardError(_told(spec, failure, trajectory))

    async def close(self) -> None:
        """Kill the processes; scorings still under way fail."""
        if self._pool is not None:
            await self._pool.close()

    def _sample(self, trajectory: Trajectory) -> RewardSample:
        return RewardSample(
            prompt=trajectory.prompt.text,
            columns=trajectory.prompt.columns,
            completion=self._tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=True),
            completion_ids=trajectory.token_ids,
        )

    async def _attempt(self, spec: RewardSpec, sample: RewardSample, row: str) -> float:
        """Score once. Raises ``TimeoutError`` after the deadline, ``RewardError`` for anything that the reward raises,
        and ``DataError`` when a process finds that the rewards cannot be built."""
        if spec.source in self._inline:
            async with asyncio.timeout(spec.config.timeout_s):
                return (await score_once(self._inline[spec.source], sample)).number()
        assert self._pool is not None
        job = {"source": spec.source, "sample": asdict(sample)}
        if not spec.config.late_scores_zero:
            return ScoringResult(**await self._pool.run(job, lambda: spec.config.timeout_s)).number()
        return await self._check(self._pool, spec, sample, row, job)

    async def _check(
        self, pool: WorkerPool, spec: RewardSpec, sample: RewardSample, row: str, job: dict[str, Any]
    ) -> float:
        """Check a response against a known answer. Raises ``TimeoutError`` at once if the same was late before."""
        deadline_s = 0.0

        def begin() -> float:
            nonlocal deadline_s
            if self._late and (row, spec.config.judged_part(sample)) in self._late:
                raise TimeoutError
            deadline_s = spec.config.timeout_s * (1.0 if self._allowances[spec.source] >= _SHORTER else 1 / _SHORTER)
            return deadline_s

        try:
            reply = await pool.run(job, begin)
        except TimeoutError:
            if deadline_s == spec.config.timeout_s:
                self._late.add((row, spec.config.judged_part(sample)))
                self._allowances[spec.source] -= _SHORTER
            raise
        self._allowances[spec.source] = min(_ALLOWANCE, self._allowances[spec.source] + 1)
        return ScoringResult(**reply).number()

    def _count(self, **more: float) -> None:
        self._stats = ScorerStats(**{k: v + more.get(k, 0) for k, v in asdict(self._stats).items()})


def _told(spec: RewardSpec, failure: str, trajectory: Trajectory) -> str:
    return f"reward {spec.config.label} of source {spec.source!r}: {failure} (prompt {trajectory.prompt.prompt_id})"
