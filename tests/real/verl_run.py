"""A run of the real verl on a CPU: ``python -m tests.real.verl_run OUTPUT OVERRIDE...``.

Its task runner, trainer, data, rewards, queue, replay buffer, agent loops, client and load balancer are verl's. Three
parts need GPUs and are replaced: the server in a replica, the weights, and the actor's gradient. OUTPUT gets a line for
each batch that reaches the gradient, and at the end a line of what the servers have seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.v1 import PPOTrainerSync, trainer_base
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

TOKENS = range(2, 16)
"""Tokens that the servers draw, besides the end token."""
END = 0
TICK_S = 0.002
SLOW = 9
"""The digit 7. Calls whose prompt begins with this token stop at ``PAUSE`` tokens until they are aborted, and meet no end token."""
PAUSE = 25


def drawn(prompt: list[int], position: int, weights: int) -> tuple[int, float]:
    """Return the token that weights of this step draw at a position behind a prompt, and its log-prob."""
    number = zlib.crc32(f"{prompt}/{position}/{weights}".encode())
    token = END if number % 29 == 0 and prompt[0] != SLOW else TOKENS[number % len(TOKENS)]
    return token, -(1 + number % 512) / 128


class Server:
    """A server of one replica. It draws a token of every call per tick, as vLLM's server in verl does when it is
    aborted, closed, opened and put to sleep."""

    def __init__(self, response_length: int) -> None:
        self._response_length = response_length
        self._weights: int | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._aborted: set[str] = set()
        self._calls: dict[str, int] = {}
        self._is_asleep = False
        self._num_aborts = 0
        self._wrong: list[str] = []

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        if self._is_asleep:
            self._wrong.append("a call came to a server that sleeps")
        await self._open.wait()
        assert self._weights is not None
        most = sampling_params.get("max_tokens", self._response_length)
        stops = {END, *(sampling_params.get("stop_token_ids") or ())}
        ids: list[int] = []
        logprobs: list[float] = []
        self._calls[request_id] = self._weights
        try:
            while len(ids) < most and not (ids and ids[-1] in stops) and request_id not in self._aborted:
                await asyncio.sleep(TICK_S)
                if prompt_ids[0] == SLOW and len(ids) == PAUSE:
                    continue
                token, logprob = drawn(prompt_ids, len(ids), self._weights)
                ids.append(token)
                logprobs.append(logprob)
        finally:
            del self._calls[request_id]
        is_over = len(ids) == most or bool(ids and ids[-1] in stops)
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="completed" if is_over else "aborted",
            extra_fields={"global_steps": self._weights},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._num_aborts += 1
        self._open.clear()
        self._aborted |= self._calls.keys()

    async def resume_generation(self) -> None:
        self._open.set()

    async def sleep(self) -> None:
        if self._calls or not self._open.is_set():
            self._wrong.append("a server was put to sleep with calls, or closed")
        self._is_asleep = True

    async def load(self, global_steps: int) -> None:
        if self._calls:
            self._wrong.append("weights came under a call")
        self._weights, self._is_asleep = global_steps, False

    async def seen(self) -> dict[str, Any]:
        return {"num_aborts": self._num_aborts, "wrong": self._wrong}


class Replica(RolloutReplica):
    """A replica of verl with such a server."""

    async def init_standalone(self) -> None:
        await self.launch_servers()

    async def launch_servers(self) -> None:
        self._server_handle = ray.remote(Server).options(max_concurrency=1000).remote(self.config.response_length)
        self._server_address = f"replica-{self.replica_rank}"
        self.servers = [self._server_handle]


class Weights:
    """The workers whose weights the servers get."""

    def __init__(self, servers: list[Any]) -> None:
        self._servers = servers

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        return [server.load.remote(global_steps) for server in self._servers]


class Trainer(PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer without a model to train."""

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.reward_loop_manager = RewardLoopManager(config=self.config, rm_resource_pool=None)
        self.teacher_model_manager = None
        self.llm_server_manager = LLMServerManager.create(config=self.config)
        self.actor_rollout_wg = Weights(self.llm_server_manager.server_handles)
        self.checkpoint_manager = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.llm_server_manager.get_replicas(),
        )
        self.checkpoint_manager.sleep_replicas()
        self._load_checkpoint()

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _balance_batch(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        rows = [{name: plain(values[i]) for name, values in data.items()} for i in range(len(batch.keys))]
        mine = {name: float(value) for name, value in metrics.items() if name.startswith("rollover/")}
        pending = [key for key, tag in tq.kv_list("train")["train"].items() if tag.get("is_prompt")]
        self._write(step=self.global_steps, keys=batch.keys, tags=batch.tags, rows=rows, metrics=mine, pending=pending)
        return batch

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        self._write(servers=ray.get([server.seen.remote() for server in self.llm_server_manager.server_handles]))

    def _validate(self) -> Any:
        found = super()._validate()
        self._write(validated=self.global_steps, metrics={name: float(value) for name, value in found.items()})
        return found

    def _write(self, **line: Any) -> None:
        with open(self.config.trainer.experiment_name, "a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc,name-defined]
    """verl's task runner, with these replicas and this trainer."""

    def run(self, config: Any) -> None:
        RolloutReplicaRegistry.register("vllm", lambda: Replica)
        trainer_base.TRAINER_REGISTRY["sync"] = Trainer
        super().run(config)


def main(output: str, *overrides: str) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*overrides, f"trainer.experiment_name={Path(output).resolve()}"])
    run_ppo(config, task_runner_class=ray.remote(Runner))


if __name__ == "__main__":
    main(*sys.argv[1:])
