"""The coordinator's address."""

from __future__ import annotations

import pytest

from rollover.errors import ConfigError
from rollover.swarm.wire.address import CoordinatorAddress


@pytest.mark.parametrize(
    ("url", "session", "http"),
    [
        ("wss://swarm.example:8443", "wss://swarm.example:8443/v1/session", "https://swarm.example:8443"),
        ("https://swarm.example/", "wss://swarm.example/v1/session", "https://swarm.example"),
        ("ws://127.0.0.1:8400", "ws://127.0.0.1:8400/v1/session", "http://127.0.0.1:8400"),
        ("http://localhost:8400/behind/", "ws://localhost:8400/behind/v1/session", "http://localhost:8400/behind"),
        ("ws://[::1]:8400", "ws://[::1]:8400/v1/session", "http://[::1]:8400"),
        ("wss://a.example/v1/session", "wss://a.example/v1/session", "https://a.example"),
    ],
)
def test_http_and_websocket_addresses_mean_the_same(url: str, session: str, http: str) -> None:
    address = CoordinatorAddress.parse(url)
    assert (address.session_url, address.blob_url) == (session, f"{http}/v1/blobs")


@pytest.mark.parametrize("url", ["ws://10.0.0.5:8790", "http://swarm.example:80", "ws://0.0.0.0:1"])
def test_a_plain_connection_over_a_network_needs_to_be_asked_for(url: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        CoordinatorAddress.parse(url)
    assert CoordinatorAddress.parse(url, insecure=True).session_url.startswith("ws://")


@pytest.mark.parametrize("url", ["ws://127.0.0.1", "http://localhost/", "ws://[::1]", "ws://127.0.0.1:"])
def test_a_plain_address_without_a_port_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="the port is missing"):
        CoordinatorAddress.parse(url)


@pytest.mark.parametrize(
    "url",
    ["swarm.example", "ftp://a", "ws://", "ws://a:0", "ws://a:70000", "ws://a b", "", "ws://[1", "wss://a..lan:8790"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a coordinator's address"):
        CoordinatorAddress.parse(url, insecure=True)


@pytest.mark.parametrize(
    "url", ["wss://me:secret@a.example", "wss://a.example/?token=secret", "wss://a.example/#secret"]
)
def test_secrets_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CoordinatorAddress.parse(url)
    assert "secret" not in str(caught.value)
