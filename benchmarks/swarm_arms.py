"""Runs of one task in three arms, as a person would start them: ``rollover train`` alone, and with workers that join.

==============  ============================================  ==============================================
arm             engine                                        strategy
==============  ============================================  ==============================================
``co-located``  embedded, in the trainer's process            ``sync``
``pull``        swarm, ``mode = "pull"``, edge machines       ``sync``
``push-pull``   swarm, ``mode = "push_pull"``, the same ones  ``bounded_async`` with ``max_staleness``
==============  ============================================  ==============================================

All arms of a seed start from the same policy, draw the same prompts and have the same optimizer and batch. Before the
first step a short evaluation keeps everybody busy until all members are there; the clock starts behind it. Nobody
evaluates later on: checkpoints are evaluated afterwards, by the embedded engine at full speed.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge import EdgeMachine
from forked import Forks

from rollover.run.building import find
from rollover.swarm.coordinator.status.snapshot import read_status
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.publication.keys import open_key

ARMS = ("co-located", "pull", "push-pull")
START_S, RUN_S = 180.0, 1800.0
POLL_S = 0.05
BARRIER_TOKENS = 16
"""Of each response of the evaluation before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned, and how the swarm is set up for it.

    Example: ``QUICKSTART`` in ``benchmarks/swarm.py``: 30 steps of the packaged experiment.
    """

    name: str
    config: str
    """A file or a packaged experiment."""
    steps: int
    eval_every: int
    """Steps between the checkpoints that are evaluated."""
    groups: int
    group_size: int
    max_new_tokens: int
    max_staleness: int
    machines: tuple[EdgeMachine, ...]
    examples: tuple[str, Callable[[Path], None]] | None = None
    """A file that the warm-up reads, by the name that the config has for it, and what writes it."""

    @property
    def room(self) -> int:
        return sum(machine.max_running for machine in self.machines)

    def write(self, arm: str, seed: int, model: Path, folder: Path) -> Path:
        """Write the config of a run and return its file."""
        text = without_sections(
            find(self.config).read_text(), "model.scratch", "sft", "sft.sources", "rollout", "engine", "eval"
        )
        text = re.sub(r"(?m)^steps = .*$", "", text, count=1)
        strategy = f'"bounded_async"\nmax_staleness = {self.max_staleness}' if arm == "push-pull" else '"sync"'
        engine = (
            'kind = "embedded"\nmax_running = 384\nkv_cache_bytes = 134_217_728'
            if arm == "co-located"
            else f'kind = "swarm"\nmode = "{arm.replace("-", "_")}"\nlisten = "127.0.0.1:0"\nlease_s = 12.0\n'
            f"max_running = {self.room}"
        )
        file = folder / "run.toml"
        file.write_text(
            f"seed = {seed}\nsteps = {self.steps}\n{text}\n"
            f'[model]\npath = "{model}"\n'
            f"[rollout]\nstrategy = {strategy}\nrollout_batch_size = {self.groups}\ngroup_size = {self.group_size}\n"
            f"max_new_tokens = {self.max_new_tokens}\n"
            f"[engine]\n{engine}\n"
            f"[eval]\nnum_prompts = 280\nmax_new_tokens = {BARRIER_TOKENS}\n"
            f"[checkpoint]\nevery_steps = {self.eval_every}\nkeep_last = 1000\n"
            '[logging]\nprogress = "off"\ntensorboard = false\n'
        )
        return file


def without_sections(text: str, *names: str) -> str:
    """The TOML text without these tables and arrays of tables."""
    for name in names:
        text = re.sub(rf"(?ms)^\[+{re.escape(name)}\]+$.*?(?=^\[|\Z)", "", text)
    return text


def warm_up(task: Task, seed: int, folder: Path, forks: Forks) -> Path:
    """The policy from which all arms of a seed start."""
    run = folder / "warm-up" / f"{task.name}-{seed}"
    if not (run / "model" / "config.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        if task.examples is not None and not (run.parent / task.examples[0]).exists():
            task.examples[1](run.parent / task.examples[0])
        log = run.with_suffix(".log")
        argv = ("sft", str(find(task.config)), "--seed", str(seed), "--run-dir", str(run), "--logging.progress", "off")
        process = forks.start(log, run.parent, *argv)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"the warm-up failed: {log.read_text()[-2000:]}")
    return run / "model"


def train(task: Task, arm: str, seed: int, model: Path, folder: Path, forks: Forks) -> Path:
    """Run one arm to its end and return its run directory. Raises ``RuntimeError`` when a process ends before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config, run = task.write(arm, seed, model, folder), folder / "run"
    trainer = forks.start(folder / "trainer.log", folder, "train", str(config), "--run-dir", str(run))
    members: list[Any] = []
    try:
        with _logs_on_failure(folder):
            if arm != "co-located":
                members = _join(task, run, folder, trainer, forks)
            _until_over(trainer, members)
    finally:
        forks.end([trainer, *members])
    return run


def _join(task: Task, run: Path, folder: Path, trainer: Any, forks: Forks) -> list[Any]:
    status = run / "swarm" / "status.json"
    give_up_s = time.monotonic() + START_S
    while not status.exists():
        if trainer.exitcode is not None or time.monotonic() > give_up_s:
            raise RuntimeError("the swarm was not opened")
        time.sleep(POLL_S)
    url = read_status(status.parent).url
    credentials, key = Credentials(run / "swarm" / "workers.json"), open_key(run / "swarm" / "publisher.key")
    members = []
    for machine in task.machines:
        token = folder / f"{machine.name}.token"
        token.write_text(credentials.add(machine.name, key.public_key()).text)
        token.chmod(0o600)
        argv = (
            *("worker", "--join", url, "--token-file", str(token), "--cache", str(folder / f"cache-{machine.name}")),
            *("--engine.max_running", str(machine.max_running), "--engine.kv_cache_bytes", "67108864"),
        )
        report = folder / f"edge-{machine.name}.json"
        members.append(forks.start(folder / f"{machine.name}.log", folder, *argv, machine=machine, report=report))
    return members


def _until_over(trainer: Any, members: Sequence[Any]) -> None:
    give_up_s = time.monotonic() + RUN_S
    while trainer.exitcode is None:
        trainer.join(0.5)
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"the run was not over after {RUN_S:.0f} s")
        if gone := [m.exitcode for m in members if m.exitcode is not None]:
            trainer.join(5.0)  # members leave when the run is over
            if trainer.exitcode is None:
                raise RuntimeError(f"a worker ended with {gone[0]}")
    if trainer.exitcode:
        raise RuntimeError(f"the trainer ended with {trainer.exitcode}")


@contextmanager
def _logs_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        for log in sorted(folder.glob("*.log")):
            error.add_note(f"-- {log}\n{log.read_text(errors='replace')[-1500:]}")
        raise
