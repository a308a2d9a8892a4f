"""Builds the config of a run from files, which may extend others, from overrides, and from the config of another
run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from shlex import quote
from typing import Any

from rollover.errors import ConfigError, nearest
from rollover.run.config import RunConfig
from rollover.run.sections import ModelConfig
from rollover.settings import toml
from rollover.settings.overrides import parse_overrides
from rollover.settings.plain import resolved
from rollover.settings.schema import build, in_full, kind_at, with_kinds
from rollover.settings.shape import at_key

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
"""The packaged experiments, each ``NAME.toml``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SettingsLayer:
    """Settings that replace the settings of a user's file, and where they come from."""

    name: str
    """The file that they come from, for messages."""
    settings: Mapping[str, Any]


def build_config(config: str | Path, overrides: Sequence[str] = (), layer: SettingsLayer | None = None) -> RunConfig:
    """Load a TOML file or a packaged experiment, with ``--section.key value`` overrides applied.

    A file may begin with ``extends = "..."``, another file (relative to its own folder) or a packaged experiment, and
    then contains only the differences.

    Args:
        layer: settings that replace the file's; overrides replace both.

    Raises ``ConfigError`` listing every mistake with its line.

    Examples:
        >>> build_config("quickstart", ["--steps", "5"]).steps
        5
    """
    document = _read(find(config), str(config), ())
    if layer is not None:
        document = _laid_over(document, layer)
    loaded = build(RunConfig, document, parse_overrides(overrides))
    for name in loaded.variants:
        _build_variant(loaded, name, document)
    return loaded


def _read(file: Path, name: str, extending: tuple[Path, ...]) -> toml.Document:
    """Read a file together with the file that it extends."""
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
    extending = (*extending, file.resolve())
    if below.resolve() in extending:
        raise ConfigError(f"{where}: {base} extends this file in turn; break the cycle")
    extended = _read(below, str(below), extending)
    inherited = with_kinds(RunConfig, extended.data)
    merged = _merged(inherited, data)
    inner = extended.lines.keys() - document.lines.keys()
    kept = [path for path in inner if reduce(at_key, path, merged) == reduce(at_key, path, inherited)]
    return toml.Document(
        name=document.name,
        data=merged,
        lines={**document.lines, **{path: extended.lines[path] for path in kept}},
        files={path: extended.files.get(path, extended.name) for path in kept},
    )


def written_kind(config: str | Path, overrides: Sequence[str], section: str) -> str:
    """Return the ``kind`` of a section of a user's file, which need not be valid otherwise."""
    return kind_at(RunConfig, _read(find(config), str(config), ()), parse_overrides(overrides), (section,))


def replaced(config: str | Path, overrides: Sequence[str], layer: SettingsLayer) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that a user's file, or a file that it extends, sets otherwise than ``layer``, with both values;
    not the keys that an override sets in any case.
    """
    data = _read(find(config), str(config), ()).data
    given = [in_full(RunConfig, override).path for override in parse_overrides(overrides)]
    for path, new in _leaves(layer.settings):
        old: Any = data
        for key in path:
            old = old.get(key) if isinstance(old, Mapping) else None
        if isinstance(old, Mapping) and not isinstance(new, Mapping):
            old = old.get("kind")
        if old is not None and old != new and path not in given and (*path, "kind") not in given:
            yield toml.dotted(path), old, new


def _laid_over(document: toml.Document, layer: SettingsLayer) -> toml.Document:
    """Replace the settings of a file by a layer's, and remember which of them are no longer the file's."""
    said: dict[toml.KeyPath, str] = {}
    lines = dict(document.lines)
    for path, value in _leaves(layer.settings):
        text = toml.literal(value)
        said[path] = f"{layer.name} sets {toml.dotted(path)}" + (f" = {text}" if len(text) <= _LONGEST_SHOWN else "")
        for line in document.lines:
            inside = line[: len(path)] == path
            # A strategy keeps the file's other keys if the layer names the same kind.
            if inside and (isinstance(value, list) or line[len(path) :] in ((), ("kind",))):
                del lines[line]
    data = _merged(with_kinds(RunConfig, document.data), layer.settings)
    return toml.Document(name=document.name, data=data, lines=lines, files=document.files, laid_over=said)


_LONGEST_SHOWN = 60
"""Characters up to which a message repeats the value of a layer."""


def _leaves(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each setting in nested tables; lists are values."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def variant(config: RunConfig, name: str, *, model: Path) -> RunConfig:
    """Return the config of the variant ``name``, which starts from the policy in ``model``."""
    made = _build_variant(config, name, toml.Document(name=f"variants.{name}", data={}))
    return dataclasses.replace(made, model=ModelConfig(path=str(model)), sft=None)


def _build_variant(config: RunConfig, name: str, written: toml.Document) -> RunConfig:
    """Build the variant ``name``; messages refer to ``written``."""
    data = _merged({**resolved(config), "variants": {}}, config.variants[name])
    head = ("variants", name)
    lines = {path[2:]: line for path, line in written.lines.items() if path[:2] == head and path != head}
    files = {path[2:]: file for path, file in written.files.items() if path[:2] == head}
    return build(RunConfig, toml.Document(name=written.name, data=data, lines=lines, files=files))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge table by table; a table whose ``kind`` changes inherits nothing. A string in place of a table is its
    kind."""
    merged = dict(base)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and "kind" in old and isinstance(change, str):
            change = {"kind": change}
        elif isinstance(old, str) and isinstance(change, Mapping):
            old = {"kind": old}
        if isinstance(old, Mapping) and isinstance(change, Mapping) and change.get("kind") in (None, old.get("kind")):
            merged[key] = _merged(old, change)
        else:
            merged[key] = change
    return merged


def restore(data: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Invert ``resolved`` and apply overrides; ``source`` names the data in messages. Raises ``ConfigError`` naming the
    keys that this version does not have, if another version stored them."""
    return build(RunConfig, toml.Document(name=source, data=dict(data)), parse_overrides(overrides))


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
        raise ConfigError(f"{config} is a directory; to resume a run: rollover train --resume {quote(str(config))}")
    packaged = {file.stem: file for file in EXPERIMENTS.glob("*.toml")}
    if str(config) not in packaged:
        hint = nearest(str(config), packaged)
        raise ConfigError(f"{config}: neither a .toml file nor a packaged experiment{hint}")
    return packaged[str(config)]
