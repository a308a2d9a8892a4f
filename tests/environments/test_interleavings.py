"""Whatever happens to a program, its connections and its run, in whatever order: in virtual time, without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollover.batch import Batch
from rollover.environments.episodes import AgentConfig, agents
from rollover.environments.episodes.actor import EpisodeActor
from rollover.environments.episodes.agents import SourceEnvironment
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
from tests.rollout.test_episodes import Killed, assert_decoded
from tests.rollout.test_written_prompts import Unwritten
from tests.tasks.shapes import user
from tests.virtual_time import run

LIMIT, STEPS, TIMEOUT_S, TRAIN_S = 80, 3, 60.0, 7.0
HARMLESS = ("disconnect", "retry", "abort", "stop", "crash")
HARMFUL = ("forget", "hang", "exit")


class Connection:
    """A request on its way through the door. ``answer`` is what came back, unless the client has left, or the response
    was cut off."""

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
        if self.gone.is_set() or self.messages[-1].get("more_body"):
            return None
        (start, *bodies) = self.messages
        assert start["type"] == "http.response.start", "one response"
        assert [m.get("more_body", False) for m in bodies] == [True] * (len(bodies) - 1) + [False], "and one end"
        return json.loads(b"".join(m["body"] for m in bodies))


class Refused(Exception):
    """A request has got no reply."""


class Asking:
    """A request of a program, however many connections it takes."""

    def __init__(self, connect: Callable[[Any, int], Connection], messages: Sequence[Any]) -> None:
        self.body = {"model": "m", "messages": messages}
        self.open: list[Connection] = []
        self.says_retry, self.has_twin = True, False
        self._connect = connect

    def suffer(self, fault: str) -> None:
        if fault == "retry" and (self.open or not self.has_twin):
            if self.has_twin:  # the connection before is gone, which the door sees a little later
                asyncio.get_running_loop().call_later(0.3, self.open[-1].gone.set)
            self.open.append(self._connect(self.body, 1))
        elif fault != "retry":
            self.says_retry = fault == "disconnect"
            for connection in self.open:
                connection.gone.set()

    async def reply(self) -> Any:
        """Ask until there is an answer, however many connections are lost; ``None`` if it is a refusal."""
        num_retries, answers = 0, list[Any]()
        while not answers:
            self.open = [self._connect(self.body, num_retries)]
            while self.open and not answers:
                await asyncio.wait([one.task for one in self.open], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0.01)  # the reply comes to all connections of the request
                ended = [one for one in self.open if one.task.done()]
                self.open = [one for one in self.open if one not in ended]
                answers += [one.answer for one in ended if one.answer is not None]
            num_retries += self.says_retry
            await asyncio.sleep(0.5 * (not answers))
        if not self.has_twin:
            assert not self.open and all(answer == answers[0] for answer in answers), "every connection has one reply"
        if "error" in answers[0]:
            assert answers[0]["error"]["message"], "a refusal has a reason"
            return None
        return answers[0]["choices"][0]["message"]


def mark(*replies: str) -> str:
    """A short text that follows from replies."""
    return ":".join(str(sum(map(ord, reply))) for reply in replies)


class Program:
    """A program as a task. It holds a conversation of one to four requests, or has two others work at the same time, or
    asks for two alternatives and goes on from the better one; and then posts a reward."""

    doors: dict[str, Door] = {}  # noqa: RUF012
    alive: list[Program] = []  # noqa: RUF012
    may_fail: set[int] = set()  # noqa: RUF012
    """Rows of programs that something harmful has happened to."""
    num_lives = 0

    def __init__(self, row: Any, variables: Any) -> None:
        self._door, self._key = self.doors[variables["OPENAI_BASE_URL"]], variables["OPENAI_API_KEY"]
        self._row = row["row"]
        self.asking: list[Asking] = []
        self.hangs, self.exits = False, False
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
        still_open = [connection for asking in self.asking for connection in asking.open]
        for connection in still_open:
            connection.gone.set()
        await asyncio.wait([self._task, *(connection.task for connection in still_open)])
        if self in self.alive:
            self.alive.remove(self)

    def suffer(self, fault: str, number: int) -> None:
        """Have something happen to the program or to its client: to one of its requests, or to all."""
        self.hangs, self.exits = self.hangs or fault == "hang", self.exits or fault == "exit"
        if fault in HARMFUL:
            self.may_fail.add(self._row)
        if fault in ("retry", "disconnect", "forget") and self.asking:
            for asking in self.asking if number % 2 else [self.asking[number // 2 % len(self.asking)]]:
                asking.suffer(fault)

    async def _run(self) -> int:
        try:
            num_replies = await (self._talk, self._delegate, self._choose)[self._row % 3]()
        except Refused:
            num_replies = 0
        if self.exits:
            return 3
        await Connection(self._door, self._key, "/reward", {"reward": float(num_replies)}, 0).task
        return 0

    async def _talk(self) -> int:
        messages = [user(f"{self._row}?")]
        for number in range(1 + self._row // 3 % 4):
            (reply,) = await self._ask(messages)
            messages += [reply, user(f"{number}:{mark(reply['content'])}")]
        return len(messages) // 2

    async def _delegate(self) -> int:
        question = user(f"{self._row}?")
        (plan,) = await self._ask([question])
        parts = [
            part["content"] for part in await self._ask(*([user(f"{name}{mark(plan['content'])}")] for name in "xy"))
        ]
        await self._ask([question, plan, user(f"w{mark(*parts)}")])
        await self._ask([user(f"s{mark(*parts)}")])
        return 5

    async def _choose(self) -> int:
        question = user(f"{self._row}?")
        plan = max(await self._ask([question], [question]), key=lambda plan: str(plan["content"]))
        await self._ask([question, plan, user(f"w{mark(plan['content'])}")])
        return 3

    async def _ask(self, *conversations: Any) -> list[Any]:
        """Return the replies to requests that are sent at the same time, in one order or the other."""
        await asyncio.sleep(1000.0 if self.hangs else 0.5)
        if self.exits:
            raise Refused
        self.asking = [Asking(self._connect, messages) for messages in conversations]
        for asking in self.asking:
            asking.has_twin = conversations.count(asking.body["messages"]) > 1
        turn = 1 - 2 * (self.num_lives % 2)
        replies = (await asyncio.gather(*(asking.reply() for asking in self.asking[::turn])))[::turn]
        self.asking = []
        if None in replies:
            raise Refused
        return replies

    def _connect(self, body: Any, num_retries: int) -> Connection:
        return Connection(self._door, self._key, "/chat/completions", body, num_retries)


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
            elif Program.alive and fault != "abort":
                Program.alive[victim % len(Program.alive)].suffer(fault, victim)

    plain: Any = Plain()
    config = AgentConfig(function="mine:solve", turn_timeout_s=TIMEOUT_S, max_turn_tokens=20, workers=3)
    actor = EpisodeActor({"toy": SourceEnvironment(config, plain, LIMIT, must_post_reward=True)}, plain)
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
    replies, row = ["".join(map(chr, ids)) for ids in trajectory.turns], trajectory.prompt.columns["row"]
    asked, depths = [""], [0]
    for number, observation in enumerate(trajectory.observations):
        if observation.end is None:
            parent = number if observation.parent is None else observation.parent
            (message,) = json.loads(observation.text)["messages"]
            asked.append(message["content"])
            depths.append(depths[parent] + 1)
            # a client that forgets asks the same as another turn, so that several may have the same name
            said = {name: [r for a, r in zip(asked, replies, strict=False) if a[:1] == name] for name in "xy"}
            begun = [reply for question, reply in zip(asked, replies, strict=False) if question == f"{row}?"]
            parts = [mark(x, y) for x in said["x"] for y in said["y"]]
            if row % 3 == 0:
                may_ask = {f"{depths[parent] - 1}:{mark(replies[parent])}" if parent else f"{row}?"}
            elif parent:
                assert asked[parent] == f"{row}?"
                may_ask = {f"w{part}" for part in parts} if row % 3 == 1 else {f"w{mark(replies[parent])}"}
            else:
                may_ask = {f"{row}?", *(f"{name}{mark(plan)}" for name in "xy" for plan in begun)}
                may_ask |= {f"s{part}" for part in parts}
            assert asked[-1] in may_ask and message == user(asked[-1])
            assert observation.token_ids == tuple(map(ord, asked[-1]))
    if trajectory.finish_reason is FinishReason.STOP:
        num_replies = (1 + row // 3 % 4, 5, 3)[row % 3]
        assert trajectory.observations[-1].reward == num_replies
        assert len(asked) > num_replies - (row in Program.may_fail)


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


def some(kinds: Sequence[str]) -> st.SearchStrategy[list[Fault]]:
    fault = st.tuples(st.integers(1, 25), st.sampled_from(kinds), st.integers(0, 7))
    return st.lists(fault, min_size=1, max_size=10)


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(name=st.sampled_from(ON_FULL), faults=some(HARMLESS) | some((*HARMLESS, *HARMFUL)))
def test_every_request_is_answered_once_and_no_turn_is_lost(name: str, faults: list[Fault]) -> None:
    found: dict[int, list[Any]] = {}
    batches: dict[int, Batch] = {}
    reasons = set[str]()
    Program.may_fail.clear()
    state, journal = RolloutState(), Journal(Path(":memory:"))
    with mock.patch.object(agents, "Door", LocalDoor), mock.patch.object(agents, "Child", Program):
        while not found or max(found) < STEPS - 1 or state.ledger.replay:
            Program.doors.clear(), Program.alive.clear()
            Program.num_lives += 1
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
    rows = {int(reason.rpartition("prompt toy/")[2].partition("@")[0]) for reason in late}
    assert rows <= Program.may_fail, "a lost connection, a retry or a lost run fails no sample"
