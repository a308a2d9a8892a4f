"""The calls by which a server takes weights, says which ones it has, and gives memory back.

An endpoint knows no policy version and no other run: weights are named by a label. A call names the adapter that
computes it and keeps it to its end. So calls are ended before another adapter is sent, each adapter has a name of its
own, and no cached block is found by a call of another adapter.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rollover.engine.background import refused
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.weights.ownership import Part
from rollover.engine.servers.weights.transfer import Receiver, TransferCalls, send_folder
from rollover.errors import EngineError
from rollover.types import AdapterShape
from rollover.weights.adapters import holds_adapters
from rollover.weights.groups import GroupPlan

C = TypeVar("C", bound=ServerConfig)

Backend = Literal["folder", "nccl", "gloo"]
_OURS = "rollover:"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTerms:
    """The terms on which the servers of a pool are given weights."""

    adapters: AdapterShape | None = None
    """The shape of the adapters that they are given; ``None`` if they are given full weights alone."""
    device: str | None = None
    """The GPU from which weights of a folder are sent."""


class WeightEndpoint(ABC, Generic[C]):
    """The endpoint of one server. Each kind of server has a subclass. All calls raise ``EngineError``."""

    def __init__(self, client: HTTPClient, config: C, model: ModelFolder, terms: WeightTerms) -> None:
        self.adapters = terms.adapters
        self.adapter: str | None = None
        """Name by which calls refer to the adapter in force."""
        self.num_sends = 0
        """Times that weights were sent, whether they arrived or not."""
        self._base = model.path
        self._over_base: str | None = None
        """The label under which the server has the base, adapter or not; ``None`` if it has other full weights."""
        self._client = client
        self._config = config
        self._device = terms.device
        self._group_name = secrets.token_hex(4)

    # -- weights ---------------------------------------------------------------------------------------------

    async def send(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Replace the weights of a paused server and set the label.

        No later call finds cached blocks of older weights; with ``keeps_kv`` the paused calls keep theirs.

        Args:
            source: a model folder, or a folder of adapters for the base, on which no call is open.
        """
        self.num_sends += 1
        if holds_adapters(source):
            await self._send_adapter(label, source, keeps_kv=keeps_kv)
        else:
            await self._send_full(label, source, keeps_kv=keeps_kv)

    async def receiver(self, label: str, *, keeps_kv: bool) -> Receiver:
        """Return how the paused server receives weights with this label in one group with other servers; nothing is
        changed yet. Only for servers that do not read folders."""
        self.num_sends += 1
        plan, calls = await self._transfer(label, keeps_kv=keeps_kv)
        return Receiver(name=repr(self._client), plan=plan, calls=calls, post=self._post, ping=self.label)

    async def settle(self, label: str, *, keeps_kv: bool) -> None:
        """Do what remains once all tensors are there, under ``label``."""
        await self._forget_cache(keeps_kv=keeps_kv)
        self.adapter = self._over_base = None

    @abstractmethod
    async def label(self) -> str:
        """Read the label of the weights that the server has."""

    async def set_label(self, label: str) -> None:
        """Change the label; the weights stay."""
        await self._client.call("POST", "/update_weight_version", body={"new_version": label})

    async def _send_full(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        if self._config.weight_transfer == "folder":
            await self._load_folder(label, source, keeps_kv=keeps_kv)
        else:
            await send_folder(source, await self.receiver(label, keeps_kv=keeps_kv), self._config)
        await self.settle(label, keeps_kv=keeps_kv)
        self._over_base = label if source == self._base else None

    async def _send_adapter(self, label: str, source: Path, *, keeps_kv: bool) -> None:
        """Put an adapter beside the base, which is sent first unless the server is known to have it."""
        del keeps_kv  # no call is open
        if await self.label() != self._over_base:
            await self._send_full(label, self._base, keeps_kv=False)
        name = f"{label}/{secrets.token_hex(4)}"
        with refused(lambda e: EngineError(f"{e}; {self.how_to_serve_adapters()}")):
            there = await self._load_adapter(name, source)
        self.adapter, self._over_base = name, label
        for other in there:
            if other.startswith(_OURS) and other != name:  # of ours, or of a run that was killed
                await self._unload_adapter(other)
        await self._forget_cache(keeps_kv=False)
        await self.set_label(label)

    @abstractmethod
    async def _load_folder(self, label: str, folder: Path, *, keeps_kv: bool) -> None:
        """Have the server read full weights."""

    @abstractmethod
    async def _transfer(
        self, label: str, *, keeps_kv: bool
    ) -> tuple[GroupPlan, Callable[[Mapping[str, Any]], TransferCalls]]:
        """Return the group in which the server would be alone, and its calls for a group that meets at an address."""

    async def _forget_cache(self, *, keeps_kv: bool) -> None:
        """Free the blocks of older weights, if loading has not done so."""

    async def _load_adapter(self, name: str, folder: Path) -> Collection[str]:
        """Have the server read an adapter. Returns the names of the adapters that it has then."""
        raise NotImplementedError

    async def _unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    def how_to_serve_adapters(self) -> str:
        """Say how a server is started that takes adapters of this shape."""
        raise NotImplementedError

    async def _post(self, path: str, body: Any) -> None:
        await self._client.call("POST", path, body=body, timeout_s=self._config.load_timeout_s)

    def _torch_plan(self, backend: Backend, host: str | None, *, num_workers: int, is_flat: bool) -> GroupPlan:
        """Return a group that meets as torch.distributed does, at ``host``."""
        assert backend != "folder", "a group was asked of a server that reads folders"
        return GroupPlan(
            meets="torch",
            backend=backend,
            towards=self._client.url,
            host=host,
            name=f"{self._group_name}/{self.num_sends}",
            num_workers=num_workers,
            timeout_s=self._config.load_timeout_s,
            device=self._device,
            is_flat=is_flat,
        )

    # -- memory ----------------------------------------------------------------------------------------------

    async def check_memory(self) -> None:
        """Raise ``EngineError``, which says how to start it, unless the server can give its memory back."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Give back the memory of weights and cache. The server stands still and has no calls."""

    async def take_memory(self, part: Part) -> None:
        """Take the memory of a part again, weights before cache, if loading does not. Its content is lost."""
