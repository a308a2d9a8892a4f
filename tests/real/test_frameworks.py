"""Agents of frameworks and environments of other libraries, trained by the embedded engine, and a client that waits a
minute: ``make test-agents``."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import string
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollover import cli
from rollover.environments.episodes import ClassConfig
from rollover.types import FinishReason, Observation, Trajectory
from tests import runs
from tests.environments import test_agents
from tests.environments.test_agents import acting
from tests.environments.test_clients import play, texts
from tests.environments.test_episodes import stepped_in
from tests.speed import within
from tests.tasks.test_templates import tokenizer_of

pytestmark = [pytest.mark.agents, pytest.mark.real_time]
ADAPTERS = "rollover.environments.adapters"
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
LIBRARY = """\
reward = {{kind = "environment"}}
[tasks.train.environment]
kind = "class"
factory = "{factory}"
params = {{ {params} }}
reset_in_prompt = true
workers = 1
max_turn_tokens = 200
turn_timeout_s = 300
"""
SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    echo: str

class Echo(Environment):
    "Says twice what it has heard, backwards."
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    def reset(self, seed=None, episode_id=None, **options):
        self.turns = 0
        return Heard(echo="0=")
    def step(self, action, timeout_s=None, **options):
        self.turns += 1
        return Heard(echo=action.message[::-1] + "=", reward=len(action.message), done=self.turns == 2)

uvicorn.run(create_app(Echo, Said, Heard, max_concurrent_envs=64), fd=int(sys.argv[1]), log_level="error")
"""


def trained(environment: str, max_new_tokens: int) -> Sequence[Trajectory]:
    """Train the model in the folder ``chat`` for a few steps."""
    head, _, rest = runs.CONFIG.partition("[tasks.train.reward]")
    config = (head + environment + "[tasks]" + rest.partition("[tasks]")[2]).replace('"model"', '"chat"')
    stops = json.dumps([*string.ascii_letters])
    config = config.replace("= 60", f"= {max_new_tokens}\nstop_strings = {stops}").replace("= 4194304", "= 67108864")
    Path("run.toml").write_text(config.replace("rollout_batch_size = 4", "rollout_batch_size = 2"))
    assert cli.main(["train", "run.toml", "--run-dir", "out", "--steps", "3"]) == 0
    assert runs.ledger(Path("out")).num_failed == 0
    found = [t for batch in runs.batches(Path("out")) for t in batch.trajectories]
    assert len(found) == 12 and {t.finish_reason for t in found} == {FinishReason.STOP}
    return found


@pytest.mark.parametrize(
    ("program", "parser", "rewrites"),
    [
        (OPENAI_AGENTS, "once_or_more", False),
        (SMOLAGENTS, "to_the_end", True),
        (SMOLAGENTS.replace("ToolCallingAgent", "CodeAgent"), "to_the_end", True),
    ],
)
def test_an_agent_of_a_framework_is_trained(experiment: Path, program: str, parser: str, rewrites: bool) -> None:
    """The model writes bytes that are no text, which the program never sees as they are."""
    tokenizer = tokenizer_of("qwen2_5")
    runs.save_model(Path("chat"), vocab_size=len(tokenizer), max_position_embeddings=8192)
    tokenizer.save_pretrained("chat")
    Path("agent.py").write_text(HEAD + program + TAIL)
    Path("calls.py").write_text(CALLS)
    environment = ENVIRONMENT.format(python=os.environ["AGENTS_PYTHON"], parser=parser)
    found = trained(environment, 8000)
    assert max(t.num_turns for t in found) > 2
    for trajectory in found:
        assert trajectory.reward == len(tokenizer.decode(trajectory.turns[-1], skip_special_tokens=True))
    steps = runs.rows(Path("out"))
    assert max(row["drift"] for row in steps if "drift" in row) < 1e-5, "the trainer reads what the engine has"
    assert (max(row["episode/rows"] for row in steps) > 1) is rewrites, "smolagents writes calls into the text"


@pytest.fixture
def libraries(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agents' environment has, behind what this one has, as if it were installed beside Rollover."""
    where = [os.environ["AGENTS_PYTHON"], "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"]
    monkeypatch.setattr(sys, "path", [*sys.path, subprocess.check_output(where, text=True)])
    runs.save_model(Path("chat"), max_position_embeddings=1600)


@pytest.mark.usefixtures("libraries")
def test_a_game_of_textarena_is_played_to_its_end_and_trained() -> None:
    factory, opening = f"{ADAPTERS}:TextArena", "guess the number between 1 and 20"
    config = ClassConfig(factory=factory, params={"game": "GuessTheNumber-v0"}, reset_in_prompt=True)
    begun, *answers, last = stepped_in(config, {}, *(f"[{number}]" for number in range(20, 10, -1)))
    assert opening in begun["text"]
    for answer in answers:
        assert (answer["text"], answer["reward"], answer["done"]) == ("The target number is lower.", None, False)
    assert (last["reward"], last["done"]) == (1.0, True)
    found = trained(LIBRARY.format(factory=factory, params='game = "GuessTheNumber-v0"'), 1500)
    for trajectory in found:
        assert opening in trajectory.observations[0].text
        assert "attempted an invalid move" in trajectory.observations[1].text
        assert (trajectory.num_turns, trajectory.reward) == (3, 0.0), "the game ends at the second such move"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of OpenEnv."""
    (tmp_path / "server.py").write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        command = [os.environ["AGENTS_PYTHON"], str(tmp_path / "server.py"), str(listening.fileno())]
        process = subprocess.Popen(command, pass_fds=[listening.fileno()])
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=within(60)):
                yield url
        finally:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("libraries")
def test_an_environment_behind_a_server_of_openenv_is_trained(server: str) -> None:
    params = f'base_url = "{server}", sends = "message", reads = "echo"'
    for trajectory in trained(LIBRARY.format(factory=f"{ADAPTERS}:OpenEnv", params=params), 1500):
        assert trajectory.num_turns == 3 and trajectory.observations[0].text == "0="
        assert [len(o.text) - 1 for o in trajectory.observations[1:]] == [o.reward for o in trajectory.observations[1:]]


async def test_openai_with_a_time_out_of_20_s_is_parked_for_60(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_agents, "HERE", "tests.environments.clients")

    async def talk(client: str) -> list[Observation]:
        async with acting(client) as actor:
            return await play(actor, "It is 3.", "Yes.", parked_s=60.0, timeout_s=20.0)

    for answers in await asyncio.gather(*map(talk, ("in_turn", "awaited", "streamed"))):
        assert texts(answers) == ["1 + 2?", "Sure?", ""]
        assert answers[-1].end is FinishReason.STOP
