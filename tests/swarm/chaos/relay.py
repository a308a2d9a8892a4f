"""A real nginx between the trainer and its workers, with the configuration that ``rollover relay`` writes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rollover.engine.servers.launch import free_port
from rollover.swarm.relay.folder import write_folder
from rollover.swarm.relay.settings import RelaySettings
from rollover.swarm.wire.address import CoordinatorAddress
from tests.swarm.nginx_kit import Nginx


class Relay(Nginx):
    """nginx as one of the cast: a signal to it is one to all of its processes.

    Args:
        folder: does not exist yet.
        trainer: where the relay asks for blobs, ``ws://HOST:PORT``.
    """

    name = "nginx"

    def __init__(self, folder: Path, trainer: str) -> None:
        self._trainer, self._listen = trainer, f"127.0.0.1:{free_port()}"
        settings = self._settings(None)
        super().__init__(folder, int(self._listen.rpartition(":")[2]), settings.url)

    def _settings(self, token: str | None) -> RelaySettings:
        return RelaySettings(trainer=CoordinatorAddress.parse(self._trainer), listen=self._listen, token=token)

    def configure(self, token: str) -> None:
        """Write the folder: the relay asks for blobs with a token of its own."""
        write_folder(self._settings(token), self.folder)

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
