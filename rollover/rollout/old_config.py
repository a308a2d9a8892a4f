"""Converts ``[rollout]`` tables stored by earlier versions into today's form. It applies only to recorded runs: a
user's file is read as it is.

Before version 1 the options of all strategies stood next to the strategy's name: ``{"strategy": "april",
"over_sampling_batch_size": 64, "num_running": None, ...}``; the options of other strategies were unset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPTIONS = (
    *("over_sampling_batch_size", "drop_surplus", "num_running", "tokens_per_round", "staleness_threshold"),
    *("window_groups", "fast_lane_samples", "lag_target", "prefill_tokens_per_iteration"),
)


def upgraded(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with the options of its strategy in a table of their own.

    Example:
        ``upgraded({"strategy": "april", "over_sampling_batch_size": 64, "lag_target": None})`` is
        ``{"strategy": {"kind": "april", "over_sampling_batch_size": 64}}``.
    """
    table = {key: value for key, value in rollout.items() if key not in _OPTIONS}
    options = {key: value for key in _OPTIONS if (value := rollout.get(key)) is not None and value is not False}
    strategy = table.get("strategy")
    if isinstance(strategy, str):
        table["strategy"] = {"kind": strategy, **options}
    elif options:
        table["strategy"] = {**(strategy or {}), **options}
    return table
