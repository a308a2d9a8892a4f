"""A reward process whose parent is gone ends without a word, at whatever point it notices."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rollover.environments.channel import LOST
from rollover.environments.rewards import FunctionConfig
from rollover.environments.rewards.base import RewardSample, RewardSpec
from rollover.environments.worker import _score
from rollover.errors import DataError
from rollover.run.jobs import _run
from tests.speed import within

_PATIENCE_S = within(120.0)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


CONFIG = FunctionConfig(function="tests.environments.functions:length")
SPECS = line({"specs": [asdict(RewardSpec(source="s", config=CONFIG))]})
SAMPLE = RewardSample(prompt="p", columns={}, completion="abc", completion_ids=(1,))
JOB = line({"id": 0, "reward": "s/", "samples": [asdict(SAMPLE)]})


def before_it_is_asked(parent: socket.socket) -> None:
    parent.close()


def in_the_middle_of_the_specs(parent: socket.socket) -> None:
    parent.sendall(SPECS[:20])
    parent.close()


def before_it_says_that_it_is_ready(parent: socket.socket) -> None:
    parent.shutdown(socket.SHUT_RD)
    parent.sendall(SPECS)


def when_it_is_ready_and_nobody_has_read_that(parent: socket.socket) -> None:
    parent.sendall(SPECS)
    assert parent.recv(1, socket.MSG_PEEK) == b"{"
    parent.close()


def before_it_answers(parent: socket.socket) -> None:
    parent.sendall(SPECS)
    assert parent.makefile("rb").readline() == b'{"ready": true}\n'
    parent.shutdown(socket.SHUT_RD)
    parent.sendall(JOB)


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (before_it_is_asked, 0),
        (in_the_middle_of_the_specs, LOST),
        (before_it_says_that_it_is_ready, LOST),
        (when_it_is_ready_and_nobody_has_read_that, LOST),
        (before_it_answers, LOST),
    ],
)
def test_a_worker_whose_parent_has_gone_ends_silently(leave: Callable[[socket.socket], None], code: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_PATIENCE_S)
        command = [sys.executable, "-m", "rollover.environments.worker", str(theirs.fileno())]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, pass_fds=(theirs.fileno(),), **pipes) as worker:  # type: ignore[call-overload]
            theirs.close()
            leave(ours)
            assert (worker.stdout.read(), worker.stderr.read(), worker.wait(_PATIENCE_S)) == (b"", b"", code)


PRINTS = """
import os
from rollover.environments.keeper import keep

def work():
    for _ in range(300):
        print("x" * 9999)

keep(work)
"""


def test_what_work_prints_is_passed_on_up_to_a_bound() -> None:
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as keeper:
        assert keeper.stderr is not None
        printed = keeper.stderr.read()
        assert keeper.wait(_PATIENCE_S) == 0
    assert printed[:10001] == b"x" * 9999 + b"\nx"
    assert printed[2**20 :] == b"\n(a process of yours has printed 1 MiB; what else it prints is dropped)\n"


def test_work_whose_output_nobody_reads_ends_as_it_would() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdin=subprocess.PIPE, stderr=writable) as keeper:
        os.close(writable)
        assert keeper.wait(_PATIENCE_S) == 0


def test_a_keeper_ends_with_work_that_was_over_before_it_looked() -> None:
    program = """
import os
from rollover.environments.keeper import keep

fork = os.fork

def fork_and_let_it_end():
    if pid := fork():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid

os.fork = fork_and_let_it_end
keep(lambda: os._exit(7))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as keeper:
        try:
            assert keeper.wait(within(30)) == 7
        finally:
            keeper.kill()


class Stops:
    """An async reward that stops its event loop for one completion."""

    async def score(self, sample: RewardSample) -> float:
        if sample.completion == "stop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
        return 1.0


def test_a_reward_that_stops_its_event_loop_fails_its_sample_alone() -> None:
    channel: Any = SimpleNamespace(leave_in_a_child=lambda: None)
    with asyncio.Runner() as runner:
        found = [_score(Stops(), [replace(SAMPLE, completion=text)], channel, runner) for text in ("stop", "go")]
    assert "loop stopped" in found[0].reason and found[1].values == [1.0]


def test_a_reward_that_stops_the_event_loop_of_its_run_is_named() -> None:
    with pytest.raises(DataError, match=r"set its reward\.workers to 1 or more"):
        _run(Stops().score(replace(SAMPLE, completion="stop")))
