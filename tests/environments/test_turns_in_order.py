"""A process that answers one turn at a time, whatever its turns do, in virtual time: each failure is its turn's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollover.environments.episodes import host
from rollover.environments.episodes.host import EpisodeProcess
from rollover.errors import RewardError
from tests.virtual_time import run

TIMEOUT_S, START_S = 5.0, 1.0
REASONS = {"hang": "it took more than 5 s (environment.turn_timeout_s)", "die": "the process died"}


class Fate(NamedTuple):
    """What becomes of a turn: how long it takes, and whether it is answered or ``hang``, ``die``; or whether its
    episode is left, and the turn with it, as soon as another turn is over; or when it is over, and ``cling`` then."""

    what: str
    seconds: float


class Process:
    """Answers turns in order."""

    num_started = num_stepped = 0

    def __init__(self) -> None:
        self._asked, self._answers = asyncio.Queue[Any](), asyncio.Queue[Any]()
        self._held: dict[str, int] = {}
        self._working = asyncio.create_task(self._work())

    @classmethod
    async def start(cls, module: str, greeting: Any, name: str) -> Process:
        await asyncio.sleep(START_S)
        cls.num_started += 1
        return cls()

    def send(self, message: Any) -> None:
        self._asked.put_nowait(message)

    async def receive(self) -> Any:
        if (answer := await self._answers.get()) is None:
            raise RewardError("the process died")
        return answer

    def end(self) -> asyncio.Task[None]:
        self._working.cancel()
        self._answers.put_nowait(None)
        return asyncio.create_task(asyncio.sleep(0.1))

    async def _work(self) -> None:
        while True:
            message = await self._asked.get()
            if "forget" in message:
                clings = self._held.pop(message["forget"], 0) < 0
                await asyncio.sleep(3600.0 * clings)
                self._answers.put_nowait({"id": message["id"]})
                continue
            key, number, fate = message["key"], message["num_turns"], message["action"]
            if self._held.get(key, -1) != number and message.get("history") != number:
                self._answers.put_nowait({"id": message["id"], "missing": True})
                continue
            for _ in range(message.get("num_repeated", 0)):
                await asyncio.sleep(SLOW.seconds)
                self._answers.put_nowait({"id": message["id"], "repeated": True})
            self._held[key] = -9 if fate.what == "cling" else number + 1
            Process.num_stepped += 1
            if fate.seconds:
                await asyncio.sleep(fate.seconds)
            if fate.what == "die":
                self._answers.put_nowait(None)
                return
            self._answers.put_nowait({"id": message["id"], "text": f"{key}.{number}"})


async def played(process: EpisodeProcess, key: str, after_s: float, fates: Sequence[Fate]) -> str:
    """Play an episode to its end; return why it has failed."""
    await asyncio.sleep(after_s)
    for number, fate in enumerate(fates):
        turn = {"key": key, "num_turns": number, "action": fate} | ({} if number else {"history": 0})
        asking = asyncio.create_task(process.answer(turn, lambda number=number: {"history": number}))
        if fate.what == "leave":
            await asyncio.sleep(fate.seconds)
            asking.cancel()
            await asyncio.wait([asking])
            process.forget(key)
            return ""
        try:
            assert (await asking)["text"] == f"{key}.{number}"
        except RewardError as error:
            return str(error)
        if fate.what == "cling":
            process.forget(key)
            return ""
    return ""


FATES = st.one_of(
    st.builds(Fate, st.sampled_from(["", "", "leave", "cling", "die"]), st.sampled_from([0.0, 0.1, 4.9])),
    st.just(Fate("hang", 3600.0)),
)


EPISODES = st.tuples(st.sampled_from([0.0, 0.0, 6.0]), st.lists(FATES, min_size=1, max_size=3))
DONE, SLOW, DIES = Fate("", 0.0), Fate("", 4.9), Fate("die", 0.0)


def test_each_repeated_turn_of_a_lost_episode_has_the_time_of_a_turn() -> None:
    async def play() -> list[str]:
        process, found = EpisodeProcess({"turn_timeout_s": TIMEOUT_S}, 1), list[str]()
        for number, fate in ((9, SLOW), (10, Fate("hang", 3600.0))):
            turn = {"key": "long", "num_turns": number, "action": fate}
            try:
                answer = await process.answer(turn, lambda number=number: {"history": number, "num_repeated": number})
                found.append(answer["text"])
            except RewardError as error:
                found.append(str(error))
        await process.close()
        return found

    Process.num_started = 0
    with mock.patch.object(host, "Child", Process):
        assert run(play()) == ["long.9", REASONS["hang"]]
    assert Process.num_started == 1


@settings(max_examples=200)
@example(
    games=[(0.0, [DONE, DONE]), (0.0, [Fate("die", 0.1)]), (0.0, [SLOW]), (6.0, [DIES])]
)  # dies as an episode is found lost
@given(games=st.lists(EPISODES, min_size=1, max_size=8))
def test_a_turn_that_hangs_or_dies_fails_its_own_sample_alone(games: list[tuple[float, list[Fate]]]) -> None:
    async def play() -> tuple[list[str], float]:
        process = EpisodeProcess({"turn_timeout_s": TIMEOUT_S}, 1)
        found = await asyncio.gather(*(played(process, str(i), *game) for i, game in enumerate(games)))
        now_s = asyncio.get_running_loop().time()
        await process.close()
        return found, now_s

    Process.num_started = Process.num_stepped = 0
    with mock.patch.object(host, "Child", Process):
        found, now_s = run(play())
    episodes = [fates for _, fates in games]
    ends = [next((i for i, fate in enumerate(fates) if fate.what), len(fates) - 1) for fates in episodes]
    fates = [episode[end] for episode, end in zip(episodes, ends, strict=True)]
    assert found == [REASONS.get(fate.what, "") for fate in fates]
    stepped = [fate for episode, end in zip(episodes, ends, strict=True) for fate in episode[: end + 1]]
    num_clinging, num_left = (sum(fate.what == what for fate in fates) for what in ("cling", "leave"))
    num_bad = sum(fate.what in REASONS for fate in fates) + num_clinging
    assert Process.num_started <= 1 + num_bad, "a process is started again by the fault of a turn"
    assert len(stepped) - num_left <= Process.num_stepped <= len(stepped), "no turn is stepped twice"
    longest_s = sum(min(fate.seconds, TIMEOUT_S) for fate in stepped) + TIMEOUT_S * num_clinging
    assert now_s <= max(after_s for after_s, _ in games) + longest_s + (START_S + 0.1) * Process.num_started + 0.1
