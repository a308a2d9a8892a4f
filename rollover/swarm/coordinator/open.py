"""Opens the trainer's side of a swarm in a run's folder.

::

    root/workers.json         hashes of the workers' tokens
    root/sent_away.json       workers that were sent away for good, and why
    root/publisher.key        the publisher's private key
    root/publications.json    what can be fetched, with root/blobs/
    root/status.json          the members as they are now
    root/weights.jsonl        what publications, and members' changes to them, took
    root/epoch                how often the run was started
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollover.clock import Clock
from rollover.errors import ConfigError, EngineError, RunError
from rollover.hf.architecture import Architecture
from rollover.hf.weights import number_format, read_weight_infos
from rollover.swarm.config import SwarmConfig
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.gateway import Gateway
from rollover.swarm.coordinator.machine.coordinator import Coordinator
from rollover.swarm.coordinator.machine.members import RunIdentity
from rollover.swarm.coordinator.status.board import StatusBoard
from rollover.swarm.coordinator.status.pages.listener import AdminListener
from rollover.swarm.coordinator.trust import Blocklist, Credentials
from rollover.swarm.publication.blobs import replace_file
from rollover.swarm.publication.publisher import SwarmPublisher
from rollover.swarm.wire.messages import Head
from rollover.weights.base import WeightSource


async def open_swarm(
    config: SwarmConfig,
    folder: Path,
    *,
    root: Path,
    run: str,
    max_context_tokens: int,
    keep_versions: int,
    clock: Clock,
    checks: bool = True,
    returns_kept: bool = False,
    returns_routes: bool = False,
) -> SwarmEngine:
    """Return an engine whose workers dial in once the first weights are published.

    Args:
        folder: the model folder that the run began with.
        root: the swarm's folder in the run directory.
        run: the run's name among all runs.
        max_context_tokens: of the longest prompt and response; workers with less are refused.
        keep_versions: publications that can be fetched.
        checks: members get calls only once their log-probs are found to be the trainer's.
        returns_kept: calls want the kept sets of their tokens; workers whose engine gives none are refused.
        returns_routes: calls want the routes of their tokens, likewise.

    Raises:
        ConfigError: the address is in use, or the certificate cannot be used.
    """
    root.mkdir(parents=True, exist_ok=True)
    epoch = _next_epoch(root / "epoch")
    publisher = await asyncio.to_thread(
        SwarmPublisher,
        root,
        run_id=run,
        run_epoch=epoch,
        model=folder,
        anchor_every=config.anchor_every,
        keep_versions=keep_versions,
    )
    identity = RunIdentity(
        run_id=run,
        run_epoch=epoch,
        vocab_size=Architecture.from_folder(folder).vocab_size,
        max_context_tokens=max_context_tokens,
        returns_kept=returns_kept,
        returns_routes=returns_routes,
    )
    credentials = Credentials(root / "workers.json")
    board = StatusBoard(root, run=root.parent.name, mode=config.mode)

    def publish(version: int, source: WeightSource) -> Head:
        published = publisher.publish(source)
        board.published(published)
        return published.head

    engine = SwarmEngine(
        config,
        _coordinator(config, identity, publisher, checks=checks),
        publish,
        clock,
        number_format=number_format(folder),
        check_source=_fits(folder),
        valid_tokens=credentials.hashes,
        board=board,
        blocklist=Blocklist(root),
    )
    engine.gateway = Gateway(config, engine.shell, member_of=credentials.member_of, blobs=root / "blobs")
    await _open_page(engine, config, board)
    return engine


def _coordinator(config: SwarmConfig, run: RunIdentity, publisher: SwarmPublisher, *, checks: bool) -> Coordinator:
    return Coordinator(
        run,
        Head(version=0, manifest=""),
        ttl_s=config.lease_s,
        exact=config.mode == "pull",
        checks=checks,
        blob_urls=config.blob_urls,
        earlier=[(kept.run_epoch, Head(version=kept.version, manifest=kept.manifest)) for kept in publisher.kept],
        secret=publisher.secret_for("rollover.swarm.samples.v1"),
    )


async def _open_page(engine: SwarmEngine, config: SwarmConfig, board: StatusBoard) -> None:
    """Serve the live page from now on, if the config wants it; the engine closes it."""
    if config.admin_address is None:
        return
    try:
        engine.admin = AdminListener(config.admin_address, board)
    except ConfigError:
        await engine.close()
        raise
    engine.admin.serve()
    board.page = engine.admin.url


def _fits(folder: Path) -> Callable[[WeightSource], None]:
    """Return the function that refuses weights of another model than the run's."""
    shapes = {name: info.shape for name, info in read_weight_infos(folder).items()}

    def check(source: WeightSource) -> None:
        given = {spec.name: spec.shape for spec in source.manifest.tensors}
        for name, shape in shapes.items():
            if given.get(name) != shape:
                raise EngineError(
                    f"the swarm: tensor {name!r} has the shape {given.get(name)}, but the model's has {shape}"
                )

    return check


def _next_epoch(file: Path) -> int:
    """Return how often the run was started, this time included, and remember it."""
    try:
        epoch = int(file.read_text()) + 1 if file.exists() else 1
    except ValueError:
        raise RunError(f"{file} does not hold a number; write into it how many times this run was started") from None
    replace_file(file, f"{epoch}\n".encode())
    return epoch
