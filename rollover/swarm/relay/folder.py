"""A folder from which nginx runs as a relay: its configuration, its cache, its logs."""

from __future__ import annotations

import os
import re
import ssl
from importlib.resources import files
from pathlib import Path

from rollover.errors import ConfigError
from rollover.privacy import make_private
from rollover.swarm.relay.settings import RelaySettings

SLICE_MB = 2
"""Pieces in which blobs are fetched and kept, in MiB."""
_PLAIN = re.compile(r"[\w./:@+,=-]+")
"""Texts that mean themselves in a configuration of nginx."""


def write_folder(settings: RelaySettings, folder: Path) -> Path:
    """Write what nginx needs to run as a relay into ``folder``; return the configuration, which its owner alone can
    read. What is in the cache stays.

    Raises:
        ConfigError: a certificate is missing, or a path cannot be written into a configuration.
        OSError: the folder cannot be written.

    Example: ``write_folder(settings, Path("relay"))`` writes ``relay/nginx.conf``; ``nginx -p relay -c nginx.conf``
    runs it.
    """
    content = render(settings, folder)
    for name in ("cache", "logs", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    file = folder / "nginx.conf"
    make_private(file)
    file.write_text(content)
    return file


def render(settings: RelaySettings, folder: Path) -> str:
    """Return the configuration of nginx. Raises ``ConfigError``."""
    trainer = settings.trainer
    for option, file in (
        ("--tls-certificate", settings.tls_certificate),
        ("--tls-key", settings.tls_key),
        ("--ca-file", settings.ca_file),
    ):
        if file is not None and not file.is_file():
            raise ConfigError(f"{option} {file}: there is no such file")
    _check_certificates(settings)
    values = {
        "FOLDER": _path(folder),
        "MAX_CACHE_MB": str(max(1, round(settings.max_cache_gb * 1000))),
        "HOST": _plain(trainer.netloc),
        "UPSTREAM": settings.upstream,
        "LISTEN": settings.listen + ("" if settings.tls_certificate is None else " ssl"),
        "LISTEN_TLS": _lines(_listen_tls(settings)),
        "UPSTREAM_TLS": _lines(_upstream_tls(settings)),
        "SLICE_MB": str(SLICE_MB),
        "AUTHORIZATION": "$http_authorization" if settings.token is None else f'"Bearer {settings.token}"',
        "SCHEME": "https" if trainer.is_encrypted else "http",
        "PATH": _plain(trainer.path),
    }
    template = (files("rollover.swarm.relay") / "nginx.conf.in").read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)


def _check_certificates(settings: RelaySettings) -> None:
    """Raise ``ConfigError`` for what nginx would refuse to start with."""
    if settings.tls_certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                settings.tls_certificate, settings.tls_key, password=""
            )
        except PermissionError:
            pass  # nginx may be started by a user who can read them
        except (OSError, ssl.SSLError) as e:
            given = f"--tls-certificate {settings.tls_certificate}, --tls-key {settings.tls_key}"
            raise ConfigError(
                f"{given}: they are not a certificate (PEM) and its key, without a password: {_why(e)}"
            ) from None
    if settings.ca_file is not None:
        try:
            ssl.create_default_context(cafile=settings.ca_file)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(
                f"--ca-file {settings.ca_file}: holds no readable certificates (PEM): {_why(e)}"
            ) from None


def _why(error: OSError) -> str:
    """Return what is wrong with a file; OpenSSL names its reason in capitals."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return reason.replace("_", " ").lower()


def _listen_tls(settings: RelaySettings) -> list[str]:
    if settings.tls_certificate is None or settings.tls_key is None:
        return []
    return [
        f"ssl_certificate {_path(settings.tls_certificate)};",
        f"ssl_certificate_key {_path(settings.tls_key)};",
        "ssl_protocols TLSv1.2 TLSv1.3;",
        "ssl_session_cache shared:tls:8m;",
    ]


def _upstream_tls(settings: RelaySettings) -> list[str]:
    if not settings.trainer.is_encrypted:
        return []
    authorities = settings.ca_file or ssl.get_default_verify_paths().cafile
    if authorities is None:
        raise ConfigError("this machine has no file of trusted certificates: name one with --ca-file")
    return [
        f"proxy_ssl_name {settings.trainer_name or settings.trainer_host};",
        "proxy_ssl_server_name on;",
        "proxy_ssl_verify on;",
        "proxy_ssl_verify_depth 5;",
        f"proxy_ssl_trusted_certificate {_path(Path(authorities))};",
    ]


def _lines(directives: list[str]) -> str:
    return "".join(f"        {directive}\n" for directive in directives)


def _path(path: Path) -> str:
    """Return an absolute path, in quotes; nginx resolves others against its own folder."""
    text = os.path.abspath(path)
    if any(c in text for c in '"\\$\n{};'):
        raise ConfigError(f'{text}: a path with one of "\\${{}}; cannot be written into an nginx configuration')
    return f'"{text}"'


def _plain(text: str) -> str:
    if text and not _PLAIN.fullmatch(text):
        raise ConfigError(f"{text!r} cannot be written into an nginx configuration")
    return text
