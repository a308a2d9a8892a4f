"""Environments in their processes: what hangs or dies there harms no other episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollover.environments.child import Child
from rollover.environments.episodes import AgentConfig, ClassConfig, ToolsConfig, host
from rollover.errors import DataError, RewardError
from rollover.types import FinishReason, Observation, Trajectory
from tests.environments import test_agents
from tests.environments.test_agents import Plain, acting_in
from tests.environments.test_episodes import HERE, TOOLS, call, given


def episode(*turns: str, index: int = 0, answers: Sequence[Observation] = ()) -> Trajectory:
    """An episode whose prompt is the row's."""
    written = test_agents.episode(*turns, index=index, answers=answers)
    return replace(written, prompt=replace(written.prompt, token_ids=(1,)), segments=written.segments[1:])


async def acted(config: Any, *trajectories: Trajectory) -> list[Any]:
    async with acting_in(config) as acting:
        return await asyncio.gather(*(acting.act(t, 0.0) for t in trajectories), return_exceptions=True)


pytestmark = pytest.mark.real_time
FAST = replace(TOOLS, workers=1, turn_timeout_s=2.0)
HOG = given("re.match('(a+)+$', 'a' * 60 + 'b')")
"""Holds the interpreter for hours."""


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (given("blocks()"), r"it took more than 2 s \(environment\.turn_timeout_s\)"),
        (HOG, r"it took more than 2 s \(environment\.turn_timeout_s\)"),
        (given("os._exit(7)"), r"the environment's process died \(exit code 7\)"),
    ],
)
async def test_a_bad_tool_fails_its_own_sample_alone(bad: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_RESPONSE_S", 0.5)
    texts = [bad, *(call("add", a=i, b=i) for i in range(1, 6))]
    failed, *good = await acted(FAST, *(episode(text, index=i) for i, text in enumerate(texts)))
    assert isinstance(failed, RewardError)
    with pytest.raises(RewardError, match=rf"environment of source 's', turn 1: {reason} \(prompt s/0@0\)"):
        raise failed
    assert [one.text for one in good] == ["2", "4", "6", "8", "10"]


async def test_a_late_answer_ends_the_episode_if_the_config_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_RESPONSE_S", 0.5)
    bad = (given("blocks()"), HOG, given("os._exit(7)"))
    config = replace(FAST, on_timeout="end")
    waited, hogged, died = await acted(config, *(episode(text, index=i) for i, text in enumerate(bad)))
    assert waited == hogged == Observation((), "", 0.0, FinishReason.LENGTH)
    assert isinstance(died, RewardError), "which is no time-out"


async def test_tools_that_hang_together_cost_one_time_out(tmp_path: Path) -> None:
    """No turn is answered a second time, neither a late turn nor a turn beside it."""
    waits = [3600, 0, 3600, 0, 3600]
    note = f"open({str(tmp_path / 'log')!r}, 'a').write"
    texts = [given(f"{note}('{seconds}\\n') and time.sleep({seconds}) or 'noted'") for seconds in waits]
    found = await acted(FAST, *(episode(text, index=i) for i, text in enumerate(texts)))
    for seconds, answer in zip(waits, found, strict=True):
        assert "took more than 2 s" in str(answer) if seconds else answer.text == "noted"
    assert sorted((tmp_path / "log").read_text().split()) == sorted(map(str, waits))


async def test_a_lost_process_costs_no_episode_its_state() -> None:
    config = ClassConfig(factory=f"{HERE}:Counter", workers=1, turn_timeout_s=30.0)
    async with acting_in(config) as acting:
        first = await acting.act(episode("+1"), 0.0)
        second = await acting.act(episode("+1", "+2", answers=[first]), 0.0)
        assert (first.text, second.text, second.reward) == ("6", "8", 2.0)
        with pytest.raises(RewardError, match=r"the environment's process was killed \(SIGKILL\)"):
            await acting.act(episode("die", index=1), 0.0)
        third = await acting.act(episode("+1", "+2", "+3", answers=[first, second]), 0.0)
        assert third.text == "11"
        forged = second._replace(text="9")
        with pytest.raises(RewardError, match="it answered turn 2 with '8' and not with '9'"):
            await acting.act(episode("+1", "+2", "+3", answers=[first, forged], index=2), 0.0)


async def test_a_process_tells_of_each_turn_that_it_repeats() -> None:
    """So that a long episode has the time of its turns, and not that of one."""
    settings = asdict(ClassConfig(factory=f"{HERE}:Counter"))
    child = await Child.start("rollover.environments.episodes.worker", {"environment": settings}, "process")
    action = {"text": "+1", "token_ids": []}
    history = [(action, {"text": text, "reward": 1.0}) for text in ("6", "7")]
    turn = {"key": "g0.0", "row": {"start": 5}, "seed": 7, "num_turns": 2, "history": history, "action": action}
    child.send({"id": 3, **turn})
    found = [await child.receive()]
    while "text" not in found[-1]:
        found.append(await child.receive())
    assert found[:-1] == [{"id": 3, "repeated": True}] * 2 and found[-1]["text"] == "8"
    await child.end()


async def test_a_message_that_the_template_refuses_fails_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=DataError("the chat template rejects these messages: no such role"))
    monkeypatch.setattr(Plain, "write", refuse)
    (failed,) = await acted(FAST, episode(call("add", a=1, b=2)))
    assert isinstance(failed, RewardError) and "turn 1: the chat template rejects these messages" in str(failed)


async def test_budgets_end_an_episode_and_say_so() -> None:
    said, last = Observation(tuple(map(ord, "2")), "2"), call("add", a=1, b=1)
    async with acting_in(replace(TOOLS, workers=1, max_turns=2), 2 * len(last) + 3) as acting:
        assert (await acting.act(episode(last), 0.0)).end is None
        assert (await acting.act(episode(last, last, answers=[said]), 0.0)).end is FinishReason.LENGTH
        assert (await acting.act(episode("no call"), 0.0)).end is FinishReason.STOP
    async with acting_in(replace(TOOLS, workers=1), len(last) + 1) as acting:
        full = await acting.act(episode(last), 0.0)
        assert (full.end, full.token_ids, full.text) == (FinishReason.LENGTH, (), "2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ToolsConfig(functions=(f"{HERE}:nothing",)), f"tool {HERE}:nothing: no function 'nothing'"),
        (ToolsConfig(functions=(f"{HERE}:yielding",)), f"tool {HERE}:yielding is a generator"),
        (ToolsConfig(functions=(f"{HERE}:many",)), f"tool {HERE}:many takes 'a' by position"),
        (ToolsConfig(functions=(f"{HERE}:by_position",)), f"tool {HERE}:by_position takes 'a' by position"),
        (ClassConfig(factory=f"{HERE}:NoStep"), "NoStep has no method 'step'"),
        (ClassConfig(factory=f"{HERE}:Dice", recovery="snapshot"), "Dice has no method 'snapshot'"),
        (ClassConfig(factory=f"{HERE}:Dice", params={"sides": 6}), "do not fit .*unexpected keyword argument 'sides'"),
        (AgentConfig(command=("no-such-program",)), "there is no executable 'no-such-program'; give its path"),
        (AgentConfig(function="tests.environments.agents:nothing"), "no function 'nothing'"),
    ],
)
def test_wrong_code_is_found_before_the_first_episode(config: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        config.check()
