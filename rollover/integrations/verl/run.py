"""A run inside verl: the feed over its replicas, prompts and rewards, one batch for each of its training steps.

Invariants: batch ``s`` of this run is trained by verl's step ``first_step + 1 + s``, where ``first_step`` is
the step of the checkpoint it began from; a batch is in the journal before verl has it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollover.batch import Batch
from rollover.hf.hub import located, resolve_model
from rollover.hf.tokenizer import stop_token_ids
from rollover.integrations.feed import FeedParts, ScoredByHost
from rollover.integrations.record import HostedRun
from rollover.integrations.scoring import HostScorer
from rollover.integrations.steps import opened
from rollover.integrations.verl.fields import fields, key, reward_input, tag
from rollover.integrations.verl.replicas import GeneratesTokens, StopsCalls, VerlReplicas
from rollover.integrations.verl.rows import Row, VerlRows
from rollover.integrations.verl.settings import VerlSettings, verl_version
from rollover.rollout.events import Event, GroupDropped, GroupOpened
from rollover.types import Prompt, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlParts:
    """The parts of verl that a run uses."""

    client: GeneratesTokens
    replicas: Sequence[StopsCalls]
    reward_workers: Sequence[Any] | None
    """``None`` if verl's trainer computes rewards itself, once it has a batch."""
    tokenizer: Any
    model: str
    """The model's folder, or its id on the hub."""
    max_running: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlBatch:
    """A batch in the form of verl's queue; the lists are in the same order."""

    uids: list[str]
    """Ids of its prompts."""
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    metrics: dict[str, float]


class VerlScorer(HostScorer[dict[str, Any]]):
    """Implements ``Scorer`` with verl's reward workers, each used in turn.

    Args:
        workers: their Ray handles.
        row: returns the row of a prompt.
    """

    def __init__(self, workers: Sequence[Any], row: Callable[[Prompt], Row], *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._workers = itertools.cycle(workers)
        self._row = row

    async def ask(self, trajectory: Trajectory) -> dict[str, Any]:
        asked = next(self._workers).compute_score.remote(reward_input(trajectory, self._row(trajectory.prompt)))
        answer: dict[str, Any] = await asyncio.ensure_future(asked)
        return answer

    def reward(self, answer: dict[str, Any]) -> float:
        return float(answer["reward_score"])


class VerlRun:
    """One run. Its methods are for the thread of verl's trainer. Raises ``RolloverError`` for settings or a
    directory that cannot be used.

    Args:
        first_step: verl's number of the last training step that its checkpoint includes; 0 without one.
        folder: the directory of the run.
    """

    def __init__(
        self, settings: VerlSettings, parts: VerlParts, rows: VerlRows, *, first_step: int, folder: Path
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._rows = rows
        self._first_step = first_step
        self._prompts: dict[int, Prompt] = {}
        """Prompts of the open groups, by number."""
        workers, options = parts.reward_workers, settings.options
        self._scorer = None if workers is None else VerlScorer(workers, rows.row, timeout_s=options.reward_timeout_s)
        self._engine = VerlReplicas(
            parts.client,
            parts.replicas,
            max_running=parts.max_running,
            max_context_tokens=parts.max_context_tokens,
            response_timeout_s=options.response_timeout_s,
            abort_timeout_s=options.abort_timeout_s,
        )
        with ExitStack() as stack:
            run = HostedRun(
                folder,
                settings.hosted,
                host=f"verl {verl_version()}",
                resume=False,
                remedy="a run inside verl cannot be resumed, so move it away",
                decodes="verl",
            )
            stack.enter_context(run)
            self._feed, self._steps = opened(
                stack,
                run,
                settings.hosted,
                self._open_parts,
                observer=self._happened,
                knows_rewards=self._scorer is not None,
            )
            run.note(model=located(parts.model))
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Close the feed and release the run's directory. Does nothing when called again."""
        self._closing.close()

    def set_aside(self) -> AbstractContextManager[None]:
        """Exclude verl's evaluation within this context from a step's time."""
        return self._steps.set_aside()

    def batch(self, global_steps: int) -> VerlBatch:
        """Return the batch that verl's step ``global_steps`` trains.

        Raises:
            RunError: another step is next.
            EngineError: the replicas fail, or do not have the weights of the previous step.
        """
        step = global_steps - 1 - self._first_step
        self._steps.begin(step)
        self._steps.trained_before(step)
        self._feed.saved(step)  # nothing is handed out again, since each start is a run of its own
        self._feed.publish(step, lambda: self._engine.begin(version=step, global_steps=global_steps - 1))
        self._steps.published()
        batch = self._feed.batch(step)
        metrics = self._steps.handed_out(batch)
        made = self._made(batch, {f"rollover/{name}": value for name, value in metrics.items()})
        for group in batch.groups:
            self._rows.forget(self._prompts.pop(group.group_id))
        return made

    def _made(self, batch: Batch, metrics: Mapping[str, float]) -> VerlBatch:
        made = VerlBatch(uids=[], keys=[], fields=[], tags=[], metrics=dict(metrics))
        for group in batch.groups:
            row = self._rows.row(group.prompt)
            made.uids.append(str(row["uid"]))
            for trajectory in group.trajectories:
                reward = None if self._scorer is None else self._scorer.kept(trajectory.sample_id)
                made.keys.append(key(row, trajectory.sample_id.index))
                made.fields.append(fields(trajectory, row, first_step=self._first_step, reward=reward))
                made.tags.append(tag(trajectory, row, first_step=self._first_step))
        return made

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        parts = self._parts
        try:
            yield FeedParts(
                engine=self._engine,
                source=self._rows,
                scorer=self._scorer or ScoredByHost(),
                stop_token_ids=stop_token_ids(resolve_model(parts.model, weights=False), parts.tokenizer),
            )
        finally:
            await self._engine.close()

    def _happened(self, event: Event) -> None:
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt):
                self._prompts[group_id] = prompt
            case GroupDropped(group_id=group_id, prompt_returned=returned):
                prompt = self._prompts.pop(group_id)
                if not returned:
                    self._rows.forget(prompt)
                if self._scorer is not None:
                    self._scorer.forget(group_id)
