"""Rollouts over servers that die, hang, refuse, lie about nothing and come back: nothing is lost, nothing is invented.

The real driver, the real pool and real engines before scripted servers, in virtual time; the faults are drawn.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import ModuleType

import pytest

from rollover.batch import Batch
from rollover.rollout.config import Limits
from rollover.rollout.driver import RolloutDriver
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, SamplingParams
from rollover.weights.sources import FolderWeights
from tests.engine.contract import update
from tests.engine.servers.pool.kit import Fleet
from tests.engine.servers.scripted_server import Answer
from tests.engine.servers.vllm.kit import model_folder
from tests.rollout.kit import SEED, ParityScorer, Prompts, strategy_of
from tests.virtual_time import VirtualClock

STEPS = 6
MAX_TOKENS = 40


class Rollouts(Fleet):
    """A driver over three servers."""

    def __init__(self, folder: Path, kind: ModuleType, *, strategy: str, kv_on_update: str) -> None:
        limits = {"token_timeout_s": 3.0, "first_token_timeout_s": 6.0, "control_timeout_s": 5.0}
        limits |= {"abort_timeout_s": 1.0, "health_timeout_s": 1.0}
        settings = {"max_running": 6, "kv_on_update": kv_on_update, "stream_interval_tokens": 4}
        super().__init__(kind, folder, num_servers=3, **settings, **limits)
        for server in self.servers:
            server.tick_s = 0.02
        state = RolloutState()
        self.ledger = state.ledger
        self.scorer = ParityScorer()
        self.sampling = SamplingParams(max_new_tokens=MAX_TOKENS, stop_token_ids=(7, 9))
        self.driver = RolloutDriver(
            engine=self.pool,
            strategy=strategy_of(
                strategy, max_running=18, rollout_batch_size=3, group_size=3, max_new_tokens=MAX_TOKENS
            ),
            source=Prompts(),
            scorer=self.scorer,
            sampling=self.sampling,
            seed=SEED,
            clock=VirtualClock(),
            state=state,
            limits=Limits(max_retries=30, abort_timeout_s=60.0),
            observer=lambda event: self.ledger.check(),
        )

    def weights(self, version: int) -> Path:
        return self.folder.parent / f"v{version}"

    async def publish(self, version: int) -> None:
        source = FolderWeights(version, model_folder(self.weights(version)))
        await self.driver.update_weights(version, lambda: update(self.pool, source))


async def torment(fleet: Rollouts, drawn: random.Random) -> None:
    """One fault after another, each of a server that the last one did not hit; at most one server is out."""
    while True:
        await asyncio.sleep(drawn.uniform(0.1, 1.5))
        server = drawn.choice(fleet.servers)
        match drawn.choice(["kill", "freeze", "error", "busy", "cut", "deaf", "garble"]):
            case "kill":
                server.kill()
                await asyncio.sleep(drawn.uniform(0.0, 6.0))
                server.restart()
            case "freeze":
                server.freeze()
                await asyncio.sleep(drawn.uniform(0.0, 8.0))
                server.thaw()
            case "error":
                server.answer_once(server.generate_path, *[Answer(500, {"error": "broken"})] * drawn.randint(1, 6))
            case "busy":
                server.answer_once(server.generate_path, *[Answer(503, headers={"retry-after": "0.2"})] * 3)
            case "cut":
                server.break_after = drawn.randint(0, 5)
                await asyncio.sleep(1.0)
                server.break_after = None
            case "deaf":
                server.aborts_by_id = False
                await asyncio.sleep(2.0)
                server.aborts_by_id = True
            case "garble":
                server.mangle = lambda event: event[:-9]
                await asyncio.sleep(0.5)
                server.mangle = lambda event: event


def assert_exact(fleet: Rollouts, batch: Batch) -> None:
    """Each sample is whole, ends as it says, and every token was really sampled by the weights it is labelled with."""
    sampled = {entry for server in fleet.servers for entry in server.sampled}
    for trajectory in batch.trajectories:
        assert trajectory.reward is not None
        assert trajectory.num_tokens == len(trajectory.rollout_logprobs) <= MAX_TOKENS
        stopped = trajectory.token_ids[-1] in fleet.sampling.stop_token_ids
        assert trajectory.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert not set(trajectory.token_ids[:-1]) & set(fleet.sampling.stop_token_ids)
        assert stopped or trajectory.num_tokens == MAX_TOKENS
        for segment in trajectory.segments:
            weights = fleet.weights(segment.policy_version)
            for token, logprob in zip(segment.token_ids, segment.rollout_logprobs, strict=True):
                assert (str(weights), token, round(logprob, 9)) in sampled


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
@pytest.mark.parametrize("strategy", ["april", "bounded_async", "sync"])
@pytest.mark.parametrize("seed", range(4))
async def test_no_sample_is_lost_or_mislabelled_whatever_befalls_the_servers(
    folder: Path, kind: ModuleType, strategy: str, kv_on_update: str, seed: int
) -> None:
    async with Rollouts(folder, kind, strategy=strategy, kv_on_update=kv_on_update) as fleet:
        tormentor = asyncio.create_task(torment(fleet, random.Random(seed)))
        trained = 0
        try:
            for step in range(STEPS):
                batch = await fleet.driver.next_batch()
                assert batch.step == step
                assert_exact(fleet, batch)
                trained += batch.num_tokens
                await fleet.publish(step + 1)
        finally:
            tormentor.cancel()
            for server in fleet.servers:
                server.thaw()
        await fleet.driver.stop()
        fleet.ledger.check()
        assert fleet.ledger.tokens.trained == trained
        assert fleet.ledger.tokens.decoded <= sum(s.decoded_tokens for s in fleet.servers)
        assert max(fleet.scorer.scored.values()) == 1, "nothing is scored twice"
    assert not any(server.requests for server in fleet.servers)
