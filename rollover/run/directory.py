"""The run directory: everything one run leaves behind, owned by one process at a time.

::

    RUN/config.json       the resolved config, and under "meta" what ran it and where
        began_with.json   fingerprint of the model that the run began with
        journal.sqlite    every rollout event
        metrics.jsonl     one line per step
        tensorboard/
        model/            the policy that training starts from, if the run makes it
        checkpoints/      what --resume continues from
        report.html
        lock              held while a process works here

A directory belongs to one config for good: when a run is resumed, only settings that say so may differ (``changes``).
The lock is the kernel's (flock), so no process leaves one behind, however it dies.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from rollover import locks
from rollover.engine.base import Capabilities
from rollover.errors import ConfigError, DataError, MissingExtra, ModelError, ResourceError, RunError
from rollover.privacy import make_private, redacted_command
from rollover.report.record import read_config
from rollover.rollout.strategies import SIMULATED_ONLY
from rollover.run import layout
from rollover.run.building import restore
from rollover.run.config import RunConfig
from rollover.settings.plain import resolved
from rollover.settings.shape import on_resume, types_at
from rollover.settings.toml import KeyPath, dotted
from rollover.version import __version__

_MAX_NAME_CHARACTERS = 50
"""The part of a config's name that goes into the default name of a directory: file systems allow 255 bytes."""
_LEFT_UNBEGUN = (layout.LOCK, "config.partial")
"""The files of a run that was killed while it created its directory; the next run can use that directory."""
_PRELIMINARIES = (layout.CONFIG, layout.BEGAN_WITH, layout.LOCK, "metrics.jsonl", "tensorboard", "model-untrained")

MIN_FREE_BYTES = 256 * 2**20
"""No run is started with less free disk space: it is enough for the journal and report of a small one."""


class RunDir:
    """A run directory, locked by this process until ``close``. As a context manager it is closed at the end, and after
    an error a new run is discarded as ``discard_after`` says."""

    def __init__(self, path: Path) -> None:
        """Lock ``path``, which must exist. Raises ``RunError`` when another process holds it."""
        self.path = path
        self.config_file = path / layout.CONFIG
        self.began_with = path / layout.BEGAN_WITH
        self.journal = path / layout.JOURNAL
        self.model = path / layout.MODEL
        self.checkpoints = path / layout.CHECKPOINTS
        self.report = path / layout.REPORT
        self.resume_command = f"rollover train --resume {shlex.quote(str(path))}"
        """The command that continues this run."""
        self.made: tuple[Path, ...] = ()
        """Directories created for this run: its own, then those around it."""
        self.is_new = False
        """True for a new run, whose directory can still be cleared."""
        self._unsettled: tuple[Mapping[str, Any], str] | None = None
        """The config under which a resumed run is to continue, and the record of the resume."""
        self._lock: int | None = _locked(path / layout.LOCK)

    def require_free(self, num_bytes: int, purpose: str) -> None:
        """Raise ``ResourceError`` unless the disk has room for ``num_bytes`` more."""
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < num_bytes:
            raise ResourceError(
                f"{self.path}: {purpose} needs {num_bytes / 1e9:.1f} GB of disk, but "
                f"{free_bytes / 1e9:.1f} GB are free; make room or choose another place with --run-dir"
            )

    def noted(self, fact: str) -> Any:
        """Return the fact that ``note`` recorded under this name; ``None`` when there is none."""
        return _read(self.path)[1].get(fact)

    def note(self, **facts: Any) -> None:
        """Add facts to "meta" in ``config.json`` that are only known once the run has started."""
        config, meta = _read(self.path)
        _write(self, config, {**meta, **facts})

    def note_engine(self, can: Capabilities, **facts: Any) -> None:
        """Note what simulations of the run have to know of its engine, for all its servers together."""
        rate = can.prefill_tokens_per_iteration
        told = {"prefill_tokens_per_iteration": rate} if math.isfinite(rate) else {}
        self.note(max_running=can.max_running, **told, **facts)

    def changed_environment(self) -> list[str]:
        """List the versions and features of the machine that affect the last bits and differ from what the run
        began with.
        """
        began_with = _read(self.path)[1]
        return [
            f"{key} {began_with[key]}, now {value}"
            for key, value in _environment().items()
            if key != "git_commit" and began_with.get(key, value) != value
        ]

    def changed_measure(self, config: RunConfig) -> list[str]:
        """List the settings of evaluations, as ``config`` has them, that change what they measure."""
        same = {"every_steps", "keep_best", "patience", "metric", "workers", "retries", "samples_per_prompt", "k"}
        same |= {"concurrency", "api_key_env", "threads", "max_memory_gib", "weight"}
        same |= {"path"} if config.tasks.keep_eval_out else set()  # its rows are compared then
        before, sets = derived_config(self.path), ("eval", "sets")
        changed = [key for key in _differing(before, config) if key[:2] != sets]
        for name in sorted({*before.eval.sets, *config.eval.sets}):  # a table that comes or goes may repeat [eval]
            changed += [(*sets, name, *key) for key in _differing(before.eval.of(name), config.eval.of(name))]
        users = {"params", "config"}  # tables whose keys are a user's own
        names = [[part for part in key if isinstance(part, str)][-1] for key in changed]
        measures = [k for k, name in zip(changed, names, strict=True) if name not in same or users & {*k}]
        return [name for name in map(dotted, measures) if name.startswith(("eval.", "tasks.eval"))]

    def settle(self) -> None:
        """Record the config under which the run continues, now that every part of it is open. A resume that fails
        earlier leaves the run with its old settings."""
        if self._unsettled is not None:
            config, resumed = self._unsettled
            meta = _read(self.path)[1]
            earlier = f"{meta['resumed']}; " if "resumed" in meta else ""
            _write(self, config, {**meta, "resumed": earlier + resumed})
            self._unsettled = None

    def identity(self) -> str:
        """Return a name that no other run has; a resumed run keeps it."""
        if (known := self.noted("identity")) is None:
            name = "".join(c if (c.isalnum() and c.isascii()) or c in "-_." else "-" for c in self.path.resolve().name)
            self.note(identity=(known := f"{name[:40]}-{secrets.token_hex(4)}"))
        return str(known)

    def discard_after(self, error: BaseException) -> None:
        """Remove the files of a new run that ``error`` kept from beginning, if the user has to fix something first, so
        that the next attempt can use the directory. Does nothing to a resumed run, nor once there is a journal, a model
        or anything else that took work."""
        mendable = isinstance(error, ConfigError | DataError | MissingExtra | ModelError | ResourceError)
        if not (mendable and self.is_new) or any(entry.name not in _PRELIMINARIES for entry in self.path.iterdir()):
            return
        self.is_new = False
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in self.made:
            with suppress(OSError):  # other processes may have put something there meanwhile
                folder.rmdir()

    def close(self) -> None:
        """Release the lock. Does nothing when called again."""
        if self._lock is not None:
            locks.release(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self.discard_after(error)
        finally:
            self.close()


def create(config: RunConfig, path: Path, argv: Sequence[str] = (), *, job: str = "train") -> RunDir:
    """Create and lock a new run directory and write ``config.json``. Only the runs of the job ``train`` can be resumed.
    Raises ``RunError`` when ``path`` is in use or not empty, ``ResourceError`` when its disk is full."""
    try:
        made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path}: cannot become a run directory: {reason}") from None
    if not is_run(path) and any(entry.name not in _LEFT_UNBEGUN for entry in path.iterdir()):
        raise RunError(f"{path} is neither empty nor a run directory: choose another with --run-dir")
    run = RunDir(path)
    try:
        if is_run(path):
            raise RunError(f"{path} holds a run of {_held(path, config, job)}choose another directory with --run-dir")
        run.made, run.is_new = made, True
        run.require_free(MIN_FREE_BYTES, "a new run")
        started = {"job": job, "started": _now(), "command": redacted_command(argv), "seed": config.seed}
        _write(run, resolved(config), {**started, **_environment()})
    except BaseException as error:
        run.discard_after(error)
        run.close()
        raise
    return run


def _held(path: Path, config: RunConfig, job: str) -> str:
    """Describe how the config of the run in ``path`` differs from ``config``, and offer to resume it if possible."""
    before = derived_config(path)
    changed = ", ".join(map(dotted, _differing(before, config)[:3]))
    what = f"another config (it differs in {changed})" if changed else "this config"
    if not job == _read(path)[1].get("job", "train") == "train" or refusals(before, config):
        return f"{what}: "
    return f"{what}: resume it with --resume {shlex.quote(str(path))}{' and these settings' if changed else ''}, or "


def open_for_resume(path: Path, overrides: Sequence[str] = (), argv: Sequence[str] = ()) -> tuple[RunConfig, RunDir]:
    """Lock an existing run directory and return the config that ``saved_config`` gives. ``RunDir.settle`` records it.
    Raises ``RunError`` as ``saved_config`` does, and when the directory is in use."""
    config = saved_config(path, overrides)
    return config, reopen(config, path, argv)


def reopen(config: RunConfig, path: Path, argv: Sequence[str] = ()) -> RunDir:
    """Lock an existing run directory. ``RunDir.settle`` records that its run continues under ``config``."""
    run = RunDir(path)
    try:
        run.require_free(MIN_FREE_BYTES, "a resumed run")
        meta = _read(path)[1]
        changed = [f"{key} {value}" for key, value in _environment().items() if meta.get(key) != value]
        resumed = f"{_now()} by {redacted_command(argv)}" + (f" under {', '.join(changed)}" if changed else "")
        run._unsettled = resolved(config), resumed
    except BaseException:
        run.close()
        raise
    return run


def saved_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of the run in ``path`` with ``overrides`` applied. Raises ``RunError`` when there is no run, or
    when an override changes a setting that may not change."""
    config, meta = _read(path)
    _require_own(path, meta)
    if (job := meta.get("job", "train")) != "train":
        raise RunError(
            f"{path} is the directory of a rollover {job}, which runs in one go and has nothing to resume;"
            " give --resume the directory of a rollover train"
        )
    kind = config.get("rollout", {}).get("strategy")
    if isinstance(kind, str) and kind in SIMULATED_ONLY:
        raise RunError(
            f"{path} cannot be resumed: it was created with rollout.strategy {kind!r}; {SIMULATED_ONLY[kind]}"
        )
    derived = derived_config(path, overrides)
    if overrides:
        check_changes(path, derived_config(path), derived)
    return derived


def check_changes(path: Path, before: RunConfig, after: RunConfig) -> None:
    """Raise ``RunError`` when the run in ``path`` cannot continue under ``after``, naming the setting that prevents it
    and why."""
    for key, reason in refusals(before, after).items():
        raise RunError(
            f"{path}: {key} cannot change when a run is resumed: {reason}; leave it as it was, or start a new run"
        )


def refusals(before: Any, after: Any) -> dict[str, str]:
    """Return the settings of a run that must not differ but do, each with the reason. Both configs are of one kind."""
    found, schema = {}, type(after)
    for key in _differing(before, after):
        data = resolved(after if types_at(schema, key, resolved(after)) else before)
        if (reason := on_resume(schema, key, data).refusal(before, after)) is not None:
            found[dotted(key)] = reason
    return found


def derived_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config of the run in ``path`` as the start of another run: any setting may be overridden."""
    config, meta = _read(path)
    _require_own(path, meta)
    return restore(config, str(path / layout.CONFIG), overrides)


def _require_own(path: Path, meta: Mapping[str, Any]) -> None:
    if host := meta.get("host"):
        raise RunError(
            f"{path} holds the rollouts of {host}: that trainer resumes and saves its runs itself, not rollover"
        )


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run directory."""
    return (path / layout.CONFIG).is_file()


def default_path(experiment: str, folder: Path = Path("runs"), now: datetime.datetime | None = None) -> Path:
    """Return ``runs/<experiment>-<date-time>``, with a number when several start within a second."""
    stem = f"{experiment[:_MAX_NAME_CHARACTERS]}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, sys.maxsize))
    return next(path for name in names if not (path := folder / name).exists())


def _differing(before: Any, after: Any) -> list[KeyPath]:
    old, new = dict(_leaves(resolved(before))), dict(_leaves(resolved(after)))
    return [key for key in {**old, **new} if key not in old or key not in new or old[key] != new[key]]


def _leaves(value: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    items = list(inner)
    for key, child in items:
        yield from _leaves(child, (*prefix, key))
    if not items:
        yield prefix, value


def _locked(file: Path) -> int:
    """Lock ``file`` and return its descriptor, which children do not inherit."""
    make_private(file)
    descriptor = os.open(file, os.O_RDWR)
    holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
    try:
        locks.take(descriptor)
    except BlockingIOError:
        raise RunError(f"{file.parent} is in use by {holder}: wait for it, or choose another directory") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the meta data of a run directory."""
    config = read_config(path)
    return config, config.pop("meta")


def _write(run: RunDir, config: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    replace_json(run.config_file, {**config, "meta": meta})


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file in one step, so that readers and crashes see either the old one or the new one."""
    partial = path.with_suffix(".partial")
    make_private(partial)  # the config contains its secrets, since --resume needs them
    with partial.open("w") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _environment() -> dict[str, str]:
    """Return the versions, machine and commit on which a run depends besides its config."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    environment = {
        "rollover": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
        "machine": f"{os.cpu_count()} x {_cpu_model()}, {memory_bytes >> 30} GiB, {platform.platform()}",
    }
    commit = _git_commit()
    return environment if commit is None else {**environment, "git_commit": commit}


def _git_commit() -> str | None:
    """Return the commit checked out in the working directory, with ``+changes`` when files differ from it."""
    try:
        commit, status = (
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=10, check=True).stdout
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+changes" if status.strip() else "")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
