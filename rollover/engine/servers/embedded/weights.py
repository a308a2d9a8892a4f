"""Weight endpoint of a server of the embedded engine.

What is peculiar to it: a load from a folder is all or nothing, one through a group leaves a server that must be given
all weights again if it fails in the middle; and the server's digests are those of the folder's tensors wherever it
holds them in the folder's number format. Adapters are merged by the server, into the model of a folder that it reads
for it; of the sums no folder tells the digests, so that the log-prob check alone can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import ServerInfo, TensorDigests
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.read_back import HeldTensor
from rollover.engine.servers.weights.transfer import TransferCalls
from rollover.weights.groups import GroupPlan


class EmbeddedServerWeights(WeightEndpoint[EmbeddedServerConfig]):
    """Implements ``WeightEndpoint``."""

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        await self._load(label, folder, keeps_kv=keeps_kv)

    async def _send_adapter(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Have the server merge adapters into the run's model, where its own machine has it: a server that we have
        started began with it, maybe with a copy."""
        base = str(self._base.resolve())
        if self._config.launch:
            base = (await self._client.ask(ServerInfo, "GET", "/info")).model_path
        await self._load(label, source, base=base, keeps_kv=keeps_kv)

    async def _load(self, label: str, folder: Path, *, keeps_kv: bool, base: str | None = None) -> None:
        body = {"folder": str(folder.resolve()), "base": base, "label": label, "keeps_kv": keeps_kv}
        await self._post("/load_weights", body)

    async def _transfer(
        self, label: str, *, keeps_kv: bool
    ) -> tuple[GroupPlan, Callable[[Mapping[str, Any]], TransferCalls]]:
        config = self._config
        plan = self._torch_plan(config.weight_transfer, config.transfer_host, num_workers=1, is_flat=True)

        def calls(address: Mapping[str, Any]) -> TransferCalls:
            return TransferCalls(
                meet=("/group/join", dict(address)),
                begin=("/group/begin", {}),
                announce=lambda bucket, _: ("/group/receive", {**bucket.described("dtypes"), "is_flat": True}),
                finish=("/group/finish", {"label": label, "keeps_kv": keeps_kv}),
                leave=("/group/leave", {}),
            )

        return plan, calls

    async def _digests(self, source: Path) -> Mapping[HeldTensor, str]:
        limit_s = self._config.load_timeout_s
        found = await self._client.ask(TensorDigests, "POST", "/digests", body={}, timeout_s=limit_s)
        return {("", name): digest for name, digest in found.digests.items()}

    async def release_memory(self) -> None:
        await self._post("/sleep", {})
