"""Checkpoints on disk: a folder is complete or it is not there.

Layout of ``step_<version>/``: an ordinary Hugging Face model folder (trainable and servable as it is), plus
``trainer/optimizer.safetensors`` (Adam's moments by parameter name, generator states; in a folder of its own, since
servers take every ``*.safetensors`` beside the model for weights) and ``trainer.json``, the manifest. Several ranks
write one file each in place of the model's and the optimizer's (``shares``); any number of ranks reads both layouts.
Nothing is pickled. A folder is written under a hidden name, flushed, and renamed, so a reader sees only finished ones.
The manifest contains a checksum of each file and of itself: a checkpoint is resumed exactly as it was written, or
refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rollover import locks
from rollover.errors import ModelError, parse_json

FORMAT_VERSION = 1
MANIFEST = "trainer.json"
OPTIMIZER = "trainer/optimizer.safetensors"

_NAME = re.compile(r"step_(\d+)")
_OWN_SUM = "sha256"
"""Key of the manifest's own checksum in its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The content of ``trainer.json``."""

    version: int
    """Batches trained: the ``policy_version`` of the weights."""
    identity: Mapping[str, Any]
    """Settings under which training can continue, by their keys."""
    num_threads: int
    """CPU threads of each process that wrote it; the bits of a sum depend on them."""
    num_ranks: int = 1
    """Number of processes that trained and wrote it; the bits depend on it too. Left out of the file if there was
    one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The caller's own JSON, such as a journal position."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every other file, by its path within the folder; none in folders that earlier versions wrote."""
    format_version: int = FORMAT_VERSION


def checkpoint_path(root: Path, version: int) -> Path:
    return root / f"step_{version}"


def list_checkpoints(root: Path) -> tuple[Path, ...]:
    """List the finished checkpoints under ``root``, oldest first."""
    if not root.is_dir():
        return ()
    found = [(int(m[1]), p) for p in root.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / MANIFEST).is_file()]
    return tuple(path for _, path in sorted(found))


def latest_checkpoint(root: Path) -> Path | None:
    return next(reversed(list_checkpoints(root)), None)


def prune_checkpoints(root: Path, keep_last: int, keep: Collection[int] = ()) -> None:
    """Delete all but the newest ``keep_last`` checkpoints and those after ``keep`` steps, and anything that a killed
    process left half written. A checkpoint that another process reads stays until the next time."""
    kept = {checkpoint_path(root, step) for step in keep}
    for path in list_checkpoints(root)[:-keep_last]:
        if path in kept:
            continue
        with locks.claimed(path / MANIFEST) as is_free:
            if is_free:
                path.rename(root / f".partial-{path.name}")  # NFS deletes no folder with an open file
    for path in root.glob(".partial-*"):
        shutil.rmtree(path)


class DamagedCheckpoint(ModelError):
    """A checkpoint that differs from what was written; the message says what the user can do about it."""

    oldest = 0.0
    """The version of the oldest checkpoint from which the run could be resumed; older ones may be kept as the best."""

    def __init__(self, folder: Path, damage: str) -> None:
        super().__init__(damage)
        self._folder = folder

    def __str__(self) -> str:
        return f"{super().__str__()}; {_doing_without(self._folder, self.oldest)}"


def _doing_without(folder: Path, oldest: float) -> str:
    """Return what the user can do about a damaged checkpoint: use the newest other checkpoint that is intact."""
    others = [path for path in reversed(list_checkpoints(folder.parent)) if path != folder]
    if not others:
        return "no other is left: restore it, or start a new run"
    damaged = [str(folder)]
    for path in others:
        if _is_whole(path):
            new = f"start a new run with --model.path {path}"
            if read_manifest(path).version < oldest:
                return f"no other that can be resumed is intact: restore one, or {new}"
            return f"delete {' and '.join(damaged)} to resume from {path.name}, or {new}"
        damaged.append(str(path))
    return "no other is intact: restore one, or start a new run"


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint. Raises ``ModelError`` when the folder is not a checkpoint of this format,
    ``DamagedCheckpoint`` when it was one."""
    path = folder / MANIFEST
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
        found = values["format_version"]
        if found != FORMAT_VERSION:
            raise ModelError(f"{path}: format version {found} cannot be read; this program reads {FORMAT_VERSION}")
        if values.pop(_OWN_SUM, None) != (_sum_of(values) if values.get("files") else None):
            raise DamagedCheckpoint(folder, f"{path} is damaged: its content has changed since it was written")
        return CheckpointManifest(**values)
    except FileNotFoundError as error:
        raise ModelError(f"{str(folder)!r} is not a checkpoint: it has no {MANIFEST}") from error
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        raise DamagedCheckpoint(folder, f"{path} is damaged ({error})") from error


def verify_files(folder: Path, manifest: CheckpointManifest) -> None:
    """Read every file that ``manifest`` names and compare it with its checksum: about 0.7 s per GB.

    Raises ``DamagedCheckpoint`` naming the first file that differs from what was written.
    """
    for name, written in manifest.files.items():
        try:
            found = sum_of_file(folder / name)
        except FileNotFoundError:
            raise DamagedCheckpoint(folder, f"{folder / name} is missing") from None
        if found != written:
            damage = f"{folder / name} is damaged: its SHA-256 is {found[:12]}..., not {written[:12]}... as written"
            raise DamagedCheckpoint(folder, damage)


def check_identity(folder: Path, manifest: CheckpointManifest, identity: Mapping[str, Any]) -> None:
    """Raise ``ModelError`` naming the first setting that differs from the checkpoint's. A setting that the checkpoint
    does not have was introduced after it, and is ignored."""
    wanted = json.loads(json.dumps(dict(identity)))
    for key in sorted(wanted.keys() & manifest.identity.keys()):
        if (old := manifest.identity[key]) != (new := wanted[key]):
            raise ModelError(
                f"checkpoint {str(folder)!r} was written with {key} = {old!r}, now it is {new!r}: "
                "restore the setting, or start a new run with what rollover export RUN FOLDER makes of it as its model"
            )


def write_manifest(folder: Path, manifest: CheckpointManifest, sums: Mapping[str, str] | None = None) -> None:
    """Write ``trainer.json``, the last file of a checkpoint, with the checksums of all others; ``sums`` has the
    checksums that are already known, by path within the folder."""
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    known = sums or {}
    files = {name: known[name] if name in known else sum_of_file(folder / name) for name in names}
    values = asdict(replace(manifest, files=files))
    if manifest.num_ranks == 1:
        del values["num_ranks"]
    values[_OWN_SUM] = _sum_of(values)
    (folder / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def optimizer_files(folder: Path) -> Sequence[Path]:
    """List the files of a checkpoint that hold the optimizer's state: one, or one from each rank that wrote it."""
    of_ranks = sorted((folder / OPTIMIZER).parent.glob("optimizer-*.safetensors"))
    return of_ranks or [folder / OPTIMIZER]


def _is_whole(folder: Path) -> bool:
    try:
        verify_files(folder, read_manifest(folder))
    except (ModelError, OSError):
        return False
    return True


def sum_of_file(path: Path, tick: Callable[[], object] = lambda: None) -> str:
    """Return the SHA-256 of a file; ``tick`` is called from time to time."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**26):
            found.update(piece)
            tick()
    return found.hexdigest()


def _sum_of(values: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest, computed without the checksum itself."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
