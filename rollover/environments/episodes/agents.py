"""Acts in the episodes of agents' programs: starts a program, replies to its requests, and reports what it asks next.

An episode begins with an empty turn. The program's first request answers it, and so holds the whole prompt; each later
request answers the turn that was the reply to the one before. A program that is not alive, as after a restart of the
run, is started and told the recorded replies to its first requests, which have to be those of the record.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rollover.environments.child import Child
from rollover.environments.episodes.agent import AgentConfig
from rollover.environments.episodes.conversation import Messages, record_of, reply_to
from rollover.environments.episodes.door import Door
from rollover.environments.episodes.guest import Asked, Guest
from rollover.environments.episodes.tools import call_reader
from rollover.environments.keeper import describe_exit
from rollover.errors import DataError, RewardError
from rollover.hf.tokenizer import Tokenizer
from rollover.types import FinishReason, Observation, SampleId, Trajectory


class ConversationWriter(Protocol):
    """Writes messages out in tokens, up to the beginning of the model's next turn.

    Example: ``begin(messages, (), {})`` returns the tokens of a prompt that a program has written, and
    ``write([{"role": "tool", "content": "46"}], 7, {})`` those that follow a turn: ``(19, 6, 12)``, say. ``last_id`` is
    the last token of the turn, which is not written a second time if it is the marker that ends a turn.
    """

    def begin(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]
    ) -> tuple[int, ...]: ...

    def write(
        self,
        messages: Messages,
        last_id: int,
        columns: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]: ...


class AgentSource(NamedTuple):
    """A source whose episodes are those of a program.

    Example: ``AgentSource(AgentConfig(command=("python", "agent.py")), writer, max_new_tokens=512)``
    """

    config: AgentConfig
    writer: ConversationWriter
    max_new_tokens: int
    """Tokens of an episode, sampled and observed."""
    must_post_reward: bool = False
    """True if what the program posts is its reward."""


@dataclass(slots=True)
class _Life:
    """One life of a program."""

    child: Child
    guest: Guest
    key: str
    exited: asyncio.Task[int] = field(init=False)
    """Its exit code, once it has ended."""

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self.child.exit_code())

    async def end(self) -> None:
        """Kill the program. Only then is its open request answered, so that it does not complain about that."""
        await self.child.end()
        self.guest.leave()

    async def next_request(self, timeout_s: float) -> Asked | None:
        """Wait for the next request; ``None`` if the program ends instead.

        Raises:
            RewardError: it fails, or does neither in time.
        """
        guest = self.guest
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while guest.open is None and not guest.failure and not self.exited.done():
                    guest.changed.clear()
                    changed = asyncio.create_task(guest.changed.wait())
                    try:
                        await asyncio.wait([changed, self.exited], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
        if guest.failure:
            raise RewardError(guest.failure)
        if self.exited.done():
            if code := self.exited.result():
                raise RewardError(f"the program {describe_exit(code)}")
            if guest.open is not None:
                raise RewardError("the program ended before the reply to its request came")
            return None
        if guest.open is None:
            said = "reply" if guest.num_replies else "start"
            raise RewardError(
                f"the program asked nothing for {timeout_s:g} s after its {said}, and did not end"
                " (environment.turn_timeout_s)"
            )
        return guest.open


class AgentActor:
    """Answers the turns of episodes whose environment is a program. Belongs to one event loop; ``close`` it there.

    Args:
        sources: by name.

    Example: with a program that asks ``"12+34?"`` first, the empty turn of an episode is answered with an
    ``Observation`` whose tokens are those of the prompt ``"12+34?"``.
    """

    def __init__(self, sources: Mapping[str, AgentSource], tokenizer: Tokenizer) -> None:
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
                life = await self._start(sample_id, source.config, prompt.columns)
                asked = await self._after_replies(life, trajectory, source.config)
        observation = Observation((), "", life.guest.reward, FinishReason.STOP, now_s)
        if asked is None:
            if trajectory.num_turns == 1:
                raise RewardError("the program ended without a request")
            if source.must_post_reward and observation.reward is None:
                raise RewardError("the program ended without a reward (POST /v1/reward)")
            return observation
        tools = () if trajectory.observations else asked.request.tools
        text = record_of(asked.new, tools)
        try:
            ids = self._written(source.writer, asked, trajectory)
        except DataError as error:
            raise RewardError(str(error)) from None
        refusal, size = "", len(trajectory.response_ids) + len(ids)
        if trajectory.num_turns > source.config.max_turns:
            refusal = f"the episode has had its {source.config.max_turns} turns (environment.max_turns)"
        elif size >= source.max_new_tokens:
            refusal = f"the conversation has {size} tokens, and an episode may have {source.max_new_tokens}"
        if not refusal:
            return observation._replace(token_ids=ids, text=text, reward=None, end=None)
        if trajectory.num_turns == 1:
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

    async def _start(self, sample_id: SampleId, config: AgentConfig, row: Mapping[str, Any]) -> _Life:
        guest = Guest()
        key = self._door.let_in(guest)
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))  # a proxy is not for this address
        variables = dict(os.environ) | {"NO_PROXY": direct, "no_proxy": direct}
        variables |= {"OPENAI_BASE_URL": self._door.url, "OPENAI_API_KEY": key}
        program = {"command": config.command, "function": config.function, "variables": variables, "row": dict(row)}
        try:
            child = await Child.start("rollover.environments.program", program, "program")
        except BaseException:
            self._door.let_out(key)
            raise
        life = self._lives[sample_id] = _Life(child, guest, key)
        return life

    async def _after_replies(self, life: _Life, trajectory: Trajectory, config: AgentConfig) -> Asked | None:
        """Give the program all replies that it has not had yet, and return what it asks next."""
        size, timeout_s = 0, config.turn_timeout_s
        turns = zip(trajectory.observations, trajectory.turns[1:], strict=True)
        for number, (recorded, turn) in enumerate(turns, start=1):
            size += len(recorded.token_ids)
            if number > life.guest.num_replies:
                asked = await life.next_request(timeout_s)
                tools = () if number > 1 or asked is None else asked.request.tools
                if asked is None or record_of(asked.new, tools) != recorded.text:
                    was = "ended" if asked is None else f"added {record_of(asked.new, tools)!r:.120}"
                    raise RewardError(
                        f"started again, the program {was} at request {number}, where it had added"
                        f" {recorded.text!r:.120}: its requests must depend on row and replies alone"
                    )
                text = self._tokenizer.decode(list(turn), skip_special_tokens=True)
                read = self._readers[trajectory.prompt.source]
                sizes = size, len(turn)
                life.guest.answer(reply_to(asked.request, text, read, number=number, sizes=sizes))
            size += len(turn)
        return await life.next_request(timeout_s)

    def _written(self, writer: ConversationWriter, asked: Asked, trajectory: Trajectory) -> tuple[int, ...]:
        columns, tools = trajectory.prompt.columns, asked.request.tools
        if not trajectory.observations:
            return writer.begin(asked.new, tools, columns)
        return writer.write(asked.new, trajectory.turn_ids[-1], columns, tools)

    async def _refuse(self, life: _Life, refusal: str, timeout_s: float) -> None:
        """Refuse the open request and all later ones, and let the program come to its end."""
        life.guest.leave(refusal)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(life.exited)
