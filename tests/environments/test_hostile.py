"""Reward functions that fork, hang, die and leave things behind: each sample gets its own reward, and nothing stays."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollover.environments.keeper import _BoundedOutput, describe_exit
from rollover.environments.rewards import FunctionConfig
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import RewardError
from tests.environments.test_scorer import PATIENCE_S, prompt, scoring, trajectory

HOSTILE = "tests.environments.hostile"

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The processes that came of this test and still live."""
    mark = f"mark-{uuid.uuid4()}"
    monkeypatch.setenv("HOSTILE_MARK", mark)

    def alive() -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (place / "environ").read_bytes():
                    found.append(int(place.name))
            except OSError:
                continue
        return found

    return alive


def test_all_that_a_process_has_printed_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    source, prints = os.pipe()
    output = _BoundedOutput(source)
    os.write(prints, b"the cause")
    output.read()
    os.write(prints, b" of its death")
    os.close(prints)
    output.drain()
    assert capfd.readouterr().err == "the cause of its death"


def specs(name: str, **fields: Any) -> list[RewardSpec]:
    """The function for the sources ``s``, whose deadline is far, and ``late``, whose deadline is near."""
    deadlines_s, given = {"s": PATIENCE_S, "late": 0.3}, {"workers": 1, "retries": 0} | fields
    function = f"{HOSTILE}:{name}"
    return [
        RewardSpec(source=source, config=FunctionConfig(function=function, timeout_s=timeout_s, **given))
        for source, timeout_s in deadlines_s.items()
    ]


@pytest.mark.parametrize(
    "name",
    [
        "forks_and_returns_twice",
        "forks_and_raises_in_the_child",
        "leaves_a_child_that_waits",
        "leaves_a_program",
        "leaves_a_program_in_a_session_of_its_own",
        "leaves_a_daemon",
        "uses_a_pool",
        "leaves_a_thread",
        "ignores_signals",
        "prints_a_lot",
        "reads_standard_input",
    ],
)
async def test_every_sample_gets_its_reward_and_no_process_is_left(name: str, marked: Callable[[], list[int]]) -> None:
    async with scoring(specs(name, workers=2)) as scorer:
        numbers = range(3 if name == "prints_a_lot" else 12)
        rewards = await asyncio.gather(*(scorer.score(trajectory(prompt(), str(n))) for n in numbers))
        assert rewards == [float(n) for n in numbers]
        assert marked(), "the mark finds what is alive"
    assert marked() == []


@pytest.mark.parametrize(
    "name", ["leaves_a_program", "leaves_a_program_in_a_session_of_its_own", "leaves_a_daemon", "ignores_signals"]
)
async def test_a_late_function_is_ended_with_all_that_came_of_it(name: str, marked: Callable[[], list[int]]) -> None:
    async with scoring(specs(name)) as scorer:
        assert await scorer.score(trajectory(prompt(), "1")) == 1.0
        with pytest.raises(RewardError, match=r"timed out after 0\.3 s"):
            await scorer.score(trajectory(prompt("late"), "hang 2"))
        assert (scorer.num_processes, marked()) == (0, [])
        assert await scorer.score(trajectory(prompt(), "3")) == 3.0
    assert marked() == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("leaves_a_daemon", "die 1", "the reward process died (exit code 7)"),
        ("dies", "die 1", "the reward process was killed (SIGKILL); was it out of memory?"),
        ("kills_its_parent", "kill 1", "the reward process was killed (SIGKILL)"),
        ("closes_what_it_does_not_know", "close 1", "the reward process died (exit code "),
        ("forges_a_reply", "forge 1", "the reward process answered request 99 when asked "),
        ("forges_a_reply", "garble 1", "the reward process sent something other than replies"),
        ("exits", "exit 1", "SystemExit: 3 (hostile.py, line "),
        ("raises_a_book", "1", "ValueError: zzz"),
    ],
)
async def test_a_function_that_ruins_its_process_fails_its_sample_alone(
    name: str, text: str, message: str, marked: Callable[[], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE_FILE", str(tmp_path / "file"))
    async with scoring(specs(name)) as scorer:
        for _ in range(2):
            with pytest.raises(RewardError) as caught:
                await scorer.score(trajectory(prompt(), text))
            assert message in str(caught.value)
            assert len(str(caught.value)) < 1000
            if name != "raises_a_book":
                assert await scorer.score(trajectory(prompt(), "3")) == 3.0
    assert marked() == []
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_bytes() == b""


async def test_waiting_samples_get_a_slot_after_late_dead_and_cancelled_ones(marked: Callable[[], list[int]]) -> None:
    async with scoring(specs("leaves_a_daemon", workers=2)) as scorer:
        texts = ["hang 1", "die 2", "3", "hang 4", "die 5", "6", "7"] * 2
        sources = ["late" if "hang" in text else "s" for text in texts]
        asked = [trajectory(prompt(source), text) for source, text in zip(sources, texts, strict=True)]
        scored = [asyncio.create_task(scorer.score(one)) for one in asked]
        await asyncio.sleep(0)
        scored[6].cancel()
        results = await asyncio.gather(*scored, return_exceptions=True)
        for n, (text, result) in enumerate(zip(texts, results, strict=True)):
            if n == 6:
                assert isinstance(result, asyncio.CancelledError)
            elif text[0].isdigit():
                assert result == float(text)
            else:
                assert isinstance(result, RewardError)
        assert scorer.num_processes <= 2
    assert marked() == []


async def test_a_process_that_cannot_start_fails_its_sample_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    none_left = AsyncMock(side_effect=BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
    async with scoring(specs("leaves_a_thread")) as scorer:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", none_left)
            with pytest.raises(RewardError, match="a reward process cannot be started: Resource temporarily unavail"):
                await scorer.score(trajectory(prompt(), "1"))
        assert await scorer.score(trajectory(prompt(), "1")) == 1.0


async def test_closing_ends_scorings_under_way_and_lets_none_begin(marked: Callable[[], list[int]]) -> None:
    async with scoring(specs("leaves_a_program")) as scorer:
        assert await scorer.score(trajectory(prompt(), "1")) == 1.0
        waiting = [asyncio.create_task(scorer.score(trajectory(prompt(), f"hang {n}"))) for n in range(4)]
        await asyncio.sleep(0)
        await scorer.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, RewardError) for result in results)
        assert (scorer.num_processes, marked()) == (0, [])


KILLED = """
import asyncio, sys
from tests.environments.test_hostile import prompt, scoring, specs, trajectory

async def run():
    async with scoring(specs(sys.argv[1])) as scorer:
        await scorer.score(trajectory(prompt(), "1"))
        hanging = asyncio.create_task(scorer.score(trajectory(prompt(), "hang 2")))
        await asyncio.sleep(0.2)
        print("hanging", flush=True)
        await hanging

asyncio.run(run())
"""


@pytest.mark.parametrize("name", ["leaves_a_program_in_a_session_of_its_own", "leaves_a_daemon", "ignores_signals"])
def test_a_killed_run_leaves_no_process_behind(name: str, marked: Callable[[], list[int]]) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, name], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "hanging\n"
        assert len(marked()) > 1
        os.kill(run.pid, signal.SIGKILL)
        run.wait(PATIENCE_S)
    deadline_s = time.monotonic() + PATIENCE_S
    while marked() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert marked() == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (128 + 11, "was killed (SIGSEGV)"),
        (-9, "was killed (SIGKILL); was it out of memory?"),
        (255, "died (exit code 255)"),
    ],
)
def test_an_exit_code_is_told_in_words(code: int, told: str) -> None:
    assert describe_exit(code) == told
