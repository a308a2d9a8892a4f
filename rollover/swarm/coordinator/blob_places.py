"""The places beside the trainer where workers find blobs: relays, and an object store that gets copies of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig
from rollover.swarm.publication.blobs import BlobFolder
from rollover.swarm.publication.object_store import BlobMirror, ObjectStore


def check_blobs(config: SwarmConfig, *, writes: bool) -> list[str]:
    """Find out whether workers will find blobs where the config says; return what a user should know.

    Args:
        writes: an object is put into the store and deleted; without, only asked for.

    Raises ``ConfigError`` when the object store refuses, or the variable of ``blob_query_env`` is not set.
    """
    blob_urls(config, os.environ)
    if config.blob_store is None:
        return []
    ObjectStore(config.blob_store).check(writes=writes)
    lines = [f"weights are copied to {config.blob_store}"]
    if not config.blob_urls:
        lines.append(f"warning: no worker fetches from {config.blob_store}: name its URL in engine.blob_urls")
    return lines


def blob_urls(config: SwarmConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the places where workers fetch first, with the query that the environment holds for them.

    Raises ``ConfigError`` when it holds none.

    Example: ``("https://weights.example/run-7?sig=x",)``
    """
    if config.blob_query_env is None:
        return config.blob_urls
    query = environ.get(config.blob_query_env, "").removeprefix("?")
    if not query or any(c.isspace() or c == "#" for c in query):
        raise ConfigError(
            f"engine.blob_query_env = {config.blob_query_env!r}: that environment variable holds no query for"
            " engine.blob_urls, such as 'sv=2026&sig=...'"
        )
    return tuple(f"{url}?{query}" for url in config.blob_urls)


def open_mirror(config: SwarmConfig, root: Path) -> BlobMirror | None:
    """Open the mirror that keeps the object store up to date with the blobs in ``root``, the swarm's folder; return
    ``None`` without a store.

    Raises ``ConfigError`` when it cannot be opened.
    """
    if config.blob_store is None:
        return None
    return BlobMirror(ObjectStore(config.blob_store), BlobFolder(root / "blobs"), root / "uploaded.json")
