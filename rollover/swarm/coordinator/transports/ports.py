"""Listening on a port, in the event loop of its owner: the gateway and the live page both do."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from rollover.errors import ConfigError


class LibraryServer(uvicorn.Server):
    """A server that leaves the process's signal handlers to their owner.

    Example: ``asyncio.create_task(LibraryServer(settings).serve(sockets=[bound]))``; ``should_exit = True`` ends it.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen_on(address: tuple[str, int], *, setting: str, backlog: int = 1024) -> socket.socket:
    """Take an address; port 0 takes a free one. Raises ``ConfigError`` naming ``setting`` when it is in use or cannot
    be had.

    Example: ``listen_on(("127.0.0.1", 0), setting="engine.admin").getsockname()[1]`` is 40121, say.
    """
    host, port = address
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise ConfigError(
            f"cannot listen on {setting} = {shown!r}: {e.strerror or e}; stop the program that uses this address, or"
            " choose another one (port 0 takes a free port)"
        ) from e
    return listener
