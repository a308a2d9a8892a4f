"""Takes the fingerprint of a dataset, by which another can be told from it.

That of a file is its content (see ``data_file.py``). That of a dataset of the hub or a saved folder is the number of
rows and a hash of a few hundred of them, so that another version of the library or a new download of the same rows is
no change.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

from rollover.tasks.data_file import DataFile
from rollover.tasks.rows import DatasetRows

_NUM_ROWS = 256

Fingerprint = dict[str, Any]
"""JSON: ``path``, ``size``, ``unit`` of the size, ``sha256`` and, of a file, when it was ``written``."""


def fingerprint_of_file(path: Path) -> Fingerprint:
    """Hash the content of a file. Raises ``DataError`` when it cannot be read."""
    file = DataFile(path)
    written = datetime.datetime.fromtimestamp(file.written_s).astimezone()
    return {
        "path": str(file.path),
        "size": file.content.size,
        "unit": "bytes",
        "sha256": file.content.sha256,
        "written": written.isoformat(timespec="seconds"),
    }


def fingerprint_of_rows(rows: DatasetRows, path: str) -> Fingerprint:
    """Hash the number of rows and up to 256 of them, spread evenly."""
    assert rows.num_rows is not None
    num_taken = min(_NUM_ROWS, rows.num_rows)
    digest = hashlib.sha256()
    for place in range(num_taken):
        row = rows[(rows.num_rows - 1) * place // max(1, num_taken - 1)]
        # Of what is no JSON (an image, say) its type stands for it: it has no other lasting form.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return {"path": path, "size": rows.num_rows, "unit": "rows", "sha256": digest.hexdigest()}
