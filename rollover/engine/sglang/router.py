"""The workers behind SGLang routers.

Control calls must reach every worker, and a router forwards a call to one; so routers are asked once who their workers
are, and from then on each worker is a server of its own.
"""

from __future__ import annotations

import asyncio

from rollover.engine.http.answer import field_of
from rollover.engine.http.client import HTTPClient
from rollover.errors import EngineError, EngineTimeout


async def worker_urls(clients: list[HTTPClient]) -> tuple[str, ...]:
    """Of each server: its own url when it is a worker, those of its workers when it is a router; each once.

    Raises ``EngineError`` when a router has no workers, or has some that only prefill or only decode.
    """
    found = await asyncio.gather(*map(_workers, clients))
    return tuple(dict.fromkeys(url for urls in found for url in urls))


async def _workers(client: HTTPClient) -> list[str]:
    for path, key in (("/workers", "workers"), ("/list_workers", "urls")):
        try:
            answer = await client.call("GET", path)
        except EngineTimeout:
            raise
        except EngineError:
            continue  # a worker has no such path; one that cannot be reached says so when it is opened
        urls = [_url(client, worker) for worker in field_of(answer, key, list)]
        if not urls:
            raise EngineError(f"{client} is a router without workers")
        return urls
    return [client.url]


def _url(client: HTTPClient, worker: object) -> str:
    if isinstance(worker, str):
        return worker.rstrip("/")
    kind = worker.get("worker_type", "regular") if isinstance(worker, dict) else None
    if kind != "regular":
        raise EngineError(f"{client} has a worker of type {kind!r}: only regular workers can be used")
    return str(field_of(worker, "url", str)).rstrip("/")
