"""A session: the parts of a run, opened in the order of their dependencies and closed in reverse.

Invariants: every part that was opened is closed, whatever happens; a resumed run is opened from its newest
checkpoint and its journal, which agree.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rollover.algorithms.config import resolve
from rollover.clock import Clock, SystemClock
from rollover.engine.kind import OpenedEngine
from rollover.environments.scorer import RewardScorer
from rollover.hf.tokenizer import load_tokenizer
from rollover.report.metrics import MetricsWriter, read_metrics
from rollover.report.progress import Progress
from rollover.report.sinks import open_sinks
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.journal import Journal, restart
from rollover.rollout.scheduler import EachSample
from rollover.rollout.state import RolloutState
from rollover.run.checkpoint_schedule import Checkpointer, open_journal, step_to_resume
from rollover.run.checks import check_capabilities, check_context
from rollover.run.config import RunConfig
from rollover.run.directory import RunDir
from rollover.run.engine import open_engine_of
from rollover.run.engine_trust import Trust
from rollover.run.evaluation import Evaluator
from rollover.run.meter import StepMeter
from rollover.run.observers import EngineObserver, MetricsObserver, Observer, ProgressObserver, to_all
from rollover.run.prepare import check_model, initial_policy
from rollover.run.trainers import logprob_format, open_trainer
from rollover.run.weight_sync import WeightSync
from rollover.settings.plain import resolved
from rollover.tasks.open import eval_sources, held_out_texts, response_ends, train_source
from rollover.tasks.prompt_source import PromptSource, RowSource
from rollover.tasks.resume_check import same_datasets
from rollover.weights.publisher import Publisher

if TYPE_CHECKING:
    from rollover.trainer.base import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The open parts of a run, as the loop uses them.

    Example: within ``async with open_session(config, run, progress) as session``, ``session.version`` is 0 for a new
    run and 40 for a run that resumes from the checkpoint ``step_40``.
    """

    config: RunConfig
    trainer: Trainer
    driver: RolloutDriver
    weights: WeightSync
    evaluator: Evaluator
    checkpoints: Checkpointer
    meter: StepMeter
    observe: Observer
    clock: Clock
    resume_command: str
    """The command that continues the run."""

    @property
    def version(self) -> int:
        """Return the version of the trainer's weights, which is the number of steps done."""
        return self.trainer.version


@asynccontextmanager
async def open_session(
    config: RunConfig, run: RunDir, progress: Progress, *, skip_batch: int | None = None
) -> AsyncIterator[Session]:
    """Open every part of a run, new or resumed; close them all at the end. ``skip_batch``: see ``journal.restart``."""
    from rollover.trainer.checkpoint import latest_checkpoint

    checkpoint, algorithm = latest_checkpoint(run.checkpoints), resolve(config.algorithm)
    async with AsyncExitStack() as stack:
        step = step_to_resume(run, checkpoint)
        sinks = open_sinks(config.logging, run.path, run_config=resolved(config), resume_step=step)
        metrics = stack.enter_context(MetricsWriter(run.path, sinks=sinks))
        evaluated = {row.step for row in read_metrics(run.path) if row.kind == "eval"}
        resuming = run.journal.exists()
        run.note(datasets=same_datasets(config.tasks, run.noted("datasets") if resuming else None))
        folder = initial_policy(config, run.model, progress, metrics)
        needs_base = algorithm.needs_ref or config.trainer.lora is not None
        check_model(run, folder, needs_weights=checkpoint is None or needs_base)
        tokenizer = load_tokenizer(folder)
        stops = response_ends(folder, tokenizer, config.tasks)
        trainer = open_trainer(config, run, folder, checkpoint, progress)
        stack.callback(trainer.close)
        opened = await open_engine_of(config, run, folder, progress.message)
        engine = opened.engine
        stack.push_async_callback(engine.close)
        check_context(config, engine.capabilities.max_context_tokens)
        check_capabilities(config, engine.capabilities)
        tasks = _open_tasks(config, tokenizer)
        stack.push_async_callback(tasks.scorer.close)
        journal = open_journal(run, checkpoint)
        stack.callback(journal.close)
        state = _resumed(run, journal, config, trainer, progress, skip_batch) if resuming else RolloutState()
        if math.isfinite(rate := engine.capabilities.prefill_tokens_per_iteration):
            run.note(prefill_tokens_per_iteration=rate)
        clock = SystemClock(journal.last_time_s)
        batch_size = config.rollout.rollout_batch_size * config.rollout.num_siblings
        observers: list[Observer] = [MetricsObserver(metrics), ProgressObserver(progress, state.ledger, batch_size)]
        if opened.metrics is not None:
            observers.append(EngineObserver(opened.metrics))
        observe = to_all(observers)
        driver = _open_driver(config, opened, tasks, journal, state, clock=clock, stops=stops, observe=observe)
        stack.push_async_callback(driver.stop)
        run.settle()
        meter = _open_meter(config, state, tasks, opened, clock)
        computed_in, replayed = logprob_format(config.trainer, folder), state.ledger.replay
        trust = Trust(config, opened, trainer, num_tokens=len(tokenizer), trainer_format=computed_in, replayed=replayed)
        weights = WeightSync(
            trainer=trainer,
            publisher=Publisher(
                [opened.weights], folders=opened.folders, timeout_s=config.engine.publication_timeout_s
            ),
            trust=trust,
            driver=driver,
            reloads_after_check=config.engine.declared.deterministic,
            sleeper=opened.sleeper,
            notify=observe,
            measured=meter.measured,
        )
        yield Session(
            config=config,
            trainer=trainer,
            driver=driver,
            weights=weights,
            evaluator=Evaluator(
                config,
                engine=engine,
                sources=tasks.evaluation,
                scorer=tasks.scorer,
                stops=stops,
                clock=clock,
                on_progress=progress.evaluating,
                done_version=trainer.version if trainer.version in evaluated else None,
            ),
            checkpoints=Checkpointer(config.checkpoint, run.checkpoints, trainer, driver, journal),
            meter=meter,
            observe=observe,
            clock=clock,
            resume_command=run.resume_command,
        )


class _Tasks(NamedTuple):
    """The prompts of a run, and the scorer of the responses to them."""

    source: PromptSource
    evaluation: Sequence[RowSource]
    scorer: RewardScorer


def _open_tasks(config: RunConfig, tokenizer: Any) -> _Tasks:
    evaluation = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    held_out = held_out_texts(config.tasks, evaluation)
    source = train_source(config.tasks, tokenizer, seed=config.seed, held_out=held_out)
    specs = [spec for s in (source, *evaluation) for spec in s.reward_specs]
    return _Tasks(source, evaluation, RewardScorer(specs, tokenizer))


def _open_meter(config: RunConfig, state: RolloutState, tasks: _Tasks, opened: OpenedEngine, clock: Clock) -> StepMeter:
    overlaps_training = config.rollout.strategy.overlaps_training
    return StepMeter(state.ledger, tasks.scorer, opened.metrics, clock, overlaps_training=overlaps_training)


def _open_driver(
    config: RunConfig,
    opened: OpenedEngine,
    tasks: _Tasks,
    journal: Journal,
    state: RolloutState,
    *,
    clock: Clock,
    stops: tuple[int, ...],
    observe: Observer,
) -> RolloutDriver:
    rollout, algorithm = config.rollout, resolve(config.algorithm)
    return RolloutDriver(
        engine=opened.engine,
        strategy=rollout.build_strategy(opened.engine.capabilities),
        source=EachSample(tasks.source, rollout.num_siblings),
        scorer=tasks.scorer,
        sampling=rollout.sampling(stops),
        seed=config.seed,
        clock=clock,
        state=state,
        journal=journal,
        limits=Limits.from_config(rollout),
        keep_group=algorithm.keeps_group,
        shaping=partial(algorithm.overlong_punishment, rollout.max_new_tokens),
        observer=observe,
        lockstep=config.deterministic,
        placement=opened.placement,
    )


def _resumed(
    run: RunDir, journal: Journal, config: RunConfig, trainer: Trainer, progress: Progress, skip_batch: int | None
) -> RolloutState:
    """Return the rollouts of a run that resumes at the trainer's version."""
    state = restart(journal, step=trainer.version, redo_round=config.deterministic, skip_batch=skip_batch)
    progress.resumed(trainer.version)
    if config.deterministic and (changed := run.changed_environment()):
        progress.message(
            "deterministic = true promises identical bits only with identical versions, and this run began with"
            f" others ({'; '.join(changed)}): it continues with the batches on record, but its weights may differ"
            " from the weights of a run that was never stopped"
        )
    return state
