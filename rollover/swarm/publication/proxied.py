"""Requests for blobs, sent directly or through the proxy that the environment names for their URL."""

from __future__ import annotations

import ssl

import httpx

from rollover.errors import ConfigError
from rollover.swarm.wire.proxies import proxy_for


class ProxiedTransport(httpx.AsyncBaseTransport):
    """A transport of HTTP that goes where ``proxy_for`` says.

    Args:
        verify: how servers' certificates are checked, even behind a proxy.

    Example: ``httpx.AsyncClient(transport=ProxiedTransport(verify=True))``
    """

    def __init__(self, *, verify: ssl.SSLContext | bool) -> None:
        self._verify = verify
        self._by_proxy: dict[str | None, httpx.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. Raises ``httpx.TransportError``, even where the environment names no usable proxy."""
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
