"""Whether the datasets of a run are still those it began with.

A cursor is a number of prompts drawn: over other rows it means something else, and nothing would show. So a run keeps a
fingerprint of each dataset, and compares it when it is resumed. That of a file is its content (see ``data_file.py``).
That of a dataset of the hub or a saved folder is the number of rows and a hash of a few hundred of them, so that
another version of the library or a new download of the same rows is no change. When a file was written is told and
never decides. What reasoning-gym generates depends on the config and the library's version, and is not compared.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rollover.errors import DataError
from rollover.tasks.config import SourceConfig, TasksConfig
from rollover.tasks.data_file import DataFile
from rollover.tasks.rows import dataset_file, open_rows

_NUM_ROWS = 256

Fingerprint = dict[str, Any]
"""JSON: ``path``, ``size``, ``unit`` of the size, ``sha256`` and, of a file, when it was ``written``."""


def same_datasets(config: TasksConfig, recorded: Mapping[str, Fingerprint] | None) -> dict[str, Fingerprint]:
    """The fingerprints of all datasets of a run, which are those ``recorded`` when it began (``None``: it begins now,
    or began before they were recorded).

    Raises:
        DataError: a dataset is missing, or is not the recorded one.
    """
    roles = (("train", config.train), ("eval", config.eval))
    datasets = {f"{role}/{s.name}": s for role, sources in roles for s in sources if s.kind != "reasoning_gym"}
    return {name: _same(source, (recorded or {}).get(name), name) for name, source in datasets.items()}


def fingerprint(source: SourceConfig) -> Fingerprint:
    """What the dataset of ``source`` is now. Raises ``DataError`` when it cannot be read."""
    if source.kind == "hf":
        return _fingerprint_of_rows(source)
    file = DataFile(dataset_file(source))
    written = datetime.datetime.fromtimestamp(file.written_s).astimezone()
    return {
        "path": str(file.path),
        "size": file.content.size,
        "unit": "bytes",
        "sha256": file.content.sha256,
        "written": written.isoformat(timespec="seconds"),
    }


def _same(source: SourceConfig, before: Fingerprint | None, name: str) -> Fingerprint:
    mend = f"put the one that the run began with back, give its new path on --resume, or start a new run ({name})"
    try:
        now = fingerprint(source)
    except DataError as error:
        if before is None:
            raise
        raise DataError(f"a dataset of this run is gone: {str(error).partition(';')[0]}; {mend}") from None
    if before is None or (before["size"], before["sha256"]) == (now["size"], now["sha256"]):
        return before or now
    change = f"{before['size']} {before['unit']} then, {now['size']} now"
    if before["size"] == now["size"]:
        change = f"{now['size']} {now['unit']} as before, with other content"
    written = f", written {now['written']}" if "written" in now else ""
    raise DataError(
        f"{source.path} has changed since the run began ({change}{written}), so its rows are no longer those that the"
        f" run has counted; {mend}"
    )


def _fingerprint_of_rows(source: SourceConfig) -> Fingerprint:
    rows = open_rows(source)
    num_rows = len(rows)
    num_taken = min(_NUM_ROWS, num_rows)
    digest = hashlib.sha256()
    for place in range(num_taken):
        row = rows[(num_rows - 1) * place // max(1, num_taken - 1)]
        # Of what is no JSON (an image, say) its type stands for it: it has no other lasting form.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return {"path": str(source.path), "size": num_rows, "unit": "rows", "sha256": digest.hexdigest()}
