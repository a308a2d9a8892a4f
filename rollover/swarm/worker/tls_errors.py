"""TLS failures in words of a worker's user, each with what to do about it."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime

_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_HOST = (62, 64)
"""OpenSSL's codes for a certificate of another host name and of another IP address."""
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
"""Signed by itself, by an authority that signed itself, or by one that is not known."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")


def certificate_refused(error: ssl.SSLCertVerificationError, *, now: datetime | None = None) -> str:
    """Say why a coordinator's certificate was not accepted, and what to do.

    Example: ``"its certificate is not valid yet; this machine's clock says 2026-11-23 06:40 UTC: set it if that is
    wrong"``.
    """
    clock = f"this machine's clock says {now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    code, reason = error.verify_code, error.verify_message.rstrip(".")
    if code == _NOT_YET_VALID:
        return f"its certificate is not valid yet; {clock}: set the clock if it is wrong; otherwise, wait"
    if code == _EXPIRED:
        return (
            f"its certificate has expired; {clock}: set the clock if it is wrong; otherwise, ask"
            " the trainer's owner to renew the certificate"
        )
    if code in _WRONG_HOST:
        return (
            f"its certificate is for another host ({reason}): join with a name or address that it"
            " contains, or have it created with this one as a subjectAltName"
        )
    if code in _UNKNOWN_AUTHORITY:
        return (
            f"its certificate is not signed by an authority that this worker trusts ({reason}):"
            " name the file of its authority, or of the certificate itself, with --ca-file"
        )
    return f"its certificate cannot be trusted: {reason}"


def tls_failed(error: ssl.SSLError) -> str:
    """Say why the TLS handshake failed, and what to do.

    Example: ``"it does not speak TLS there: ..."`` of a coordinator that has no certificate.
    """
    reason = error.reason or str(error)
    if reason in _NOT_TLS:
        return (
            f"it does not speak TLS there ({reason}): is the port right? Join a trainer that has"
            " no certificate with ws://"
        )
    return f"TLS failed: {reason}"


async def speaks_tls(host: str, port: int, *, timeout_s: float) -> bool:
    """Tell whether a server answers a TLS handshake, whatever its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
