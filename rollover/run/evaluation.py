"""Accuracy on held-out prompts: the engine generates, the scorer scores, ``environments.pass_at_k`` computes the means.

Every evaluation of a run draws the same noise, so two of them differ only in the weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollover.clock import Clock
from rollover.engine.base import Engine, GenerateRequest
from rollover.engine.complete import complete
from rollover.environments.pass_at_k import EvalRow, ScoredPrompt, evaluate
from rollover.environments.scorer import RewardScorer
from rollover.errors import RewardError
from rollover.rollout.generation import sample_seed
from rollover.run.config import RunConfig
from rollover.tasks.prompt_source import RowSource
from rollover.types import SampleId, SamplingParams, Segment, Trajectory

_SEED = 0
"""The seed of the sampling noise of every evaluation, whatever the run's own seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of one evaluation.

    Example:
        Of 200 prompts with one sample each, 84 were solved: ``evaluation.metrics()["accuracy"]`` is 0.42 and
        ``["accuracy_se"]`` is 0.035.
    """

    rows: tuple[EvalRow, ...]
    """One per source, and ``all`` last when there are several."""
    lengths: tuple[int, ...]
    """Response lengths in tokens, over all samples."""
    num_failed: int
    """Samples whose scoring failed; they count as reward 0."""

    def metrics(self) -> dict[str, float]:
        """Return ``accuracy`` and ``pass@k`` over everything and, if there are several sources, ``accuracy/<source>``,
        each with its standard error ``_se``."""
        numbers: dict[str, float] = {"eval/mean_tokens": math.fsum(self.lengths) / len(self.lengths)}
        for row in self.rows:
            place = "" if row is self.rows[-1] else f"/{row.source.removeprefix('eval/')}"
            for k, estimate in row.pass_at.items():
                name = "accuracy" if k == 1 else f"pass@{k}"
                numbers[f"{name}{place}"] = estimate.mean
                if estimate.standard_error is not None:
                    numbers[f"{name}_se{place}"] = estimate.standard_error
        return numbers


class Evaluator:
    """Evaluates the weights in the engine, as ``[eval]`` describes it: before the first step, after the last, and every
    ``eval.every_steps`` in between.

    Args:
        sources: the held-out prompts; without any, no evaluation is ever due.
        stops: the tokens that end a response.
        on_progress: called with (samples done, samples in all).
        done_version: the version that an earlier process has evaluated already.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: Engine,
        sources: Sequence[RowSource],
        scorer: RewardScorer,
        stops: tuple[int, ...],
        clock: Clock,
        on_progress: Callable[[int, int], None],
        done_version: int | None = None,
    ) -> None:
        self._config = config.eval
        self._num_steps = config.steps
        self._sampling = SamplingParams(
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
            temperature=config.eval.temperature,
            stop_token_ids=stops,
            stop_strings=config.rollout.stop_strings,
        )
        self._engine = engine
        self._scorer = scorer
        self._clock = clock
        self._on_progress = on_progress
        self._prompts = [source.prompt(i) for source in sources for i in range(source.num_rows)]
        self._num_evaluations = 0
        self._done_version = done_version

    def is_due(self, version: int) -> bool:
        """Return whether the weights of ``version`` are due for evaluation."""
        every = self._config.every_steps
        due = version in (0, self._num_steps) or bool(every and version % every == 0)
        return bool(self._prompts) and due and version != self._done_version

    async def run_when_due(self, version: int) -> Evaluation | None:
        """Evaluate the weights of ``version``, which the engine has; ``None`` when they are not due."""
        if not self.is_due(version):
            return None
        evaluation = await self.run()
        self._done_version = version
        return evaluation

    async def run(self) -> Evaluation:
        """Evaluate the weights that the engine has, and report pass@1 and pass@k for each k of ``eval.k``.

        Raises:
            EngineError: the engine fails.
            DataError: a reward function is wrong.
        """
        self._num_evaluations += 1
        n = self._config.samples_per_prompt
        room = asyncio.Semaphore(self._engine.capabilities.max_running)
        ids = [SampleId(p, i) for p in range(len(self._prompts)) for i in range(n)]
        done = 0

        async def one(sample_id: SampleId) -> tuple[float, int, bool]:
            nonlocal done
            async with room:
                trajectory = await self._generate(sample_id)
            try:
                reward, failed = await self._scorer.score(trajectory), False
            except RewardError:
                reward, failed = 0.0, True
            done += 1
            self._on_progress(done, len(ids))
            return reward, trajectory.num_tokens, failed

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i)) for i in ids]
        except ExceptionGroup as failed:  # they all fail for one reason: the engine or a reward function
            raise failed.exceptions[0] from None
        results = [task.result() for task in tasks]
        scored = [
            ScoredPrompt(
                source=prompt.source,
                prompt_id=prompt.prompt_id,
                rewards=tuple(reward for reward, _, _ in results[p * n : (p + 1) * n]),
            )
            for p, prompt in enumerate(self._prompts)
        ]
        pass_scores = {p.source: self._scorer.pass_score(p.source) for p in self._prompts}
        return Evaluation(
            rows=evaluate(scored, pass_scores, sorted({1, *self._config.k})),
            lengths=tuple(length for _, length, _ in results),
            num_failed=sum(failed for _, _, failed in results),
        )

    async def _generate(self, sample_id: SampleId) -> Trajectory:
        prompt = self._prompts[sample_id.group]
        key = f"eval{self._num_evaluations}/{sample_id}."
        trajectory = Trajectory(sample_id=sample_id, prompt=prompt)
        request = GenerateRequest(
            request_id=key,
            sample_key=key,
            prompt_key=f"eval{self._num_evaluations}/g{sample_id.group}.",
            prompt_ids=prompt.token_ids,
            params=self._sampling,
            seed=sample_seed(_SEED, sample_id),
        )
        start_s = self._clock.now_s()
        async for chunk in complete(self._engine, request):
            end_s = self._clock.now_s()
            trajectory = trajectory.extended(
                Segment(
                    policy_version=chunk.policy_version,
                    token_ids=chunk.token_ids,
                    rollout_logprobs=chunk.logprobs,
                    finish_reason=chunk.finish_reason,
                    kv_version=chunk.kv_version,
                    start_s=start_s,
                    end_s=end_s,
                )
            )
            start_s = end_s
        return trajectory
