"""Find a model by its folder or by its id on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from rollover.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SNAPSHOT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def resolve_model(name: str | Path, *, weights: bool = True) -> Path:
    """Return the local folder of a model. One given by hub id is downloaded, with its weights unless told not to.

    Raises ``ModelError`` when there is neither a folder nor a reachable repository of that name.
    """
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:  # a path that no file system accepts, or the home of an unknown user
        raise ModelError(f"model folder {str(name)!r} cannot be accessed: {error}") from None
    if not _HUB_ID.fullmatch(str(name)):
        raise ModelError(
            f"model folder {str(name)!r} does not exist; give a folder with config.json or a hub id (--model.path)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=_SNAPSHOT_FILES + ["*.safetensors"] * weights))
    except Exception as error:  # the hub client's errors share no base class with the errors of its HTTP library
        raise ModelError(
            f"model {str(name)!r} is not a folder here and could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the connection, or give a local folder (--model.path)"
        ) from error


def located(name: str) -> str:
    """Return the name of a model as it is read from any working directory: a folder by its whole path."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def public_name(folder: Path) -> str:
    """Return the hub id of a folder in the hub's cache, else the folder's name: never a path of this machine.

    Example: ``public_name(Path(".../models--Qwen--Qwen3-0.6B/snapshots/c1899de"))`` is ``"Qwen/Qwen3-0.6B"``.
    """
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.resolve().name
