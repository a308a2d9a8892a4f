"""Blobs in an object-store bucket of JetStream: the trainer's copy of its folder, and workers' downloads from it.

What it keeps true: when ``mirror`` returns, everything that a publication needs is in the bucket; an object of another
run, or of another program, is not touched; workers verify what they get as they do elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ObjectMeta, ObjectMetaOptions, ObjectStoreConfig, StorageType
from nats.js.object_store import ObjectStore

from rollover.swarm.nats.client import NatsConnection, NatsFailure
from rollover.swarm.publication.manifest import DIGEST

SCHEME = "jetstream"
"""``jetstream://BUCKET/DIGEST`` is the object DIGEST in a bucket of the cluster that the worker is on."""
_REQUEST_TIMEOUT_S = 5.0
_CHUNK_BYTES = 128 * 1024
_MAX_PARALLEL = 4
_NOT_ENABLED = (10039, 10076)
"""JetStream's codes where an account, or the server, may not use it."""


class NatsBucket:
    """The bucket in which a run's blobs are.

    Args:
        subject: the run's subject, by which it knows its own objects.

    Example: ``await bucket.mirror(connection, run / "swarm" / "blobs")``; workers fetch from ``bucket.url``.
    """

    def __init__(self, name: str, *, subject: str) -> None:
        self.name, self._subject = name, subject
        self._mirroring = asyncio.Lock()

    @property
    def url(self) -> str:
        """Return the place that workers are told."""
        return f"{SCHEME}://{self.name}"

    async def open(self, connection: NatsConnection) -> None:
        """Make the bucket, where it is not there. Raises ``NatsFailure``, final when there is no JetStream."""
        await self._store(connection)

    async def mirror(self, connection: NatsConnection, folder: Path) -> None:
        """Copy the blobs of the folder that the bucket lacks into it, then delete those that the folder no longer has.
        What it has is asked each time, since a server may come back without its disk.

        Raises ``NatsFailure``; what has been stored by then stays.
        """
        async with self._mirroring:
            store = await self._store(connection)
            try:
                stored = await self._listed(store)
                here = {path.name for path in folder.iterdir() if DIGEST.fullmatch(path.name)}
                turn = asyncio.Semaphore(_MAX_PARALLEL)
                await asyncio.gather(*(self._put(store, folder / name, turn) for name in sorted(here - stored)))
                for name in sorted(stored - here):
                    await self._delete(connection, store, name)
            except (nats.errors.Error, TimeoutError) as e:
                raise _failure(self.name, e) from e

    async def _store(self, connection: NatsConnection) -> ObjectStore:
        jetstream = _jetstream(connection)
        try:
            try:
                return await jetstream.object_store(self.name)
            except nats.js.errors.BucketNotFoundError:
                config = ObjectStoreConfig(description="blobs of Rollover", storage=StorageType.FILE)
                return await jetstream.create_object_store(self.name, config=config)
        except (nats.errors.Error, TimeoutError) as e:
            raise _failure(self.name, e) from e

    async def _listed(self, store: ObjectStore) -> set[str]:
        try:
            async with asyncio.timeout(12 * _REQUEST_TIMEOUT_S):
                objects = await store.list()
        except nats.js.errors.NotFoundError:
            return set()
        ours = [each for each in objects if each.description == self._subject and not each.deleted]
        return {each.name for each in ours if DIGEST.fullmatch(each.name)}

    async def _put(self, store: ObjectStore, path: Path, turn: asyncio.Semaphore) -> None:
        async with turn:
            try:
                content = await asyncio.to_thread(path.read_bytes)
            except FileNotFoundError:  # a publication meanwhile has made it useless
                return
            options = ObjectMetaOptions(max_chunk_size=_CHUNK_BYTES)
            await store.put(path.name, content, ObjectMeta(description=self._subject, options=options))

    async def _delete(self, connection: NatsConnection, store: ObjectStore, name: str) -> None:
        """Delete an object without leaving its name behind, as the library's own deletion does."""
        jetstream, stream = _jetstream(connection), f"OBJ_{self.name}"
        try:
            info = await store.get_info(name)
            key = base64.urlsafe_b64encode(name.encode()).decode()
            await jetstream.purge_stream(stream, subject=f"$O.{self.name}.M.{key}")
            await jetstream.purge_stream(stream, subject=f"$O.{self.name}.C.{info.nuid}")
        except nats.js.errors.NotFoundError:
            pass  # another process was faster


class JetStreamTransport(httpx.AsyncBaseTransport):
    """Answers HTTP requests for ``jetstream://BUCKET/DIGEST`` from a cluster.

    Args:
        connect: opens a connection; it is asked again when the last one has ended.

    Example: ``httpx.AsyncClient(mounts={"jetstream://": JetStreamTransport(connect)})``
    """

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._connection: NatsConnection | None = None
        self._connecting = asyncio.Lock()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        bucket, name = request.url.host, request.url.path.removeprefix("/")
        stall_s = float((request.extensions.get("timeout") or {}).get("read") or _REQUEST_TIMEOUT_S)
        try:
            connection = await self._connected()
            jetstream = _jetstream(connection)
            try:
                info = await (await jetstream.object_store(bucket)).get_info(name)
            except nats.js.errors.NotFoundError:
                return httpx.Response(404, request=request)
            subject, size = f"$O.{bucket}.C.{info.nuid}", info.size or 0
            stream = f"OBJ_{bucket}"  # the library would ask for its name, which a worker may not
            messages = await jetstream.subscribe(subject, stream=stream, ordered_consumer=True) if size else None
        except (nats.errors.Error, NatsFailure, TimeoutError) as e:
            raise httpx.ConnectError(str(e), request=request) from e
        headers = {"Content-Length": str(size)}
        return httpx.Response(200, headers=headers, stream=_Chunks(messages, size, stall_s), request=request)

    async def aclose(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def _connected(self) -> NatsConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                if self._connection is not None:
                    await self._connection.close()
                self._connection = await self._connect()
            return self._connection


class _Chunks(httpx.AsyncByteStream):
    """The content of an object, in the order in which it was stored."""

    def __init__(self, messages: Any, size: int, stall_s: float) -> None:
        self._messages, self._size, self._stall_s = messages, size, stall_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._size
        while left > 0:
            try:
                message = await self._messages.next_msg(timeout=self._stall_s)
            except (nats.errors.Error, TimeoutError) as e:
                raise httpx.ReadError(f"no more came of it: {e}") from e
            left -= len(message.data)
            yield message.data

    async def aclose(self) -> None:
        if self._messages is not None:
            try:
                await self._messages.unsubscribe()
            except nats.errors.Error:  # the connection has ended
                return


def _jetstream(connection: NatsConnection) -> JetStreamContext:
    return connection.client.jetstream(timeout=_REQUEST_TIMEOUT_S)


def _failure(bucket: str, error: Exception) -> NatsFailure:
    """Return what to tell of a bucket that cannot be used."""
    is_missing = isinstance(error, nats.js.errors.ServiceUnavailableError | nats.errors.NoRespondersError)
    if is_missing or getattr(error, "err_code", None) in _NOT_ENABLED:
        return NatsFailure(
            "there is no JetStream here to hold the weights: enable JetStream for the account, or name in"
            " engine.blob_urls a server that serves swarm/blobs of the run directory",
            is_final=True,
        )
    reason = getattr(error, "description", None) or str(error).removeprefix("nats: ") or type(error).__name__
    return NatsFailure(f"the bucket {bucket!r} cannot be used: {reason}", is_final=False)
