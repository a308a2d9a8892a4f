"""SGLang servers from a config.

Control calls must reach every worker, and a router forwards a call to one; so routers are asked once who their workers
are, and from then on each worker is a server of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from rollover.engine.kind import EngineSetup
from rollover.engine.servers.config import is_server_url
from rollover.engine.servers.folder import ModelFolder
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.open import ServerKind, open_servers
from rollover.engine.servers.pool.pool import EnginePool
from rollover.engine.servers.sglang.answers import Worker, Workers, WorkerUrls
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.sglang.dialect import SGLangDialect
from rollover.engine.servers.sglang.weights import adapter_arguments
from rollover.engine.servers.start.places import ServerProgram
from rollover.engine.servers.weights.endpoint import WeightTerms
from rollover.errors import EngineError, EngineTimeout

_REMEDIES = {
    "torch_memory_saver": "engine.colocated = true needs the package torch-memory-saver in SGLang's environment:"
    " install it there, or leave that setting out, and SGLang keeps its memory",
}


async def open_sglang(config: SGLangConfig, setup: EngineSetup) -> EnginePool:
    """See ``open_servers``; routers among the urls are replaced by their workers."""
    if config.urls:
        clients = [HTTPClient(url, config) for url in config.urls]
        try:
            workers = await worker_urls(clients)
        finally:
            for client in clients:
                await client.close()
        if workers != tuple(url.rstrip("/") for url in config.urls) and not isinstance(config.max_running, int):
            raise EngineError(
                "engine.max_running lists a number for each url, and one of the urls is a router of several servers:"
                " give one number for all, or the servers' own urls"
            )
        config = replace(config, urls=workers)
    model, adapters = ModelFolder.read(setup.folder), setup.adapters
    terms = WeightTerms(adapters=adapters, device=setup.device)

    def kind_for(config: SGLangConfig) -> ServerKind:
        return ServerKind(
            name="SGLang",
            dialect=lambda client: SGLangDialect(client, config, model, terms),
            program=ServerProgram(
                command=config.launch_command,
                arguments=lambda host, port: [
                    *launch_arguments(config, setup.folder, port, host),
                    *adapter_arguments(adapters),
                ],
                more=config.launch_args,
            ),
            remedies=_REMEDIES,
        )

    return await open_servers(config, setup, model, kind_for)


async def worker_urls(clients: list[HTTPClient]) -> tuple[str, ...]:
    """List the urls of workers, each once: a server's own, or the urls of a router's workers.

    Raises ``EngineError`` when a router has no workers, or has some that only prefill or only decode.
    """
    found = await asyncio.gather(*map(_workers, clients))
    return tuple(dict.fromkeys(url for urls in found for url in urls))


async def _workers(client: HTTPClient) -> list[str]:
    for path in ("/workers", "/list_workers"):
        try:
            body = await client.call("GET", path)
        except EngineTimeout:
            raise
        except EngineError:
            continue  # a worker has no such path; an unreachable one says so when it is opened
        if path == "/workers":
            workers = client.reader.typed(Workers, body, f"GET {path}").workers
        else:
            workers = [*client.reader.typed(WorkerUrls, body, f"GET {path}").urls]
        if not workers:
            raise EngineError(f"{client} is a router without workers")
        return [_url(client, worker) for worker in workers]
    return [client.url]


def _url(client: HTTPClient, worker: str | Worker) -> str:
    """Return the address to which calls, and with them the key, will go."""
    if isinstance(worker, Worker) and worker.worker_type != "regular":
        raise EngineError(f"{client} has a worker of type {worker.worker_type!r}: only regular workers can be used")
    url = worker.url if isinstance(worker, Worker) else worker
    if not is_server_url(url):
        raise EngineError(
            f"{client} has a worker at {client.reader.shown(url)!r}, which is not the address of a server"
        )
    return url.rstrip("/")


def launch_arguments(config: SGLangConfig, folder: Path, port: int, host: str = "127.0.0.1") -> list[str]:
    """Give the arguments with which a server serves ``folder`` for training; ``launch_args`` may overrule them."""
    return [
        *("--model-path", str(folder.resolve())),
        *("--host", host, "--port", str(port)),
        *("--dtype", ModelFolder.read(folder).dtype or "auto"),  # "auto" would halve float32
        *("--max-running-requests", str(config.running())),
        "--incremental-streaming-output",
        "--sleep-on-idle",
        *(("--enable-memory-saver",) if config.colocated else ()),
    ]
