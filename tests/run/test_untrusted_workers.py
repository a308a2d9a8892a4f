"""Runs whose workers lie, with real sockets and real weights: who lies is found, and what it has sampled and nobody has
trained is dropped and counted."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover import cli
from rollover.batch import Batch, WasteCause
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.start.launch import free_port
from rollover.errors import RolloverError
from rollover.rollout.records import FAILED, GroupRecord
from rollover.run import worker
from rollover.run.engine_trust import MIN_TOKENS
from rollover.swarm.coordinator.status.snapshot import read_status
from rollover.swarm.coordinator.trust import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import Refused
from rollover.swarm.worker.joining import work_for
from tests import runs
from tests.swarm import liars
from tests.swarm.liars import Liar, lingering, lying

DEADLINE_S, GOODBYE_S = 300.0, 15.0
"""Seconds that a test may take, and that a worker may take to hear that the run has ended."""
STEPS = 16
ENGINE = EmbeddedConfig(max_running=6, max_context_tokens=80, kv_cache_bytes=2**22, stream_interval_tokens=2)
OUT = Path("out")
BY_DRIFT = "nats from the trainer's on average"
GROUPS_OF_8 = ("--rollout.group_size", "8")


class Workers:
    """Joins workers to the run in ``OUT`` as soon as it listens; the worker ``liar`` lies."""

    def __init__(self, port: int, names: tuple[str, ...], engine: EmbeddedConfig) -> None:
        self._address = CoordinatorAddress.parse(f"ws://127.0.0.1:{port}")
        self._names, self._engine = names, engine
        self.endings: dict[str, RolloverError | None] = {}
        self.stops: list[Callable[[str], None]] = []

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
        config, cache = WorkerConfig(engine=self._engine), Path(f"cache-{name}")
        say, started = (lambda line: None), self.stops.append
        open_on = worker.opener(config, name=name, root=cache)
        try:
            await work_for(self._address, token, config, open_on, cache, None, "test", say, started)
        except Refused as e:
            self.endings[name] = e
        else:
            self.endings[name] = None


@contextmanager
def working(port: int, names: tuple[str, ...], engine: EmbeddedConfig = ENGINE) -> Iterator[Workers]:
    workers = Workers(port, names, engine)
    thread = threading.Thread(target=workers.run)
    thread.start()
    try:
        yield workers
    finally:
        thread.join(GOODBYE_S)
        for stop in workers.stops:  # on a slow machine, one may have lost its connection shortly before the end
            stop("the run is over")
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Liar]], None]:
    """Say how the worker lies that is called so."""
    honest = worker.opener

    def set_kind(kind: type[Liar]) -> None:
        def opener(config: WorkerConfig, *, name: str, root: Path) -> Any:
            open_on = honest(config, name=name, root=root)
            return lying(kind, open_on) if name == "liar" else open_on

        monkeypatch.setattr(worker, "opener", opener)

    return set_kind


def train(port: int, *args: str) -> int:
    engine = ["--engine.kind", "swarm", "--engine.listen", f"127.0.0.1:{port}", "--engine.lease_s", "4"]
    engine += ["--engine.max_running", "24"]
    rollout = ["--rollout.strategy", "bounded_async", "--rollout.max_staleness", "2"]
    rollout += ["--rollout.max_new_tokens", "30", "--trainer.learning_rate", "3e-4"]
    toml = Path("run.toml").read_text()
    start, end = toml.index("[engine]"), toml.index("[trainer]")
    Path("swarm.toml").write_text(toml[:start] + toml[end:])
    return cli.main(["train", "swarm.toml", "--run-dir", "out", "--steps", str(STEPS), *engine, *rollout, *args])


def sampled_by(batch: Any) -> set[str]:
    return {s.engine for t in batch.trajectories for s in t.segments if s.token_ids}


def of_liar(group: GroupRecord) -> int:
    """Return how many of a group's tokens the liar has sampled, but for samples that have failed."""
    samples = (sample for sample in group.samples if sample.state is not FAILED)
    return sum(len(s.token_ids) for sample in samples for s in sample.segments if s.engine == "liar")


def assert_the_liar_is_out(workers: Workers, *says: str) -> None:
    """It is sent away for one of the reasons ``says``, nothing of it is trained from a batch on, and honest workers have
    stayed to the end."""
    ending = str(workers.endings["liar"])
    assert "is no longer trusted" in ending and any(reason in ending for reason in says)
    assert all(ending is None for name, ending in workers.endings.items() if name != "liar")
    members = {w.name: w for w in read_status(OUT / "swarm").workers}
    assert members["liar"].state == "sent away" and any(reason in members["liar"].note for reason in says)
    assert all(member.state == "away" for name, member in members.items() if name != "liar")
    batches = runs.batches(OUT)
    assert len(batches) == STEPS and "liar" not in sampled_by(batches[-1])
    ledger = runs.ledger(OUT)
    assert not any(of_liar(group) for group in ledger.unconsumed())
    assert ledger.tokens.wasted[WasteCause.UNTRUSTED_ENGINE] > 0


def test_false_log_probs_are_found_within_a_batch_of_many(experiment: Path, lies: Callable[[type[Liar]], None]) -> None:
    torch.set_num_threads(1)
    lies(lingering(liars.Int8))
    for _ in range(3):
        port = free_port()
        with working(port, ("anna", "liar")) as workers:
            assert train(port, *GROUPS_OF_8) == 0
        if workers.endings["liar"] is not None:
            break
        fresh = [of_newest_weights(batch, "liar") for batch in runs.batches(OUT)]
        assert max(fresh) < MIN_TOKENS, "it was too slow with new weights to be judged"
        for folder in (OUT, Path("cache-anna"), Path("cache-liar")):
            shutil.rmtree(folder)
    assert_the_liar_is_out(workers, BY_DRIFT)
    assert "the operator of this worker must make sure" in str(workers.endings["liar"])
    assert any("drift/liar" in row for row in runs.rows(OUT))
    batches = runs.batches(OUT)
    found_at = next(batch.step for batch in batches if of_newest_weights(batch, "liar") >= MIN_TOKENS)
    assert all("liar" not in sampled_by(batch) for batch in batches if batch.step > found_at)


def of_newest_weights(batch: Batch, name: str) -> int:
    """Return how many tokens of a batch a worker has sampled from the weights that the batch is trained on."""
    segments = (s for t in batch.trajectories for s in t.segments if s.engine == name)
    return sum(len(s.token_ids) for s in segments if s.policy_version == s.kv_version == batch.step)
