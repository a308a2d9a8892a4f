"""Translates task settings that earlier versions stored.

They wrote the keys of every kind of source and reward into ``config.json``, with their defaults if they belonged to
another kind. A user's own file is never translated: a key of another kind is a mistake there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rollover.environments.rewards import RewardConfig
from rollover.settings.schema import field_names, kinds
from rollover.tasks.sources import SourceConfig

_UNSET: tuple[Any, ...] = (None, {}, "whole")
"""The defaults that keys of other kinds were stored with."""


def without_keys_of_other_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop from a stored run config the keys of its sources and rewards that belong to other kinds.

    Example: ``{"kind": "jsonl", "path": "a.jsonl", "dataset": None, "config": {}}`` becomes ``{"kind": "jsonl",
    "path": "a.jsonl"}``.
    """
    translated = copy.deepcopy(dict(config))
    tasks, warmup = _table(translated.get("tasks")), _table(translated.get("sft"))
    for sources in (tasks.get("train"), tasks.get("eval"), warmup.get("sources")):
        for source in map(_table, sources if isinstance(sources, list) else ()):
            _keep_own(source, SourceConfig)
            _keep_own(_table(source.get("reward")), RewardConfig)
    return translated


def _keep_own(table: dict[str, Any], union: Any) -> None:
    own = field_names([kinds(union).get(table.get("kind", ""))])
    for key in [key for key, value in table.items() if value in _UNSET and own and key not in own]:
        del table[key]
    if table.get("extract", "") is None:  # once the way to say "tag"
        del table["extract"]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
