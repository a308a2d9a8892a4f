"""Scores finished trajectories off the critical path.

``score`` never blocks the event loop for longer than a verifier that its user declared cheap
(``workers = 0``) takes; everything else runs in killable processes under a deadline. A scoring that raises
or is late is retried, then fails its sample alone, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rollover.errors import DataError
from rollover.tasks.pool import WorkerPool
from rollover.tasks.prompts import Tokenizer
from rollover.tasks.rewards import (
    FunctionReward,
    Reward,
    RewardError,
    RewardSample,
    RewardSpec,
    build_reward,
    reason,
)
from rollover.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerStats:
    """Counters since the scorer was made."""

    num_scored: int = 0
    num_retried: int = 0
    num_failed: int = 0
    busy_s: float = 0.0
    """Time trajectories spent being scored, summed over them, waiting for a free process included."""


class Scorer:
    """The rewards of all sources of a run. Belongs to one event loop; ``close`` it there.

    Raises ``DataError`` at once when a reward function is missing or has a wrong signature.
    """

    def __init__(self, specs: Sequence[RewardSpec], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specs = {spec.source: spec for spec in specs}
        self._inline: dict[str, Reward] = {}
        for spec in specs:
            inline = spec.config.workers == 0
            if inline or spec.config.kind == "function":
                reward = build_reward(spec)
                if inline and isinstance(reward, FunctionReward) and not reward.is_async:
                    raise DataError(
                        f"reward function {spec.config.function} is not async and would block the run; "
                        "set reward.workers to 1 or more"
                    )
                if inline:
                    self._inline[spec.source] = reward
        pooled = [spec for spec in specs if spec.config.workers > 0]
        self._pool = WorkerPool(pooled, max(s.config.workers for s in pooled)) if pooled else None
        self._stats = ScorerStats()

    @property
    def stats(self) -> ScorerStats:
        return self._stats

    @property
    def num_processes(self) -> int:
        """Reward processes alive now."""
        return self._pool.num_processes if self._pool is not None else 0

    def pass_score(self, source: str) -> float:
        """The reward from which a response of this source counts as solved."""
        return self._specs[source].config.pass_score

    async def score(self, trajectory: Trajectory) -> float:
        """Reward of a finished trajectory. Raises ``RewardError``, with the reason, after the last retry."""
        spec = self._specs[trajectory.prompt.source]
        started_s = time.perf_counter()
        failure = ""
        for attempt in range(spec.config.retries + 1):
            try:
                reward = await self._attempt(spec, self._sample(trajectory))
            except TimeoutError:
                failure = f"timed out after {spec.config.timeout_s:g} s (reward.timeout_s)"
            except Exception as error:  # whatever a reward raises fails its sample, never the run
                failure = reason(error)
            else:
                self._count(num_scored=1, num_retried=attempt, busy_s=time.perf_counter() - started_s)
                return reward
        self._count(num_failed=1, num_retried=spec.config.retries, busy_s=time.perf_counter() - started_s)
        what = spec.config.function or spec.config.kind
        raise RewardError(f"reward {what} of source {spec.source!r}: {failure} (prompt {trajectory.prompt.prompt_id})")

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

    async def _attempt(self, spec: RewardSpec, sample: RewardSample) -> float:
        if spec.source in self._inline:
            async with asyncio.timeout(spec.config.timeout_s):
                return await self._inline[spec.source].score(sample)
        assert self._pool is not None
        reply = await self._pool.run(
            {
                "source": spec.source,
                "prompt": sample.prompt,
                "columns": dict(sample.columns),
                "completion": sample.completion,
                "completion_ids": list(sample.completion_ids),
            },
            spec.config.timeout_s,
        )
        if "error" in reply:
            raise RewardError(reply["error"])
        return float(reply["reward"])

    def _count(self, **more: float) -> None:
        self._stats = ScorerStats(**{k: v + more.get(k, 0) for k, v in asdict(self._stats).items()})
