"""The kinds of engine. A new kind is a folder and a row of ``ENGINES``. Importing this module needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, Union

from rollover.engine.config import EngineConfig
from rollover.engine.embedded.kind import EMBEDDED
from rollover.engine.kind import EngineKind, EngineSetup, OpenedEngine
from rollover.engine.servers.kind import EMBEDDED_SERVERS, SGLANG, VLLM
from rollover.settings.shape import kinds
from rollover.swarm.kind import SWARM

_KINDS = (
    EMBEDDED,
    VLLM,
    SGLANG,
    EMBEDDED_SERVERS,
    SWARM,
)

if TYPE_CHECKING:
    AnyEngineConfig: TypeAlias = EngineConfig
else:
    AnyEngineConfig = Union[tuple(kind.config for kind in _KINDS)]  # noqa: UP007
"""Configs are told apart by ``kind``; the first is used when it is left out."""

ENGINES: Mapping[str, EngineKind] = dict(zip(kinds(AnyEngineConfig), _KINDS, strict=True))
"""The kinds of engine, by the ``kind`` of their configs."""


async def open_engine(config: EngineConfig, setup: EngineSetup) -> OpenedEngine:
    """Open the engine. Raises ``RolloverError`` when it cannot be opened; the message says what to change."""
    assert not setup.lockstep or config.declared.deterministic, "the config refuses deterministic = true with it"
    from rollover.hf.raw_tensors import untied
    from rollover.weights.folders import WeightFolders

    kind, name = ENGINES[config.kind], setup.weights_name
    if name is None or (root := config.weights_root(setup.root / "weights", name)) is None:
        return await kind.open(config, setup)
    folder = untied(setup.folder, root / "initial") if config.unties_first else setup.folder
    folders = WeightFolders(root, like=folder)
    return replace(await kind.open(config, replace(setup, folder=folder)), folders=folders)
