"""Reward functions that do to their process what functions of users do. Each gives a sample its own number."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from typing import Any

SLEEPER = ["sleep", "600"]


def _own(completions: list[str]) -> list[float]:
    while "hang" in completions[0]:
        time.sleep(600)
    return [float(completions[0].split()[-1])]


def forks_and_returns_twice(completions: list[str], **columns: Any) -> list[float]:
    os.fork()
    return _own(completions)


def forks_and_raises_in_the_child(completions: list[str], **columns: Any) -> list[float]:
    if os.fork() == 0:
        raise SystemExit(3)
    return _own(completions)


def leaves_a_child_that_waits(completions: list[str], **columns: Any) -> list[float]:
    if os.fork() == 0:
        while True:
            time.sleep(600)
    return _own(completions)


def leaves_a_program(completions: list[str], **columns: Any) -> list[float]:
    subprocess.Popen(SLEEPER, close_fds=False)
    return _own(completions)


def leaves_a_program_in_a_session_of_its_own(completions: list[str], **columns: Any) -> list[float]:
    subprocess.Popen(SLEEPER, start_new_session=True)
    return _own(completions)


def leaves_a_daemon(completions: list[str], **columns: Any) -> list[float]:
    """Forked twice and in a session of its own: its parent is gone."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp(SLEEPER[0], SLEEPER)
        os._exit(0)
    os.waitpid(child, 0)
    if "die" in completions[0]:
        os._exit(7)
    return _own(completions)


def uses_a_pool(completions: list[str], **columns: Any) -> list[float]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(float, [completions[0].split()[-1]])


def leaves_a_thread(completions: list[str], **columns: Any) -> list[float]:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return _own(completions)


def ignores_signals(completions: list[str], **columns: Any) -> list[float]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return _own(completions)


def closes_what_it_does_not_know(completions: list[str], **columns: Any) -> list[float]:
    if "close" in completions[0]:
        os.closerange(3, 4096)
        for _ in range(32):  # whatever takes the place of what was closed is not written to
            os.open(os.environ["HOSTILE_FILE"], os.O_RDWR | os.O_CREAT)
    return _own(completions)


def prints_a_lot(completions: list[str], **columns: Any) -> list[float]:
    print("x" * 2**20)
    sys.stderr.write("y" * 2**20)
    os.write(1, b'{"id": 0, "reward": 99}\n')
    return _own(completions)


def reads_standard_input(completions: list[str], **columns: Any) -> list[float]:
    assert sys.stdin.read() == ""
    return _own(completions)


def exits(completions: list[str], **columns: Any) -> list[float]:
    if "exit" in completions[0]:
        sys.exit(3)
    return _own(completions)


def dies(completions: list[str], **columns: Any) -> list[float]:
    if "die" in completions[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return _own(completions)


def kills_its_parent(completions: list[str], **columns: Any) -> list[float]:
    if "kill" in completions[0]:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return _own(completions)


def forges_a_reply(completions: list[str], **columns: Any) -> list[float]:
    """Writes a reply to every socket it can find, before its own is sent."""
    forged = b'{"id": 99, "reward": 99.0, "failure": null, "reason": ""}\n'
    if "garble" in completions[0]:
        forged = b"99\n"
    if "forge" in completions[0] or "garble" in completions[0]:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.write(int(name), forged)
    return _own(completions)


def raises_a_book(completions: list[str], **columns: Any) -> list[float]:
    raise ValueError("z" * 2**25)
