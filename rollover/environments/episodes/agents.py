"""Acts in the episodes of agents' programs: starts a program, replies to its requests, and reports what it asks next.

An episode begins with an empty turn, number 0. A request that goes on from the reply of an earlier turn is written
after it, and any other as a prompt of its own, after turn 0. Requests become turns in the order in which they come,
each when the turn before has ended: one answers the turn, and the rest wait. A program that is not alive, as after a
restart of the run, is started and told the recorded replies to its first requests, which have to be those of the
record, in any order: the second of two equal requests is the second of the record.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rollover.environments.child import Child
from rollover.environments.episodes.agent import AgentConfig
from rollover.environments.episodes.base import EnvironmentSettings, EnvironmentTimeout
from rollover.environments.episodes.conversation import ChatReply, ChatRequest, Messages, reply_to
from rollover.environments.episodes.door import Door
from rollover.environments.episodes.guest import Asked, Guest
from rollover.environments.episodes.tools import call_reader
from rollover.environments.keeper import describe_exit
from rollover.errors import RewardError
from rollover.hf.tokenizer import FastTokenizer
from rollover.types import FinishReason, Observation, SampleId, Trajectory

Settings = TypeVar("Settings", bound=EnvironmentSettings)


class MessageWriter(Protocol):
    """Writes messages out in tokens. All raise ``DataError`` when the chat template has no place for a message."""

    def open(self, messages: Messages, columns: Mapping[str, Any]) -> tuple[int, ...]:
        """Write the prompt of a row, with the messages of an environment after it."""
        ...

    def begin(self, messages: Messages, tools: Sequence[Any], columns: Mapping[str, Any]) -> tuple[int, ...]:
        """Write a conversation from its beginning."""
        ...

    def write(
        self, messages: Messages, last_id: int, columns: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        """Write messages after a turn that ended with ``last_id``."""
        ...


class SourceEnvironment(NamedTuple, Generic[Settings]):
    """The environment of a source of prompts, and how its answers are written out."""

    config: Settings
    writer: MessageWriter
    max_new_tokens: int
    """Tokens of an episode, sampled and observed."""
    must_post_reward: bool = False
    """True if an agent's program has to post its reward."""
    seed: int = 0
    """Seed of which the seeds of its episodes are made."""

    def write(self, columns: Mapping[str, Any], new: Messages, tools: Any, last_id: int | None) -> tuple[int, ...]:
        """Write messages out after a turn that ended with ``last_id``, or as a prompt. Raises ``DataError``."""
        if last_id is None:
            return self.writer.begin(new, tools, columns)
        return self.writer.write(new, last_id, columns, tools)


@dataclass(slots=True)
class _Life:
    child: Child
    guest: Guest
    key: str
    memory: str
    """The end of the message if it fails: how much memory it may have."""
    exited: asyncio.Task[int] = field(init=False)
    """Its exit code, once it has ended."""

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self.child.exit_code())

    async def end(self) -> None:
        """Kill the program. Only then is its open request answered, so that it does not complain about that."""
        await self.child.end()
        self.guest.leave()

    async def wait(self, is_there: Callable[[], object], timeout_s: float) -> None:
        """Wait until something is there, the program has ended, or the time is up.

        Raises:
            RewardError: the program fails.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_there() and not self.exited.done():
                    self.guest.changed.clear()
                    changed = asyncio.create_task(self.guest.changed.wait())
                    try:
                        await asyncio.wait([changed, self.exited], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
        if self.exited.done() and (code := self.exited.result()):
            raise RewardError(f"the program {describe_exit(code)}{self.memory}")

    async def next_request(self, timeout_s: float) -> Asked | None:
        """Wait for the next request; ``None`` if the program ends instead.

        Raises:
            RewardError: it fails, or does neither in time.
        """
        guest = self.guest
        await self.wait(lambda: guest.waiting, timeout_s)
        if self.exited.done():
            if guest.waiting or not guest.has_heard:
                raise RewardError("the program ended before the reply to its request came")
            return None
        if not guest.waiting:
            said = "reply" if len(guest.said) > 1 else "start"
            raise EnvironmentTimeout(
                f"the program asked nothing for {timeout_s:g} s after its {said}, and did not end"
                " (environment.turn_timeout_s)",
                guest.reward or 0.0,
            )
        return guest.waiting[0]


class AgentActor:
    """Answers the turns of episodes whose environment is a program. Belongs to one event loop; ``close`` it there.

    Args:
        sources: by name.

    Example: with a program that asks ``"12+34?"`` first, the empty turn of an episode is answered with an
    ``Observation`` whose tokens are the prompt ``"12+34?"``.
    """

    def __init__(self, sources: Mapping[str, SourceEnvironment[AgentConfig]], tokenizer: FastTokenizer) -> None:
        self._sources = sources
        self._tokenizer = tokenizer
        self._readers = {name: call_reader(source.config.parser) for name, source in sources.items()}
        self._starting = {name: asyncio.Semaphore(source.config.workers) for name, source in sources.items()}
        self._door = Door()
        self._lives: dict[SampleId, _Life] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        """Answer the last turn of an episode. Raises as ``rollover.rollout.environment.Environment`` says."""
        sample_id, prompt = trajectory.sample_id, trajectory.prompt
        source = self._sources[prompt.source]
        if (life := self._lives.get(sample_id)) is not None:
            asked = await self._after_replies(life, trajectory, source.config)
        else:
            async with self._starting[prompt.source]:  # many programs that start at once would all be late
                life = await self._start(sample_id, source, prompt.columns)
                asked = await self._after_replies(life, trajectory, source.config)
        observation = Observation((), "", life.guest.reward, FinishReason.STOP, now_s)
        if asked is None:
            if trajectory.num_turns == 1:
                raise RewardError("the program ended without a request")
            if source.must_post_reward and observation.reward is None:
                raise RewardError("the program ended without a reward (POST /v1/reward)")
            return observation
        parent, latest = asked.parent, trajectory.num_turns - 1
        size = len(trajectory.before(parent)) + len(trajectory.turns[parent]) + len(asked.token_ids)
        refusal = ""
        if latest >= source.config.max_turns:
            refusal = f"the episode has had its {source.config.max_turns} turns (environment.max_turns)"
        elif size >= source.max_new_tokens:
            refusal = f"the conversation has {size} tokens, and an episode may have {source.max_new_tokens}"
        elif trajectory.num_tokens >= source.max_new_tokens:
            refusal = f"the model has written {trajectory.num_tokens} tokens, as many as it may in an episode"
        if not refusal:
            life.guest.take(asked, latest + 1)
            branch = None if parent == latest else parent
            return Observation(asked.token_ids, asked.record, start_s=now_s, parent=branch)
        if latest == 0:
            raise RewardError(f"its first request cannot be answered: {refusal} (max_new_tokens)")
        await self._refuse(life, refusal, source.config.turn_timeout_s)
        return observation._replace(reward=life.guest.reward, end=FinishReason.LENGTH)

    def leave(self, sample_id: SampleId) -> None:
        """End the program of an episode, if it has one."""
        if (life := self._lives.pop(sample_id, None)) is not None:
            self._door.let_out(life.key)
            task = asyncio.create_task(life.end())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        for sample_id in list(self._lives):
            self.leave(sample_id)
        await asyncio.gather(*self._leaving)
        await self._door.close()

    async def _start(
        self, sample_id: SampleId, source: SourceEnvironment[AgentConfig], row: Mapping[str, Any]
    ) -> _Life:
        guest, config = Guest(write=partial(source.write, row)), source.config
        limit = config.max_memory_gib
        key = self._door.let_in(guest)
        own = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        direct = own if own == "*" else f"{own},127.0.0.1".lstrip(",")  # a proxy is not for this address
        variables = dict(os.environ) | {"NO_PROXY": direct, "no_proxy": direct}
        variables |= {"OPENAI_BASE_URL": self._door.url, "OPENAI_API_KEY": key}
        program = {name: getattr(config, name) for name in ("command", "function", "max_memory_gib")}
        program |= {"variables": variables, "row": dict(row)}
        memory = f"; was it out of memory? It may have {limit} GiB (environment.max_memory_gib)" if limit else ""
        try:
            child = await Child.start("rollover.environments.program", program, "program")
        except BaseException:
            self._door.let_out(key)
            raise
        life = self._lives[sample_id] = _Life(child, guest, key, memory)
        return life

    async def _after_replies(self, life: _Life, trajectory: Trajectory, config: AgentConfig) -> Asked | None:
        """Give the program all replies that it has not had yet, and return what it asks next."""
        guest, parents, recorded = life.guest, trajectory.parents, [o.text for o in trajectory.observations]

        def asked_again() -> int | None:
            """Return the first recorded turn that the program asks for and was not told yet."""
            for turn in missing:
                asked = None if turn in guest.turns else guest.asked_again(parents[turn - 1], recorded[turn - 1])
                if asked is not None:
                    guest.take(asked, turn)
                if turn in guest.turns:
                    return turn
            return None

        while missing := [turn for turn in range(1, trajectory.num_turns) if turn not in guest.said]:
            await life.wait(asked_again, config.turn_timeout_s)
            if (turn := asked_again()) is None:
                was = "ended" if life.exited.done() else "asked nothing"
                if guest.waiting:
                    was = f"added {guest.waiting[0].record!r:.120}"
                raise RewardError(
                    f"started again, the program {was} at request {missing[0]}, where it had added"
                    f" {recorded[missing[0] - 1]!r:.120}: its requests must depend on row and replies alone"
                )
            guest.answer(turn, partial(self._reply, trajectory, turn), trajectory.turns[turn][-1])
        return await life.next_request(config.turn_timeout_s)

    def _reply(self, trajectory: Trajectory, turn: int, request: ChatRequest) -> ChatReply:
        ids, read = trajectory.turns[turn], self._readers[trajectory.prompt.source]
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return reply_to(request, text, read, number=turn, sizes=(len(trajectory.before(turn)), len(ids)))

    async def _refuse(self, life: _Life, refusal: str, timeout_s: float) -> None:
        """Refuse the open request and all later ones, and let the program come to its end."""
        life.guest.leave(refusal)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(life.exited)
