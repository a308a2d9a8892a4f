"""Embedded engines decode again what others have decoded, in other company and in other number formats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollover.engine.base import Chunk, Engine, GenerateRequest
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.logprob_check import default_tolerance
from rollover.engine.reexecution import Comparison, Doubt, Slack, Stretch
from rollover.swarm.coordinator.trust.second_opinion import SecondOpinion
from tests.engine.contract import collect, request
from tests.engine.models import saved, tiny_model
from tests.swarm.test_worker_real import ENGINE

NUM_SAMPLES, NUM_TOKENS = 5, 80
CONFIG = replace(ENGINE, max_running=16, kv_cache_bytes=2**23)


class One:
    """A swarm of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def generate(self, request: GenerateRequest, *, only: str | None = None) -> AsyncIterator[Chunk]:
        return self._engine.generate(request)


async def compared(folder: Path, first: str, second: str, *, noise: int = 0) -> list[Comparison]:
    """Decode samples side by side in one number format and each alone in another. ``noise``: what the first engine does
    to the seeds."""
    one, two = (EmbeddedEngine.from_folder(folder, replace(CONFIG, dtype=each)) for each in (first, second))  # type: ignore[arg-type]
    try:
        asked = [request(f"s{i}", seed=7919 * i, max_new_tokens=NUM_TOKENS) for i in range(NUM_SAMPLES)]
        sampled = await asyncio.gather(*(collect(one, replace(each, seed=each.seed ^ noise)) for each in asked))
        swarm: Any = One(two)
        found = []
        for each, chunks in zip(asked, sampled, strict=True):
            stretch = Stretch(
                request=each,
                engine="one",
                version=0,
                token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
                logprobs=tuple(p for chunk in chunks for p in chunk.logprobs),
            )
            slack = Slack(logprobs=default_tolerance(first, second))
            found.append(await SecondOpinion(swarm, "two", stretch, slack).comparison())
        return found
    finally:
        await one.close()
        await two.close()


@pytest.mark.parametrize("formats", [("float32", "float32"), ("bfloat16", "float32")])
def test_rounding_is_told_from_other_noise(tmp_path: Path, formats: tuple[str, str]) -> None:
    torch.set_num_threads(1)
    folder = saved(tiny_model(), tmp_path / "model")

    async def main() -> None:
        honest = await compared(folder, *formats)
        assert [each.doubt for each in honest] == [None] * NUM_SAMPLES
        if formats == ("float32", "float32"):
            assert all(len(each.answers) == NUM_TOKENS and not each.outside for each in honest)
        lies = await compared(folder, *formats, noise=1)
        assert [each.doubt for each in lies].count(Doubt.TOKEN) >= NUM_SAMPLES - 1

    asyncio.run(main())
