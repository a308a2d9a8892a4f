"""The initial policy: an existing model, or a small one built from scratch, with a supervised warm-up if the config
asks for it.

Invariants: the folder that it returns is an ordinary Hugging Face model folder, complete or absent, so a run
that is killed in its warm-up repeats it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rollover.algorithms.config import resolve
from rollover.errors import ModelError, RunError, parse_json
from rollover.hf.companions import fingerprint
from rollover.hf.config import max_context, read_model_config
from rollover.hf.folder import PARTIAL
from rollover.hf.hub import resolve_model
from rollover.hf.tokenizer import open_tokenizer
from rollover.report.metrics import MetricsWriter
from rollover.report.progress import Progress
from rollover.report.record import read_config
from rollover.run import layout
from rollover.run.config import RunConfig
from rollover.run.directory import RunDir, replace_json
from rollover.run.engine import check_engine
from rollover.run.trainers import check_devices, cluster_launcher
from rollover.tasks.episodes import demonstrations
from rollover.tasks.open import companions_of, eval_sources, held_out_texts, reply_end, same_datasets, train_source
from rollover.tasks.prompt_source import Example, examples
from rollover.trainer.checkpoint import latest_checkpoint

NUM_TOKENIZER_TEXTS = 2000
"""Number of prompts, with their solutions if there is a warm-up, on which a tokenizer from scratch is trained."""


def initial_policy(
    config: RunConfig, folder: Path, progress: Progress, metrics: MetricsWriter, *, samples: bool = True
) -> Path:
    """Return the folder of the policy that training starts from: the user's own, or ``folder``, which is made unless it
    exists. ``samples``: an engine will serve it.

    Raises:
        ModelError: the model is not available or has an unsupported architecture.
        DataError: a source cannot be read or has no solutions for a warm-up.
    """
    for left in folder.parent.glob(f"{PARTIAL}{folder.name}-*"):  # by a process that was killed; the run is locked
        shutil.rmtree(left)
    base = folder.with_name(f"{folder.name}-untrained")
    if config.model.scratch is None:
        assert config.model.path is not None
        base = resolve_model(config.model.path)
        read_model_config(base)  # reports what is wrong with it before other code fails on it
    check_devices(config)
    for line in check_engine(config) if samples else ():
        if "warning:" in line:
            progress.message(line)
    if config.model.scratch is None:
        open_tokenizer(base)
    elif not (base / "config.json").is_file():  # a run that is resumed has built it before
        _build(config, base, progress)
    if config.sft is None:
        return base
    if not (folder / "config.json").is_file():
        _warm_up(config, base, folder, progress, metrics)
    return folder


def check_model(config: RunConfig, run: RunDir, folder: Path) -> None:
    """Check that ``folder`` holds the model that the run began with; a new run records it. Once there is a checkpoint,
    its weights are needed only for the algorithm's reference policy and beside adapters. Raises ``ModelError`` naming
    what is different."""
    if run.began_with.is_file():
        check_began_with(run.path, folder, needs_weights=_needs_weights(config, run.path))
    else:  # the run begins, or was begun by an earlier version of Rollover
        replace_json(run.began_with, {"model": fingerprint(folder)})


def check_resume(config: RunConfig, run: Path) -> None:
    """Check that the run in ``run`` would find what it began with: datasets and a model that need no download and that
    it has not made itself. Raises ``DataError`` or ``ModelError`` naming what is different."""
    if (run / layout.JOURNAL).exists() or (run / layout.MODEL).is_dir():
        train, measured = (
            tuple(s for s in role if not s.look_up()) for role in (config.tasks.train, config.tasks.eval)
        )
        tasks = replace(config.tasks, train=train, eval=measured)
        same_datasets(tasks, read_config(run)["meta"].get("datasets"))
    path = None if config.sft is not None else config.model.path
    if path is not None and (run / layout.BEGAN_WITH).is_file():
        needs_weights = Path(path).is_dir() and _needs_weights(config, run)
        check_began_with(run, resolve_model(path, weights=False), needs_weights=needs_weights)


def _needs_weights(config: RunConfig, run: Path) -> bool:
    has_checkpoint = latest_checkpoint(run / layout.CHECKPOINTS) is not None
    return not has_checkpoint or resolve(config.algorithm).needs_ref or config.trainer.lora is not None


def check_began_with(run: Path, folder: Path, *, needs_weights: bool = True) -> None:
    """Check that ``folder`` holds the model whose fingerprint the run in ``run`` has recorded, with its files or those
    of the run's checkpoints beside the weights. Raises ``ModelError`` naming what is different."""
    record, found = run / layout.BEGAN_WITH, fingerprint(folder)
    try:
        began_with = dict(parse_json(record.read_text())["model"])
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{record} is damaged: delete it if {folder} is the model that the run started from") from None
    checkpoint = latest_checkpoint(run / layout.CHECKPOINTS)
    own = {**began_with, **(fingerprint(checkpoint) if checkpoint else {}), "weights": began_with.get("weights")}
    for name in sorted(found.keys() | began_with.keys()):
        if found.get(name) not in (began_with.get(name), own.get(name)) and (name != "weights" or needs_weights):
            what = "its weights are" if name == "weights" else f"{name} is"
            raise ModelError(
                f"{folder} is not the model that the run started from: {what} different; bring that model"
                " back, name it with --model.path, or start a new run"
            )


def _build(config: RunConfig, folder: Path, progress: Progress) -> None:
    from rollover.trainer.scratch import build_scratch_model, build_tokenizer

    assert config.model.scratch is not None
    shape = config.model.scratch
    progress.message("building a tokenizer and a model from scratch")
    plain = replace(config.tasks, max_prompt_tokens=10**6, chat_template="off", system_prompt=None)
    taught = () if config.sft is None else config.warmup_sources
    source = train_source(plain, build_tokenizer([]), seed=_warmup_seed(config), taught=taught)
    prompts = (source.prompt(i) for i in range(NUM_TOKENIZER_TEXTS))
    texts = (f"{p.text}\n{source.solution(p)}" if config.sft is not None else p.text for p in prompts)
    tokenizer = build_tokenizer(texts, vocab_size=shape.vocab_size)
    build_scratch_model(folder, tokenizer, shape, seed=config.seed)


def _warm_up(config: RunConfig, base: Path, folder: Path, progress: Progress, metrics: MetricsWriter) -> None:
    from rollover.trainer.sft import SFTProgress, run_sft

    warmup = config.sft
    assert warmup is not None
    tokenizer = open_tokenizer(base)
    evaluation = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
    held_out = held_out_texts(config.tasks, evaluation)
    tasks, taught = config.tasks, config.warmup_sources
    source = train_source(tasks, tokenizer, seed=_warmup_seed(config), held_out=held_out, taught=taught)
    if source.left_out:
        progress.message(f"warm-up: {source.left_out}")

    def on_progress(done: SFTProgress) -> None:
        progress.warmup(done.step + 1, warmup.num_steps, done.loss)
        values = {"loss": done.loss, "grad_norm": done.grad_norm, "lr": done.learning_rate}
        metrics.write("warmup", done.step, done.elapsed_s, values)

    end, context, bare = reply_end(tokenizer, tasks), max_context(base), warmup.bare_answers

    class Worked:
        def __iter__(self) -> Iterator[Example]:  # as often as the warm-up begins
            lessons = demonstrations(taught, tasks, tokenizer, end=end)
            return examples(source, tokenizer, end=end, bare_answers=bare, lessons=lessons, context=context)

    worked = Worked()
    for _ in islice(worked, warmup.num_steps * warmup.batch_size):
        pass  # a warm-up has no checkpoints, and would be lost to a row that cannot be learned
    run_sft(
        base,
        worked,
        warmup,
        output=folder,
        deterministic=config.deterministic,
        companions=companions_of(base, tokenizer, tasks),
        timeout_s=config.trainer.rank_timeout_s,
        logs=folder.parent / "logs",
        launcher=cluster_launcher(config, warmup, folder.parent, progress),
        max_restarts=config.trainer.max_restarts,
        on_progress=on_progress,
        notify=progress.message,
    )


def _warmup_seed(config: RunConfig) -> int:
    """Return a seed far from the run's own, so that warm-up and training draw different items of a generated task."""
    return config.seed + 2**20
