"""Members that the trainer sends away at a moment of its round that a file names, as if a check had failed then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import pytest

from rollover.rollout.actions import Action, ConsumeBatch, StartSample
from rollover.rollout.journal import read_events
from rollover.rollout.scheduler import _ENDING, Scheduler
from rollover.swarm.coordinator.checks import MemberChecks
from rollover.swarm.coordinator.trust.blocklist import Blocklist

Moment = Literal["collecting", "ending", "full", "training"]
"""A sample is started; the batch is full and its round is not over; a batch is about to be taken; it was taken."""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
SENT_AWAY = "sent-away.jsonl"
"""Members that were sent away, each with the number of events that the journal had then; next to the blocklist."""
_ORDERS = "judged"


def order(folder: Path, name: str, moment: Moment) -> None:
    """Have the trainer send a member away at the next such moment."""
    (folder / _ORDERS).mkdir(exist_ok=True)
    (folder / _ORDERS / name).write_text(moment)


def sent_away(run: Path) -> list[tuple[str, int]]:
    """Return the members that were sent away, each with the number of events that were journaled before."""
    path = run / "swarm" / SENT_AWAY
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def judge_on_order(folder: Path) -> None:
    """From now on the swarm of this process obeys orders in ``folder``, and records who is sent away."""
    patch = pytest.MonkeyPatch()  # for good: the process ends with its run
    orders, opened, lots = folder / _ORDERS, list[MemberChecks](), Random(0)
    begin, decide, consume, add = MemberChecks.__init__, Scheduler.decide, Scheduler.consume, Blocklist.add

    def begun(checks: MemberChecks, *args: Any) -> None:
        begin(checks, *args)
        opened.append(checks)

    def judge(path: Path) -> None:
        checks = opened[-1]
        coordinator = checks._shell.coordinator
        if path.exists() and path.name in coordinator.members:
            checks._shell.perform(coordinator.distrust(path.name, "it was judged on order"))
            path.unlink()

    def carry_out(now: Moment) -> None:
        loop = asyncio.get_running_loop()
        for path in list(orders.iterdir()) if opened and orders.exists() else ():
            if path.read_text() == now == "training":
                loop.call_later(lots.uniform(0.0, 0.05), judge, path)
            elif path.read_text() == now:
                loop.call_soon(judge, path)  # before whoever waits for the batch goes on

    def decided(scheduler: Scheduler, now_s: float) -> Sequence[Action]:
        actions = decide(scheduler, now_s)
        if any(isinstance(action, ConsumeBatch) for action in actions):
            carry_out("full")
        elif scheduler._phase is _ENDING:
            carry_out("ending")
        elif any(isinstance(action, StartSample) for action in actions):
            carry_out("collecting")
        return actions

    def consumed(scheduler: Scheduler, now_s: float) -> Any:
        batch = consume(scheduler, now_s)
        carry_out("training")
        return batch

    def added(blocklist: Blocklist, name: str, reason: str) -> None:
        add(blocklist, name, reason)
        file = blocklist._table._file
        num_events = sum(1 for _ in read_events(file.parents[1] / "journal.sqlite", tokens=False))
        with file.with_name(SENT_AWAY).open("a") as told:
            told.write(json.dumps([name, num_events]) + "\n")

    patch.setattr(MemberChecks, "__init__", begun)
    patch.setattr(Scheduler, "decide", decided)
    patch.setattr(Scheduler, "consume", consumed)
    patch.setattr(Blocklist, "add", added)
