"""A real nginx, with the configuration that docs/how-to/ shows."""

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
from urllib.parse import urlsplit

import pytest

from rollover.engine.servers.start.launch import free_port

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt install nginx-light")
SHOWN = Path(__file__).parents[2] / "docs" / "how-to" / "relay-nginx.conf"
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
            command = [NGINX, "-p", str(self.folder), "-e", "stderr", "-c", "nginx.conf", *root]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all its processes at once."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def said(self) -> str:
        return (self.folder / "said.log").read_text()

    def cached(self) -> list[Path]:
        """The files of its cache."""
        return [path for path in (self.folder / "cache").rglob("*") if path.is_file()]

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False


def configure(folder: Path, trainer: str, port: int, *, token: str = "") -> None:
    """Write nginx.conf as its reader would: with the addresses and the token, and nothing else, changed.

    ``trainer``: its URL. Of one without TLS, the relay has none either.
    """
    folder.mkdir(exist_ok=True)
    text = SHOWN.read_text()
    changes = {
        "server trainer.example:8790": f"server {urlsplit(trainer).netloc}",
        'default "";  # CHANGE': f'default "{token}";  # CHANGE',
        "listen 0.0.0.0:8795": f"listen 127.0.0.1:{port}",
    }
    for shown, changed in changes.items():
        assert text.count(shown) == 1
        text = text.replace(shown, changed)
    if urlsplit(trainer).scheme == "http":
        text = "".join(line for line in text.splitlines(keepends=True) if "ssl_" not in line)
        text = text.replace(" ssl;", ";").replace("https://trainer", "http://trainer")
    (folder / "nginx.conf").write_text(text)


@contextmanager
def running(nginx: Nginx) -> Iterator[Nginx]:
    nginx.start()
    try:
        yield nginx
    finally:
        nginx.kill()


@contextmanager
def relay(folder: Path, trainer: str, *, token: str = "") -> Iterator[Nginx]:
    """A relay in front of the trainer at the URL ``trainer``."""
    port, scheme = free_port(), urlsplit(trainer).scheme
    configure(folder, trainer, port, token=token)
    with running(Nginx(folder, port, f"{scheme}://127.0.0.1:{port}/v1/blobs")) as nginx:
        yield nginx
