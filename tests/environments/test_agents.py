"""Agents' programs from their start to their end: what they ask becomes tokens, and what they do wrong has a name."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.episodes import AgentConfig
from rollover.environments.episodes.actor import EpisodeActor
from rollover.environments.episodes.agents import SourceEnvironment
from rollover.errors import DataError, RewardError
from rollover.settings import toml
from rollover.settings.schema import build
from rollover.tasks.config import TasksConfig
from rollover.tasks.episodes import open_environments
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment, Trajectory
from tests.environments.words import CHAT, char_tokenizer

SUM = Prompt(prompt_id="s/0@0", token_ids=(), text="", source="s", columns={"question": "1 + 2 - 9", "answer": "-6"})
HERE = "tests.environments.agents"
CONTAINER = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""The command of docs/how-to/agents.md, which gives a program processes and mounts of its own."""
pytestmark = pytest.mark.real_time


class Plain:
    """A tokenizer and a writer of one token per character."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def begin(self, messages: Any, tools: Any, columns: Any) -> tuple[int, ...]:
        if not any(message["content"] for message in messages):
            raise DataError("messages: all are blank")
        return tuple(map(ord, "".join(message["content"] for message in messages)))

    def write(self, messages: Any, last_id: int, columns: Any, tools: Any = ()) -> tuple[int, ...]:
        return self.begin(messages, tools, columns)


def turn(text: str) -> Segment:
    return Segment(0, tuple(map(ord, text)), (0.0,) * len(text), FinishReason.TURN, 0, 0.0, 0.0)


def episode(*turns: str, answers: Sequence[Observation] = (), index: int = 0) -> Trajectory:
    prompt = Prompt(prompt_id="s/0@0", token_ids=(), text="p", source="s", columns={"start": 5})
    segments = (turn(""), *map(turn, turns))
    return Trajectory(sample_id=SampleId(0, index), prompt=prompt, segments=segments, observations=tuple(answers))


@asynccontextmanager
async def acting_in(config: Any, max_new_tokens: int = 500, **more: Any) -> AsyncIterator[EpisodeActor]:
    plain: Any = Plain()
    actor = EpisodeActor({"s": SourceEnvironment(config, plain, max_new_tokens, **more)}, plain)
    try:
        yield actor
    finally:
        await actor.close()


def acting(
    function: str = "", *, max_new_tokens: int = 500, must_post_reward: bool = False, **settings: Any
) -> AbstractAsyncContextManager[EpisodeActor]:
    """Have a program act: a function of ``agents.py`` or at a path, or else the ``command`` of the settings."""
    path = function if ":" in function else f"{HERE}:{function}"
    config = AgentConfig(**({"function": path} if function else {}), **settings)
    return acting_in(config, max_new_tokens, must_post_reward=must_post_reward)


def content(observation: Observation) -> str:
    assert "".join(map(chr, observation.token_ids)) == json.loads(observation.text)["messages"][0]["content"]
    return "".join(map(chr, observation.token_ids))


async def play(actor: EpisodeActor, *replies: str, answers: Sequence[Observation] = (), index: int = 0) -> Trajectory:
    """Hold an episode to its end, or go on with it, in which these are the model's turns."""
    found = [*answers]
    while not found or found[-1].end is None:
        found.append(await actor.act(episode(*replies[: len(found)], answers=found, index=index), 0.0))
    return episode(*replies[: len(found) - 1], answers=found, index=index)


async def test_each_request_answers_a_turn() -> None:
    async with acting("counts") as actor:
        first = await actor.act(episode(), 1.0)
        second = await actor.act(episode("ab", answers=[first]), 2.0)
        third = await actor.act(episode("ab", "c", answers=[first, second]), 3.0)
        last = await actor.act(episode("ab", "c", "d", answers=[first, second, third]), 4.0)
    assert [content(o) for o in (first, second, third)] == ["start 5", "0:ab", "1:c"]
    assert [o.start_s for o in (first, second, third, last)] == [1.0, 2.0, 3.0, 4.0]
    assert (last.end, last.reward, last.token_ids) == (FinishReason.STOP, 3.0, ())
    assert [o.reward for o in (first, second, third)] == [None] * 3, "a reward is the episode's"


async def test_a_program_that_is_lost_is_told_the_recorded_replies() -> None:
    async with acting("counts") as actor:
        first = await actor.act(episode(), 0.0)
        second = await actor.act(episode("ab", answers=[first]), 0.0)
    async with acting("counts", turn_timeout_s=30.0) as actor:
        assert await actor.act(episode("ab", answers=[first]), 0.0) == second
        actor.leave(SampleId(0, 0))
        third = await actor.act(episode("ab", "c", answers=[first, second]), 0.0)
        assert content(third) == "1:c"
        forged = second._replace(text=second.text.replace("ab", "xy"))
        message = r"turn 2: started again, the program added '.*0:ab.*' at request 2, where it had added '.*0:xy"
        with pytest.raises(RewardError, match=message):
            await actor.act(episode("ab", "c", answers=[first, forged], index=1), 0.0)
        extra = [first, second, third]
        with pytest.raises(RewardError, match="the program ended at request 4"):
            replies = ("ab", "c", "d", "e", "f")
            await actor.act(episode(*replies[:4], answers=[*extra, third], index=2), 0.0)


def read(trajectory: Trajectory) -> list[str]:
    """Return what the model reads before each turn and writes in it."""
    turns = enumerate(trajectory.turns[1:], start=1)
    return ["".join(map(chr, trajectory.before(turn))) + ">" + "".join(map(chr, ids)) for turn, ids in turns]


BRANCHES = ["plan>ab", "plan>cd", "plancdgo>e", "planEDITEDgo>f", "in short: cd>g"]


async def test_requests_that_branch_make_a_tree() -> None:
    async with acting("branches") as actor:
        found = await play(actor, "ab", "cd", "e", "f", "g")
        assert read(found) == BRANCHES
        assert [o.parent for o in found.observations] == [None, 0, None, 0, 0, None]
        assert found.paths == ((0, 1), (0, 2, 3), (0, 4), (0, 5))
        assert (found.observations[-1].reward, found.finish_reason) == (1.0, FinishReason.STOP)
    async with acting("delegates") as actor:
        found = await play(actor, "p", "x", "y", "q")
        assert sorted(read(found)[1:3]) in (["part 0>x", "part 1>y"], ["part 0>y", "part 1>x"])
        said = "x y" if read(found)[1] == "part 0>x" else "y x"
        assert (read(found)[0], read(found)[3]) == ("whole>p", f"wholep{said}>q")
        assert found.paths == ((0, 2), (0, 3), (0, 1, 4))


@pytest.mark.parametrize("function", ["branches", "delegates"])
async def test_a_lost_program_is_told_what_was_said_on_every_branch(function: str) -> None:
    """Killed after each turn, it goes on as it would have, with the siblings in either order."""
    replies = ("cd", "ab", "e", "f", "g")
    async with acting(function) as actor:
        whole = await play(actor, *replies)
    for done in range(2, whole.num_turns):
        async with acting(function) as actor:
            again = await play(actor, *replies, answers=whole.observations[:done], index=done)
            assert sorted(read(again)) == sorted(read(whole)) and again.paths == whole.paths


@pytest.mark.parametrize(
    ("function", "replies", "reason"),
    [
        ("leaves", 0, "the program ended without a request"),
        ("never_asks", 0, r"the program asked nothing for 5 s after its start, .* \(environment\.turn_timeout_s\)"),
        ("waits", 1, "the program asked nothing for 5 s after its reply"),
        ("fails", 1, r"the program died \(exit code 3\)"),
        ("hoards", 1, r".* \(exit code 1\); was it out of memory\? It may have 1 GiB \(environment\.max_memory_gib\)"),
    ],
)
async def test_a_program_that_misbehaves_fails_its_sample(function: str, replies: int, reason: str) -> None:
    async with acting(function, turn_timeout_s=5.0, max_memory_gib=1) as actor:
        answers: list[Observation] = []
        with pytest.raises(RewardError, match=rf"environment of source 's', turn {replies}: {reason}"):
            for number in range(replies + 1):
                answers.append(await actor.act(episode(*["r"] * number, answers=answers), 0.0))


async def test_a_late_program_ends_its_episode_with_what_it_has_earned_if_the_config_says_so() -> None:
    async with acting("waits", turn_timeout_s=5.0, on_timeout="end") as actor:
        last = (await play(actor, "a")).observations[1]
        assert (last.end, last.reward, last.token_ids) == (FinishReason.LENGTH, 1.0, ())


async def test_a_request_that_cannot_be_written_out_is_refused_with_the_reason() -> None:
    """In a second life too, in which the program asks it again."""
    async with acting("corrects") as actor:
        first = await actor.act(episode(), 0.0)
        assert content(first) == "messages: all are blank"
    async with acting("corrects") as actor:
        assert (await play(actor, "a", answers=[first])).finish_reason is FinishReason.STOP


async def test_requests_beyond_a_budget_are_refused_and_the_reward_still_counts() -> None:
    async with acting("counts", max_turns=2) as actor:
        last = (await play(actor, "a", "b")).observations[2]
        assert (last.end, last.reward, last.token_ids) == (FinishReason.LENGTH, 2.0, ())
    async with acting("counts", max_new_tokens=13) as actor:
        first, last = (await play(actor, "abc")).observations
        assert last.end is FinishReason.LENGTH  # 7 + 3 + 5
        second = await actor.act(episode("a", answers=[first], index=1), 0.0)
        assert (len(first.token_ids), content(second)) == (7, "0:a")
    async with acting("counts", max_new_tokens=7) as actor:
        with pytest.raises(RewardError, match="its first request cannot be answered: the conversation has 7 tokens"):
            await play(actor)


async def test_a_program_that_has_to_post_a_reward_fails_its_sample_otherwise() -> None:
    async with acting("asks_once", must_post_reward=True) as actor:
        with pytest.raises(RewardError, match=r"turn 1: the program ended without a reward \(POST /v1/reward\)"):
            await play(actor, "a")


@pytest.mark.parametrize("weight", [0, 0.5])
async def test_a_reward_that_only_draws_its_curve_need_not_be_posted(weight: float) -> None:
    posted = f"{{kind = 'environment', name = 'posted', weight = {weight}}}"
    config = build(
        TasksConfig,
        toml.parse(
            f"[[train]]\nkind = 'reasoning_gym'\nname = 's'\nrewards = [{{kind = 'verifier'}}, {posted}]\n"
            f"environment = {{kind = 'agent', function = '{HERE}:asks_once'}}",
            "run.toml",
        ),
    )
    actor = open_environments(config, char_tokenizer(CHAT), limit=lambda source: 500, seed=1, eval_seed=1)
    ending = pytest.raises(RewardError, match="ended without a reward") if weight else nullcontext()
    with ending:
        assert (await play(actor, "a")).finish_reason is FinishReason.STOP
    await actor.close()


async def test_a_program_that_ends_without_the_reply_to_its_request_fails_its_sample() -> None:
    async with acting("gives_up") as actor:
        first = await actor.act(episode(), 0.0)
        life = actor._agents._lives[SampleId(0, 0)]
        assert await life.exited == 0
        while life.guest.turns[1].num_listening:
            await asyncio.sleep(0.01)
        with pytest.raises(RewardError, match="turn 1: the program ended before the reply to its request came"):
            await actor.act(episode("r", answers=[first]), 0.0)


async def test_the_end_of_an_episode_ends_all_that_its_program_started() -> None:
    async with acting("forks") as actor:
        process = int(content(await actor.act(episode(), 0.0)))
        assert is_alive(process)
        actor.leave(SampleId(0, 0))
    assert not is_alive(process)


def is_alive(process: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, 0)
        return True
    return False


async def test_many_programs_wait_side_by_side() -> None:
    """More of them than start at the same time."""
    async with acting("counts", workers=2) as actor:
        found = await asyncio.gather(*(actor.act(episode(index=i), 0.0) for i in range(6)))
        assert [content(one) for one in found] == ["start 5"] * 6


@pytest.mark.parametrize("around", [(), CONTAINER], ids=["plain", "unshare"])
async def test_a_command_gets_its_row_and_its_own_environment(
    around: tuple[str, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if around and subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    program = (
        "import json, os, sys, httpx\n"
        "assert json.load(sys.stdin) == json.loads(os.environ['ROLLOVER_ROW']) == {'start': 5}\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "said = os.environ.get('PYTHONPATH', 'none') + os.environ['no_proxy'] + os.environ['NO_PROXY']\n"
        "body = {'messages': [{'role': 'user', 'content': said}]}\n"
        "httpx.post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json=body, headers=key, timeout=60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "intern.al")
    async with acting(command=(*around, sys.executable, "-c", program)) as actor:
        found = content(await actor.act(episode(), 0.0))
        assert found == str(tmp_path) + 2 * "intern.al,127.0.0.1", "and nothing of the run's"


async def test_a_script_that_cannot_be_started_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "agent.py"
    script.write_text("print(1)")  # and no line that names Python
    script.chmod(0o755)
    async with acting(command=(str(script),)) as actor:
        with pytest.raises(RewardError, match=r"turn 0: the program died \(exit code 126\)"):
            await actor.act(episode(), 0.0)
    assert capfd.readouterr().err == f"environment.command: {script} cannot be started: Exec format error\n"


async def test_what_a_function_exits_with_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    async with acting("explains") as actor:
        with pytest.raises(RewardError, match=r"turn 0: the program died \(exit code 1\)"):
            await actor.act(episode(), 0.0)
    assert capfd.readouterr().err == "no API key\n"


async def test_the_packaged_program_works_a_sum_out() -> None:
    async with acting("rollover.tasks.calculator_agent:solve") as actor:
        turns, answers = [], list[Observation]()
        for reply, asked in (("1 + 2 =", "1 + 2 - 9"), ("3 - 9 =", " 3"), ("what =", " -6"), ("so\n#### -6 ", " ?")):
            begun = replace(episode(*turns, answers=answers), prompt=SUM)
            answers.append(await actor.act(begun, 0.0))
            assert content(answers[-1]) == asked + "\n"
            turns.append(reply)
        last = await actor.act(replace(episode(*turns, answers=answers), prompt=SUM), 0.0)
        assert (last.end, last.reward) == (FinishReason.STOP, 1.0)
