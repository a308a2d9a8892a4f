"""The login at a NATS cluster, in a file: any form that NATS knows, told apart by what the file holds.

===========================================  =============================================================
a file that holds                            is
===========================================  =============================================================
``-----BEGIN NATS USER JWT-----``            a ``.creds`` file, as ``nsc`` makes them: a user's JWT and key
``-----BEGIN CERTIFICATE-----`` and a key    a client certificate (PEM) for TLS
``SU`` and 56 more letters and digits        the seed of a user's nkey
``USER:PASSWORD``                            what it says
any other word                               a token
===========================================  =============================================================

What it keeps true: no secret is in a message or a ``repr``; others than its owner cannot read the file.
"""

from __future__ import annotations

import re
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.errors import ConfigError

WHERE_CREDENTIALS = "--nats-credentials (of a worker) or engine.nats_credentials (of a run)"
"""The settings that name the file, for messages."""
_MAX_BYTES = 64 * 1024
_NKEY = re.compile(r"SU[A-Z2-7]{56}")
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsCredentials:
    """A login at a NATS cluster.

    Example: of a file with the one line ``trainer:secret``, ``options`` is ``{"user": "trainer", "password": ...}``.
    """

    file: Path
    options: Mapping[str, Any] = field(repr=False)
    """Arguments of the NATS client."""
    is_certificate: bool = False
    """The file holds a certificate and its key, to be shown when TLS begins."""

    @classmethod
    def read(cls, file: Path) -> NatsCredentials:
        """Read a login. Raises ``ConfigError``, which does not repeat what the file holds."""
        try:
            mode, size = file.stat().st_mode, file.stat().st_size
            if not stat.S_ISREG(mode) or size > _MAX_BYTES:
                raise ConfigError(f"{file}: it is not a file that could hold a login for a NATS cluster")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{file}: users other than its owner can read it; restrict it with chmod 600 {file}")
            text = file.read_text(errors="replace").strip()
        except OSError as e:
            raise ConfigError(f"{file}: the login for the NATS cluster cannot be read: {e.strerror or e}") from None
        if "BEGIN NATS USER JWT" in text and "BEGIN USER NKEY SEED" in text:
            return cls(file=file, options={"user_credentials": str(file)})
        if "BEGIN CERTIFICATE" in text and "PRIVATE KEY" in text:
            return cls(file=file, options={}, is_certificate=True)
        if _NKEY.fullmatch(text):
            return cls(file=file, options={"nkeys_seed_str": text})
        if not _WORD.fullmatch(text):
            raise ConfigError(
                f"{file}: holds no login that NATS accepts: it must be a .creds file, a certificate"
                " with its key (PEM), the seed of an nkey, USER:PASSWORD or a token"
            )
        user, colon, password = text.partition(":")
        return cls(file=file, options={"user": user, "password": password} if colon else {"token": text})

    def add_to(self, tls: ssl.SSLContext) -> None:
        """Show the certificate of the file, where it is one. Raises ``ConfigError``."""
        if not self.is_certificate:
            return
        try:
            tls.load_cert_chain(self.file, password="")
        except (OSError, ssl.SSLError) as e:
            reason = e.strerror if isinstance(e, OSError) and e.strerror else e
            raise ConfigError(f"{self.file}: its certificate and key cannot be used: {reason}") from None
