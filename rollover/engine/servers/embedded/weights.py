"""Weight endpoint of a server of the embedded engine.

What is peculiar to it: a load from a folder is all or nothing, one through a group leaves a server that must be given
all weights again where it fails in the middle; and the server's digests are those of the folder's tensors wherever it
holds them in the folder's number format. Adapters are merged by the server, into the model of a folder that it reads
for it; of the sums no folder tells the digests, so that the log-prob check alone can tell.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import ServerInfo, TensorDigests
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.read_back import FolderDigests, HeldTensor, LoadConfirmation
from rollover.engine.servers.weights.transfer import Receiver, TransferCalls, send_folder
from rollover.weights.adapters import holds_adapters
from rollover.weights.groups import GroupPlan


class EmbeddedServerWeights:
    """Implements ``WeightEndpoint``."""

    def __init__(
        self,
        client: HTTPClient,
        config: EmbeddedServerConfig,
        model: ModelFolder,
        folders: FolderDigests,
        device: str | None = None,
    ) -> None:
        self._client = client
        self._base = model.path
        self._config = config
        self._device = device
        self._group_name = secrets.token_hex(4)
        self._num_groups = 0
        self._confirmation = LoadConfirmation(repr(client), config, model, folders, self._digests)

    async def send(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """See ``WeightEndpoint.send``."""
        is_full = not holds_adapters(source)
        if is_full and self._config.weight_transfer != "folder":
            await send_folder(source, await self.receiver(label, keeps_kv=keeps_kv), self._config)
        else:
            base = None if is_full else await self._base_there()
            body = {"folder": str(source.resolve()), "base": base, "label": label, "keeps_kv": keeps_kv}
            await self._post("/load_weights", body)
        if is_full:
            await self._confirmation.of(source)

    async def _base_there(self) -> str:
        """Return where the server's machine has the run's model: one that we have started began with it, maybe with a
        copy."""
        if self._config.launch:
            return (await self._client.ask(ServerInfo, "GET", "/info")).model_path
        return str(self._base.resolve())

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def set_label(self, label: str) -> None:
        await self._client.call("POST", "/update_weight_version", body={"new_version": label})

    async def receiver(self, label: str, *, keeps_kv: bool) -> Receiver:
        """See ``WeightEndpoint.receiver``."""
        backend = self._config.weight_transfer
        assert backend != "folder", "a group was asked of a server that reads folders"
        self._num_groups += 1
        plan = GroupPlan(
            meets="torch",
            backend=backend,
            towards=self._client.url,
            host=self._config.transfer_host,
            name=f"{self._group_name}/{self._num_groups}",
            num_workers=1,
            timeout_s=self._config.load_timeout_s,
            is_flat=True,
            device=self._device,
        )

        def calls(address: Mapping[str, Any]) -> TransferCalls:
            return TransferCalls(
                meet=("/group/join", dict(address)),
                begin=("/group/begin", {}),
                announce=lambda bucket, _: ("/group/receive", {**bucket.described("dtypes"), "is_flat": True}),
                finish=("/group/finish", {"label": label, "keeps_kv": keeps_kv}),
                leave=("/group/leave", {}),
            )

        return Receiver(name=repr(self._client), plan=plan, calls=calls, post=self._post, ping=self.label)

    async def settle(self, label: str, *, keeps_kv: bool) -> None:
        """See ``WeightEndpoint.settle``: the label came with the last call."""

    async def _post(self, path: str, body: Any) -> None:
        await self._client.call("POST", path, body=body, timeout_s=self._config.load_timeout_s)

    async def _digests(self, source: Path) -> Mapping[HeldTensor, str]:
        limit_s = self._config.load_timeout_s
        found = await self._client.ask(TensorDigests, "POST", "/digests", body={}, timeout_s=limit_s)
        return {HeldTensor(name=name): digest for name, digest in found.digests.items()}


class EmbeddedServerMemory:
    """Implements ``MemoryEndpoint``.

    Example: ``await memory.release()`` sends ``POST /sleep``.
    """

    def __init__(self, client: HTTPClient, config: EmbeddedServerConfig) -> None:
        self._client = client
        self._timeout_s = config.load_timeout_s

    async def check(self) -> None:
        """Accept every server: each can give its memory back."""

    async def release(self) -> None:
        await self._client.call("POST", "/sleep", body={}, timeout_s=self._timeout_s)

    async def take(self, part: Part) -> None:
        """Do nothing: the load takes the memory."""
