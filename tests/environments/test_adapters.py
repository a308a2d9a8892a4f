"""Environments of TRL. Those of TextArena and OpenEnv are in ``tests/real``, since their libraries are not installed here."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.environments.episodes import ClassConfig
from rollover.environments.rewards.episode import EnvironmentRewardConfig
from rollover.tasks.config import TasksConfig
from rollover.tasks.episodes import encoder_of
from rollover.tasks.messages import Question
from rollover.tasks.sources import JsonlConfig
from tests.environments.test_episodes import call, stepped_in
from tests.tasks.test_templates import tokenizer_of

HERE = "tests.environments.games"
ADAPTERS = "rollover.environments.adapters"


TRL = ClassConfig(factory=f"{ADAPTERS}:Trl", params={"factory": f"{HERE}:Guessing"}, reset_in_prompt=True)


def test_an_environment_of_trl_plays_here() -> None:
    opening, low, unknown, end = stepped_in(TRL, {"number": 7}, call("guess", number=3), call("_peek"), "It is 7.")
    assert (opening["text"], low["text"], low["done"]) == (" Guess a number up to 10.", "higher", False)
    assert unknown["text"].startswith("Error: there is no tool '_peek'")
    assert (end["done"], end["reward"]) == (True, 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_environment_of_trl_has_the_tools_that_trl_offers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own trainer finds the same tools in the same class, and renders the same prompt."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tests import runs
    from tests.environments.games import Guessing

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = tokenizer_of("qwen2_5")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Play."}], "number": 7}])
    options = GRPOConfig(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, bf16=False)
    trainer = GRPOTrainer(
        model=str(runs.save_model(tmp_path / "model")),
        args=options,
        train_dataset=rows,
        processing_class=tokenizer,
        environment_factory=Guessing,
    )
    config = JsonlConfig(name="o", path="o.jsonl", reward=EnvironmentRewardConfig(), environment=TRL)
    ours = encoder_of(config, TasksConfig(chat_template_date="2026-11-27"), tokenizer)
    question = Question([{"role": "user", "content": "Play. Guess a number up to 10."}])
    theirs = tokenizer.apply_chat_template(
        question.content, tools=trainer.tools, tokenize=False, add_generation_prompt=True
    )
    assert ours.encode(question, where="row 1").text == theirs
