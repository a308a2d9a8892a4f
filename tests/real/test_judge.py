"""A judge that is a real server: SGLang on a CPU (``make test-sglang``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollover.environments.rewards import JudgeConfig
from rollover.environments.rewards.base import RewardSpec
from rollover.environments.scorer import RewardScorer
from rollover.types import Score
from tests.environments.test_scorer import prompt, trajectory
from tests.environments.words import char_tokenizer
from tests.real.models import real_model
from tests.real.sglang_server import sglang_server

pytestmark = pytest.mark.sglang


def test_a_real_server_is_asked_at_temperature_0_and_repeats_itself(tmp_path: Path) -> None:
    model = real_model(tmp_path / "judge")
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    server = sglang_server(model, tmp_path / "server.log")
    config = JudgeConfig(
        url=f"{server.url}/v1",
        model="judge",
        template="the quick {response}",
        parser="tests.environments.functions:counted",
        range=(0, 1000),
        max_tokens=200,
        params={"stop": [*"aeiou "]},
        retries=0,
    )

    async def use() -> tuple[list[Score], dict[str, float]]:
        scorer = RewardScorer([RewardSpec(source="s", config=config)], char_tokenizer())
        try:
            texts = ("fox", "dog", "lazy", "over")
            scores = await asyncio.gather(*(scorer.score(trajectory(prompt(), text)) for text in texts))
            return scores, scorer.judge_metrics
        finally:
            await scorer.close()

    server.start()
    try:
        server.wait_until_ready()
        (scores, used), (again, _) = asyncio.run(use()), asyncio.run(use())
    finally:
        server.stop()
    assert scores == again and all(score.solved is not None for score in scores)
    assert used["judge/requests"] == 4 and used["judge/recalled"] == 0
    assert used["judge/prompt_tokens"] > 4 and used["judge/reply_tokens"] > 0
