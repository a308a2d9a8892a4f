"""Weight endpoint of a server of the embedded engine.

What is peculiar to it: a load is all or nothing, and the server's digests are those of the folder's tensors wherever it
holds them in the folder's number format. Adapters are merged by the server, into the model of a folder that it reads
for it; of the sums no folder tells the digests, so that the log-prob check alone can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.confirm import LoadConfirmation
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.embedded.messages import ServerInfo, TensorDigests
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.read_back import FolderDigests, HeldTensor
from rollover.weights.adapters import holds_adapters


class EmbeddedServerWeights:
    """Implements ``WeightEndpoint``."""

    def __init__(
        self, client: HTTPClient, config: EmbeddedServerConfig, model: ModelFolder, folders: FolderDigests
    ) -> None:
        self._client = client
        self._base = model.path
        self._config = config
        self._confirmation = LoadConfirmation(repr(client), config, model, folders, self._digests)

    async def send(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """See ``WeightEndpoint.send``."""
        is_full = not holds_adapters(source)
        base = None if is_full else str(self._base.resolve())
        body = {"folder": str(source.resolve()), "base": base, "label": label, "keeps_kv": keeps_kv}
        await self._client.call("POST", "/load_weights", body=body, timeout_s=self._config.load_timeout_s)
        if is_full:
            await self._confirmation.of(source)

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def set_label(self, label: str) -> None:
        await self._client.call("POST", "/update_weight_version", body={"new_version": label})

    async def _digests(self, source: Path) -> Mapping[HeldTensor, str]:
        limit_s = self._config.load_timeout_s
        found = await self._client.ask(TensorDigests, "POST", "/digests", body={}, timeout_s=limit_s)
        return {HeldTensor(name=name): digest for name, digest in found.digests.items()}
