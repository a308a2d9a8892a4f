"""Agents that use frameworks, trained by the embedded engine, and a client that waits a minute: ``make test-agents``."""

from __future__ import annotations

import asyncio
import json
import os
import string
from pathlib import Path

import pytest

from rollover import cli
from rollover.types import FinishReason, Observation
from tests import runs
from tests.environments import test_agents
from tests.environments.test_agents import acting
from tests.environments.test_clients import play, texts
from tests.tasks.test_templates import tokenizer_of

pytestmark = [pytest.mark.agents, pytest.mark.real_time]
HEAD = """\
import json, os
from openai import OpenAI

row = json.loads(os.environ["ROLLOVER_ROW"])

def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    \"\"\"
    return a + b
"""
OPENAI_AGENTS = """
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
agent = Agent(name="adder", instructions="Add.", tools=[function_tool(add)], model="rollover")
answer = Runner.run_sync(agent, row["prompt"], max_turns=30).final_output
"""
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel("rollover", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=3, verbosity_level=-1)
agent.prompt_templates["system_prompt"] = "Add."
answer = agent.run(row["prompt"])
"""
TAIL = """
OpenAI().post("/reward", body={"reward": len(answer)}, cast_to=object)
"""
CALLS = """
def once_or_more(text):
    return [("add", {"a": len(text), "b": 1})] if len(text) % 2 else []

def to_the_end(text):
    return once_or_more(text) or [("final_answer", {"answer": text})]
"""
"""Calls of a model that has learned nothing."""
ENVIRONMENT = """\
reward = {{kind = "environment"}}
[tasks.train.environment]
kind = "agent"
command = ["{python}", "agent.py"]
parser = "calls:{parser}"
max_turn_tokens = 200
turn_timeout_s = 300
"""


@pytest.mark.parametrize(
    ("program", "parser", "rewrites"), [(OPENAI_AGENTS, "once_or_more", False), (SMOLAGENTS, "to_the_end", True)]
)
def test_an_agent_of_a_framework_is_trained(experiment: Path, program: str, parser: str, rewrites: bool) -> None:
    """The model writes bytes that are no text, which the program never sees as they are."""
    tokenizer = tokenizer_of("qwen2_5")
    runs.save_model(Path("chat"), vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained("chat")
    Path("agent.py").write_text(HEAD + program + TAIL)
    Path("calls.py").write_text(CALLS)
    head, _, rest = runs.CONFIG.partition("[tasks.train.reward]")
    environment = ENVIRONMENT.format(python=os.environ["AGENTS_PYTHON"], parser=parser)
    config = (head + environment + "[tasks]" + rest.partition("[tasks]")[2]).replace('"model"', '"chat"')
    stops = json.dumps([*string.ascii_letters])
    config = config.replace("= 60", f"= 8000\nstop_strings = {stops}").replace("= 4194304", "= 67108864")
    Path("run.toml").write_text(config.replace("rollout_batch_size = 4", "rollout_batch_size = 2"))
    assert cli.main(["train", "run.toml", "--run-dir", "out", "--steps", "3"]) == 0
    assert runs.ledger(Path("out")).num_failed == 0
    trained = [t for batch in runs.batches(Path("out")) for t in batch.trajectories]
    assert len(trained) == 12 and max(t.num_turns for t in trained) > 2
    for trajectory in trained:
        assert trajectory.finish_reason is FinishReason.STOP
        assert trajectory.reward == len(tokenizer.decode(trajectory.turns[-1], skip_special_tokens=True))
    steps = runs.rows(Path("out"))
    assert max(row["drift"] for row in steps if "drift" in row) < 1e-5, "the trainer reads what the engine has"
    assert (max(row["episode/rows"] for row in steps) > 1) is rewrites, "smolagents writes calls into the text"


async def test_openai_with_a_time_out_of_20_s_is_parked_for_60(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_agents, "HERE", "tests.environments.clients")

    async def talk(client: str) -> list[Observation]:
        async with acting(client) as actor:
            return await play(actor, "It is 3.", "Yes.", parked_s=60.0, timeout_s=20.0)

    for answers in await asyncio.gather(*map(talk, ("in_turn", "awaited", "streamed"))):
        assert texts(answers) == ["1 + 2?", "Sure?", ""]
        assert answers[-1].end is FinishReason.STOP
