"""Weight endpoints of an SGLang server: read from a folder, or received over NCCL or gloo.

What is peculiar to it:

* An update that is refused may have changed the weights all the same, and a file that does not fit kills the server. So
  folders are checked before they are sent, and after a refusal the old weights are loaded again (``ServerEngine``).
* Weights are received between ``/begin_weight_update`` and ``/end_weight_update`` only, and a session that was left
  open refuses the next one. The label and the flush of the cache go with the last piece: until then the server calls
  its weights by their old name.
* Cached blocks are found again by tokens and ``extra_key``. With the label of the weights as the key, no new call can
  hit a block that other weights have computed while running calls keep theirs. A call that is taken off the batch
  leaves blocks of new weights under its old key: so the cache is flushed at every update that does not keep it.
* Adapters are read from a folder, in peft's format, beside a base that stays as it is; an unload waits for the calls
  that use the adapter. Cached blocks are found by the adapter too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.servers.sglang.answers import (
    AdapterOutcome,
    ModelInfo,
    SGLangServerInfo,
    UpdateOutcome,
)
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.transfer import TransferCalls
from rollover.errors import EngineError
from rollover.types import AdapterShape
from rollover.weights.buckets import Bucket
from rollover.weights.groups import GroupPlan

_TAGS: dict[Part, list[str]] = {"weights": ["weights"], "cache": ["kv_cache", "cuda_graph"]}


class SGLangWeights(WeightEndpoint[SGLangConfig]):
    """Implements ``WeightEndpoint``. Memory is given back by SGLang's memory saver: weights, cache and recorded graphs.

    Without ``--enable-memory-saver`` a server gives nothing back and does not report that, so its settings are looked
    at first. It dies when it is asked to give memory back while it decodes, or to take what it has.
    """

    async def label(self) -> str:
        return (await self._client.ask(ModelInfo, "GET", "/model_info")).weight_version

    async def set_label(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._client.call("POST", "/update_weight_version", body=body)

    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        body = {
            "model_path": str(folder.resolve()),
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": not keeps_kv,
        }
        await self._post("/update_weights_from_disk", body)

    async def _load_adapter(self, name: str, folder: Path) -> Collection[str]:
        body = {"lora_name": name, "lora_path": str(folder.resolve())}
        return await self._change_adapters("/load_lora_adapter", body)

    async def _unload_adapter(self, name: str) -> None:
        await self._change_adapters("/unload_lora_adapter", {"lora_name": name})

    async def _change_adapters(self, path: str, body: Mapping[str, str]) -> Collection[str]:
        limit_s = self._config.load_timeout_s
        answer = await self._client.ask(AdapterOutcome, "POST", path, body=body, timeout_s=limit_s)
        if not answer.success:
            raise EngineError(f"{self._client} refused POST {path}: {answer.error_message or 'no reason given'}")
        return answer.loaded_adapters or ()

    async def _transfer(
        self, label: str, *, keeps_kv: bool
    ) -> tuple[GroupPlan, Callable[[Mapping[str, Any]], TransferCalls]]:
        info = await self._client.ask(SGLangServerInfo, "GET", "/server_info")
        if info.dp_size != 1 or info.pp_size != 1:
            raise EngineError(
                f"{self._client} is data or pipeline parallel and takes weights from folders only: set"
                " engine.weight_transfer to 'folder'"
            )
        backend = self._config.weight_transfer
        is_flat = backend == "nccl"  # on a CPU, copying into one piece costs more than it saves

        def calls(address: Mapping[str, Any]) -> TransferCalls:
            name = {"group_name": address["group_name"]}

            def announce(bucket: Bucket, is_last: bool) -> tuple[str, Any]:
                last = {"weight_version": label, "flush_cache": not keeps_kv} if is_last else {}
                flat = {"load_format": "flattened_bucket"} if is_flat else {}
                form = {"flush_cache": False, "abort_all_requests": False, **flat, **name}
                return "/update_weights_from_distributed", {**form, **bucket.described("dtypes"), **last}

            return TransferCalls(
                meet=("/init_weights_update_group", dict(address)),
                begin=("/begin_weight_update", {}),
                announce=announce,
                finish=("/end_weight_update", {}),
                cancel=("/end_weight_update", {}),
                leave=("/destroy_weights_update_group", name),
            )

        return self._torch_plan(backend, self._config.transfer_host, num_workers=info.tp_size, is_flat=is_flat), calls

    def how_to_serve_adapters(self) -> str:
        arguments = " ".join(adapter_arguments(self.adapters or AdapterShape(rank=16, targets=("all",))))
        return (
            f"to take adapters, start it with {arguments}, or set trainer.lora.publish = 'merged' (docs/how-to/lora.md)"
        )

    async def _post(self, path: str, body: Any) -> None:
        answer = await self._client.ask(UpdateOutcome, "POST", path, body=body, timeout_s=self._config.load_timeout_s)
        if not answer.success:
            raise EngineError(f"{self._client} refused POST {path}: {answer.message or 'no reason given'}")

    async def check_memory(self) -> None:
        info = await self._client.ask(SGLangServerInfo, "GET", "/server_info")
        if not info.enable_memory_saver:
            raise EngineError(
                f"{self._client} cannot give its memory back to the trainer, which engine.colocated = true asks for:"
                " start it with --enable-memory-saver (it needs the package torch-memory-saver, and a GPU)"
            )

    async def release_memory(self) -> None:
        await self._occupy("/release_memory_occupation", [tag for tags in _TAGS.values() for tag in tags])

    async def take_memory(self, part: Part) -> None:
        await self._occupy("/resume_memory_occupation", _TAGS[part])

    async def _occupy(self, path: str, tags: list[str]) -> None:
        await self._client.call("POST", path, body={"tags": tags}, timeout_s=self._config.load_timeout_s)


def adapter_arguments(shape: AdapterShape | None) -> list[str]:
    """Give the further arguments for a server that is given adapters alone: room for one, and for calls without."""
    if shape is None:
        return []
    room = ["--enable-lora", "--max-lora-rank", str(shape.rank), "--max-loras-per-batch", "2"]
    return [*room, "--lora-target-modules", *shape.targets]
