"""The names of the files and folders of a run directory."""

from __future__ import annotations

CONFIG = "config.json"
BEGAN_WITH = "began_with.json"
JOURNAL = "journal.sqlite"
MODEL = "model"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
LOCK = "lock"

RUN_FILES = (
    *(CONFIG, "config.partial", BEGAN_WITH, "began_with.partial", LOCK),
    *(JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", "metrics.jsonl", "tensorboard", "wandb", REPORT, "logs"),
    *("judge.sqlite", "judge.sqlite-wal", "judge.sqlite-shm"),
    *(MODEL, "model-untrained", CHECKPOINTS, "weights", "staging", "swarm"),
)
"""All entries of a run directory. No variant may take one of these names for its own directory."""
