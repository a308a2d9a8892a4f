"""A session: the parts of a run, opened in the order of their dependencies and closed in reverse.

Invariants: every part that was opened is closed, whatever happens; a resumed run is opened from its newest
checkpoint and its journal, which agree.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rollover.algorithms.config import resolve
from rollover.batch import Batch
from rollover.clock import Clock, SystemClock
from rollover.engine.kind import OpenedEngine
from rollover.environments.episodes.actor import EpisodeActor
from rollover.environments.scorer import RewardScorer
from rollover.hf.config import max_context
from rollover.hf.tokenizer import FastTokenizer, open_tokenizer
from rollover.privacy import Redactor
from rollover.report.metrics import MetricRow, MetricsWriter, read_metrics
from rollover.report.progress import Progress
from rollover.report.samples import of_batch, table_rows
from rollover.report.sinks import open_sinks
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import Event
from rollover.rollout.journal import Journal, read_events, restart
from rollover.rollout.scheduler import EachSample, GroupRules
from rollover.rollout.state import RolloutState
from rollover.run.best import Scores
from rollover.run.checkpoint_schedule import Checkpointer, open_journal, step_to_resume
from rollover.run.config import RunConfig, check_capabilities, check_context
from rollover.run.directory import RunDir
from rollover.run.engine import open_engine_of
from rollover.run.engine_trust import Trust
from rollover.run.evaluation import Evaluator
from rollover.run.meter import StepMeter
from rollover.run.observers import Observer, RunEvent, RunObserver, alarms_to, samples_to
from rollover.run.prepare import check_model, initial_policy
from rollover.run.trainers import logprob_format, open_trainer
from rollover.run.weight_sync import WeightSync
from rollover.settings.plain import resolved
from rollover.tasks.curriculum import Curriculum
from rollover.tasks.episodes import open_environments
from rollover.tasks.open import companions_of, eval_sources, held_out_texts, response_ends, same_datasets, train_source
from rollover.tasks.prompt_source import PromptSource, RowSource
from rollover.trainer.checkpoint import latest_checkpoint, read_manifest
from rollover.weights.publisher import Publisher

if TYPE_CHECKING:
    from rollover.trainer.base import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The open parts of a run, as the loop uses them."""

    config: RunConfig
    trainer: Trainer
    driver: RolloutDriver
    weights: WeightSync
    evaluator: Evaluator
    scores: Scores
    """The results of all evaluations so far."""
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


Start = tuple[MetricsWriter, Path, Path | None]
"""The metrics, the initial policy and the newest checkpoint, which precede a session and its event loop."""


def start(config: RunConfig, run: RunDir, progress: Progress, stack: ExitStack) -> Start:
    """Make the initial policy, outside any event loop: a warm-up calls code of the user's that may be ``async``.
    ``stack`` closes the metrics."""
    checkpoint = latest_checkpoint(run.checkpoints)
    step = step_to_resume(run, checkpoint)
    sinks = open_sinks(config.logging, run.path, run_config=resolved(config), identity=run.identity(), resume_step=step)
    metrics = stack.enter_context(MetricsWriter(run.path, sinks=sinks))
    has_begun = run.journal.exists() or run.model.is_dir()  # taught by its datasets and template
    run.note(
        datasets=same_datasets(config.tasks, run.noted("datasets") if has_begun else None),
        eval_seed=run.noted("eval_seed") if has_begun else config.tasks.eval_seed,
    )
    folder = initial_policy(config, run.model, progress, metrics)
    check_model(config, run, folder)
    check_context(config, max_context(folder))
    return metrics, folder, checkpoint


@asynccontextmanager
async def open_session(
    config: RunConfig, run: RunDir, begun: Start, progress: Progress, *, skip_batch: int | None = None
) -> AsyncIterator[Session]:
    """Open every part of a run, new or resumed; close them all at the end. ``skip_batch``: see ``journal.restart``."""
    async with AsyncExitStack() as stack:
        parts = await _open_parts(config, run, begun, progress, stack, skip_batch)
        can = parts.engine.engine.capabilities
        observe = _observers(config, parts, progress)
        driver = _driver(config, parts, observe)
        stack.push_async_callback(driver.stop)
        run.settle()
        overlaps = config.rollout.strategy.overlaps_training
        ledger, scorer, metrics = parts.state.ledger, parts.scorer, parts.engine.metrics
        meter = StepMeter(ledger, scorer, metrics, parts.clock, overlaps_training=overlaps, curriculum=parts.curriculum)
        evaluator = Evaluator(
            config,
            engine=parts.engine.engine,
            sources=parts.evaluation,
            scorer=scorer,
            environment=parts.environment,
            stops=parts.stops,
            clock=parts.clock,
            on_progress=progress.evaluating,
            version=parts.trainer.version,
            done_version=max((row.step for row in parts.evaluated), default=None),
            # The best checkpoint has to be the weights that were measured, so they must not change meanwhile.
            beside_training=overlaps and can.in_flight_update and not config.eval.keep_best,
            placement=parts.engine.placement,
        )
        stack.push_async_callback(evaluator.close)
        scores = Scores(config.best_metric, parts.evaluated)
        base = Path(config.model.path or "").expanduser()
        is_own = base.resolve().parent == run.checkpoints.resolve()  # it stands for a model that is gone
        stands_in = {read_manifest(base).version} if is_own else set[int]()

        def kept() -> set[int]:
            best = scores.best_kept(run.checkpoints) if config.eval.keep_best else None
            return stands_in if best is None else {best, *stands_in}

        yield Session(
            config=config,
            trainer=parts.trainer,
            driver=driver,
            weights=_weight_sync(config, parts, driver, meter, observe),
            evaluator=evaluator,
            scores=scores,
            checkpoints=Checkpointer(config.checkpoint, run.checkpoints, parts.trainer, driver, parts.journal, kept),
            meter=meter,
            observe=observe,
            clock=parts.clock,
            resume_command=run.resume_command,
        )


class _Parts(NamedTuple):
    """The parts that a session is made of, all open."""

    metrics: MetricsWriter
    trainer: Trainer
    trainer_format: str
    engine: OpenedEngine
    tokenizer: FastTokenizer
    stops: tuple[int, ...]
    source: PromptSource
    evaluation: Sequence[RowSource]
    scorer: RewardScorer
    environment: EpisodeActor
    journal: Journal
    state: RolloutState
    curriculum: Curriculum | None
    clock: Clock
    evaluated: Sequence[MetricRow]
    """The evaluations of the weights up to the trainer's version."""


async def _open_parts(
    config: RunConfig, run: RunDir, begun: Start, progress: Progress, stack: AsyncExitStack, skip_batch: int | None
) -> _Parts:
    """Open the parts in the order of their dependencies; ``stack`` closes them."""
    metrics, folder, checkpoint = begun
    resuming = run.journal.exists()
    tokenizer = open_tokenizer(folder)
    stops = response_ends(folder, tokenizer, config.tasks)
    evaluation = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    held_out = held_out_texts(config.tasks, evaluation)
    source = train_source(config.tasks, tokenizer, seed=config.seed, held_out=held_out)
    for left_out in filter(None, [source.left_out, *(each.left_out for each in evaluation)]):
        progress.message(left_out)
    trainer = open_trainer(config, run, folder, checkpoint, progress, companions_of(folder, tokenizer, config.tasks))
    stack.callback(trainer.close)
    engine = await open_engine_of(config, run, folder, progress.message)
    stack.push_async_callback(engine.engine.close)
    evaluated = [row for row in read_metrics(run.path) if row.kind == "eval" and row.step <= trainer.version]
    capabilities = engine.engine.capabilities
    check_context(config, capabilities.max_context_tokens)
    check_capabilities(config, capabilities)
    scorer = RewardScorer([spec for each in (source, *evaluation) for spec in each.reward_specs], tokenizer, run.path)
    stack.push_async_callback(scorer.close)
    # A run of an earlier version began to evaluate in environments of its own seed, and goes on in them.
    seeds = {"seed": config.seed, "eval_seed": config.seed if (noted := run.noted("eval_seed")) is None else noted}
    environment = open_environments(config.tasks, tokenizer, limit=config.response_limit, **seeds)
    stack.push_async_callback(environment.close)
    journal = open_journal(run, checkpoint)
    stack.callback(journal.close)
    state = _resumed(run, journal, config, trainer, progress, skip_batch) if resuming else RolloutState()
    run.note_engine(capabilities)
    return _Parts(
        metrics=metrics,
        trainer=trainer,
        trainer_format=logprob_format(config.trainer, folder),
        engine=engine,
        tokenizer=tokenizer,
        stops=stops,
        source=source,
        evaluation=evaluation,
        scorer=scorer,
        environment=environment,
        journal=journal,
        state=state,
        curriculum=_curriculum(config, run, resuming=resuming),
        clock=SystemClock(journal.last_time_s),
        evaluated=evaluated,
    )


def _curriculum(config: RunConfig, run: RunDir, *, resuming: bool) -> Curriculum | None:
    """Return the curriculum with the pass rates of the run so far."""
    if config.tasks.curriculum is None:
        return None
    curriculum = Curriculum(config.tasks.curriculum, config.seed)
    for _, event in read_events(run.journal, effective=True, tokens=False) if resuming else ():
        curriculum.apply(event)
    return curriculum


def _observers(config: RunConfig, parts: _Parts, progress: Progress) -> Observer:
    observers: list[Observer] = [
        RunObserver(
            metrics=parts.metrics,
            progress=progress,
            ledger=parts.state.ledger,
            batch_size=config.rollout.rollout_batch_size * config.rollout.num_siblings,
            engine=parts.engine.metrics,
        ),
        alarms_to(progress.message, resolve(config.algorithm)),
    ]
    if config.logging.samples_every_steps and (config.logging.wandb or config.logging.trackio):
        rows = partial(_sample_rows, config, parts)
        observers.append(samples_to(parts.metrics, config.logging.samples_every_steps, rows))

    def observe(event: RunEvent) -> None:
        for observer in observers:
            observer(event)

    return observe


def _sample_rows(config: RunConfig, parts: _Parts, batch: Batch) -> list[list[Any]]:
    shaping = partial(resolve(config.algorithm).overlong_punishment, config.rollout.max_new_tokens)
    return table_rows(of_batch(batch, shaping), parts.tokenizer, Redactor(resolved(config), prose=True).text)


def _weight_sync(
    config: RunConfig, parts: _Parts, driver: RolloutDriver, meter: StepMeter, observe: Observer
) -> WeightSync:
    engine, timeout_s = parts.engine, config.engine.publish_timeout_s
    return WeightSync(
        trainer=parts.trainer,
        publisher=Publisher(engine.weights, folders=engine.folders, timeout_s=timeout_s),
        trust=Trust(
            config.rollout,
            config.engine,
            engine,
            next_logits=parts.trainer.next_logits,
            vocab_size=min(len(parts.tokenizer), parts.trainer.vocab_size),
            trainer_format=parts.trainer_format,
            replayed=parts.state.ledger.replay,
        ),
        driver=driver,
        reloads_after_check=config.engine.declared.deterministic,
        sleeper=engine.sleeper,
        notify=observe,
        measured=meter.measured,
    )


def _driver(config: RunConfig, parts: _Parts, observe: Observer) -> RolloutDriver:
    rollout, algorithm, engine = config.rollout, config.weighing_algorithm, parts.engine.engine
    curriculum = parts.curriculum

    def watch(event: Event) -> None:
        if curriculum is not None:
            curriculum.apply(event)
        observe(event)

    rules = GroupRules(
        keep_group=algorithm.keeps_group,
        compared=lambda sample: algorithm.compared(sample.prompt.source, sample.reward or 0.0, sample.components),
        shaping=partial(algorithm.overlong_punishment, rollout.max_new_tokens),
        **({} if curriculum is None else {"passes_over": curriculum.passes_over}),
    )
    return RolloutDriver(
        engine=engine,
        strategy=rollout.build_strategy(engine.capabilities),
        source=EachSample(parts.source, rollout.num_siblings),
        scorer=parts.scorer,
        environment=parts.environment,
        sampling=replace(rollout.sampling(parts.stops), returns_routes=config.trainer.replay_routes),
        seed=config.seed,
        clock=parts.clock,
        state=parts.state,
        journal=parts.journal,
        limits=Limits.from_config(rollout, away_s=config.engine.away_timeout_s),
        rules=rules,
        observer=watch,
        lockstep=config.deterministic,
        placement=parts.engine.placement,
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
    if measure := run.changed_measure(config):
        progress.message(
            f"evaluations measure something else from now on ({', '.join(measure)} changed): the accuracies before are"
            " no longer comparable, but eval.keep_best, eval.patience and the closing table compare them"
        )
    return state
