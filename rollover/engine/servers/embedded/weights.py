"""Weight endpoint of a server of the embedded engine.

What is peculiar to it: a load is all or nothing, and the server's digests are those of the folder's tensors wherever it
holds them in the folder's number format.
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


class EmbeddedServerWeights:
    """Implements ``WeightEndpoint``."""

    def __init__(
        self, client: HTTPClient, config: EmbeddedServerConfig, model: ModelFolder, folders: FolderDigests
    ) -> None:
        self._client = client
        self._config = config
        self._confirmation = LoadConfirmation(repr(client), config, model, folders, self._digests)

    async def send(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """See ``WeightEndpoint.send``."""
        body = {"folder": str(source.resolve()), "label": label, "keeps_kv": keeps_kv}
        await self._client.call("POST", "/load_weights", body=body, timeout_s=self._config.load_timeout_s)
        await self._confirmation.of(source)

    async def label(self) -> str:
        return (await self._client.ask(ServerInfo, "GET", "/info")).label

    async def set_label(self, label: str) -> None:
        await self._client.call("POST", "/update_weight_version", body={"new_version": label})

    async def _digests(self, source: Path) -> Mapping[HeldTensor, str]:
        limit_s = self._config.load_timeout_s
        found = await self._client.ask(TensorDigests, "POST", "/digests", body={}, timeout_s=limit_s)
        return {HeldTensor(name=name): digest for name, digest in found.digests.items()}
