"""The address of a swarm on a NATS cluster, as a user writes it, and the subjects behind it."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from rollover.errors import ConfigError
from rollover.swarm.nats.credentials import WHERE_CREDENTIALS, NatsCredentials
from rollover.swarm.wire.address import is_loopback

SCHEMES = ("nats", "tls")
_PORT = 4222
_SUBJECT = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_SUBJECT = 100
_DEFAULT_SUBJECT = "rollover"
_SECRET_BYTES = 24
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
_SECRET = r"[A-Za-z0-9_-]{22,64}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAddress:
    """Servers of a NATS cluster and the subject below which one run's messages travel.

    Example: ``NatsAddress.parse("tls://a.example,b.example:4333/runs.sums")`` has the servers
    ``("tls://a.example:4222", "tls://b.example:4333")`` and the subject ``"runs.sums"``.
    """

    servers: tuple[str, ...]
    """URLs of servers of one cluster, in the order in which they are tried."""
    subject: str
    credentials: NatsCredentials | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, insecure: bool = False) -> NatsAddress:
        """Read ``nats://HOST[:PORT][,HOST[:PORT]...][/SUBJECT]``, or ``tls://``, which insists on TLS.

        Raises ``ConfigError`` for what is no such address, and for one whose connection others could read and change,
        unless ``insecure``.
        """
        scheme, _, rest = url.partition("://")
        hosts, _, subject = rest.partition("/")
        if scheme not in SCHEMES or any(c.isspace() for c in url):
            raise _no_address(url)
        if "@" in hosts or "?" in url or "#" in url:
            raise ConfigError(
                "the NATS address contains a login, a query or a fragment: remove it; logins belong"
                f" in a file: {WHERE_CREDENTIALS}"
            )
        servers = tuple(_server(scheme, host, url) for host in hosts.split(","))
        subject = subject.rstrip("/") or _DEFAULT_SUBJECT
        if not _SUBJECT.fullmatch(subject) or len(subject) > _MAX_SUBJECT:
            raise ConfigError(
                f"{subject!r} is not a NATS subject for a run: use words of letters, digits, '_' and"
                " '-', separated by dots, such as 'runs.sums'"
            )
        open_hosts = [host for server in servers if not is_loopback(host := urlsplit(server).hostname or "")]
        if scheme == "nats" and open_hosts and not insecure:
            raise ConfigError(
                f"{url}: on a network, anyone on the way can read and change what a plain connection"
                " carries: use tls://, or give --insecure (engine.insecure = true) if the network"
                " itself is private"
            )
        return cls(servers=servers, subject=subject)

    def having(self, credentials: NatsCredentials | None) -> NatsAddress:
        """Return the address with the login for it."""
        return replace(self, credentials=credentials)

    @property
    def is_encrypted(self) -> bool:
        """Return True if TLS is required; with ``nats://`` it is used where the server asks for it."""
        return self.servers[0].startswith("tls:")

    @property
    def blob_urls(self) -> tuple[str, ...]:
        """Return no URL: a coordinator behind NATS serves no blobs itself, and names the places where they are."""
        return ()

    @property
    def hello(self) -> str:
        """Return the subject on which workers ask for a session."""
        return f"{self.subject}.hello"

    @property
    def coordinator(self) -> str:
        """Return the subject on which a coordinator says that it is there."""
        return f"{self.subject}.coordinator"

    @property
    def sessions(self) -> str:
        """Return the pattern of all subjects of sessions, towards the coordinator."""
        return f"{self.subject}.session.*"

    def new_session(self) -> str:
        """Return a subject that cannot be guessed, towards the coordinator."""
        return f"{self.subject}.session.{secrets.token_urlsafe(_SECRET_BYTES)}"

    def new_inbox(self, name: str) -> str:
        """Return a subject that cannot be guessed, towards the worker called ``name``."""
        return f"{self.subject}.worker.{name}.{secrets.token_urlsafe(_SECRET_BYTES)}"

    def replies(self, name: str | None = None) -> str:
        """Return where the cluster answers requests of the worker called ``name``, or the coordinator's: below subjects
        that are theirs alone, and not where all clients of a cluster are answered."""
        return f"{self.coordinator if name is None else f'{self.subject}.worker.{name}'}.replies"

    def inbox_owner(self, inbox: str) -> str | None:
        """Return the name of the worker whose inbox this is; ``None`` for any other subject."""
        match = re.fullmatch(rf"{re.escape(self.subject)}\.worker\.({_NAME})\.{_SECRET}", inbox)
        return None if match is None else match[1]

    def __str__(self) -> str:
        scheme = self.servers[0].partition("://")[0]
        hosts = ",".join(server.partition("://")[2] for server in self.servers)
        return f"{scheme}://{hosts}/{self.subject}"


def _server(scheme: str, host: str, url: str) -> str:
    try:
        parts = urlsplit(f"{scheme}://{host}")
        port = parts.port if parts.port is not None else _PORT
        is_server = bool(parts.hostname) and port != 0
    except ValueError:
        is_server = False
    if not is_server:
        raise _no_address(url)
    name = parts.hostname or ""
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"


def _no_address(url: str) -> ConfigError:
    return ConfigError(
        f"{url!r} is not an address on a NATS cluster: it must look like"
        " 'tls://nats.example:4222/rollover' or 'nats://127.0.0.1:4222/rollover'"
    )
