"""TLS failures in the words of a worker's user, each with what to do about it."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime

_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_HOST = (62, 64)
"""OpenSSL's codes for a certificate of another host name and of another IP address."""
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
"""Signed by itself, by an authority that signed itself, or by an unknown authority."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")


def tls_refusal(error: BaseException | None) -> str | None:
    """Return why TLS failed and what to do, if an error or one of its causes is of TLS."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        return certificate_refused(error)
    if error is None:
        return None
    reason = error.reason or str(error)
    if reason in _NOT_TLS:
        return (
            f"it does not speak TLS there ({reason}): is the port right? Join a trainer that has"
            " no certificate with ws://"
        )
    return f"the two sides cannot agree on TLS ({reason}): is the address right, and is TLS 1.2 or newer allowed there?"


def certificate_refused(error: ssl.SSLCertVerificationError, *, now: datetime | None = None) -> str:
    """Return why a certificate was not accepted, and what to do."""
    clock = f"this machine's clock says {now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    code, reason = error.verify_code, error.verify_message.rstrip(".")
    if code == _NOT_YET_VALID:
        return f"its certificate is not valid yet; {clock}: set the clock if it is wrong; otherwise, wait"
    if code == _EXPIRED:
        return f"its certificate has expired; {clock}: set the clock if it is wrong; otherwise, have it renewed"
    if code in _WRONG_HOST:
        return (
            f"its certificate is for another host ({reason}): use a name or address that it"
            " contains, or have it created with this one as a subjectAltName"
        )
    if code in _UNKNOWN_AUTHORITY:
        return (
            f"its certificate is not signed by an authority that this worker trusts ({reason}): name the file of"
            " its authority, or of the certificate itself, with --ca-file, or add it to that file"
        )
    return f"its certificate cannot be trusted: {reason}"


async def speaks_tls(host: str, port: int, *, timeout_s: float) -> bool:
    """Return whether a server answers a TLS handshake, whatever its certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
