"""Determines where a run inside slime begins: from scratch, from a checkpoint, or after a crash before the first one.

::

    SAVE/rollover/             the run's directory, as ``record`` describes it
        slime.json             which of slime's rollouts was the first, and the cursor at each checkpoint

The journal contains every group and batch; from slime itself only the position of its data source is needed. So a
checkpoint that slime wrote without being able to report it, because it was killed in between, is as good as any.

Invariants: batch ``s`` is slime's rollout ``first_rollout + s``; a run continues in the directory of
``--save``, and a directory of ``--load`` elsewhere is copied once and left as it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.errors import RunError, parse_json
from rollover.report.record import read_config
from rollover.run.directory import is_run, replace_json

FOLDER = "rollover"
"""The run's directory within slime's ``--save``."""
_FILE, _FORMAT = "slime.json", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeProgress:
    """The facts about a run that are not in its journal."""

    first_rollout: int = 0
    cursors: Mapping[int, int] = field(default_factory=dict)
    """Number of groups drawn, by the rollout after which slime saved."""

    def saved(self, rollout_id: int, cursor: int) -> SlimeProgress:
        """Return the progress after a checkpoint; entries of later rollouts, from before a restart, are dropped."""
        kept = {r: c for r, c in self.cursors.items() if r < rollout_id}
        return SlimeProgress(first_rollout=self.first_rollout, cursors={**kept, rollout_id: cursor})

    def step(self, rollout_id: int) -> int:
        """Return the batch that a rollout of slime's makes."""
        return rollout_id - self.first_rollout

    def oldest_step(self, num_kept: int) -> int:
        """Return how many batches the oldest of the last ``num_kept`` checkpoints includes: 0 while there are fewer."""
        kept = sorted(self.cursors)[-num_kept:]
        return self.step(kept[0]) + 1 if len(kept) == num_kept else 0

    def write(self, folder: Path) -> None:
        """Write the progress into a run's directory, completely or not at all."""
        cursors = {str(rollout_id): cursor for rollout_id, cursor in self.cursors.items()}
        replace_json(folder / _FILE, {"format": _FORMAT, "first_rollout": self.first_rollout, "cursors": cursors})

    @classmethod
    def read(cls, folder: Path) -> SlimeProgress | None:
        """Return the progress in a run's directory; ``None`` if there is no run. Raises ``RunError`` when it is damaged
        or of another format."""
        file = folder / _FILE
        if not file.exists():
            return None
        try:
            found: Any = parse_json(file.read_text(encoding="utf-8"))
            if found["format"] != _FORMAT:
                raise RunError(
                    f"{file} has format {found['format']}, and this version of Rollover reads {_FORMAT}: resume the run"
                    " with the version that wrote it, or begin a new one elsewhere"
                )
            cursors = {int(rollout_id): int(cursor) for rollout_id, cursor in found["cursors"].items()}
            return cls(first_rollout=int(found["first_rollout"]), cursors=cursors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{file} cannot be read ({error}); bring it back from a copy, or begin a new run elsewhere"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The place where a run resumes."""

    folder: Path | None
    """The run's directory; ``None`` when slime saves nothing."""
    progress: SlimeProgress
    step: int
    """Number of batches that slime's checkpoint includes."""
    restore: int | None
    """The rollout after which the data source's state was saved that is to be loaded; ``None`` for its start."""
    position: int
    """Number of groups that the data source had provided by then, as the journal counts them."""


def beginning(load: str | None, save: str | None, rollout_id: int) -> Beginning:
    """Return where a run begins, and copy its directory if it is to continue elsewhere. Raises ``RunError`` if the
    directory is damaged, or the directory of another run is in the way.

    Args:
        load: slime's ``--load``.
        save: slime's ``--save``. A run without it resumes with slime's prompts only.
        rollout_id: the last rollout that slime's checkpoint includes, -1 without a checkpoint.
    """
    folder = None if save is None else Path(save) / FOLDER
    source = None if folder is None else _find(load, folder, rollout_id)
    if source is None or (progress := SlimeProgress.read(source)) is None or rollout_id + 1 < progress.first_rollout:
        if folder is not None and SlimeProgress.read(folder) is not None:
            raise RunError(
                f"{folder} holds the rollouts of a different run, not the one that resumes after rollout {rollout_id}:"
                " move it away, or give this run another --save"
            )
        progress = SlimeProgress(first_rollout=rollout_id + 1)
        restore = rollout_id if rollout_id >= 0 else None
        return Beginning(folder=folder, progress=progress, step=0, restore=restore, position=0)
    assert folder is not None, "a run that is resumed has a directory"
    if folder != source:
        if folder.exists():
            raise RunError(
                f"{folder} holds the rollouts of another run than {source}, which is to be resumed: move it away, or"
                " give this run another --save"
            )
        part = folder.with_name(f".{FOLDER}.part")  # what a copy that was cut off has left is begun anew
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part, ignore=shutil.ignore_patterns("lock"))
        part.rename(folder)
    restore, position = progress.first_rollout - 1, 0
    for saved_behind, cursor in progress.cursors.items():
        if restore < saved_behind <= rollout_id:
            restore, position = saved_behind, cursor
    return Beginning(
        folder=folder,
        progress=progress,
        step=progress.step(rollout_id) + 1,
        restore=restore if restore >= 0 else None,
        position=position,
    )


def _find(load: str | None, folder: Path, rollout_id: int) -> Path | None:
    """Return the directory of the run to resume: ``folder`` if an earlier start of the run has made it, else the one of
    the checkpoint. A run that begins with rollout 0 takes only the weights from ``load``."""
    if load is None or rollout_id < 0 or not (loaded := Path(load) / FOLDER).exists():
        return folder if folder.exists() else None
    return folder if folder.exists() and _continues(folder, loaded, rollout_id) else loaded


def _continues(folder: Path, loaded: Path, rollout_id: int) -> bool:
    """Return whether ``folder`` has the run in ``loaded`` as it was after a rollout: it is the same, or its copy."""
    if folder.samefile(loaded):
        return True
    copy, original = SlimeProgress.read(folder), SlimeProgress.read(loaded)
    if copy is None or original is None or not (is_run(folder) and is_run(loaded)):
        return False
    began = [read_config(path)["meta"].get("started") for path in (folder, loaded)]
    passed = {(saved_behind, cursor) for saved_behind, cursor in original.cursors.items() if saved_behind <= rollout_id}
    return began[0] == began[1] and copy.first_rollout == original.first_rollout and passed <= set(copy.cursors.items())
