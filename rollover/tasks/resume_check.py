"""Checks that a run still has the datasets that it began with.

A cursor is a number of prompts drawn: with other rows it would mean something else, and nothing would show it. So a run
keeps a fingerprint of each dataset and compares it when it is resumed. The time at which a file was written appears in
messages but decides nothing. The items of reasoning-gym depend on the config and the library's version, and are not
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.fingerprint import DataFile, Fingerprint


def same_datasets(config: TasksConfig, recorded: Mapping[str, Fingerprint] | None) -> dict[str, Fingerprint]:
    """Return the fingerprints of all datasets of a run, which must be those ``recorded`` when it began (``None`` if it
    begins now, or began before they were recorded).

    Raises:
        DataError: a dataset is missing, or is not the recorded one.
    """
    fingerprints: dict[str, Callable[[], Fingerprint | None]]
    roles = (("train", config.train), ("eval", config.eval))
    datasets = {f"{role}/{source.name}": source for role, sources in roles for source in sources}
    fingerprints = {name: source.fingerprint for name, source in datasets.items()}
    if config.chat_template_file is not None:
        fingerprints["chat_template"] = DataFile(Path(config.chat_template_file)).fingerprint
    now = {name: _same(take, (recorded or {}).get(name), name) for name, take in fingerprints.items()}
    return {name: found for name, found in now.items() if found is not None}


def _same(take: Callable[[], Fingerprint | None], before: Fingerprint | None, name: str) -> Fingerprint | None:
    mend = f"restore the original dataset, give its new path on --resume, or start a new run ({name})"
    try:
        now = take()
    except DataError as error:
        if before is None:
            raise
        raise DataError(f"a dataset of this run is missing: {str(error).partition(';')[0]}; {mend}") from None
    if before is None or now is None or (before["size"], before["sha256"]) == (now["size"], now["sha256"]):
        return before or now
    change = f"{before['size']} {before['unit']} then, {now['size']} now"
    if before["size"] == now["size"]:
        change = f"{now['size']} {now['unit']} as before, with other content"
    written = f", written {now['written']}" if "written" in now else ""
    raise DataError(
        f"{now['path']} has changed since the run began ({change}{written}), so its rows are no longer those that the"
        f" run has counted; {mend}"
    )
