"""Everything one training run holds open, and what the loop does with it besides the loop itself.

What it keeps true: parts are opened in the order in which they need each other and closed in reverse, whatever
happens; a resumed run is opened from its newest checkpoint and its journal, which agree.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollover.algorithms.filters import keep_group
from rollover.algorithms.registry import resolve
from rollover.algorithms.shaping import overlong_punishment
from rollover.clock import Clock, SystemClock
from rollover.engine import open as engine_open
from rollover.engine.base import Engine, EngineStats
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.open import TrainedEngine
from rollover.engine.servers.config import ServerConfig
from rollover.environments.scorer import Scorer
from rollover.errors import ConfigError, RolloverError, RunError
from rollover.hf.architecture import Architecture
from rollover.hf.tokenizer import load_tokenizer, stop_token_ids
from rollover.report import throughput
from rollover.report.metrics import MetricsWriter, read_metrics
from rollover.report.progress import Progress
from rollover.report.sinks import open_sinks
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.events import BatchTrained, CheckpointSaved, Event
from rollover.rollout.journal import Journal, restart
from rollover.rollout.ledger import Ledger
from rollover.rollout.metrics import batch_metrics, draft_metrics, drift_metrics, ledger_metrics
from rollover.rollout.scheduler import EachSample
from rollover.rollout.strategies import STRATEGIES
from rollover.run.checks import check_capabilities, check_context
from rollover.run.config import RunConfig, resolved
from rollover.run.directory import RunDir
from rollover.run.evaluation import Evaluator
from rollover.run.prepare import check_model, fitted, initial_policy
from rollover.run.trust import Trust, open_trust
from rollover.tasks.fingerprint import same_datasets
from rollover.tasks.source import RowSource, eval_sources, held_out_texts, train_source
from rollover.types import Batch, SamplingParams, TrainedStep, WasteCause
from rollover.weights.folders import WeightFolders, untied
from rollover.weights.publisher import Publisher

if TYPE_CHECKING:
    from rollover.trainer.trainer import Trainer


_JOURNAL_SEQ = "journal_seq"
"""Where a checkpoint says how much of the journal it has seen."""


class Session:
    """The open parts of a run. ``timings`` collects the seconds of the step under way by name; ``evaluated`` are the
    versions that have been measured before."""

    def __init__(
        self,
        *,
        config: RunConfig,
        run: RunDir,
        trainer: Trainer,
        driver: RolloutDriver,
        engine: Engine,
        journal: Journal,
        publisher: Publisher,
        trust: Trust,
        evaluator: Evaluator | None,
        scorer: Scorer,
        metrics: MetricsWriter,
        progress: Progress,
        clock: SystemClock,
        evaluated: Collection[int],
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.driver = driver
        self.timings: defaultdict[str, float] = defaultdict(float)
        self._run = run
        self._engine = engine
        self._journal = journal
        self._publisher = publisher
        self._trust = trust
        self._evaluator = evaluator
        self._scorer = scorer
        self._metrics = metrics
        self._progress = progress
        self._clock = clock
        self._saved_version = trainer.version
        self._evaluated_version = trainer.version if trainer.version in evaluated else -1
        self._step_began_s = clock.now_s()
        self._at_last_step = _Counters.of(driver.ledger, scorer, engine)

    @property
    def version(self) -> int:
        """Of the trainer's weights: the number of steps done."""
        return self.trainer.version

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] += time.perf_counter() - began_s

    async def publish(self) -> None:
        """Put the trainer's weights into the engines, under the trainer's version, and have them proved.

        Raises ``EngineError`` when no engine takes them, or none samples from what it was given.
        """
        version = self.trainer.version
        weights = await self._publisher.stage(version, self.trainer.weights())
        await self._trust.expect(version)
        failed: Sequence[str] = ()

        async def load() -> None:
            nonlocal failed
            await self._publisher.publish(version, weights)
            is_first = not self._trust.has_begun
            failed = await self._trust.prove(version)
            if is_first and not isinstance(self.config.engine, ServerConfig):
                # Loading forgets what the proof has left in the cache: where it lies, a resumed run has nothing.
                await self._publisher.publish(version, weights)

        await self.driver.update_weights(version, load)
        for name in failed:  # it may have gone on sampling over the load, before it was found out
            self._dropped(name, await self.driver.drop_tokens_of(name, lambda: None, since=version))

    async def judge_engines(self, batch: Batch, trained: TrainedStep) -> None:
        """Part with engines whose log-probs, as ``batch`` shows, are not the trainer's: none of their tokens is trained
        any more.

        Raises ``EngineError`` when none is left.
        """
        for name, reason in self._trust.verdicts(batch.step, trained.drift).items():
            take_out = partial(self._trust.part_with, name, reason)
            self._dropped(name, await self.driver.drop_tokens_of(name, take_out))

    def _dropped(self, name: str, num_tokens: int) -> None:
        if num_tokens:
            self._progress.message(f"groups with tokens of {name} are dropped, {num_tokens:,} tokens in all")

    async def train(self, batch: Batch) -> TrainedStep:
        """Do the step of ``batch``, or step over it where the user decided so, and journal what came of its tokens.

        Raises ``RolloverError`` when the batch cannot be trained, with the way around it.
        """
        if batch.step in self.driver.ledger.skipped:
            trained = self.trainer.skip(batch)
            self._progress.message(
                f"step {batch.step}: its batch of {len(batch.groups)} groups was skipped, as asked by --skip-batch;"
                f" {batch.num_tokens:,} tokens are wasted, the weights are those of the step before"
            )
        else:
            try:
                trained = await asyncio.to_thread(self.trainer.step, batch)
            except ConfigError:
                raise
            except RolloverError as error:
                way_around = f"{self._run.resume_command} --skip-batch {batch.step}"
                error.add_note(f"the batch of step {batch.step} was not trained; to go on without it: {way_around}")
                raise
        self.driver.record(BatchTrained(time_s=self._clock.now_s(), step=batch.step, untrained=dict(trained.untrained)))
        return trained

    async def evaluate_when_due(self) -> None:
        """Before the first step, after the last, and every ``eval.every_steps`` between."""
        every = self.config.eval.every_steps
        due = self.version in (0, self.config.steps) or (every and self.version % every == 0)
        if self._evaluator is None or not due or self.version == self._evaluated_version:
            return
        began_s = self._clock.now_s()
        result = await self._evaluator.run()
        self._evaluated_version = self.version
        numbers = result.metrics()
        self._metrics.write("eval", self.version, self._clock.now_s(), numbers)
        self._progress.evaluation(self.version, numbers)
        if self.version == 0:
            self._progress.message(f"response lengths before training: {describe_lengths(result.lengths)}")
        if result.num_failed:
            self._progress.message(f"{result.num_failed} evaluation samples could not be scored and count as 0")
        self._step_began_s += self._clock.now_s() - began_s

    def log_step(self, batch: Batch, trained: TrainedStep) -> None:
        """Write the metrics of the step that ends now, and begin the next one."""
        now_s = self._clock.now_s()
        counters, before = _Counters.of(self.driver.ledger, self._scorer, self._engine), self._at_last_step
        step_s = now_s - self._step_began_s
        numbers = {
            **trained.metrics,
            **({} if WasteCause.SKIPPED in trained.untrained else batch_metrics(batch)),
            **ledger_metrics(self.driver.ledger),
            **draft_metrics(counters.engine, before.engine),
            **drift_metrics(trained.drift),
            **self.timings,
            # Of all samples together: where rewards overlap, it is more than the step's time.
            "reward/work_s": counters.reward_s - before.reward_s,
            "reward/late": float(counters.late_rewards - before.late_rewards),
            **throughput.of_step(
                trained_tokens=batch.num_tokens - sum(trained.untrained.values()),
                decoded_tokens=counters.decoded - before.decoded,
                step_s=step_s,
                decoding_s=step_s if self.config.rollout.overlaps_training else self.timings["time/rollout_s"],
            ),
            "memory/peak_bytes": peak_memory_bytes(),
        }
        self._metrics.write("step", batch.step, now_s, numbers)
        self._progress.step(numbers)
        self.timings.clear()
        self._at_last_step = counters
        self._step_began_s = now_s

    def save_when_due(self) -> None:
        every = self.config.checkpoint.every_steps
        if every and self.version % every == 0:
            self._save()

    async def finish(self) -> None:
        """Park what still runs and leave a checkpoint, so that the run can go on from here."""
        await self.driver.stop()
        self._save()

    def _save(self) -> None:
        from rollover.trainer.checkpoint import checkpoint_path, prune_checkpoints

        root = self._run.checkpoints
        if self.version != self._saved_version:
            self.driver.flush()
            self.trainer.save(checkpoint_path(root, self.version), {_JOURNAL_SEQ: self._journal.last_seq})
            self._saved_version = self.version
            self.driver.record(CheckpointSaved(time_s=self._clock.now_s(), step=self._oldest_kept(root)))
        prune_checkpoints(root, self.config.checkpoint.keep_last)  # an earlier process may have died before it did

    def _oldest_kept(self, root: Path) -> int:
        """Batches older than every checkpoint that stays need no replay."""
        from rollover.trainer.checkpoint import list_checkpoints, read_manifest

        kept = list_checkpoints(root)[-self.config.checkpoint.keep_last :]
        return read_manifest(kept[0]).version


class _Counters:
    """Running totals, so that a step's share is a difference."""

    def __init__(self, decoded: int, reward_s: float, late_rewards: int, engine: EngineStats) -> None:
        self.decoded = decoded
        self.reward_s = reward_s
        self.late_rewards = late_rewards
        self.engine = engine

    @classmethod
    def of(cls, ledger: Ledger, scorer: Scorer, engine: Engine) -> _Counters:
        return cls(ledger.tokens.decoded, scorer.stats.busy_s, scorer.stats.num_late, engine.stats())


@asynccontextmanager
async def open_session(
    config: RunConfig, run: RunDir, progress: Progress, *, skip_batch: int | None = None
) -> AsyncIterator[Session]:
    """Open every part of a run, new or resumed; close them all at the end. ``skip_batch``: see ``journal.restart``."""
    from rollover.trainer.checkpoint import latest_checkpoint

    checkpoint, algorithm = latest_checkpoint(run.checkpoints), resolve(config.algorithm)
    async with AsyncExitStack() as stack:
        sinks = open_sinks(config.logging, run.path, run_config=resolved(config), resume_step=_step_of(checkpoint, run))
        metrics = stack.enter_context(MetricsWriter(run.path, sinks=sinks))
        evaluated = {row.step for row in read_metrics(run.path) if row.kind == "eval"}
        resuming = run.journal.exists()
        run.note(datasets=same_datasets(config.tasks, run.noted("datasets") if resuming else None))
        folder = initial_policy(config, run.path / "model", progress, metrics)
        check_model(run, folder, needs_weights=checkpoint is None or algorithm.needs_ref)
        tokenizer = load_tokenizer(folder)
        stops = stop_token_ids(folder, tokenizer)
        trainer = _open_trainer(config, folder, checkpoint, progress)
        engine, folders = await open_engine(config, run, folder)
        stack.push_async_callback(engine.close)
        check_context(config, engine.capabilities.max_context_tokens)
        check_capabilities(config, engine.capabilities)
        evaluation = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
        held_out = held_out_texts(config.tasks, evaluation)
        source = train_source(config.tasks, tokenizer, seed=config.seed, held_out=held_out)
        scorer = Scorer([spec for s in (source, *evaluation) for spec in s.reward_specs], tokenizer)
        stack.push_async_callback(scorer.close)
        journal = _open_journal(run, checkpoint)
        stack.callback(journal.close)
        ledger = _taken_over(journal, config, trainer, progress, skip_batch) if resuming else Ledger()
        if math.isfinite(rate := engine.capabilities.prefill_tokens_per_iteration):
            run.note(prefill_tokens_per_iteration=rate)
        clock = SystemClock(journal.last_time_s)
        driver = RolloutDriver(
            engine=engine,
            strategy=STRATEGIES[config.rollout.strategy].from_config(config.rollout, engine.capabilities),
            source=EachSample(source, config.rollout.num_siblings),
            scorer=scorer,
            sampling=config.rollout.sampling(stops),
            seed=config.seed,
            clock=clock,
            ledger=ledger,
            journal=journal,
            limits=Limits.from_config(config.rollout),
            keep_group=partial(keep_group, algorithm),
            shaping=partial(overlong_punishment, algorithm, config.rollout.max_new_tokens),
            observer=_Watcher(ledger, progress, config.rollout.rollout_batch_size * config.rollout.num_siblings),
            lockstep=config.deterministic,
        )
        stack.push_async_callback(driver.stop)
        run.settle()
        yield Session(
            config=config,
            run=run,
            trainer=trainer,
            driver=driver,
            engine=engine,
            journal=journal,
            publisher=Publisher([engine], folders=folders, timeout_s=_publish_timeout_s(config)),
            trust=open_trust(config, engine, trainer, num_tokens=len(tokenizer), replayed=ledger.replay),
            evaluator=open_evaluator(
                config,
                engine=engine,
                sources=evaluation,
                scorer=scorer,
                stops=stops,
                clock=clock,
                on_progress=progress.evaluating,
            ),
            scorer=scorer,
            metrics=metrics,
            progress=progress,
            clock=clock,
            evaluated=evaluated,
        )


def _open_journal(run: RunDir, checkpoint: Path | None) -> Journal:
    """The run's journal, a new one for a new run. Raises ``RunError`` when it is older than the checkpoint."""
    from rollover.trainer.checkpoint import read_manifest

    if checkpoint is None:
        return Journal(run.journal)
    mend = f"put the right one back, or start a new run with --model.path {checkpoint}"
    if not run.journal.exists():
        raise RunError(f"{run.journal} is gone, and {checkpoint} cannot go on without it: {mend}")
    journal = Journal(run.journal)
    written = read_manifest(checkpoint).extra.get(_JOURNAL_SEQ, 0)
    if written > journal.last_seq:
        last = journal.last_seq
        journal.close()
        raise RunError(f"{run.journal} ends at event {last}, but {checkpoint} has seen event {written}: {mend}")
    return journal


def _taken_over(
    journal: Journal, config: RunConfig, trainer: Trainer, progress: Progress, skip_batch: int | None
) -> Ledger:
    """The ledger of a run that goes on from where ``trainer`` stands."""
    ledger = restart(journal, step=trainer.version, redo_round=config.deterministic, skip_batch=skip_batch)
    progress.resumed(trainer.version)
    return ledger


def _open_trainer(config: RunConfig, folder: Path, checkpoint: Path | None, progress: Progress) -> Trainer:
    from rollover.trainer.checkpoint import read_manifest
    from rollover.trainer.trainer import Trainer

    if checkpoint is not None and not read_manifest(checkpoint).files:
        progress.message(f"{checkpoint} has no checksums (an earlier version wrote it): damage would go unnoticed")
    return Trainer(
        config.trainer,
        resolve(config.algorithm),
        folder,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_new_tokens,
        num_steps=config.steps,
        seed=config.seed,
        deterministic=config.deterministic,
        resume_from=checkpoint,
    )


async def open_engine(config: RunConfig, run: RunDir, folder: Path) -> tuple[TrainedEngine, WeightFolders | None]:
    """The engine with the model in ``folder``; and the folders through which it gets its weights, if it does."""
    folders: WeightFolders | None = None
    engine_config = config.engine
    if isinstance(engine_config, EmbeddedConfig):
        engine_config = fitted(engine_config, config, Architecture.from_folder(folder))
    if isinstance(config.engine, ServerConfig):
        shared = config.engine.weights_dir
        root = (run.path / "weights" if shared is None else Path(shared) / run.path.name).resolve()
        if config.engine.launch:  # vLLM on a CPU does not reload the output side of a tied matrix
            folder = untied(folder, root / "initial")
        folders = WeightFolders(root, like=folder)
    engine = await engine_open.open_engine(
        engine_config,
        folder,
        run=run.identity(),
        logs=run.path / "logs",
        clock=SystemClock(),
        lockstep=config.deterministic,
    )
    return engine, folders


def _publish_timeout_s(config: RunConfig) -> float:
    """Behind the deadlines of the servers, each of which is taken out at its own."""
    return config.engine.update_timeout_s if isinstance(config.engine, ServerConfig) else 600.0


def open_evaluator(
    config: RunConfig,
    *,
    engine: Engine,
    sources: Sequence[RowSource],
    scorer: Scorer,
    stops: tuple[int, ...],
    clock: Clock,
    on_progress: Callable[[int, int], None],
) -> Evaluator | None:
    """What ``eval`` asks for; ``None`` when there is nothing to measure on."""
    if not sources:
        return None
    return Evaluator(
        engine=engine,
        sources=sources,
        scorer=scorer,
        sampling=SamplingParams(
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
            temperature=config.eval.temperature,
            stop_token_ids=stops,
            stop_strings=config.rollout.stop_strings,
        ),
        samples_per_prompt=config.eval.samples_per_prompt,
        ks=config.eval.k,
        clock=clock,
        on_progress=on_progress,
    )


class _Watcher:
    """Shows the rollout on the terminal as events come by."""

    def __init__(self, ledger: Ledger, progress: Progress, batch_size: int) -> None:
        self._ledger = ledger
        self._progress = progress
        self._batch_size = batch_size

    def __call__(self, event: Event) -> None:
        ledger = self._ledger
        self._progress.rollout(
            len(ledger.ready), self._batch_size, len(ledger.running), len(ledger.parked), ledger.tokens.decoded
        )


def _step_of(checkpoint: Path | None, run: RunDir) -> int | None:
    from rollover.trainer.checkpoint import read_manifest

    if checkpoint is not None:
        return read_manifest(checkpoint).version
    return 0 if run.journal.exists() else None


def describe_lengths(lengths: Sequence[int]) -> str:
    """Quantiles and how long the tail is, in tokens."""
    ordered = sorted(lengths)
    median = max(1, ordered[len(ordered) // 2])
    p95, longest = ordered[int(0.95 * (len(ordered) - 1))], ordered[-1]
    return (
        f"median {median}, p95 {p95}, max {longest} tokens"
        f" (p95/median {p95 / median:.1f}, max/median {longest / median:.1f})"
    )


def peak_memory_bytes() -> int:
    """Largest resident size this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
