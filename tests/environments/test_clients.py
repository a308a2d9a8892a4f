"""Clients that people use, unmodified: what they ask becomes tokens, and they wait for as long as an episode is parked."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.episodes import agents
from rollover.environments.episodes.actor import EpisodeActor
from rollover.environments.episodes.door import Door
from rollover.types import FinishReason, Observation
from tests.environments import test_agents
from tests.environments.test_agents import acting, episode

pytestmark = pytest.mark.real_time
CURL = """
ask() { curl -sS --fail "$OPENAI_BASE_URL/$1" -H "Authorization: Bearer $OPENAI_API_KEY" -d "$2"; }
said=$(ask chat/completions '{"messages": [{"role": "user", "content": "1 + 2?"}]}' | sed 's/.*"content": "\\([^"]*\\)".*/\\1/')
ask chat/completions '{"messages": [{"role": "user", "content": "1 + 2?"},
  {"role": "assistant", "content": "'"$said"'"}, {"role": "user", "content": "Sure?"}]}'
ask reward '{"reward": 0.5}'
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that keeps connections alive often, and functions of the module with the clients."""
    monkeypatch.setattr(agents, "Door", partial(Door, keep_alive_s=0.1))
    monkeypatch.setattr(test_agents, "HERE", "tests.environments.clients")


async def play(actor: EpisodeActor, *turns: str, parked_s: float = 0.0, **row: Any) -> list[Observation]:
    """Return the answers to turns, the first of which is parked for a while."""
    answers: list[Observation] = []
    for number in range(len(turns) + 1):
        trajectory = episode(*turns[:number], answers=answers)
        trajectory.prompt.columns.update({"timeout_s": 2.0} | row)  # type: ignore[attr-defined]
        answers.append(await actor.act(trajectory, 0.0))
        await asyncio.sleep(parked_s * (number == 0))
    return answers


def texts(answers: list[Observation]) -> list[str]:
    return ["".join(map(chr, answer.token_ids)) for answer in answers]


async def test_openai_waits_longer_than_its_time_out_says() -> None:
    async def talk(client: str) -> list[Observation]:
        async with acting(client) as actor:
            return await play(actor, "It is 3.", "Yes.", parked_s=3.0)

    for answers in await asyncio.gather(*map(talk, ("in_turn", "awaited", "streamed"))):
        assert texts(answers) == ["1 + 2?", "Sure?", ""]
        assert answers[-1].end is FinishReason.STOP


async def test_a_shell_script_is_an_agent() -> None:
    async with acting(command=("sh", "-ec", CURL)) as actor:
        answers = await play(actor, "It is 3.", "Yes.")
    assert texts(answers) == ["1 + 2?", "Sure?", ""]
    assert answers[-1].reward == 0.5


async def test_the_program_of_the_documentation_is_an_agent() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "agents.md"
    program = page.read_text().partition("```python\n")[2].partition("```")[0]
    async with acting(command=(sys.executable, "-c", program)) as actor:
        answers = await play(actor, "12 - 34 =", "-22 =", "#### -22 ", question="12 - 34", answer="-22")
    assert texts(answers) == ["12 - 34\n", " -22\n", " ?\n", ""]
    assert answers[-1].reward == 1.0
