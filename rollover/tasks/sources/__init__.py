"""The kinds of task source, one file each. A new kind is one file and one row of ``SourceConfig``."""

from __future__ import annotations

from rollover.tasks.sources.generated import GeneratedConfig
from rollover.tasks.sources.hub import HubConfig
from rollover.tasks.sources.jsonl import JsonlConfig
from rollover.tasks.sources.parquet import ParquetConfig
from rollover.tasks.sources.reasoning_gym import ReasoningGymConfig

SourceConfig = (
    ReasoningGymConfig  #
    | JsonlConfig
    | ParquetConfig
    | HubConfig
    | GeneratedConfig
)
"""Distinguished by ``kind``."""
