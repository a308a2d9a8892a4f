"""Real workers that lie, among honest ones: each is found within a stated number of samples, and nobody else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollover.engine import sampling_check
from rollover.engine.base import Engine
from rollover.engine.logprob_check import (
    FLOAT32_TOLERANCE,
    TEMPERATURES,
    Reference,
    check_logprobs,
    check_prompts,
    some_prompts,
)
from rollover.engine.sampling_check import check_sampling
from rollover.errors import EngineError
from rollover.run.worker import opener
from rollover.swarm.coordinator.engine import SwarmEngine
from rollover.swarm.coordinator.trust.credentials import Credentials
from rollover.swarm.publication.keys import open_key
from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.worker.config import WorkerConfig
from rollover.swarm.worker.connection import Refused
from rollover.swarm.worker.joining import work_for
from tests.engine.contract import request
from tests.engine.models import VOCAB, saved, tiny_model
from tests.speed import within
from tests.swarm import liars
from tests.swarm.liars import Liar, lying
from tests.swarm.test_worker_real import ENGINE, swarm, weights

HONEST = ("anna", "bert")
Opened = Callable[[WorkerConfig, str], Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a model that is in doubt at each token."""
    root = tmp_path_factory.mktemp("models")
    return [saved(tiny_model(seed=seed, sharpness=2.0), root / f"v{seed}") for seed in range(2)]


@asynccontextmanager
async def workers(
    root: Path, engine: SwarmEngine, names: tuple[str, ...], kind: type[Liar] | None, *, cunning: bool
) -> AsyncIterator[None]:
    """Join workers of these names, and one that is called ``liar`` where ``kind`` says how it lies."""
    key, credentials = open_key(root / "publisher.key").public_key(), Credentials(root / "workers.json")
    stops: list[Callable[[str], None]] = []

    async def joined(name: str) -> None:
        address, config = CoordinatorAddress.parse(engine.url), WorkerConfig(engine=ENGINE)
        token = credentials.add(name, key)
        open_on = opener(config, name=name, root=root / name)
        if kind is not None and name == "liar":
            open_on = lying(kind, open_on, cunning=cunning)
        try:
            await work_for(address, token, config, open_on, root / name, None, "test", lambda line: None, stops.append)
        except Refused:
            assert name == "liar"

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(joined(name)) for name in (*names, *(("liar",) if kind else ()))]
        yield
        for stop in stops:
            stop("done")
        await asyncio.gather(*running)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(within(60)):
        while not condition():
            await asyncio.sleep(0.01)


def serving(engine: SwarmEngine, version: int, names: tuple[str, ...]) -> bool:
    members = engine.coordinator.members
    checked = engine.coordinator.checks
    return all(name in members and members[name].serves(checked=checked) == version for name in names)


async def sampled_by(engine: SwarmEngine, number: int) -> str:
    """Decode a sample. Returns who has decoded it."""
    name = f"g{number // 4}.{number % 4}."
    settings: dict[str, Any] = {"prompt_ids": (5, 6, 7 + number // 4 % 3), "seed": 1000 + number, "max_new_tokens": 24}
    try:
        return [chunk.engine async for chunk in engine.generate(request(name, **settings))][-1]
    except EngineError:
        return "nobody"


def assert_only_the_liar_is_gone(engine: SwarmEngine, told: list[str]) -> None:
    members = engine.coordinator.members
    assert {name for name, member in members.items() if member.distrust} == {"liar"} == {*told}
    assert all(members[name].is_connected for name in HONEST)


@pytest.mark.parametrize("kind", [liars.InventedLogprobs, liars.Int8, liars.BFloat16, liars.OldWeights, liars.Greedy])
def test_a_liar_that_is_not_cunning_samples_nothing_at_all(
    tmp_path: Path, models: list[Path], kind: type[Liar], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "MAX_DRAWS", 4)
    references = {}
    prompts = check_prompts(VOCAB, 128)
    for version, seed in enumerate((0, 1)):
        model = tiny_model(seed=seed, sharpness=2.0)
        with torch.no_grad():
            logits = [model(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts]
        references[version] = Reference(version=version, prompts=prompts, logits_PV=np.array(logits))

    async def check(member: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        await check_logprobs(
            member,
            references[version],
            tolerance=FLOAT32_TOLERANCE,
            remedy="mend it",
            temperatures=TEMPERATURES,
            first=some_prompts(version) if is_known else (),
        )
        if draws and not is_known:
            await check_sampling(member, references[version], temperature=1.0)

    async def main() -> None:
        torch.set_num_threads(1)
        root, told = tmp_path / "swarm", list[str]()
        async with (
            asyncio.timeout(within(120)),
            swarm(root, models[0]) as engine,
            workers(root, engine, HONEST, kind, cunning=False),
        ):
            engine.coordinator.checks = True
            engine.checks.check_logprobs_with(check)
            engine.placement.on_distrust(told.append)
            await until(lambda: serving(engine, 0, HONEST))
            decoders = set(await asyncio.gather(*(sampled_by(engine, i) for i in range(12))))
            if kind is liars.OldWeights:
                await until(lambda: serving(engine, 0, ("liar",)))
                await engine.load(1, weights(1, models[1]))
                await until(lambda: serving(engine, 1, HONEST))
            await until(lambda: engine.coordinator.members["liar"].distrust)
            assert "liar" not in decoders or kind is liars.OldWeights, "until the weights change its are right"
            says = "looks like greedy decoding" if kind is liars.Greedy else "does not sample from the trainer's policy"
            assert says in engine.coordinator.members["liar"].distrust
            assert_only_the_liar_is_gone(engine, told)

    asyncio.run(main())
