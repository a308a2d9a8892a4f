"""A real nginx, with the configuration that ``rollover relay`` writes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.servers.launch import free_port
from rollover.swarm.relay.folder import SLICE_MB, write_folder
from rollover.swarm.relay.settings import RelaySettings
from rollover.swarm.wire.address import CoordinatorAddress

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light")
_DEADLINE_S = 30.0


class Nginx:
    """One nginx in ``folder``, which holds its nginx.conf; it may be killed and started again."""

    def __init__(self, folder: Path, port: int, url: str) -> None:
        self.folder, self.port, self.url = folder, port, url
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return once it answers."""
        self.launch()
        give_up_s = time.monotonic() + _DEADLINE_S
        while not self._answers():
            assert self.process is not None and self.process.poll() is None, self.said()
            assert time.monotonic() < give_up_s, self.said()
            time.sleep(0.02)

    def launch(self) -> None:
        assert NGINX is not None, "nginx is not installed: apt install nginx-light"
        root = ["-g", "user root;"] if os.geteuid() == 0 else []  # as nobody it could not reach the tests' folders
        with (self.folder / "said.log").open("ab") as log:
            command = [NGINX, "-p", str(self.folder), "-c", "nginx.conf", *root]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all its processes at once."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def said(self) -> str:
        logs = [self.folder / "said.log", self.folder / "logs" / "error.log"]
        return "\n".join(log.read_text() for log in logs if log.exists())

    def cached(self) -> list[Path]:
        """The files of its cache."""
        return [path for path in (self.folder / "cache").rglob("*") if path.is_file()]

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


@contextmanager
def running(nginx: Nginx) -> Iterator[Nginx]:
    nginx.start()
    try:
        yield nginx
    finally:
        nginx.kill()


@contextmanager
def relay(folder: Path, trainer: str, *, more: str = "", **settings: Any) -> Iterator[Nginx]:
    """A relay in front of the trainer at the URL ``trainer``, with pieces of 1 MiB. ``more``: directives for it."""
    port = free_port()
    address = CoordinatorAddress.parse(trainer.removesuffix("/v1/blobs"))
    made = RelaySettings(trainer=address, listen=f"127.0.0.1:{port}", **settings)
    config = write_folder(made, folder)
    text = config.read_text().replace("sendfile on;", f"sendfile on; {more}")
    config.write_text(text.replace(f"slice {SLICE_MB}m;", "slice 1m;"))
    with running(Nginx(folder, port, made.url)) as nginx:
        yield nginx
