"""Environments of other libraries: with TRL itself, and with stand-ins where TextArena and OpenEnv are not installed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
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
def test_the_tools_of_an_environment_of_trl_are_those_that_trl_offers(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.fixture
def textarena(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("textarena") is None:
        from tests.environments.games import Numbers

        module = ModuleType("textarena")
        module.make = lambda name: Numbers(name)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "textarena", module)


@pytest.mark.usefixtures("textarena")
def test_a_game_of_textarena_is_played_to_its_end() -> None:
    config = ClassConfig(factory=f"{ADAPTERS}:TextArena", params={"game": "GuessTheNumber-v0"}, reset_in_prompt=True)
    opening, *answers = stepped_in(config, {}, *(f"[{number}]" for number in range(1, 11)))
    assert "guess the number between 1 and 20" in opening["text"]
    end = [answer["done"] for answer in answers].index(True)
    for answer in answers[:end]:
        assert answer["text"].endswith("The target number is higher.") and answer["reward"] is None
        assert "[" not in answer["text"], "the model's own turn is not repeated"
    assert answers[end]["reward"] is not None


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tests.environments.games import EchoClient

    monkeypatch.setitem(sys.modules, "openenv", ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", ModuleType("openenv.core"))
    client = SimpleNamespace(GenericEnvClient=EchoClient)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", client)
    return EchoClient


def test_an_environment_of_openenv_is_asked_through_its_client(openenv: Any) -> None:
    params = {"base_url": "http://localhost:8000", "sends": "message", "reads": "echo"}
    config = ClassConfig(factory=f"{ADAPTERS}:OpenEnv", params=params, reset_in_prompt=True)
    opening, first, last = stepped_in(config, {}, "hello", "bye")
    assert opening["text"] == "ready"
    assert (first["text"], first["reward"], first["done"]) == ("hello", 0.5, False)
    assert (last["text"], last["reward"], last["done"]) == ("bye", 0.5, True)
    assert openenv.closed == ["http://localhost:8000"]
