"""The jobs of the command line that fill a run directory: train, compare variants, fine-tune, evaluate.

Each job leaves its results in the directory and reports them on the terminal. Importing this module needs no torch.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Coroutine
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from rollover.environments.pass_at_k import MeanEstimate
from rollover.errors import ConfigError, DataError, RunError
from rollover.privacy import Redactor
from rollover.report.metrics import MetricsWriter
from rollover.report.progress import Progress
from rollover.run import directory, layout, signals
from rollover.run.building import variant
from rollover.run.config import RunConfig, check_context
from rollover.run.directory import RunDir
from rollover.run.sections import WarmupConfig
from rollover.run.signals import Stopped
from rollover.settings.plain import resolved
from rollover.tasks.config import NO_SOURCE

T = TypeVar("T")

_OPEN_FILES = 65_536
"""Files that a run may have open: a call to a server takes one, the program of an agent three."""


def completed(config: RunConfig, job: str) -> tuple[RunConfig, tuple[str, ...]]:
    """Return ``config`` with defaults for everything that ``job`` (a function of this module) requires, and a sentence
    about each of them. Raises ``DataError`` if there is no source of prompts, which has no default."""
    notes: tuple[str, ...] = ()
    if job == "sft" and config.sft is None:
        sft = WarmupConfig()
        about = f"{sft.num_steps} steps of {sft.batch_size} examples at a learning rate of {sft.learning_rate:g}"
        config, notes = replace(config, sft=sft), (f"the config has no [sft] section: {about}",)
    if job == "evaluate" and not config.tasks.eval:
        drawn = all(source.kind == "reasoning_gym" for source in config.tasks.train)
        about = "on newly drawn items" if drawn else "on prompts that it may have been trained on"
        try:
            tasks = replace(config.tasks, eval=config.tasks.train, keep_eval_out=False)
        except ValueError as error:
            raise ConfigError(f"tasks.eval names no source, and those of tasks.train cannot be used: {error}") from None
        config = replace(config, tasks=tasks)
        notes = (f"tasks.eval names no source: the model is measured {about} (tasks.train)",)
    makes_policy = config.model.scratch is not None or config.sft is not None
    asked = {"train": config.tasks.train, "sft": config.warmup_sources, "evaluate": config.tasks.eval}[job]
    if not asked or (makes_policy and not config.warmup_sources):
        raise DataError(NO_SOURCE)
    return config, notes


def train(config: RunConfig, run: RunDir, *, skip_batch: int | None = None) -> None:
    """Train to ``config.steps`` and report; with ``[variants]``, each of them from the same initial policy.

    Args:
        skip_batch: step of a resumed run whose batch is skipped.

    Raises:
        Stopped: Ctrl-C or another signal ended it early, cleanly; it can be resumed.
        RolloverError: the message says what the user can do about it; the run can be resumed.
    """
    if config.variants:
        if skip_batch is not None:
            raise RunError(f"{run.path} compares variants: give --skip-batch with --resume {run.path}/VARIANT")
        _compare(config, run)
    else:
        _train(config, run, resume=run.resume_command, skip_batch=skip_batch)


def sft(config: RunConfig, run: RunDir) -> None:
    """Fine-tune on worked solutions and leave the model in ``run.path/model``."""
    from rollover.run.prepare import initial_policy

    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        folder = initial_policy(config, run.model, progress, metrics, samples=False)
        progress.result(f"model: {folder}")


def evaluate(config: RunConfig, run: RunDir) -> None:
    """Measure the initial policy on every source of ``tasks.eval``."""
    from rollover.run.prepare import initial_policy

    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        if config.engine.declared.serves_training_only:
            kind = config.engine.kind
            raise ConfigError(f"engine.kind {kind!r} is only for training: to evaluate, add --engine.kind embedded")
        folder = initial_policy(config, run.model, progress, metrics)  # outside any event loop, as in training
        result = _run(_evaluate(config, run, folder, progress))
        metrics.write("eval", 0, 0.0, result.metrics())
        ks = sorted({k for row in result.rows for k in row.pass_at})
        table = Table("source", "samples", "reward", *(f"pass@{k}" for k in ks))
        for row in result.rows:
            shown = (row.reward, *(row.pass_at.get(k) for k in ks))
            cells = [_estimate(e) if e else "" for e in shown]
            each, rest = divmod(row.num_samples, row.num_prompts)
            samples = str(row.num_samples) if rest else f"{row.num_prompts} x {each}"
            table.add_row(row.source.removeprefix("eval/"), samples, *cells)
        progress.console.print(table)
        reason = f"; the first failure: {result.failures[0]}" if result.failures else ""
        num, num_late = len(result.lengths), result.costs["reward/late"]
        late = f", {num_late:.0f} of them late (scored 0)" if num_late else ""
        progress.result(f"{num - len(result.failures)} of {num} samples were scored{late}{reason}")
        if getattr(config.engine, "urls", ()):
            progress.result(
                "the servers at engine.urls had the model's weights, but only training checks their log-probs: one with"
                " another number format, or with sampling settings of its own, has measured another policy"
            )


def _estimate(estimate: MeanEstimate) -> str:
    return f"{estimate.mean:.3f}" + (f"±{estimate.standard_error:.3f}" if estimate.standard_error is not None else "")


def _train(config: RunConfig, run: RunDir, *, resume: str, skip_batch: int | None = None) -> None:
    """Train one run and report; ``resume`` is the command that continues it."""
    from rollover.frontier.job import instead_of
    from rollover.report.record import read_run
    from rollover.report.run_report import write_report
    from rollover.report.summary import summarize, summary_table
    from rollover.run.checkpoint_schedule import advice_on_damage
    from rollover.run.interrupt import Interrupt
    from rollover.run.loop import train as train_loop
    from rollover.run.session import open_session, start

    async def work() -> None:
        async with open_session(config, run, begun, progress, skip_batch=skip_batch) as session:
            if session.version >= config.steps:
                progress.result(f"all {config.steps} steps are done; for more: {resume} --steps N")
            await train_loop(session, interrupt)

    with _progress(config) as progress, ExitStack() as stack:
        interrupt = Interrupt(progress, resume=resume)
        stack.enter_context(signals.handled(interrupt.on_signal))
        stack.enter_context(advice_on_damage(run.journal))
        begun = start(config, run, progress, stack)
        _run(work())
    record = read_run(run.path)
    progress.console.print(summary_table(record, summarize(record.metrics, record.timeline, record.config)))
    write_report(run.path, record)
    if interrupt.number is not None:
        raise Stopped(interrupt.number)
    if sentence := instead_of(run.path, record.timeline):
        progress.console.print(f"simulated: {sentence}", markup=False)


def _run(work: Coroutine[Any, Any, T]) -> T:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:  # negative numbers are no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(hard, _OPEN_FILES), hard))
    try:
        return asyncio.run(work)
    except RuntimeError as error:
        if "loop stopped" not in str(error):
            raise
        raise DataError(
            "the event loop of the run was stopped, as an async reward with workers = 0 can do: set its"
            " reward.workers to 1 or more"
        ) from error


def _compare(config: RunConfig, run: RunDir) -> None:
    """Run each variant in a directory of its own below ``run``; one that is done is passed over."""
    from rollover.hf.config import max_context
    from rollover.report.comparison import compare_tables
    from rollover.report.record import read_run
    from rollover.run.prepare import initial_policy
    from rollover.tasks.open import same_datasets

    recorded = run.noted("datasets") if run.model.is_dir() else None  # variants share the warm-up
    run.note(datasets=same_datasets(config.tasks, recorded))
    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        folder = initial_policy(config, run.model, progress, metrics)
    wanted = {run.path / name: variant(config, name, model=folder) for name in config.variants}
    for each in wanted.values():  # else the last one would fail after the others have trained
        check_context(each, max_context(folder))
        same_datasets(each.tasks, None)
    for path in filter(directory.is_run, wanted):
        directory.check_changes(path, directory.saved_config(path), wanted[path])
    run.settle()
    for path, each in wanted.items():
        if _is_done(each, path):
            progress.result(f"variant {path.name} is done; for more: {run.resume_command} --steps N")
            continue
        progress.message(f"variant {path.name}")
        with directory.reopen(each, path) if directory.is_run(path) else directory.create(each, path) as opened:
            _train(each, opened, resume=run.resume_command)
    progress.console.print(*compare_tables([read_run(path) for path in wanted], progress.console.width))


def _is_done(config: RunConfig, path: Path) -> bool:
    """Return whether nothing is left to train, and nothing to evaluate, of a run in ``path``."""
    from rollover.report.metrics import read_metrics
    from rollover.trainer.checkpoint import latest_checkpoint, read_manifest

    if (checkpoint := latest_checkpoint(path / layout.CHECKPOINTS)) is None:
        return False
    version, rows = read_manifest(checkpoint).version, read_metrics(path)
    is_measured = not config.tasks.eval or any(row.kind == "eval" and row.step == version for row in rows)
    return is_measured and version >= config.steps


async def _evaluate(config: RunConfig, run: RunDir, folder: Path, progress: Progress) -> Any:
    from rollover.clock import SystemClock
    from rollover.environments.scorer import RewardScorer
    from rollover.hf.config import max_context
    from rollover.hf.tokenizer import open_tokenizer
    from rollover.run.engine import open_engine_of
    from rollover.run.evaluation import Evaluator
    from rollover.tasks.episodes import open_environments
    from rollover.tasks.open import eval_sources, response_ends

    check_context(config, max_context(folder), ("eval",))
    tokenizer = open_tokenizer(folder)
    sources = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    async with AsyncExitStack() as stack:
        engine = (await open_engine_of(config, run, folder, lambda text: None)).engine
        stack.push_async_callback(engine.close)
        check_context(config, engine.capabilities.max_context_tokens, ("eval",))
        scorer = RewardScorer([spec for s in sources for spec in s.reward_specs], tokenizer, run.path)
        stack.push_async_callback(scorer.close)
        seeds = {"seed": config.seed, "eval_seed": config.tasks.eval_seed}
        environment = open_environments(config.tasks, tokenizer, limit=config.response_limit, **seeds)
        stack.push_async_callback(environment.close)
        evaluator = Evaluator(
            config,
            engine=engine,
            sources=sources,
            scorer=scorer,
            environment=environment,
            stops=response_ends(folder, tokenizer, config.tasks),
            clock=SystemClock(),
            on_progress=progress.evaluating,
        )
        return await evaluator.run()


def _progress(config: RunConfig) -> Progress:
    return Progress(
        total_steps=config.steps,
        mode=config.logging.progress,
        plain_every_steps=config.logging.plain_every_steps,
        redact=Redactor(resolved(config)).text,
    )
