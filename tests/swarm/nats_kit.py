"""Real NATS servers for tests: started on free ports, killed, stopped and started again, and always ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollover.engine.servers.launch import free_port

START_S = 30.0


def program() -> str | None:
    """The distribution's server, or else the one that the extra ``test`` brings."""
    places = (os.environ.get("NATS_SERVER"), "/usr/sbin/nats-server", shutil.which("nats-server"))
    beside = Path(sys.executable).with_name("nats-server")
    return next((place for place in (*places, str(beside)) if place and os.access(place, os.X_OK)), None)


needs_server = pytest.mark.skipif(program() is None, reason="nats-server is not installed (apt install nats-server)")


class NatsServer:
    """One server, as a process. ``lines`` go into its configuration."""

    def __init__(self, folder: Path, *, name: str = "n", lines: Sequence[str] = (), jetstream: bool = False) -> None:
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self._store = folder / f"{name}-store"
        self._config = folder / f"{name}.conf"
        store = [f'jetstream: {{store_dir: "{self._store}", max_file_store: 1073741824}}'] if jetstream else []
        self._config.write_text("\n".join([f"listen: 127.0.0.1:{self.port}", f"server_name: {name}", *store, *lines]))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and return when it accepts connections."""
        found = program()
        assert found is not None and self._process is None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([found, "-c", str(self._config)], stdout=log, stderr=log)
        until_s = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                    if probe.recv(5) == b"INFO ":
                        return
            except OSError:
                pass
            assert self._process.poll() is None and time.monotonic() < until_s, self.log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def kill_and_forget(self) -> None:
        """End it and delete its disk, as a container without a volume does."""
        self.kill()
        shutil.rmtree(self._store)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process is not None:
            self.kill()


@contextmanager
def running(*servers: NatsServer) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.end()


def cluster(folder: Path) -> tuple[NatsServer, NatsServer]:
    """Two servers that are one cluster."""
    ports = [free_port(), free_port()]
    made = []
    for i in range(2):
        routes = f"cluster: {{name: c, listen: 127.0.0.1:{ports[i]}, routes: [nats-route://127.0.0.1:{ports[1 - i]}]}}"
        made.append(NatsServer(folder, name=f"n{i}", lines=[routes]))
    return made[0], made[1]


def leaf(folder: Path) -> tuple[NatsServer, NatsServer]:
    """A server and a leaf node of it."""
    port = free_port()
    hub = NatsServer(folder, name="hub", lines=[f"leafnodes: {{listen: 127.0.0.1:{port}}}"])
    remote = NatsServer(folder, name="leaf", lines=[f"leafnodes: {{remotes: [{{url: nats-leaf://127.0.0.1:{port}}}]}}"])
    return hub, remote
