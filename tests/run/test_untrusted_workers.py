"""Runs whose workers lie, with real sockets and real weights: who lies is found, and what it has sampled and nobody has
trained is dropped and counted."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover import cli
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.launch import free_port
from rollover.errors import RolloverError
from rollover.rollout.events import GroupDropped
from rollover.run.engine_trust import MIN_TOKENS
from rollover.swarm.coordinator.status.snapshot import StatusFile
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker import joining
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import Refused
from rollover.types import WasteCause
from tests import runs
from tests.swarm import liars
from tests.swarm.liars import Liar, lying

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
STEPS = 8
ENGINE = EmbeddedConfig(max_running=6, max_context_tokens=80, kv_cache_bytes=2**22, stream_interval_tokens=2)
OUT = Path("out")


class Workers:
    """Joins workers to the run in ``OUT`` as soon as it listens; the one that is called ``liar`` lies."""

    def __init__(self, port: int, names: tuple[str, ...]) -> None:
        self._address = CoordinatorAddress.parse(f"ws://127.0.0.1:{port}")
        self._names = names
        self.endings: dict[str, RolloverError | None] = {}

    def run(self) -> None:
        """Work until each worker has ended."""
        give_up_s = time.monotonic() + DEADLINE_S
        while not (OUT / "swarm" / "publisher.key").exists() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        asyncio.run(self._all())

    async def _all(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(self._one(name) for name in self._names))

    async def _one(self, name: str) -> None:
        key = open_key(OUT / "swarm" / "publisher.key").public_key()
        token = Credentials(OUT / "swarm" / "workers.json").add(name, key)
        config, cache = WorkerConfig(engine=ENGINE), Path(f"cache-{name}")
        stops: list[Any] = []
        try:
            await joining.work_for(self._address, token, config, cache, None, "test", lambda line: None, stops.append)
        except Refused as e:
            self.endings[name] = e
        else:
            self.endings[name] = None


@contextmanager
def working(port: int, names: tuple[str, ...]) -> Iterator[Workers]:
    workers = Workers(port, names)
    thread = threading.Thread(target=workers.run)
    thread.start()
    try:
        yield workers
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Liar]], None]:
    """Say how the worker lies that is called so."""
    honest = joining.opener

    def set_kind(kind: type[Liar]) -> None:
        def opener(config: WorkerConfig, *, name: str, logs: Path) -> Any:
            open_on = honest(config, name=name, logs=logs)
            return lying(kind, open_on) if name == "worker-liar" else open_on

        monkeypatch.setattr(joining, "opener", opener)

    return set_kind


def train(port: int, *args: str) -> int:
    engine = ["--engine.kind", "swarm", "--engine.listen", f"127.0.0.1:{port}", "--engine.lease_s", "4"]
    engine += ["--engine.max_running", "24"]
    rollout = ["--rollout.strategy", "bounded_async", "--rollout.max_staleness", "2", "--rollout.max_new_tokens", "30"]
    rollout += ["--rollout.group_size", "8", "--trainer.learning_rate", "3e-4"]
    toml = Path("run.toml").read_text()
    start, end = toml.index("[engine]"), toml.index("[trainer]")
    Path("swarm.toml").write_text(toml[:start] + toml[end:])
    return cli.main(["train", "swarm.toml", "--run-dir", "out", "--steps", str(STEPS), *engine, *rollout, *args])


def sampled_by(batch: Any) -> set[str]:
    return {s.engine for t in batch.trajectories for s in t.segments if s.token_ids}


def assert_the_liar_is_out(workers: Workers, says: str) -> None:
    """Nothing of it is trained from a batch on, and honest workers have stayed to the end."""
    assert "is not trusted any more" in str(workers.endings["liar"]) and says in str(workers.endings["liar"])
    assert all(ending is None for name, ending in workers.endings.items() if name != "liar")
    members = {w.name: w for w in StatusFile(OUT / "swarm" / "status.json").read().workers}
    assert members["liar"].state == "sent away" and says in members["liar"].note
    assert all(member.state == "away" for name, member in members.items() if name != "liar")
    batches = runs.batches(OUT)
    assert len(batches) == STEPS and "liar" not in sampled_by(batches[-1])
    ledger = runs.ledger(OUT)
    assert not any(
        segment.engine == "liar" and segment.token_ids
        for group in ledger.unconsumed()
        for sample in group.samples
        for segment in sample.segments
    )
    counted = ledger.tokens
    assert counted.decoded == counted.trained + counted.live + sum(counted.wasted.values())
    drops = [e for e in runs.events(OUT) if isinstance(e, GroupDropped) and e.cause is WasteCause.UNTRUSTED_ENGINE]
    assert bool(drops) == (counted.wasted[WasteCause.UNTRUSTED_ENGINE] > 0), "it may have been found between two groups"


@pytest.mark.parametrize("honest", [("anna",), ("anna", "bert")])
def test_tokens_that_no_log_prob_gives_away_are_found_by_decoding_them_again(
    honest: tuple[str, ...], experiment: Path, lies: Callable[[type[Liar]], None]
) -> None:
    """With one honest worker the trainer says who has lied, with two either it or the second."""
    torch.set_num_threads(1)
    lies(liars.AlteredTokens)
    port = free_port()
    with working(port, (*honest, "liar")) as workers:
        assert train(port, "--engine.reexecute", "1.0") == 0
    assert_the_liar_is_out(workers, "it does not sample what its seeds and weights make")
    rows = runs.rows(OUT)
    assert sum(row.get("engine/reexecuted_tokens", 0) for row in rows) > 0


@pytest.mark.parametrize("kind", [liars.InventedLogprobs, liars.Int8])
def test_log_probs_that_are_not_true_are_found_within_a_batch(
    kind: type[Liar], experiment: Path, lies: Callable[[type[Liar]], None]
) -> None:
    torch.set_num_threads(1)
    lies(kind)
    port = free_port()
    with working(port, ("anna", "liar")) as workers:
        assert train(port, "--engine.reexecute", "0") == 0
    assert_the_liar_is_out(workers, "nats from the trainer's on average")
    assert "the operator of this worker must make sure" in str(workers.endings["liar"])
    told = [i for i, row in enumerate(runs.rows(OUT)) if "drift/liar" in row]
    batches = runs.batches(OUT)
    enough = [
        batch.step
        for batch in batches
        if sum(
            len(s.token_ids)
            for t in batch.trajectories
            for s in t.segments
            if s.engine == "liar" and s.policy_version == batch.step
        )
        >= MIN_TOKENS
    ]
    assert enough and told
    assert all("liar" not in sampled_by(batch) for batch in batches if batch.step > enough[0])
