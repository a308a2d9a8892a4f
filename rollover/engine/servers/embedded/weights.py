"""Weight endpoint of a server of the embedded engine.

What is peculiar to it: a load from a folder is all or nothing, one through a group leaves a server that must be given
all weights again if it fails in the middle. Adapters are merged by the server, into the model of a folder that it reads
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import ServerInfo
from rollover.engine.servers.weights.endpoint import WeightEndpoint
from rollover.engine.servers.weights.transfer import TransferCalls
from rollover.weights.groups import GroupPlan


class EmbeddedServerWeights(WeightEndpoint[EmbeddedServerConfig]):
    """Implements ``WeightEndpoint``."""

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        await self._load(label, folder, keeps_kv=keeps_kv)

    async def _send_adapter(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Have the server merge adapters into the run's model."""
        await self._load(label, source, base=str(self._base.resolve()), keeps_kv=keeps_kv)

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

    async def release_memory(self) -> None:
        await self._post("/sleep", {})
