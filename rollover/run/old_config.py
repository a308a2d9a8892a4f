"""Converts the configs of runs that earlier versions recorded into today's form. A user's file is read as it is: there,
a removed key is unknown.

* Options of strategies: see ``rollout.old_config``.
* Sources and rewards were stored with the keys of every kind, at their defaults if they belonged to another kind.
* Settings of features that have been removed are dropped if the run does not need them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rollover.environments.rewards import RewardConfig
from rollover.rollout.old_config import upgraded as rollout_table
from rollover.settings.shape import field_names, kinds
from rollover.tasks.sources import SourceConfig

_UNSET: tuple[Any, ...] = (None, {}, "whole")
"""The defaults that keys of other kinds were stored with."""
_OFF: Mapping[str, Any] = {
    "transport": "websocket",
    "blob_store": None,
    "blob_query_env": None,
    "verifiable_only": False,
}
"""Removed settings of engines, with the value under which a run does not need them."""
_NO_EFFECT = {"engine": ("draft_rows", "reexecute"), "cluster": ("engine_lease_s",)}
"""Removed settings that never changed what was sampled or trained, by section."""


def upgraded(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config, or the changes that a variant makes to one, in today's form."""
    config = copy.deepcopy(dict(stored))
    for section, convert in (("rollout", rollout_table), ("engine", _engine), ("cluster", _cluster)):
        if isinstance(table := config.get(section), Mapping):
            config[section] = convert(table)
    _keep_own_keys(config)
    return config


def _engine(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without settings that the run does not need.

    Example: ``{"kind": "swarm", "transport": "websocket", "reexecute": 0.02}`` becomes ``{"kind": "swarm"}``; with
    ``"transport": "nats"`` the key stays, and is refused as an unknown one.
    """
    is_websocket = table.get("transport", "websocket") == "websocket"
    return {
        key: value
        for key, value in table.items()
        if not (
            key in _NO_EFFECT["engine"]
            or (key.startswith("nats_") and is_websocket)
            or (key in _OFF and value == _OFF[key])
        )
    }


def _cluster(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in _NO_EFFECT["cluster"]}


def _keep_own_keys(config: dict[str, Any]) -> None:
    """Drop from the sources and rewards of a config the keys that belong to other kinds.

    Example: the source ``{"kind": "jsonl", "path": "a.jsonl", "dataset": None, "config": {}}`` becomes ``{"kind":
    "jsonl", "path": "a.jsonl"}``.
    """
    tasks, warmup = _table(config.get("tasks")), _table(config.get("sft"))
    for sources in (tasks.get("train"), tasks.get("eval"), warmup.get("sources")):
        for source in map(_table, sources if isinstance(sources, list) else ()):
            _keep_own(source, SourceConfig)
            _keep_own(_table(source.get("reward")), RewardConfig)


def _keep_own(table: dict[str, Any], union: Any) -> None:
    own = field_names([kinds(union).get(table.get("kind", ""))])
    for key in [key for key, value in table.items() if value in _UNSET and own and key not in own]:
        del table[key]
    if table.get("extract", "") is None:  # once the way to say "tag"
        del table["extract"]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
