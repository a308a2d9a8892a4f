"""The address that a run listens on, and its certificate: tried before the run begins, taken when it does."""

from __future__ import annotations

import ssl

from rollover.engine.ports import listen_on
from rollover.errors import ConfigError
from rollover.swarm.config import SwarmConfig


def check_listening(config: SwarmConfig) -> str:
    """Try the address, the certificate and its key. Returns the address as workers join it.

    Raises ``ConfigError`` when the port is in use, or the certificate and the key cannot be used together.

    Example: ``"wss://0.0.0.0:8790"``
    """
    listen_on(config.address, setting="engine.listen").close()
    if config.tls_certificate is None or config.tls_key is None:
        return f"ws://{config.listen}"

    def ask() -> str:
        raise ConfigError(
            f"engine.tls_key: {config.tls_key!r} is encrypted, and a run cannot ask for its password: give a key"
            f" without one (openssl pkey -in {config.tls_key} -out plain.pem)"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.tls_certificate, config.tls_key, password=ask)
    except OSError as e:  # of TLS too
        reason = getattr(e, "reason", None) or e.strerror or e
        raise ConfigError(
            f"engine.tls_certificate {config.tls_certificate!r} and engine.tls_key {config.tls_key!r} cannot be used"
            f" together as PEM files: {reason}"
        ) from e
    return f"wss://{config.listen}"
