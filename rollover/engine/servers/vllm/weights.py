"""Weight endpoints of a vLLM server: read from a folder or received over NCCL, then labelled and confirmed.

What is peculiar to it:

* Cached blocks are found again by tokens and ``cache_salt``: with the label of the weights as the salt, no new call can
  hit a block that other weights have computed, whatever a reset of the cache could not free.
* Over NCCL each bucket follows its announcement as one tensor of bytes, which vLLM calls packed.
* Adapters are read from a folder, in peft's format, beside a base that stays as it is. One that replaces another under
  its name is read again at every iteration, so each has a name of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.servers.vllm.answers import Models, Success, VLLMServerInfo, WeightInfo, WorldSize
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.transfer import TransferCalls
from rollover.errors import ConfigError, EngineError, EngineTimeout
from rollover.weights.buckets import BUCKET_BYTES
from rollover.weights.groups import GroupPlan

_RESET_RETRY_S = 0.05
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class VLLMWeights(WeightEndpoint[VLLMConfig]):
    """Implements ``WeightEndpoint``. Memory is given back by vLLM's sleep mode, level 2, which drops weights and cache.

    A server that was started without ``--enable-sleep-mode`` answers that it sleeps and gives nothing back, so its
    settings are looked at first; one on a CPU cannot be started with it. When the last part is taken again, the server
    resumes by itself: it has not been sent a call yet.
    """

    async def label(self) -> str:
        return (await self._client.ask(WeightInfo, "GET", "/weight_info")).weight_version

    async def settle(self, label: str, *, keeps_kv: bool) -> None:
        await super().settle(label, keeps_kv=keeps_kv)
        await self.set_label(label)

    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
        await self._post("/collective_rpc", reload)

    async def _load_adapter(self, name: str, folder: Path) -> Collection[str]:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        return [model.id for model in (await self._client.ask(Models, "GET", "/v1/models")).data]

    async def _unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _transfer(
        self, label: str, *, keeps_kv: bool
    ) -> tuple[GroupPlan, Callable[[Mapping[str, Any]], TransferCalls]]:
        answer = await self._client.ask(WorldSize, "GET", "/get_world_size", params={"include_dp": "true"})
        plan = GroupPlan(
            meets="nccl",
            backend="nccl",
            towards=self._client.url,
            name=label,
            num_workers=answer.world_size,
            timeout_s=self._config.load_timeout_s,
            device=self._device,
            is_flat=True,
        )
        # It expects the tensors of a call in pieces, each of which ends with the tensor that makes it larger than this:
        # a bucket is one piece.
        packing = {"packed": True, "packed_buffer_size_bytes": BUCKET_BYTES}

        def calls(address: Mapping[str, Any]) -> TransferCalls:
            return TransferCalls(
                meet=("/init_weight_transfer_engine", {"init_info": {**address, **packing}}),
                begin=("/start_weight_update", None),
                announce=lambda bucket, _: ("/update_weights", {"update_info": bucket.described("dtype_names")}),
                finish=("/finish_weight_update", {"weight_version": label}),
                leave=("/shutdown_weight_transfer_engine", None),
            )

        return plan, calls

    async def _forget_cache(self, *, keeps_kv: bool) -> None:
        """Free what was cached. Calls that are kept over the update hold their blocks; the salt keeps others off them.
        Those that were aborted hold theirs for a moment."""
        deadline_s = asyncio.get_running_loop().time() + self._config.control_timeout_s
        while not (await self._client.ask(Success, "POST", "/reset_prefix_cache")).success:
            if keeps_kv:
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise EngineTimeout(
                    f"{self._client} did not free its prefix cache within {self._config.control_timeout_s:g} s"
                )
            await asyncio.sleep(_RESET_RETRY_S)

    def how_to_serve_adapters(self) -> str:
        rank = 16 if self.adapters is None else served_rank(self.adapters.rank)
        return (
            "to take adapters, start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and --enable-lora"
            f" --max-lora-rank {rank}, or set trainer.lora.publish = 'merged' (docs/how-to/lora.md)"
        )

    async def settings(self) -> VLLMServerInfo:
        params, limit_s = {"config_format": "json"}, self._config.load_timeout_s
        return await self._client.ask(VLLMServerInfo, "GET", "/server_info", params=params, timeout_s=limit_s)

    async def check_memory(self) -> None:
        if not (await self.settings()).enable_sleep_mode:
            raise EngineError(
                f"{self._client} cannot give its memory back to the trainer, which engine.colocated = true asks for:"
                " start it with --enable-sleep-mode, on a GPU"
            )

    async def release_memory(self) -> None:
        await self._client.call("POST", "/sleep", params={"level": "2"}, timeout_s=self._config.load_timeout_s)

    async def take_memory(self, part: Part) -> None:
        params = {"tags": "weights" if part == "weights" else "kv_cache"}
        await self._client.call("POST", "/wake_up", params=params, timeout_s=self._config.load_timeout_s)


def served_rank(rank: int) -> int:
    """Return the least rank that vLLM has room for and that holds ``rank``. Raises ``ConfigError``."""
    for served in _RANKS:
        if rank <= served:
            return served
    raise ConfigError(
        f"trainer.lora.rank {rank}: vLLM serves adapters up to rank {_RANKS[-1]}; set trainer.lora.publish = 'merged'"
    )
