"""The proxy for an address, as the environment names it: the same for a worker's session and for the blobs it fetches.

``HTTPS_PROXY`` is for ``wss://`` and ``https://``, ``HTTP_PROXY`` for ``ws://`` and ``http://``, ``ALL_PROXY`` for what
has none of these; ``NO_PROXY`` lists hosts that are reached without. This machine itself always is.
"""

from __future__ import annotations

import importlib.util
import ssl
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from rollover.errors import ConfigError
from rollover.swarm.wire.address import is_loopback

_ENCRYPTED = ("https", "wss")
_SCHEMES = ("http", "https")
_SOCKS_SCHEMES = ("socks5", "socks5h")
_FOR_SOCKS = {"python_socks": "'python-socks[asyncio]'", "socksio": "socksio"}
"""Packages that SOCKS needs in addition to Rollover, by module: the first for sessions, the second for blobs."""


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy through which ``url`` is reached; ``None`` if there is none. It may hold a login.

    Raises ``ConfigError`` if the environment names something that is no proxy."""
    parts = urlsplit(url)
    host, is_encrypted = parts.hostname or "", parts.scheme in _ENCRYPTED
    if is_loopback(host) or proxy_bypass(f"{host}:{parts.port or (443 if is_encrypted else 80)}"):
        return None
    named = getproxies()
    for kind in ("https" if is_encrypted else "http", "all"):
        if proxy := named.get(kind):
            return _checked(proxy if "://" in proxy else f"http://{proxy}", f"{kind.upper()}_PROXY")
    return None


def _checked(proxy: str, variable: str) -> str:
    try:
        parts = urlsplit(proxy)
        is_address = bool(parts.hostname) and parts.port != 0 and parts.path in ("", "/")
    except ValueError:
        raise ConfigError(f"{variable} does not name a proxy: it must look like 'http://proxy.example:3128'") from None
    shown = shown_proxy(proxy)
    if not is_address or parts.query or parts.fragment or parts.scheme not in (*_SCHEMES, *_SOCKS_SCHEMES):
        raise ConfigError(f"{variable} = {shown!r} is not a proxy: it must look like 'http://proxy.example:3128'")
    if parts.username is not None and parts.password is None:
        raise ConfigError(
            f"{variable} = {shown!r} has a user without a password: it must look like 'http://USER:PASSWORD@HOST:PORT'"
        )
    if parts.scheme in _SOCKS_SCHEMES:
        missing = [package for name, package in _FOR_SOCKS.items() if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(f"{variable} = {shown!r}: SOCKS needs more packages: pip install {' '.join(missing)}")
    return proxy


def shown_proxy(proxy: str) -> str:
    """Return a proxy's URL as it may be shown: a login is a secret."""
    parts = urlsplit(proxy)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


class ProxiedTransport(httpx.AsyncBaseTransport):
    """A transport of HTTP that goes where ``proxy_for`` says.

    Args:
        verify: how servers' certificates are checked, even behind a proxy.
    """

    def __init__(self, *, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify
        self._by_proxy: dict[str | None, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises ``httpx.TransportError``, even if the environment names no usable proxy."""
        try:
            proxy = proxy_for(str(request.url))
        except ConfigError as e:
            raise httpx.ProxyError(str(e), request=request) from None
        if proxy not in self._by_proxy:
            self._by_proxy[proxy] = httpx.AsyncHTTPTransport(verify=self._verify, proxy=proxy, trust_env=False)
        return await self._by_proxy[proxy].handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._by_proxy.values():
            await transport.aclose()
