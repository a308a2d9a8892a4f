"""Acts in the episodes of a run: the rollouts' ``Environment``. It sends each turn to the process that holds the
episode, writes the answer out in tokens, and ends episodes whose budgets are used up."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollover.environments.episodes.agent import AgentConfig
from rollover.environments.episodes.agents import AgentActor, MessageWriter, SourceEnvironment
from rollover.environments.episodes.base import EnvironmentSettings, EnvironmentTimeout, Messages, written
from rollover.environments.episodes.host import EpisodeProcess
from rollover.errors import DataError, RewardError
from rollover.hf.tokenizer import FastTokenizer
from rollover.types import FinishReason, Observation, Prompt, SampleId, Trajectory


class EpisodeActor:
    """Answers turns. Belongs to one event loop; ``close`` it there.

    Args:
        environments: by the name of their source.
    """

    def __init__(self, environments: Mapping[str, SourceEnvironment[Any]], tokenizer: FastTokenizer) -> None:
        self._environments = environments
        self._tokenizer = tokenizer
        self._hosts: dict[str, list[EpisodeProcess]] = {}
        self._of_source: dict[str, list[EpisodeProcess]] = {}
        agents = {name: found for name, found in environments.items() if isinstance(found.config, AgentConfig)}
        for source in environments.keys() - agents:
            config = environments[source].config
            settings = asdict(config)
            hosts = self._hosts.setdefault(
                json.dumps(settings, default=str),
                [EpisodeProcess(settings, config.concurrency) for _ in range(config.workers)],
            )
            self._of_source[source] = hosts
        self._agents = AgentActor(agents, tokenizer)
        self._open: dict[SampleId, EpisodeProcess] = {}
        """Episodes that a process may hold."""

    def turn_limit(self, prompt: Prompt) -> int | None:
        found = self._environments.get(prompt.source)
        if found is None:
            return None
        return found.config.max_turn_tokens or found.max_new_tokens

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        config, writer, max_new_tokens, *_ = self._environments[trajectory.prompt.source]
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
            ids = await written(len(answer["text"]), _write, writer, answer["messages"], trajectory, is_opening)
        except RewardError as error:
            if isinstance(error, EnvironmentTimeout) and config.on_timeout == "end" and num_turns:
                return Observation((), "", error.earned, FinishReason.LENGTH, now_s)
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
            host.forget(str(sample_id))

    async def close(self) -> None:
        await self._agents.close()
        await asyncio.gather(*(host.close() for hosts in self._hosts.values() for host in hosts))

    async def _answer(self, config: EnvironmentSettings, trajectory: Trajectory) -> dict[str, Any]:
        *earlier, turn_ids = trajectory.turns
        sample_id, prompt = trajectory.sample_id, trajectory.prompt
        hosts = self._of_source[prompt.source]
        host = hosts[(sample_id.group + sample_id.index) % len(hosts)]
        turn = {"key": str(sample_id), "num_turns": len(earlier), "action": self._action(turn_ids)}

        def past() -> dict[str, Any]:
            observations = trajectory.observations
            given = zip(earlier, observations, strict=True)
            return {
                "row": prompt.columns,
                "seed": environment_seed(self._environments[prompt.source].seed, prompt),
                "history": [(self._action(ids), {"text": o.text, "reward": o.reward}) for ids, o in given],
                "state": observations[-1].state if observations else "",
            }

        if config.has_state:
            self._open[sample_id] = host
        return await host.answer(turn if earlier or not config.has_state else turn | past(), past)

    def _action(self, turn_ids: Sequence[int]) -> dict[str, Any]:
        text = self._tokenizer.decode(list(turn_ids), skip_special_tokens=True)
        return {"text": text, "token_ids": list(turn_ids)}


def _write(writer: MessageWriter, messages: Messages, trajectory: Trajectory, is_opening: bool) -> tuple[int, ...]:
    """Write an answer out. Raises ``RewardError`` when the chat template has no place for it."""
    columns = trajectory.prompt.columns
    try:
        if is_opening:
            return writer.open(messages, columns)
        return writer.write(messages, trajectory.turn_ids[-1], columns)
    except DataError as error:
        raise RewardError(str(error)) from None


def environment_seed(seed: int, prompt: Prompt) -> int:
    """Return the seed of the environment for a prompt, the same for all siblings: 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{prompt.prompt_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
