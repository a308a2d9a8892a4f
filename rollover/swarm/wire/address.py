"""The coordinator's address as a user writes it, and the WebSocket behind it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from rollover.errors import ConfigError

SESSION_PATH = "/v1/session"
"""Path at which a coordinator accepts workers."""
BLOBS_PATH = "/v1/blobs"
_SCHEMES = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorAddress:
    """An address at which a coordinator listens."""

    scheme: str
    netloc: str
    path: str

    @classmethod
    def parse(cls, url: str, *, insecure: bool = False) -> CoordinatorAddress:
        """Read a URL; ``http`` means ``ws`` and ``https`` means ``wss``.

        A port may be missing after ``wss`` alone, where a proxy on the standard port is common.

        Raises ``ConfigError`` for what is no address, and for one whose connection others could read and change,
        unless ``insecure``.
        """
        parts = _split(url)
        scheme = _SCHEMES[parts.scheme]
        if scheme == "ws" and not insecure and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"{url}: on a network, anyone on the way can read the worker's token from a plain"
                " connection: use wss://, or give --insecure if the network itself is private"
            )
        if scheme == "ws" and parts.port is None:
            raise ConfigError(f"{url}: the port is missing; the address must look like 'ws://127.0.0.1:8790'")
        return cls(scheme=scheme, netloc=parts.netloc, path=parts.path.rstrip("/").removesuffix(SESSION_PATH))

    @property
    def is_encrypted(self) -> bool:
        return self.scheme == "wss"

    @property
    def session_url(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}{SESSION_PATH}"

    @property
    def blob_url(self) -> str:
        """Return the URL below which the coordinator itself serves blobs."""
        return f"{'https' if self.is_encrypted else 'http'}://{self.netloc}{self.path}{BLOBS_PATH}"

    @property
    def endpoint(self) -> tuple[str, int]:
        parts = urlsplit(f"//{self.netloc}")
        return parts.hostname or "", parts.port or (443 if self.is_encrypted else 80)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.path}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def has_place(url: str) -> bool:
    """Return whether a URL names a host and, if it names a port, one that exists."""
    try:
        parts = urlsplit(url)
        return bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        return False


def _split(url: str) -> SplitResult:
    if not has_place(url) or (parts := urlsplit(url)).scheme not in _SCHEMES or any(c.isspace() for c in url):
        raise ConfigError(
            f"{url!r} is not a coordinator's address: it must look like 'wss://host:8790' or 'ws://127.0.0.1:8790'"
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            "the coordinator's address contains a login, a query or a fragment: remove it; the"
            " token alone admits a worker"
        )
    return parts
