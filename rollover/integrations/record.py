"""The directory of a run inside another trainer, from which a restart resumes and reports are drawn.

::

    DIR/config.json       the settings, and under "meta" the host and other facts that identify the run
        journal.sqlite    every rollout event
        metrics.jsonl     one line per batch
        model/            the model that the engine was opened with, if it came from no folder
        lock              held while a process works here

``rollover report DIR`` draws it, and ``rollover simulate --from DIR`` uses its response lengths, as they do for a run
of Rollover's own trainer. A directory belongs to one run: it is created for a new one, and a resumed run must have the
settings that it began with.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.errors import RunError
from rollover.integrations.hosted import HostedConfig
from rollover.report.metrics import MetricsWriter
from rollover.report.record import read_config
from rollover.run.directory import RunDir, is_run, refusals, replace_json
from rollover.settings import toml
from rollover.settings.plain import resolved
from rollover.settings.schema import build
from rollover.version import __version__


class HostedRun(RunDir):
    """The directory, locked by this process until ``close``. It is a context manager. Raises ``RunError`` if the
    directory holds a run that is not to be resumed or had other settings or facts, or another process works there.

    Args:
        resume: whether the run is resumed from the directory, which may be empty if an earlier process was killed
            before it wrote anything.
        facts: facts besides the settings that identify the run, its dataset say; a resumed run must have the same.
        remedy: how a user of this host resumes a run, for messages.
        decodes: the kind of engine, if it is not the one of the settings.

    A directory without a journal belongs to a run that has not begun, and can be used for another.
    """

    def __init__(
        self,
        path: Path,
        config: HostedConfig,
        *,
        host: str,
        resume: bool,
        facts: Mapping[str, Any] | None = None,
        remedy: str = "resume it",
        decodes: str | None = None,
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        super().__init__(path)
        try:
            if self.journal.exists() and not resume:
                raise RunError(
                    f"{path} holds the rollouts of an earlier run: {remedy}, or use another directory for this run"
                )
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            known = {"host": host, "rollover": __version__}
            if self.journal.exists() and is_run(path):
                began = _check(path, config, facts or {})
                changed = "".join(f", {name} {value}" for name, value in known.items() if began.get(name) != value)
                earlier = f"{began['resumed']}; " if "resumed" in began else ""
                meta = {**began, "resumed": f"{earlier}{now}{changed}"}
            else:
                meta = {"job": host.partition(" ")[0], "started": now, "seed": config.seed, **known, **(facts or {})}
            engine = {} if decodes is None else {"engine": {"kind": decodes}}
            replace_json(self.config_file, {**resolved(config), **engine, "meta": meta})
            self._metrics = MetricsWriter(path)
        except BaseException:
            super().close()
            raise

    def step_ended(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Write the measurements of the batch of ``step``. ``time_s`` is on the feed's clock."""
        self._metrics.write("step", step, time_s, metrics)

    def close(self) -> None:
        """Release the directory. Does nothing when called again."""
        self._metrics.close()
        super().close()


def _check(path: Path, config: HostedConfig, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata of the run in ``path``, after checking that it is the run being resumed."""
    stored = read_config(path)
    meta: Mapping[str, Any] = stored.pop("meta", {})
    before = build(HostedConfig, toml.Document(name=str(path / "config.json"), data=stored))
    # A kind (the strategy's, the engine's) comes first, since choosing another one changes the settings beside it too.
    for key, reason in sorted(refusals(before, config).items(), key=lambda found: not found[0].endswith(".kind")):
        raise RunError(
            f"{path}: {key} differs from the value that this run began with, and {reason}: restore it, or start a new"
            " run in another directory"
        )
    for name, value in facts.items():
        if name in meta and meta[name] != value:
            raise RunError(
                f"{path}: this run began with {name.replace('_', ' ')} {meta[name]}, but now it is {value}: restore it,"
                " or start a new run in another directory"
            )
    return meta
