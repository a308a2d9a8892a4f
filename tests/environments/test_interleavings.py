"""Whatever happens to a program, its connections and its run, in whatever order: in virtual time, without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollover.batch import Batch
from rollover.environments.episodes import AgentConfig, agents
from rollover.environments.episodes.actor import EpisodeActor, SourceEnvironment
from rollover.environments.episodes.door import Door
from rollover.errors import EngineError
from rollover.rollout.config import Limits
from rollover.rollout.events import Event, SampleFailed
from rollover.rollout.generation import sample_key
from rollover.rollout.journal import Journal, restart
from rollover.rollout.state import RolloutState
from rollover.types import FinishReason, Trajectory
from tests.environments.test_agents import Plain
from tests.rollout.kit import ON_FULL, Rig, content, make_rig
from tests.rollout.test_episodes import Killed
from tests.rollout.test_written_prompts import Unwritten, assert_decoded
from tests.virtual_time import run

LIMIT, STEPS, TIMEOUT_S, TRAIN_S = 80, 3, 60.0, 7.0
OF_CLIENT = ("disconnect", "forget", "retry", "hang", "exit")
OF_RUN = ("abort", "stop", "crash")


class Connection:
    """A request on its way through the door. ``answer`` is what came back, unless the client has left."""

    def __init__(self, door: Door, key: str, path: str, body: Any, num_retries: int) -> None:
        self.gone, self.messages = asyncio.Event(), list[Any]()
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"x-stainless-retry-count", b"%d" % num_retries)]
        self._body = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": f"/v1{path}", "headers": headers}
        self.task = asyncio.create_task(door._serve(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        body, self._body = self._body, b""
        if not body:
            await self.gone.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    @property
    def answer(self) -> Any:
        self.task.result()
        if self.gone.is_set():
            return None
        (start, *bodies) = self.messages
        assert start["type"] == "http.response.start", "one response"
        assert [m.get("more_body", False) for m in bodies] == [True] * (len(bodies) - 1) + [False], "and one end"
        return json.loads(b"".join(m["body"] for m in bodies))


class Program:
    """A program as a task. It asks one to four times, and then posts a reward."""

    doors: dict[str, Door] = {}  # noqa: RUF012
    alive: list[Program] = []  # noqa: RUF012

    def __init__(self, row: Any, variables: Any) -> None:
        self._door, self._key = self.doors[variables["OPENAI_BASE_URL"]], variables["OPENAI_API_KEY"]
        self._row = row["row"]
        self.open: list[Connection] = []
        self.body: Any = None
        self.says_retry, self.hangs, self.exits = True, False, False
        self._task = asyncio.create_task(self._run())
        self.alive.append(self)

    @classmethod
    async def start(cls, module: str, program: Any, name: str) -> Program:
        await asyncio.sleep(1.0)
        return cls(program["row"], program["variables"])

    async def exit_code(self) -> int:
        await asyncio.wait([self._task])
        return 3 if self._task.cancelled() else self._task.result()

    async def end(self) -> None:
        self._task.cancel()
        for connection in self.open:
            connection.gone.set()
        await asyncio.wait([self._task, *(connection.task for connection in self.open)])
        if self in self.alive:
            self.alive.remove(self)

    def suffer(self, fault: str) -> None:
        """Have something happen to the program or to its client."""
        self.hangs, self.exits = self.hangs or fault == "hang", self.exits or fault == "exit"
        if fault == "retry" and self.body is not None:
            self.open.append(Connection(self._door, self._key, "/chat/completions", self.body, 1))
        if fault in ("disconnect", "forget"):
            self.says_retry = fault == "disconnect"
            for connection in self.open:
                connection.gone.set()

    async def _run(self) -> int:
        messages = [{"role": "user", "content": f"{self._row}?"}]
        for number in range(1 + self._row % 4):
            await asyncio.sleep(1000.0 if self.hangs else 0.5)
            if self.exits:
                return 3
            if (reply := await self._ask({"model": "m", "messages": messages})) is None:
                break
            messages += [reply, {"role": "user", "content": f"{number}:{len(reply['content'])}"}]
        await Connection(self._door, self._key, "/reward", {"reward": float(len(messages))}, 0).task
        return 0

    async def _ask(self, body: Any) -> Any:
        """Ask until there is an answer, however many connections are lost; ``None`` if it is a refusal."""
        self.body, self.says_retry, num_retries, answers = body, True, 0, list[Any]()
        while not answers:
            self.open = [Connection(self._door, self._key, "/chat/completions", body, num_retries)]
            while self.open and not answers:
                await asyncio.wait([one.task for one in self.open], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0.01)  # the reply comes to all connections of the request
                ended = [one for one in self.open if one.task.done()]
                self.open = [one for one in self.open if one not in ended]
                answers += [one.answer for one in ended if one.answer is not None]
            num_retries += self.says_retry
            await asyncio.sleep(0.5 * (not answers))
        self.body = None
        assert not self.open and all(answer == answers[0] for answer in answers), "every connection has the one reply"
        if "error" in answers[0]:
            assert answers[0]["error"]["message"], "a refusal has a reason"
            return None
        return answers[0]["choices"][0]["message"]


class LocalDoor(Door):
    """A door without a server."""

    @property
    def url(self) -> str:
        Program.doors[f"door {id(self)}"] = self
        return f"door {id(self)}"


Fault = tuple[int, str, int]
"""After how many events it comes, what it is, and which program it hits."""


async def live(
    name: str, state: RolloutState, journal: Journal, faults: list[Fault]
) -> tuple[Rig, dict[int, Batch], list[Event] | None]:
    """One life of a run, up to its end or the first fault that ends it. Returns what is recorded then, if it is killed."""
    recorded: list[Event] | None = None
    stopped, rig, left, last_s = asyncio.Event(), None, faults[0][0] if faults else 0, 0.0

    def watch(event: Event) -> None:
        nonlocal left, recorded, last_s
        now_s = asyncio.get_running_loop().time()
        assert now_s - last_s <= TIMEOUT_S + TRAIN_S, "something waited for longer than its deadline"
        left, last_s = left - 1, now_s
        while faults and left <= 0 and recorded is None:
            _, fault, victim = faults.pop(0)
            left = faults[0][0] if faults else 0
            if fault == "crash":
                recorded = [event for _, event in journal.read()]
                raise Killed
            if fault == "stop":
                stopped.set()
                return
            if fault == "abort" and rig is not None:
                rig.engine.fail(EngineError("the engine has lost its calls"))
            elif Program.alive and fault in OF_CLIENT:
                Program.alive[victim % len(Program.alive)].suffer(fault)

    plain: Any = Plain()
    config = AgentConfig(function="mine:solve", turn_timeout_s=TIMEOUT_S, max_turn_tokens=20, workers=3)
    actor = EpisodeActor({"toy": SourceEnvironment(config, plain, LIMIT, must_post_reward=True)}, plain, seed=1)
    limits = Limits(save_every_tokens=3)
    rig = make_rig(
        name, environment=actor, source=Unwritten(), state=state, journal=journal, observer=watch, limits=limits,
        max_new_tokens=LIMIT, max_running=8,
    )  # fmt: skip
    batches: dict[int, Batch] = {}

    async def train() -> None:
        while rig.ledger.next_step < STEPS:
            batch = await rig.driver.next_batch()
            batches[batch.step] = batch
            await asyncio.sleep(TRAIN_S)
            await rig.publish(batch.step + 1)

    training, stopping = asyncio.create_task(train()), asyncio.create_task(stopped.wait())
    await asyncio.wait([training, stopping], return_when=asyncio.FIRST_COMPLETED)
    if recorded is not None:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    else:
        stopping.cancel()
        training.cancel()
        await asyncio.wait([training])
        await rig.driver.stop()
        await actor.close()
        assert not Program.alive, "no program outlives its run"
        if not stopped.is_set():
            training.result()
    return rig, batches, recorded


def assert_as_asked(trajectory: Trajectory) -> None:
    """Every token is what the engine's script has there, and every request what the program asks then."""
    assert_decoded(trajectory)
    turns, row, depths = trajectory.turns, trajectory.prompt.columns["row"], [0]
    for number, observation in enumerate(trajectory.observations):
        if observation.end is None:
            parent = number if observation.parent is None else observation.parent
            asked = f"{depths[parent] - 1}:{len(turns[parent])}" if parent else f"{row}?"
            depths.append(depths[parent] + 1)  # a client that forgets asks the same as another turn
            assert json.loads(observation.text)["messages"] == [{"role": "user", "content": asked}]
            assert observation.token_ids == tuple(map(ord, asked))
    if trajectory.finish_reason is FinishReason.STOP:
        assert max(depths) == 1 + row % 4 and trajectory.observations[-1].reward == 3.0 + 2 * (row % 4)


def assert_goes_on(requests: Sequence[Any], before: dict[str, Trajectory]) -> None:
    """No completed turn is decoded again, and an open one from where it was."""
    at: dict[str, tuple[int, int]] = {}
    for request in requests:
        sample, turn = request.sample_key.split(".", 2)[:2], int(request.sample_key.rstrip(".").split(".")[2])
        place = turn, len(request.response_ids)
        key = sample_key_of(sample)
        if key not in at and (known := before.get(key)) is not None:
            is_acting, num_answers = known.finish_reason is FinishReason.TURN, len(known.observations)
            goes_on = not is_acting and num_answers > 0
            assert place == ((num_answers, len(known.turn_ids)) if goes_on else (num_answers + 1, 0)), "as recorded"
            assert request.response_ids == (known.turn_ids if goes_on else ())
        assert at.get(key, (0, 0)) <= place, "a call goes back"
        at[key] = place


def sample_key_of(parts: Sequence[str]) -> str:
    return ".".join(parts) + "."


faults = st.tuples(st.integers(1, 25), st.sampled_from(OF_CLIENT + OF_RUN), st.integers(0, 7))


@settings(max_examples=40, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(name=st.sampled_from(ON_FULL), faults=st.lists(faults, min_size=1, max_size=10))
def test_every_request_is_answered_once_and_no_turn_is_lost(name: str, faults: list[Fault]) -> None:
    found: dict[int, list[Any]] = {}
    batches: dict[int, Batch] = {}
    may_fail, reasons = any(fault in ("forget", "hang", "exit") for _, fault, _ in faults), set[str]()
    state, journal = RolloutState(), Journal(Path(":memory:"))
    with mock.patch.object(agents, "Door", LocalDoor), mock.patch.object(agents, "Child", Program):
        while not found or max(found) < STEPS - 1 or state.ledger.replay:
            Program.doors.clear(), Program.alive.clear()
            before = {sample_key(s.sample_id): s.trajectory for g in state.ledger.groups.values() for s in g.samples}
            rig, made, recorded = run(live(name, state, journal, faults))
            assert_goes_on(rig.engine.requests, before)
            for step, batch in made.items():
                assert found.setdefault(step, content(batch)) == content(batch), "a batch is handed out again as it was"
            batches |= made
            reasons |= {event.reason for event in rig.events if isinstance(event, SampleFailed)}
            if max(found, default=-1) == STEPS - 1:
                break
            events = recorded if recorded is not None else [event for _, event in journal.read()]
            journal = Journal(Path(":memory:"))
            journal.append(events)
            journal._is_known = False
            state = restart(journal, step=0, redo_round=False)
    ids = [g.group_id for b in batches.values() for g in b.groups]
    assert len(set(ids)) == len(ids), "a group is trained twice"
    for trajectory in (t for b in batches.values() for t in b.trajectories):
        assert_as_asked(trajectory)
    late = {reason for reason in reasons if "environment of source 'toy', turn" in reason}
    assert all("calls" in reason for reason in reasons - late)
    assert not late or may_fail, "a lost connection, a retry or a lost run fails no sample"
