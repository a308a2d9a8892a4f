"""Scores finished trajectories off the critical path: the weighted sum of the rewards of their source.

``score`` blocks the event loop only for verifiers that the user declared cheap (``workers = 0``); everything else runs
in killable processes under a deadline. What becomes of a reward that fails is in ``rater.py``. A reward that does not
apply to a response (``None``) leaves the sum to the others; if none applies, the sample has no reward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollover.environments.pool import WorkerPool
from rollover.environments.rater import Rater
from rollover.environments.reward_value import RewardValue
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.errors import NoReward, RewardError
from rollover.hf.tokenizer import FastTokenizer
from rollover.types import Score, Trajectory


class RewardScorer:
    """Scores the responses to the prompts of all sources of a run: an environment with one turn. Belongs to one event
    loop; ``close`` it there.

    Args:
        specs: the rewards of all sources; rewards of one source in the order in which they are listed.
        folder: of the run, where replies of judges are kept.

    Raises ``DataError`` at once when a reward function is missing or has a wrong signature.
    """

    def __init__(self, specs: Sequence[RewardSpec], tokenizer: FastTokenizer, folder: Path | None = None) -> None:
        self._tokenizer = tokenizer
        specs = [replace(spec, folder=None if folder is None else str(folder)) for spec in specs]
        for spec in specs:
            spec.config.check(spec)
        pooled = [spec for spec in specs if spec.config.workers > 0]
        self._pool = WorkerPool(pooled, max(s.config.workers for s in pooled)) if pooled else None
        self._raters: dict[str, list[Rater]] = {}
        for spec in specs:
            rater = Rater(spec, self._pool if spec.config.workers > 0 else None)
            self._raters.setdefault(spec.source, []).append(rater)
        self._work_s: defaultdict[str, float] = defaultdict(float)
        self._num_late = Counter[str]()

    def costs(self, *, in_evaluations: bool = False) -> dict[str, float]:
        """Return what scoring has cost since the scorer was created, in rollouts or in evaluations.

        ``reward/work_s`` is the time that responses spent being scored, summed over them, including waits for a free
        process. ``reward/late`` is the number of late checks against a known answer, whose response counts as wrong.
        ``judge/*`` is what all judges have cost, if there are any.
        """
        found = {"reward/work_s": 0.0, "reward/late": 0.0}
        for source, raters in self._raters.items():
            if source.startswith("eval/") == in_evaluations:
                found["reward/work_s"] += self._work_s[source]
                found["reward/late"] += self._num_late[source]
                for name, number in (used for rater in raters for used in rater.used.items()):
                    found[f"judge/{name}"] = found.get(f"judge/{name}", 0.0) + number
        return found

    @property
    def num_processes(self) -> int:
        """Return the number of reward processes that are alive now."""
        return self._pool.num_processes if self._pool is not None else 0

    def compares_siblings(self, source: str) -> bool:
        """Return whether the responses of a group of this source are scored together (``score_group``)."""
        return any(rater.spec.config.compares_siblings for rater in self._raters[source])

    async def score(self, trajectory: Trajectory) -> Score:
        """Score a finished trajectory.

        Raises:
            RewardError: it could not be scored, after the last retry; with the reason.
            NoReward: no reward of its source applies to it.
            DataError: the reward function is wrong, and would fail for every other trajectory too.
        """
        (score,) = await self.score_group([trajectory])
        if isinstance(score, RewardError):
            raise score
        return score

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Score | RewardError]:
        """Score the finished trajectories of one group. Returns, for each, its score or the reason why there is none.
        Raises ``DataError`` as ``score`` does."""
        started_s = time.perf_counter()
        prompt = trajectories[0].prompt
        samples = [self._sample(trajectory) for trajectory in trajectories]
        values: list[dict[str, RewardValue]] = [{} for _ in samples]
        failures: list[RewardError | None] = [None] * len(samples)
        late: set[int] = set()
        counted = self._counted(prompt.source)

        async def rate(rater: Rater, members: Sequence[int]) -> None:
            rating = await rater.rate([samples[i] for i in members], prompt.prompt_id)
            if rating.is_late:
                late.update(members)
            for place, i in enumerate(members):
                if rating.failure is not None and rater in counted:
                    failures[i] = rating.failure
                else:
                    values[i][rater.spec.component] = None if rating.failure else rating.values[place]

        # Rewards that compare siblings come last: a response that another reward fails is not among them.
        for rater in sorted(self._raters[prompt.source], key=lambda rater: rater.spec.config.compares_siblings):
            members = [i for i, failure in enumerate(failures) if failure is None]
            if len(members) == 1 or (members and rater.spec.config.compares_siblings):
                await rate(rater, members)
            else:
                await asyncio.gather(*(rate(rater, [i]) for i in members))
        scores = [failure or self._score(prompt.source, found) for failure, found in zip(failures, values, strict=True)]
        self._work_s[prompt.source] += time.perf_counter() - started_s
        self._num_late[prompt.source] += len(late)
        return scores

    async def close(self) -> None:
        """Kill the processes; scorings still under way fail."""
        if self._pool is not None:
            await self._pool.close()
        for rater in (rater for raters in self._raters.values() for rater in raters):
            await rater.close()

    def _counted(self, source: str) -> Sequence[Rater]:
        """Return the rewards of a source but those that only draw a curve, unless all do."""
        raters = self._raters[source]
        return [rater for rater in raters if rater.spec.config.weight] or raters

    def _score(self, source: str, values: dict[str, RewardValue]) -> Score | RewardError:
        """Sum up the rewards of a response; a value of ``None`` is left out."""
        reward, components, solved = 0.0, dict[str, float](), None
        for rater in self._raters[source]:
            value, spec = values[rater.spec.component], rater.spec
            if value is None:
                continue
            parts = value if isinstance(value, dict) else {"": value}
            total = sum(parts.values())
            reward += spec.config.weight * total
            if rater is self._raters[source][0]:
                solved = total >= spec.config.pass_score
            components |= {"/".join(filter(None, (spec.component, name))): one for name, one in parts.items()}
        components.pop("", None)  # a single reward without a name
        counted = self._counted(source)
        if all(values[rater.spec.component] is None for rater in counted):
            labels = ", ".join(rater.spec.config.label for rater in counted)
            return NoReward(f"reward {labels} of source {source!r} returned None (does not apply)")
        return Score(reward, components=components, solved=solved)

    def _sample(self, trajectory: Trajectory) -> RewardSample:
        texts = [self._tokenizer.decode(list(turn), skip_special_tokens=True) for turn in trajectory.turns or ((),)]
        transcript: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            if number or not trajectory.has_opening:
                transcript.append({"role": "assistant", "content": text})
            if number < len(trajectory.observations):
                answer = trajectory.observations[number]
                transcript.append({"role": "environment", "content": answer.text, "reward": answer.reward})
        return RewardSample(
            prompt=trajectory.prompt.text,
            columns=trajectory.prompt.columns,
            completion=texts[-1],
            completion_ids=trajectory.response_ids,
            transcript=tuple(transcript),
        )
