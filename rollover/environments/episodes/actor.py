"""Acts in the episodes of a run: the rollouts' ``Environment``. It sends each turn to the process that holds the
episode, writes the answer out in tokens, and ends episodes whose budgets are used up."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rollover.environments.episodes.agent import AgentConfig
from rollover.environments.episodes.agents import AgentActor, AgentSource, ConversationWriter
from rollover.environments.episodes.base import EnvironmentSettings, Messages
from rollover.environments.episodes.host import EpisodeProcess
from rollover.errors import DataError, RewardError
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory


class SourceEnvironment(NamedTuple):
    """The environment of a source of prompts, and how its answers are written out.

    Example: ``SourceEnvironment(ToolsConfig(functions=("mine:calc",)), writer, max_new_tokens=512)``
    """

    config: EnvironmentSettings
    writer: ConversationWriter
    max_new_tokens: int
    """Tokens of an episode, sampled and observed."""
    must_post_reward: bool = False
    """True if an agent's program has to post its reward."""


class EpisodeActor:
    """Answers turns. Belongs to one event loop; ``close`` it there.

    Args:
        environments: by the name of their source.
        seed: the run's, of which the environments' seeds are made.

    Example: with a calculator for source ``"sums"``, the turn ``"<tool_call>...</tool_call>"`` is answered with an
    ``Observation`` whose text is ``"46"``.
    """

    def __init__(self, environments: Mapping[str, SourceEnvironment], tokenizer: Any, *, seed: int) -> None:
        self._environments = environments
        self._tokenizer = tokenizer
        self._seed = seed
        self._hosts: dict[str, list[EpisodeProcess]] = {}
        self._of_source: dict[str, list[EpisodeProcess]] = {}
        agents = {}
        for source, (config, writer, limit, must_post_reward) in environments.items():
            if isinstance(config, AgentConfig):
                agents[source] = AgentSource(config, writer, limit, must_post_reward)
                continue
            settings = asdict(config)
            hosts = self._hosts.setdefault(
                json.dumps(settings, default=str),
                [EpisodeProcess(settings, config.concurrency) for _ in range(config.workers)],
            )
            self._of_source[source] = hosts
        self._agents = AgentActor(agents, tokenizer)
        self._open: dict[SampleId, EpisodeProcess] = {}
        """Episodes that a process may hold."""
        self._leaving: set[asyncio.Task[None]] = set()

    def turn_limit(self, prompt: Prompt) -> int | None:
        found = self._environments.get(prompt.source)
        if found is None:
            return None
        return found.config.max_turn_tokens or found.max_new_tokens

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        config, writer, max_new_tokens, _ = self._environments[trajectory.prompt.source]
        is_opening = config.writes_prompts and not trajectory.observations
        num_turns = trajectory.num_turns - config.writes_prompts
        try:
            if isinstance(config, AgentConfig):
                return await self._agents.act(trajectory, now_s)
            answer = await self._answer(config, trajectory)
            said = Observation((), answer["text"], answer["reward"], FinishReason.STOP, now_s)
            said = said._replace(state=answer.get("state", ""))
            if answer["done"] and not is_opening:
                return said
            if answer["done"]:
                raise RewardError("reset has ended the episode")
            ids = _written(writer, answer["messages"], trajectory, is_opening)
        except RewardError as error:
            where = f"environment of source {trajectory.prompt.source!r}, turn {num_turns}"
            raise RewardError(f"{where}: {error} (prompt {trajectory.prompt.prompt_id})") from None
        fits = len(trajectory.response_ids) + len(ids) < max_new_tokens
        if fits and num_turns < config.max_turns:
            return said._replace(token_ids=ids, end=None)
        if is_opening:
            raise RewardError(
                f"prompt {trajectory.prompt.prompt_id} has {len(ids)} tokens with what reset returned, and the whole"
                f" episode may have {max_new_tokens} (max_new_tokens)"
            )
        return said._replace(end=FinishReason.LENGTH)

    def leave(self, sample_id: SampleId) -> None:
        self._agents.leave(sample_id)
        if (host := self._open.pop(sample_id, None)) is not None:
            task = asyncio.ensure_future(host.forget(str(sample_id)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        await self._agents.close()
        await asyncio.gather(*(host.close() for hosts in self._hosts.values() for host in hosts))

    async def _answer(self, config: EnvironmentSettings, trajectory: Trajectory) -> dict[str, Any]:
        *earlier, turn_ids = trajectory.turns
        sample_id, prompt = trajectory.sample_id, trajectory.prompt
        hosts = self._of_source[prompt.source]
        host = hosts[(sample_id.group + sample_id.index) % len(hosts)]
        turn: dict[str, Any] = {"key": str(sample_id), "num_turns": len(earlier), "action": self._action(turn_ids)}
        past: dict[str, Any] = {}
        if config.has_state:
            self._open[sample_id] = host
            turn |= {"row": prompt.columns, "seed": environment_seed(self._seed, prompt)}
            observations = trajectory.observations
            past["history"] = [
                (self._action(ids), {"text": observation.text, "reward": observation.reward})
                for ids, observation in zip(earlier, observations, strict=True)
            ]
            if observations:
                past["state"] = observations[-1].state
        return await host.answer(turn, past, config.turn_timeout_s)

    def _action(self, turn_ids: Sequence[int]) -> dict[str, Any]:
        text = self._tokenizer.decode(list(turn_ids), skip_special_tokens=True)
        return {"text": text, "token_ids": list(turn_ids)}


def _written(writer: Any, messages: Messages, trajectory: Trajectory, is_opening: bool) -> tuple[int, ...]:
    """Write an answer out. Raises ``RewardError`` when the chat template has no place for it."""
    columns = trajectory.prompt.columns
    ids: tuple[int, ...]
    try:
        if is_opening:
            ids = writer.open(messages, columns).token_ids
        else:
            ids = writer.write(messages, trajectory.turn_ids[-1], columns)
    except DataError as error:
        raise RewardError(str(error)) from None
    return ids


def environment_seed(seed: int, prompt: Prompt) -> int:
    """Return the seed of the environment for a prompt, the same for all siblings: 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{prompt.prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
