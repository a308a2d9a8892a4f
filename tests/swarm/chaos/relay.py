"""A real nginx between the trainer and its workers, with the configuration that docs/how-to/ shows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rollover.engine.servers.start.launch import free_port
from tests.swarm.nginx_kit import Nginx, configure


class Relay(Nginx):
    """nginx as one of the cast: a signal to it is one to all of its processes.

    Args:
        folder: does not exist yet.
        trainer: where the relay asks for blobs, ``http://HOST:PORT``.
    """

    name = "nginx"

    def __init__(self, folder: Path, trainer: str) -> None:
        port = free_port()
        super().__init__(folder, port, f"http://127.0.0.1:{port}/v1/blobs")
        self._trainer = trainer

    def configure(self, token: str) -> None:
        """Write the folder: the relay asks for blobs with a token of its own."""
        configure(self.folder, self._trainer, self.port, token=token)

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def send(self, number: int) -> None:
        if self.process is not None and self.exit_code is None:
            os.killpg(self.process.pid, number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            super().kill(number)

    def last_words(self) -> str:
        return f"-- nginx: {self.exit_code}\n{self.said()[-3000:]}"
