"""Accuracy on held-out prompts: the engine generates, the scorer scores, ``environments.pass_at_k`` computes the means.

Every evaluation of a run draws the same noise, so two of them differ only in the weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollover.clock import Clock
from rollover.engine.base import CallPlacement, Engine
from rollover.engine.complete import STALL_S, complete
from rollover.environments.pass_at_k import EvalRow, ScoredPrompt, evaluate
from rollover.environments.scorer import RewardScorer
from rollover.errors import RewardError
from rollover.rollout.actions import StartSample
from rollover.rollout.environment import Environment
from rollover.rollout.generation import generation_request, is_begun_by_environment, sample_seed, turn_sampling
from rollover.run.config import RunConfig
from rollover.tasks.prompt_source import RowSource
from rollover.types import FinishReason, SampleId, SamplingParams, Score, Segment, Trajectory

_SEED = 0
"""The seed of the sampling noise of every evaluation, whatever the run's own seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The outcome of one evaluation."""

    rows: tuple[EvalRow, ...]
    """One per source, and ``all`` last when there are several."""
    lengths: tuple[int, ...]
    """Response lengths in tokens, over all samples."""
    failures: tuple[str, ...]
    """Reasons of samples that could not be scored; they count as reward 0."""
    costs: Mapping[str, float]
    """The costs of scoring, as ``RewardScorer.costs`` names them."""
    versions: tuple[int, int]
    """The oldest and the newest weights that sampled the responses; two if training went on meanwhile."""

    def metrics(self) -> dict[str, float]:
        """Return ``accuracy`` and ``pass@k`` over everything and, if there are several sources, ``accuracy/<source>``,
        each with its standard error ``_se``; how many samples there were and how many of them could be scored; and
        the weights that they were sampled from, and what scoring has cost."""
        numbers: dict[str, float] = {
            "eval/mean_tokens": math.fsum(self.lengths) / len(self.lengths),
            "eval/reward": self.rows[-1].reward.mean,
            "eval/samples": len(self.lengths),
            "eval/scored": len(self.lengths) - len(self.failures),
            "eval/oldest_version": self.versions[0],
            "eval/newest_version": self.versions[1],
            **{f"eval/{name.removeprefix('reward/')}": value for name, value in self.costs.items()},
        }
        for row in self.rows:
            place = "" if row is self.rows[-1] else f"/{row.source.removeprefix('eval/')}"
            for k, estimate in row.pass_at.items():
                name = "accuracy" if k == 1 else f"pass@{k}"
                numbers[f"{name}{place}"] = estimate.mean
                if estimate.standard_error is not None:
                    numbers[f"{name}_se{place}"] = estimate.standard_error
        return numbers


class _Room:
    """Lets as many in at the same time as ``size`` says at present.

    Example: ``async with room:`` around each response of an evaluation.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        self._size, self._num, self._left = size, 0, asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._left:
            await self._left.wait_for(lambda: self._num < self._size())
            self._num += 1

    async def __aexit__(self, *error: object) -> None:
        async with self._left:
            self._num -= 1
            self._left.notify(max(1, self._size() - self._num))


class Evaluator:
    """Evaluates the weights in the engine, as ``[eval]`` describes it: before the first step, after the last, and every
    ``eval.every_steps`` in between.

    Args:
        sources: the held-out prompts; without any, no evaluation is ever due.
        stops: the tokens that end a response.
        on_progress: called with (samples done, samples in all).
        version: of the weights from which this process goes on. If an earlier one was stopped during an evaluation
            beside training, they are due in place of the weights that it evaluated.
        done_version: the version that an earlier process has evaluated already.
        beside_training: whether an evaluation between the first and the last one lets training go on. Its calls and
            the rollouts' then take turns in the engine, of which it takes at most half.
        placement: where calls are placed, if the members of the engine come and go: it has their present room.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        engine: Engine,
        sources: Sequence[RowSource],
        scorer: RewardScorer,
        environment: Environment,
        stops: tuple[int, ...],
        clock: Clock,
        on_progress: Callable[[int, int], None],
        version: int = 0,
        done_version: int | None = None,
        beside_training: bool = False,
        placement: CallPlacement | None = None,
    ) -> None:
        self._config = config.eval
        self._num_steps = config.steps
        self._sets = {f"eval/{name}": each for name, each in config.eval_sets.items()}
        self._sampling = {
            name: SamplingParams(
                max_new_tokens=each.max_new_tokens or config.rollout.max_new_tokens,
                temperature=each.temperature,
                top_p=each.top_p,
                top_k=each.top_k,
                stop_token_ids=stops,
                stop_strings=config.rollout.stop_strings,
            )
            for name, each in self._sets.items()
        }
        self._engine = engine
        self._stall_s = STALL_S + config.engine.away_timeout_s
        self._scorer = scorer
        self._environment = environment
        self._clock = clock
        self._on_progress = on_progress
        self._prompts = [source.prompt(i) for source in sources for i in range(source.num_rows)]
        self._num_evaluations = 0
        self._done_version = done_version
        self._beside_training = beside_training
        self._placement = placement
        self._known_room = 0
        every = self._config.every_steps
        is_late = beside_training and every > 0 and version - version % every > (done_version or 0)
        self._late_version = version if is_late else None
        self._beside: asyncio.Task[Evaluation] | None = None
        """An evaluation that goes on while the run trains; of the weights ``_done_version``."""

    def is_due(self, version: int) -> bool:
        """Return whether the weights of ``version`` are due for evaluation."""
        every = self._config.every_steps
        due = version in (0, self._num_steps, self._late_version) or bool(every and version % every == 0)
        return bool(self._prompts) and due and version != self._done_version

    def is_complete(self, version: int) -> bool:
        """Return whether all evaluations up to the weights of ``version`` have ended."""
        return self._beside is None and not self.is_due(version)

    def ends_at(self, version: int) -> None:
        """Make ``version`` the last one, which is evaluated in any case."""
        self._num_steps = version

    async def run_when_due(self, version: int) -> list[tuple[int, Evaluation]]:
        """Evaluate the weights of ``version``, which the engine has, if they are due, or begin to. Returns the
        evaluations that have ended, with their versions; if there are any, the last weights may still be due."""
        ended = []
        is_last = version == self._num_steps
        if self._beside is not None and (self._beside.done() or self.is_due(version) or is_last):
            assert self._done_version is not None
            ended.append((self._done_version, await self._beside))
            self._beside = None
        if self.is_due(version) and not (ended and is_last):
            if self._beside_training and version > 0 and not is_last:
                self._beside = asyncio.create_task(self.run(version, beside=True))
            else:
                ended.append((version, await self.run(version)))
            self._done_version = version
        return ended

    async def close(self) -> None:
        """Stop an evaluation that goes on beside training."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)

    async def run(self, version: int = 0, *, beside: bool = False) -> Evaluation:
        """Evaluate the weights that the engine has, and report pass@1 and pass@k for each k of ``eval.k``.

        Args:
            version: of these weights; members of the engine that have older ones sample nothing.
            beside: whether rollouts go on meanwhile.

        Raises:
            EngineError: the engine fails.
            DataError: a reward function is wrong.
        """
        self._num_evaluations += 1
        before = self._scorer.costs(in_evaluations=True)

        def present() -> int:
            room = self._engine.capabilities.max_running
            if self._placement is not None:  # 0 while workers are away or are being checked
                self._known_room = self._placement.room() or self._known_room
                room = self._known_room or (1 if beside else room)
            return max(1, room // (2 if beside else 1))

        room = _Room(present)
        ids = [
            [SampleId(p, i) for i in range(self._sets[prompt.source].samples_per_prompt)]
            for p, prompt in enumerate(self._prompts)
        ]
        num_samples, done = sum(map(len, ids)), 0
        failures: list[str] = []

        async def one(sample_id: SampleId) -> tuple[Trajectory, Score | None]:
            nonlocal done
            prompt = self._prompts[sample_id.group]
            # Rollouts' samples have other numbers.
            trajectory = Trajectory(sample_id=SampleId(-1 - sample_id.group, sample_id.index), prompt=prompt)
            score: Score | None = None
            try:
                async with room:
                    try:
                        while trajectory.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                            trajectory = await self._turn(sample_id, trajectory, version)
                            if trajectory.finish_reason is FinishReason.TURN:
                                answer = await self._environment.act(trajectory, self._clock.now_s())
                                trajectory = replace(trajectory, observations=(*trajectory.observations, answer))
                    finally:
                        self._environment.leave(trajectory.sample_id)
                score = await self._scorer.score(trajectory)
            except RewardError as error:
                failures.append(str(error))
            done += 1
            self._on_progress(done, num_samples)
            return trajectory, score

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [[group.create_task(one(i)) for i in siblings] for siblings in ids]
        except ExceptionGroup as failed:  # they all fail for one reason: the engine or a reward function
            raise failed.exceptions[0] from None
        results = [[task.result() for task in siblings] for siblings in tasks]
        scored = [
            ScoredPrompt(
                source=prompt.source,
                prompt_id=prompt.prompt_id,
                rewards=tuple(score or 0.0 for _, score in siblings),
                solved=tuple(bool(score is not None and score.solved) for _, score in siblings),
            )
            for prompt, siblings in zip(self._prompts, results, strict=True)
        ]
        flat = [result for siblings in results for result in siblings]
        versions = [
            segment.policy_version for trajectory, _ in flat for segment in trajectory.segments if segment.token_ids
        ]
        return Evaluation(
            rows=evaluate(scored, {name: sorted({1, *each.k}) for name, each in self._sets.items()}),
            lengths=tuple(trajectory.num_tokens for trajectory, _ in flat),
            failures=tuple(failures),
            costs={name: value - before[name] for name, value in self._scorer.costs(in_evaluations=True).items()},
            versions=(min(versions, default=0), max(versions, default=0)),
        )

    async def _turn(self, sample_id: SampleId, trajectory: Trajectory, version: int) -> Trajectory:
        """Decode a response, or the next turn of an episode."""
        prompt, turn = trajectory.prompt, len(trajectory.observations)
        key = f"eval{self._num_evaluations}/{sample_id}.{turn or ''}"
        if is_begun_by_environment(trajectory):
            now_s = self._clock.now_s()
            return trajectory.extended(Segment(0, (), (), FinishReason.TURN, 0, now_s, now_s))
        turn_limit = self._environment.turn_limit(prompt)
        sampling = turn_sampling(trajectory, self._sampling[prompt.source], turn_limit)
        request = replace(
            generation_request(trajectory, key, sampling, _SEED, StartSample(sample_id, None), least_version=version),
            sample_key=key,
            prompt_key=f"eval{self._num_evaluations}/g{sample_id.group}.",
            seed=sample_seed(_SEED, sample_id, turn),
        )
        start_s = self._clock.now_s()
        async for chunk in complete(self._engine, request, stall_s=self._stall_s):
            end_s = self._clock.now_s()
            is_turn = turn_limit is not None and chunk.finish_reason is FinishReason.STOP
            reason = FinishReason.TURN if is_turn else chunk.finish_reason
            tokens = chunk.policy_version, chunk.token_ids, chunk.logprobs
            trajectory = trajectory.extended(Segment(*tokens, reason, chunk.kv_version, start_s, end_s))
            start_s = end_s
        return trajectory
