"""The workers behind SGLang routers.

Control calls must reach every worker, and a router forwards a call to one; so routers are asked once who their workers
are, and from then on each worker is a server of its own.
"""

from __future__ import annotations

import asyncio

from rollover.engine.servers.client import HTTPClient
from rollover.engine.servers.config import is_server_url
from rollover.engine.servers.sglang.answers import Worker, Workers, WorkerUrls
from rollover.errors import EngineError, EngineTimeout


async def worker_urls(clients: list[HTTPClient]) -> tuple[str, ...]:
    """List the urls of workers, each once: a server's own when it is one, those of its workers when it is a router.

    Raises ``EngineError`` when a router has no workers, or has some that only prefill or only decode.
    """
    found = await asyncio.gather(*map(_workers, clients))
    return tuple(dict.fromkeys(url for urls in found for url in urls))


async def _workers(client: HTTPClient) -> list[str]:
    for path in ("/workers", "/list_workers"):
        try:
            await client.call("GET", path)
        except EngineTimeout:
            raise
        except EngineError:
            continue  # a worker has no such path; one that cannot be reached says so when it is opened
        if path == "/workers":
            workers = (await client.ask(Workers, "GET", path)).workers
        else:
            workers = [*(await client.ask(WorkerUrls, "GET", path)).urls]
        if not workers:
            raise EngineError(f"{client} is a router without workers")
        return [_url(client, worker) for worker in workers]
    return [client.url]


def _url(client: HTTPClient, worker: str | Worker) -> str:
    """Calls, and with them the key, will go there."""
    if isinstance(worker, Worker) and worker.worker_type != "regular":
        raise EngineError(f"{client} has a worker of type {worker.worker_type!r}: only regular workers can be used")
    url = worker.url if isinstance(worker, Worker) else worker
    if not is_server_url(url):
        raise EngineError(f"{client} has a worker at {client.reader.shown(url)!r}, which is no address of a server")
    return url.rstrip("/")
