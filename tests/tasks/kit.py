"""Files of rows, and the sources that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollover.environments.rewards import ExactConfig
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import train_source
from rollover.tasks.prompt_source import PromptSource
from rollover.tasks.sources import JsonlConfig, SourceConfig
from tests.environments.words import char_tokenizer

EXACT = ExactConfig(workers=0)


def jsonl(path: Path, *rows: dict[str, Any] | str | bytes, **fields: Any) -> JsonlConfig:
    """Write rows, or the lines themselves, into a file; return the source that reads it."""
    lines = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return JsonlConfig(**{"name": "file", "path": str(path), "reward": EXACT, **fields})


def sums(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(count)]


def opened(*sources: SourceConfig, seed: int = 0, tokenizer: Any = None, **fields: Any) -> PromptSource:
    return train_source(TasksConfig(train=sources, **fields), tokenizer or char_tokenizer(), seed=seed)
