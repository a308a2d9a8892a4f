"""The engine of a server: its calls, and its weights by label.

Clients name weights by labels, the engine by numbers that only grow; so a load takes the next number.

Invariants: a token has the label of the weights that sampled it, even when new ones came while it was on its way.
"""

from __future__ import annotations

import asyncio
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from rollover.engine.base import Chunk, GenerateRequest
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.servers.embedded import messages
from rollover.engine.servers.embedded.receiving import ReceivingGroup
from rollover.errors import EngineError, EngineTimeout
from rollover.hf.architecture import Architecture
from rollover.token_bytes import join_bytes
from rollover.weights.adapters import AdapterSource, AppliedAdapters
from rollover.weights.base import WeightSource
from rollover.weights.sending import in_thread
from rollover.weights.sources import FolderWeights


class ServedEngine:
    """Decodes for clients, and takes their weights; used from one event loop.

    Args:
        folder: the model that ``engine`` was opened with.
        label: of the weights that it has; no client may ever give the same one.
    """

    def __init__(self, engine: EmbeddedEngine, folder: Path, *, label: str) -> None:
        self._engine = engine
        self._folder = folder
        self._vocab_size = Architecture.from_folder(folder).vocab_size
        self._version = 0
        self._labels = {0: label}
        self._open: set[str] = set()
        self._group: ReceivingGroup | None = None
        self._num_left = 0
        """Number of times that a group was left, or would have been had there been one."""
        self._is_paused = False
        self._is_partial = False
        """The weights in force are no longer all there: others are coming in parts, or have ceased to."""
        self._controlling = asyncio.Lock()
        """Held during a change of weights: one at a time."""

    def info(self) -> messages.ServerInfo:
        can = self._engine.capabilities
        return messages.ServerInfo(
            service="rollover embedded engine",
            model_path=str(self._folder),
            vocab_size=self._vocab_size,
            max_context_tokens=can.max_context_tokens,
            max_running=can.max_running,
            number_format=can.number_format,
            prefill_tokens_per_iteration=can.prefill_tokens_per_iteration,
            num_calls=len(self._open),
            label=_partial_label() if self._is_partial else self._labels[self._version],
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[messages.TokensEvent]:
        """Stream a call. Closing the iterator aborts it. Raises ``RolloverError`` when it cannot run or fails."""
        is_new = request.request_id not in self._open  # else the engine refuses it
        self._open.add(request.request_id)
        try:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield self._event(chunk)
        finally:
            if is_new:
                self._open.discard(request.request_id)

    async def abort(self, body: messages.AbortBody) -> None:
        """Return when these calls have ended; unknown calls are passed over."""
        await self._engine.abort({*self._open} if body.all else body.request_ids)

    async def pause(self) -> None:
        await self._engine.pause()
        self._is_paused = True

    async def resume(self) -> None:
        if self._is_partial:  # what is sampled now is of no version
            await self.leave()

            async def take(version: int) -> None:
                await self._engine.end_fill(version, keeps_kv=False, is_whole=False)

            await self._change(_partial_label(), take)
        self._is_paused = False
        await self._engine.resume()

    async def sleep(self) -> None:
        """Give back the memory of weights and cache, until the next load. Raises ``EngineError`` when a call is
        open."""
        async with self._controlling:
            await self._engine.sleep()

    async def load(self, body: messages.LoadBody) -> None:
        """Take the weights of a folder. Raises ``EngineError`` when they do not fit; the old ones then stay in
        force."""
        path = Path(body.folder)
        await self.leave()  # a sender that has gone without a word may be waited for still

        async def take(version: int) -> None:
            if not await asyncio.to_thread(path.is_dir):
                raise EngineError(
                    f"this server sees no folder {path}: engine.weights_dir has to be a folder that the run and its"
                    " servers reach under the same path"
                )
            source: WeightSource = FolderWeights(version, path)
            if body.base is not None:
                adapters = await asyncio.to_thread(AdapterSource.read, version, path)
                source = AppliedAdapters(FolderWeights(0, Path(body.base)), adapters)
            await self._engine.load(version, source, keeps_kv=body.keeps_kv)

        await self._change(body.label, take)

    async def join(self, address: messages.GroupAddress) -> None:
        """Join the process group of a sender. Raises ``EngineError`` when it cannot be met, or is left meanwhile."""
        await self.leave()
        num_left = self._num_left
        # In a daemon thread: gloo may wait for a peer that was killed meanwhile, and must not keep the server alive.
        joining = in_thread(lambda: ReceivingGroup(address, self._engine.device))
        group = await asyncio.wrap_future(joining)
        if num_left != self._num_left:
            await asyncio.to_thread(group.close)
            raise EngineError("the group was given up before all had joined it")
        self._group = group

    async def begin(self) -> None:
        """Begin to take weights in parts: they are whole again after ``finish``, or the next ``load``. Raises
        ``EngineError`` unless the engine is paused."""
        if not self._is_paused:
            raise EngineError("weights cannot come in parts while tokens are sampled: pause first")
        async with self._controlling:
            await self._engine.begin_fill()
            self._is_partial = True

    async def receive(self, announced: messages.Announcement) -> None:
        """Put what the sender broadcasts in its place. Raises ``EngineError`` when it does not come or fit."""
        if self._group is None or not self._is_partial:
            raise EngineError("weights were announced before a group was joined and a reception begun")
        async with self._controlling:
            await self._engine.fill(await asyncio.to_thread(self._group.receive, announced))

    async def finish(self, body: messages.Reception) -> None:
        """Have the engine sample from what has come. Raises ``EngineError`` when a part is missing."""
        if not self._is_partial:
            raise EngineError("no reception of weights was begun")

        async def take(version: int) -> None:
            await self._engine.end_fill(version, keeps_kv=body.keeps_kv)

        await self._change(body.label, take)

    async def leave(self) -> None:
        """Give up the process group that was joined or is being joined, if any."""
        self._num_left += 1
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.close)

    async def rename(self, body: messages.LabelBody) -> None:
        self._labels[self._version] = body.new_version

    async def close(self) -> None:
        await self.leave()
        await self._engine.close()

    def _event(self, chunk: Chunk) -> messages.TokensEvent:
        return messages.TokensEvent(
            token_ids=list(chunk.token_ids),
            logprobs=list(chunk.logprobs),
            label=self._labels[chunk.policy_version],
            kv_label=self._labels[chunk.kv_version],
            finish_reason=chunk.finish_reason,
            num_prefilled_tokens=chunk.num_prefilled_tokens,
            kept=b64encode(join_bytes(chunk.kept)).decode(),
            routes=b64encode(join_bytes(chunk.routes)).decode(),
        )

    async def _change(self, label: str, take: Callable[[int], Awaitable[None]]) -> None:
        """Have the engine take weights under the next number, which tokens may bear before ``take`` returns."""
        async with self._controlling:
            version = self._version + 1
            self._labels[version] = label
            try:
                await take(version)
            except EngineTimeout:  # the engine may take them yet
                self._labels[version] = _partial_label()
                self._version, self._is_partial = version, True
                raise
            except BaseException:
                del self._labels[version]
                raise
            self._version, self._is_partial = version, False


def _partial_label() -> str:
    """Return a label that no weights have, for weights of which only a part has come."""
    return f"partial-{secrets.token_hex(8)}"
