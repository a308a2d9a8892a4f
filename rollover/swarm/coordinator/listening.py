"""The address that a run listens on, and its certificate: tried before the run begins, taken when it does.

Invariants: what ``check_listening`` lets pass, workers can join, as far as this machine can tell; each refusal
is one message that names the key, the file and the remedy.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

from cryptography import x509

from rollover.engine.ports import listen_on
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig

_SOON = timedelta(days=7)
_ANY_HOST = ("0.0.0.0", "::")


def check_listening(config: SwarmConfig, *, now: datetime | None = None) -> list[str]:
    """Try the address and read the certificate; return what a user should know, warnings among it.

    Raises ``ConfigError`` when the port is in use, or workers could not trust the certificate.

    Example: ``["wss://0.0.0.0:8790 with a certificate for trainer.lan and 192.168.1.10, valid until 2027-11-23"]``
    """
    listen_on(config.address, setting="engine.listen").close()
    scheme = "ws" if config.tls_certificate is None else "wss"
    where = f"{scheme}://{config.listen}"
    certificate = check_certificate(config, now=now or datetime.now(UTC))
    return [f"{where} {certificate[0]}", *certificate[1:]] if certificate else [where]


def check_certificate(config: SwarmConfig, *, now: datetime) -> list[str]:
    """Read the certificate and its key; return what a user should know: names and expiry first, then warnings.

    Raises ``ConfigError`` when they cannot be read, do not belong together, or no worker would accept them now.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return []
    for key, file in (("tls_certificate", config.tls_certificate), ("tls_key", config.tls_key)):
        _readable(key, Path(file))
    leaf = _leaf(config.tls_certificate)
    _pair(config.tls_certificate, config.tls_key)
    starts, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if now < starts:
        _refuse(
            config.tls_certificate,
            f"is not valid before {starts:%Y-%m-%d %H:%M} UTC, and this machine's clock says"
            f" {now:%Y-%m-%d %H:%M}: set the clock, or create a new certificate",
        )
    if now > ends:
        _refuse(config.tls_certificate, f"expired on {ends:%Y-%m-%d %H:%M} UTC: renew it")
    names = _names(leaf)
    if not names:
        _refuse(
            config.tls_certificate,
            "names no host, so no worker would accept it: create one with a subjectAltName"
            " (openssl req -addext 'subjectAltName=DNS:trainer.example,IP:192.168.1.10')",
        )
    lines = [f"with a certificate for {' and '.join(names)}, valid until {ends:%Y-%m-%d}"]
    host = config.address[0]
    if host not in _ANY_HOST and not _covers(names, host):
        lines.append(
            f"warning: workers that join at {host!r} will reject the certificate, which is for {' and '.join(names)}"
        )
    if ends - now < _SOON:
        lines.append(f"warning: the certificate expires on {ends:%Y-%m-%d %H:%M} UTC; after that no worker can connect")
    if os.stat(config.tls_key).st_mode & stat.S_IROTH:
        lines.append(f"warning: every user of this machine can read {config.tls_key}: chmod 600 {config.tls_key}")
    return lines


def _readable(key: str, file: Path) -> None:
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as e:
        raise ConfigError(f"engine.{key}: {str(file)!r} cannot be read: {e.strerror or e}") from e


def _leaf(file: str) -> x509.Certificate:
    """Return the first certificate of a chain, which is the server's own."""
    try:
        return x509.load_pem_x509_certificates(Path(file).read_bytes())[0]
    except ValueError:
        _refuse(file, "holds no certificate in PEM format, which begins with '-----BEGIN CERTIFICATE-----'")


def _pair(certificate: str, key: str) -> None:
    """Refuse a key that is not the certificate's, or cannot be opened without a user at the keyboard."""

    def ask() -> str:
        raise ConfigError(
            f"engine.tls_key: {key!r} is encrypted, and a run cannot ask for its password: give a"
            f" key without one (openssl pkey -in {key} -out plain.pem)"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=ask)
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"engine.tls_key: {key!r} is not the key of engine.tls_certificate: {certificate!r}"
            ) from e
        raise ConfigError(
            f"engine.tls_certificate: {certificate!r} and engine.tls_key: {key!r} cannot be used: {e.reason or e}"
        ) from e


def _names(certificate: x509.Certificate) -> list[str]:
    """Return the hosts that a certificate is for: names and addresses."""
    try:
        listed = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in listed.get_values_for_type(x509.IPAddress)]
    return [*listed.get_values_for_type(x509.DNSName), *addresses]


def _covers(names: Sequence[str], host: str) -> bool:
    """Return whether a certificate's names include the host; ``*.lan`` is every name with one word before ``.lan``."""
    try:
        return str(ipaddress.ip_address(host)) in names
    except ValueError:
        host = host.lower()
        patterns = {name.lower() for name in names}
        return host in patterns or f"*.{host.partition('.')[2]}" in patterns


def _refuse(file: str, why: str) -> NoReturn:
    raise ConfigError(f"engine.tls_certificate: {file!r} {why}")
