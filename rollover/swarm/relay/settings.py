"""Settings of a relay: where it listens, whom it asks, what it may keep."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rollover.errors import ConfigError
from rollover.swarm.wire.address import CoordinatorAddress, is_loopback

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
_MOST_CACHE_GB = 1e6
"""A petabyte: more than a disk has, and what nginx can still count in bytes."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Settings of a relay.

    Example: ``RelaySettings(trainer=CoordinatorAddress.parse("ws://127.0.0.1:8790"), listen="127.0.0.1:8795")`` keeps
    up to 50 GB of blobs and passes each worker's token on to the trainer.
    """

    trainer: CoordinatorAddress
    listen: str
    """Address and port where workers fetch."""
    tls_certificate: Path | None = None
    """The relay's certificate chain (PEM)."""
    tls_key: Path | None = None
    ca_file: Path | None = None
    """Certificates by which the trainer is trusted (PEM); the system's when left out."""
    trainer_name: str | None = None
    """The name in the trainer's certificate, where it is not the host of its address."""
    token: str | None = field(default=None, repr=False)
    """The relay's own token; ``None`` passes on that of the worker who asks."""
    max_cache_gb: float = 50.0
    insecure: bool = False
    """Allow a plain connection over a network that is private itself."""

    def __post_init__(self) -> None:
        match = _ADDRESS.fullmatch(self.listen)
        if match is None or not 0 < int(match["port"]) <= 65535:
            raise ConfigError(f"--listen {self.listen}: an address and a port are needed, such as 0.0.0.0:8795")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "a certificate and its key belong together: give both (--tls-certificate, --tls-key) or neither"
            )
        if self.tls_certificate is None and not self.insecure and not is_loopback(match["host"].strip("[]")):
            raise ConfigError(
                f"--listen {self.listen} can be reached from other machines: give a certificate and"
                " its key (--tls-certificate, --tls-key), or give --insecure if the network itself"
                " is private"
            )
        if not 0 < self.max_cache_gb <= _MOST_CACHE_GB:  # a NaN is neither
            raise ConfigError(
                f"--max-cache-gb must be positive and at most {_MOST_CACHE_GB:,.0f}, got {self.max_cache_gb:g}"
            )
        if self.trainer_name is not None and not _NAME.fullmatch(self.trainer_name):
            raise ConfigError(f"--trainer-name {self.trainer_name!r} is not a host name")
        if self.trainer.is_encrypted and self.trainer_name is None and _is_number(self.trainer_host):
            raise ConfigError(
                f"{self.trainer}: nginx checks names in certificates, not addresses: give"
                " --trainer-name NAME with a name from the trainer's certificate"
                " (subjectAltName=DNS:NAME)"
            )

    @property
    def trainer_host(self) -> str:
        return urlsplit(f"//{self.trainer.netloc}").hostname or ""

    @property
    def upstream(self) -> str:
        """Return host and port of the trainer."""
        if urlsplit(f"//{self.trainer.netloc}").port is not None:
            return self.trainer.netloc
        return f"{self.trainer.netloc}:{443 if self.trainer.is_encrypted else 80}"

    @property
    def url(self) -> str:
        """Return the URL of the blobs, as workers are to be told it; ``HOST`` stands for this machine's name if need
        be."""
        return f"{'http' if self.tls_certificate is None else 'https'}://{self.reached}/v1/blobs"

    @property
    def reached(self) -> str:
        """Return host and port; ``HOST`` where it listens on all addresses."""
        host, _, port = self.listen.rpartition(":")
        return f"HOST:{port}" if host in ("0.0.0.0", "[::]") else self.listen


def _is_number(host: str) -> bool:
    return ":" in host or bool(re.fullmatch(r"[0-9.]+", host))
