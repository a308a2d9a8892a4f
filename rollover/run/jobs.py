"""What the command line does with a config and a run directory: train, compare, fine-tune, evaluate, plan.

Each job leaves its results in the directory and says on the terminal what it found. Importing this module needs no
torch.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollover.algorithms.registry import resolve
from rollover.errors import ConfigError, RunError
from rollover.privacy import Redactor
from rollover.report.metrics import MetricsWriter
from rollover.report.progress import Progress
from rollover.rollout.config import RolloutConfig
from rollover.run import directory
from rollover.run.checks import check_context
from rollover.run.config import RunConfig, WarmupConfig, resolved, variant
from rollover.run.directory import RunDir
from rollover.run.signals import Stopped


def completed(config: RunConfig, job: str) -> tuple[RunConfig, tuple[str, ...]]:
    """``config`` with what ``job`` (a function of this module) cannot do without, and a sentence about each thing that
    the user left out."""
    if job == "sft" and config.sft is None:
        sft = WarmupConfig()
        about = f"{sft.num_steps} steps of {sft.batch_size} examples at a learning rate of {sft.learning_rate:g}"
        return replace(config, sft=sft), (f"the config has no [sft] section: {about}",)
    if job == "evaluate" and not config.tasks.eval and config.tasks.train:
        tasks = replace(config.tasks, eval=config.tasks.train)
        drawn = all(source.kind == "reasoning_gym" for source in config.tasks.train)
        about = "on items drawn anew" if drawn else "on prompts that it may have been trained on"
        return replace(config, tasks=tasks), (
            f"tasks.eval names no source: the model is measured {about} (tasks.train)",
        )
    return config, ()


def train(config: RunConfig, run: RunDir, *, skip_batch: int | None = None) -> None:
    """Train to ``config.steps`` and report; with ``[variants]``, each of them from the same initial policy.

    Args:
        skip_batch: step of a resumed run whose batch is stepped over.

    Raises:
        Stopped: Ctrl-C or another signal ended it early, cleanly; it can be resumed.
        RolloverError: with what the user can do about it; the same holds.
    """
    if config.variants:
        if skip_batch is not None:
            raise RunError(f"{run.path} compares variants: give --skip-batch with --resume {run.path}/VARIANT")
        _compare(config, run)
    else:
        _train(config, run, resume=run.resume_command, skip_batch=skip_batch)


def sft(config: RunConfig, run: RunDir) -> None:
    """Only the supervised part: the model ends up in ``run.path/model``.

    Raises:
        ConfigError: the config has no ``[sft]`` section.
    """
    from rollover.run.prepare import initial_policy

    if config.sft is None:
        raise ConfigError("sft: the config has no [sft] section; add one with num_steps and learning_rate")
    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        folder = initial_policy(config, run.path / "model", progress, metrics)
        progress.result(f"model: {folder}")


def evaluate(config: RunConfig, run: RunDir) -> None:
    """Measure the initial policy on every source of ``tasks.eval``.

    Raises:
        ConfigError: there is no such source.
    """
    if not config.tasks.eval:
        raise ConfigError("tasks.eval: nothing to evaluate on; add a source")
    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        result = asyncio.run(_evaluate(config, run, progress, metrics))
        table = Table("source", "samples", "reward", *(f"pass@{k}" for k in result.rows[0].pass_at))
        for row in result.rows:
            shown = (row.reward, *row.pass_at.values())
            cells = [f"{e.mean:.3f}" + (f"±{e.standard_error:.3f}" if e.standard_error else "") for e in shown]
            per_prompt = row.num_samples // row.num_prompts
            table.add_row(row.source.removeprefix("eval/"), f"{row.num_prompts} x {per_prompt}", *cells)
        progress.console.print(table)


def fit_workload(source: str, *, cap_tokens: int | None, page: Path | None, out: Path | None) -> None:
    """Fit the length law to the run or file ``source``; the workload file goes to ``out``, or to the terminal.

    Raises:
        DataError: the lengths cannot be used, or are too few.
        RunError: ``source`` is a directory, but not that of a run.
    """
    from rollover.report.html import write_page
    from rollover.workload.fit import fit
    from rollover.workload.report import described, fit_table, law_toml, render_fit, verdict
    from rollover.workload.source import read_trace

    trace = read_trace(source, cap_tokens=cap_tokens)
    found = fit(trace)
    console = Console(highlight=False)
    console.print(fit_table(trace, found))
    console.print(f"{verdict(found)}.")
    text = law_toml(found.law, (f"Fitted to {trace.name}: {described(trace, found)}.", f"{verdict(found)}."))
    if out is None:
        console.print(f"\n{text}", end="", markup=False, soft_wrap=True)
    else:
        out.write_text(text, encoding="utf-8")
        console.print(f"workload: {out}")
    if page is not None:
        console.print(f"page: {write_page(page, render_fit(trace, found))}")


def _train(config: RunConfig, run: RunDir, *, resume: str, skip_batch: int | None = None) -> None:
    """``resume`` is the command that goes on with it."""
    from rollover.report.html import write_report
    from rollover.report.record import read_run
    from rollover.report.summary import summarize, summary_table
    from rollover.run.loop import Interrupt
    from rollover.run.loop import train as train_loop
    from rollover.run.session import open_session

    async def work() -> None:
        async with open_session(config, run, progress, skip_batch=skip_batch) as session:
            if session.version >= config.steps:
                progress.result(f"all {config.steps} steps are done; for more: {resume} --steps N")
            await train_loop(session, interrupt)

    with _progress(config) as progress, Interrupt(progress, resume=resume) as interrupt:
        asyncio.run(work())
    record = read_run(run.path)
    progress.console.print(summary_table(record, summarize(record.metrics, record.timeline)))
    write_report(run.path)
    if interrupt.number is not None:
        raise Stopped(interrupt.number)


def _compare(config: RunConfig, run: RunDir) -> None:
    """Run each variant in a directory of its own below ``run``; those that are done are left alone."""
    from rollover.report.compare import compare_table, write_comparison
    from rollover.report.record import read_run
    from rollover.run.prepare import initial_policy

    with _progress(config) as progress, MetricsWriter(run.path) as metrics:
        folder = initial_policy(config, run.path / "model", progress, metrics)
    run.settle()
    paths = []
    for name in config.variants:
        path = run.path / name
        paths.append(path)
        progress.message(f"variant {name}")
        wanted = variant(config, name, model=folder)
        if directory.is_run(path):
            directory.check_changes(path, directory.saved_config(path), wanted)
            opened = directory.reopen(wanted, path)
        else:
            opened = directory.create(wanted, path)
        with opened:
            _train(wanted, opened, resume=run.resume_command)
    progress.console.print(compare_table([read_run(path) for path in paths]))
    write_comparison(paths, run.report)


async def _evaluate(config: RunConfig, run: RunDir, progress: Progress, metrics: MetricsWriter) -> Any:
    from rollover.clock import SystemClock
    from rollover.environments.scorer import Scorer
    from rollover.hf.tokenizer import load_tokenizer, stop_token_ids
    from rollover.run.prepare import initial_policy
    from rollover.run.session import open_engine, open_evaluator
    from rollover.tasks.source import eval_sources

    folder = initial_policy(config, run.path / "model", progress, metrics)
    tokenizer = load_tokenizer(folder)
    sources = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    async with AsyncExitStack() as stack:
        engine, _ = await open_engine(config, run, folder)
        stack.push_async_callback(engine.close)
        check_context(config, engine.capabilities.max_context_tokens, ("eval",))
        scorer = Scorer([spec for s in sources for spec in s.reward_specs], tokenizer)
        stack.push_async_callback(scorer.close)
        evaluator = open_evaluator(
            config,
            engine=engine,
            sources=sources,
            scorer=scorer,
            stops=stop_token_ids(folder, tokenizer),
            clock=SystemClock(),
            on_progress=progress.evaluating,
        )
        assert evaluator is not None
        result = await evaluator.run()
    metrics.write("eval", 0, 0.0, result.metrics())
    return result


def plan(config: RunConfig) -> list[str]:
    """What a run of ``config`` would do, in sentences; checks what can be checked without loading anything big.

    Raises:
        ModelError: the model's folder is missing, its tokenizer is, or trainer or engine would refuse it.
        DataError: a dataset or a reward function cannot be used, or the first row of one.
        ConfigError: prompts and responses do not fit the model or the engine.
    """
    from rollover.run.prepare import check_engine
    from rollover.tasks.examples import solution
    from rollover.tasks.prompts import PromptEncoder
    from rollover.tasks.source import check_source

    r = config.rollout
    lines = [f"model: {_model_line(config)}"]
    check_engine(config)
    if config.sft is not None:
        lines.append(f"warm-up: {config.sft.num_steps} supervised steps of {config.sft.batch_size} examples")
    lines += [
        f"each step trains {r.rollout_batch_size} prompts x {r.group_size} samples"
        f" of at most {r.max_new_tokens} tokens, {config.steps} steps in all",
        f"strategy {r.strategy}: {_in_flight(r)}, staleness at most {r.staleness_bound} versions",
        f"algorithm {config.algorithm.name}; log-probs at temperature {r.temperature}",
    ]
    if r.top_p < 1 or r.top_k > 0:
        lines.append("warning: top_p or top_k truncates the sampling distribution; importance ratios are not exact")
    if r.strategy == "rollover" and resolve(config.algorithm).advantage == "whitened":
        lines.append(
            "warning: strategy rollover trains responses of like length together, and the advantage 'whitened' compares"
            " those of a batch; strategy april mixes them"
        )
    lines += [f"variant {name} changes {', '.join(config.variants[name])}" for name in config.variants]
    tokenizer = _tokenizer(config)
    encoder = None if tokenizer is None else PromptEncoder(tokenizer, config.tasks)
    for role in ("train", "eval"):
        for source in getattr(config.tasks, role):
            facts = check_source(source, encoder)
            size = "" if facts.num_rows is None else f", {facts.num_rows} rows"
            reply = f"; {facts.reply}" if facts.reply else ""
            lines.append(f"{role} source {source.name}: {source.kind}{size}, scored by {source.reward.kind}{reply}")
    for source in () if config.sft is None else config.sft.sources or config.tasks.train:
        facts = check_source(source, encoder)
        if facts.first is not None:
            solution(source, facts.first, facts.prompt_column)
    return lines


def _in_flight(r: RolloutConfig) -> str:
    """What decides how much is started."""
    if r.strategy == "rollover":
        return f"a lag of {r.target_lag:g} in the mean"
    if r.overlaps_training or r.strategy in ("concurrency", "fast_lane"):
        return "as many samples in flight as fit" if r.num_running is None else f"{r.num_running} samples in flight"
    return f"{r.launched_groups} groups in flight at the start of a round"


def _model_line(config: RunConfig) -> str:
    if config.model.scratch is not None:
        s = config.model.scratch
        return f"from scratch, {s.num_layers} layers of width {s.hidden_size}"
    from rollover.trainer.models import read_model_config, resolve_model

    assert config.model.path is not None
    folder = resolve_model(config.model.path, weights=False)
    model = read_model_config(folder, weights=Path(config.model.path).is_dir())
    if isinstance(context := model.get("max_position_embeddings"), int):
        check_context(config, context)
    return f"{config.model.path} ({model['model_type']})"


def _tokenizer(config: RunConfig) -> Any:
    """The model's, checked; ``None`` where it is yet to be made."""
    from rollover.hf.tokenizer import load_tokenizer
    from rollover.trainer.models import resolve_model

    if config.model.path is None:
        return None
    return load_tokenizer(resolve_model(config.model.path, weights=False))


def _progress(config: RunConfig) -> Progress:
    return Progress(
        total_steps=config.steps,
        mode=config.logging.progress,
        plain_every_steps=config.logging.plain_every_steps,
        redact=Redactor(resolved(config)).text,
    )
