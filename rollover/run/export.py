"""Exports the model of a run as an ordinary Hugging Face folder: a checkpoint without the parts that only training
needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rollover import locks
from rollover.errors import ModelError, RunError
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.report.metrics import read_metrics
from rollover.run import directory, layout
from rollover.run.best import Scores
from rollover.run.checkpoint_schedule import advice_on_damage
from rollover.run.config import RunConfig
from rollover.run.prepare import check_began_with
from rollover.trainer.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    checkpoint_path,
    list_checkpoints,
    read_manifest,
    verify_files,
)
from rollover.weights.adapters import holds_adapters


def export(run: Path, target: Path, *, step: int | None = None) -> Path:
    """Write the model of a run's checkpoint to the folder ``target``, adapters merged, and return the checkpoint.

    Args:
        step: of the checkpoint; the newest when left out.

    Raises:
        RunError: there is no such run or checkpoint, or ``target`` exists.
        ModelError: the checkpoint is damaged, or the model that the run began with is gone or was changed.
        ResourceError: the disk is full.
    """
    with held_checkpoint(run, step) as checkpoint:
        if target.exists():
            raise RunError(f"{target} exists: choose a folder that does not exist yet")
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(run, checkpoint, target)
        return checkpoint


def best_step(run: Path) -> int:
    """Return the step whose weights have done best in the evaluations of a run, by its ``eval.metric``. Raises
    ``RunError`` if there is no such run, it keeps no best checkpoint, or none of its checkpoints is the best."""
    config = directory.derived_config(run)
    if not config.eval.keep_best:
        raise RunError(f"{run} keeps no best checkpoint: give a --step, or set eval.keep_best = true in the next run")
    best = Scores(config.best_metric, read_metrics(run)).best_kept(run / "checkpoints")
    if not best:
        begun = "" if best is None else ": the model that it began with is the best"
        raise RunError(f"no checkpoint of {run} is the best by {config.eval.metric}{begun}")
    return best


def _write(run: Path, checkpoint: Path, target: Path) -> None:
    if holds_adapters(checkpoint):
        from rollover.trainer.lora import merge

        base = _base(directory.derived_config(run), run)
        if (run / layout.BEGAN_WITH).is_file():
            check_began_with(run, base)
        merge(checkpoint, target, base=base)
        return
    own = shutil.ignore_patterns(MANIFEST, Path(OPTIMIZER).parts[0])

    def write(partial: Path) -> None:
        shutil.copytree(checkpoint, partial, ignore=own, dirs_exist_ok=True)

    write_folder(target, write)


@contextmanager
def held_checkpoint(run: Path, step: int | None = None) -> Iterator[Path]:
    """Find the checkpoint after ``step`` steps, or the newest, and check its files. It is not deleted within this
    context, even if its run continues.

    Raises:
        RunError: there is no such run or checkpoint.
        ModelError: the checkpoint is damaged.
    """
    config = directory.derived_config(run)
    with ExitStack() as stack:
        while True:
            checkpoint = _find(run, config, step)
            try:
                stack.enter_context(locks.shared(checkpoint / MANIFEST))
                break
            except FileNotFoundError:  # its run has just deleted it, for a newer one
                continue
        with advice_on_damage(run / layout.JOURNAL):
            verify_files(checkpoint, read_manifest(checkpoint))
        yield checkpoint


def _find(run: Path, config: RunConfig, step: int | None) -> Path:
    found = list_checkpoints(run / "checkpoints")
    if not found:
        if config.variants:
            raise RunError(
                f"{run} compares variants, which have the checkpoints: name {run / min(config.variants)}, say"
            )
        if (run / "model").is_dir() and not (run / layout.JOURNAL).exists():
            raise RunError(f"{run} has no checkpoints: the model that its warm-up has made is {run / 'model'}")
        raise RunError(f"{run} has no checkpoint yet: wait for one, or lower checkpoint.every_steps in the next run")
    if step is None:
        return found[-1]
    if (wanted := checkpoint_path(run / "checkpoints", step)) not in found:
        kept = ", ".join(path.name.removeprefix("step_") for path in found)
        raise RunError(f"{run} has no checkpoint after step {step}; it keeps those after: {kept}")
    return wanted


def _base(config: RunConfig, run: Path) -> Path:
    """Return the folder of the model that a run began with."""
    if config.model.scratch is None and config.sft is None:
        assert config.model.path is not None
        return resolve_model(config.model.path)
    made = run / "model" if config.sft is not None else run / "model-untrained"
    if not made.is_dir():
        raise ModelError(f"{made} is missing: the adapters of {run} only work with that model")
    return made
