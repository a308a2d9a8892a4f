"""Builds the config of a run from files, which may extend others, from overrides, and from the config of another
run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollover.errors import ConfigError, nearest
from rollover.rollout.old_config import upgraded
from rollover.run.config import RunConfig
from rollover.run.sections import ModelConfig
from rollover.settings import toml
from rollover.settings.plain import resolved
from rollover.settings.schema import build, parse_overrides
from rollover.tasks.old_config import without_keys_of_other_kinds

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
"""The packaged experiments, each ``NAME.toml``."""


def load(config: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file or a packaged experiment, with ``--section.key value`` overrides applied.

    A file may begin with ``extends = "..."``, another file (relative to its own folder) or a packaged experiment, and
    then contains only the differences.

    Raises ``ConfigError`` listing every mistake with its line.

    Examples:
        >>> load("quickstart", ["--steps", "5"]).steps
        5
    """
    document = _read(find(config), str(config), ())
    loaded = build(RunConfig, document, parse_overrides(overrides))
    for name in loaded.variants:
        _build_variant(loaded, name, document)
    return loaded


def _read(file: Path, name: str, extending: tuple[Path, ...]) -> toml.Document:
    """Read a file together with the one that it extends; line numbers are those of ``file`` itself."""
    document = toml.read(file, file.name if file.parent == EXPERIMENTS else name)
    if "extends" not in document.data:
        return document
    data = dict(document.data)
    base = data.pop("extends")
    where = f"{document.name}:{document.lines.get(('extends',), 1)}: extends"
    if not isinstance(base, str):
        raise ConfigError(f"{where}: must be the name of a file or experiment, got {base!r}")
    beside = file.parent / base
    below = find(beside if beside.is_file() else base)
    if below in (*extending, file):
        raise ConfigError(f"{where}: {base} extends this file in turn; break the cycle")
    inherited = _read(below, str(below), (*extending, file))
    return toml.Document(name=document.name, data=_merged(inherited.data, data), lines=document.lines)


def variant(config: RunConfig, name: str, *, model: Path) -> RunConfig:
    """Return the config of the variant ``name``, which starts from the policy in ``model``."""
    made = _build_variant(config, name, toml.Document(name=f"variants.{name}", data={}))
    return dataclasses.replace(made, model=ModelConfig(path=str(model)), sft=None)


def _build_variant(config: RunConfig, name: str, written: toml.Document) -> RunConfig:
    """Build the variant ``name``; messages refer to ``written``."""
    data = _merged({**resolved(config), "variants": {}}, config.variants[name])
    head = ("variants", name)
    lines = {path[2:]: line for path, line in written.lines.items() if path[:2] == head and path != head}
    return build(RunConfig, toml.Document(name=written.name, data=data, lines=lines))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge table by table; a table whose ``kind`` changes inherits nothing. A string in place of a table is its
    kind."""
    merged = dict(base)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(change, str):
            change = {"kind": change}
        elif isinstance(old, str) and isinstance(change, Mapping):
            old = {"kind": old}
        if isinstance(old, Mapping) and isinstance(change, Mapping) and change.get("kind") in (None, old.get("kind")):
            merged[key] = _merged(old, change)
        else:
            merged[key] = change
    return merged


def restore(data: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Invert ``resolved`` and apply overrides; ``source`` names the data in messages. Configs stored by earlier
    versions are accepted."""
    stored = _upgraded(without_keys_of_other_kinds(data))
    stored["variants"] = {name: _upgraded(changes) for name, changes in (stored.get("variants") or {}).items()}
    return build(RunConfig, toml.Document(name=source, data=stored), parse_overrides(overrides))


def _upgraded(stored: Mapping[str, Any]) -> dict[str, Any]:
    rollout = stored.get("rollout")
    return {**stored, "rollout": upgraded(rollout)} if isinstance(rollout, Mapping) else dict(stored)


def find(config: str | Path) -> Path:
    """Return the file that ``config`` names: a path, or a packaged experiment without ``.toml``."""
    path = Path(config)
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except OSError as error:
        raise ConfigError(f"{config}: cannot be accessed: {error.strerror}") from None
    if path.suffix == ".toml" or is_file:
        return path
    if is_dir:
        raise ConfigError(f"{config} is a directory; to resume a run: rollover train --resume {config}")
    packaged = {file.stem: file for file in EXPERIMENTS.glob("*.toml")}
    if str(config) not in packaged:
        hint = nearest(str(config), packaged)
        raise ConfigError(f"{config}: neither a .toml file nor a packaged experiment{hint}")
    return packaged[str(config)]
