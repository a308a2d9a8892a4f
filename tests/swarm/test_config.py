"""Each wrong setting of a swarm is one sentence with the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from rollover.run.building import build_config
from rollover.run.engine import check_engine
from rollover.swarm.config import SwarmConfig

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no address": ({"listen": ""}, "listen must look like"),
    "no port": ({"listen": "127.0.0.1"}, "listen must look like"),
    "port beyond": ({"listen": "127.0.0.1:70000"}, "listen must look like"),
    "open without TLS": ({"listen": "0.0.0.0:8790"}, "give tls_certificate and tls_key, or set insecure = true"),
    "half a certificate": ({"tls_certificate": "a.pem"}, "belong together"),
    "away": ({"away_timeout_s": -1}, "away_timeout_s must be at least 0 seconds, got -1"),
    "lease": ({"lease_s": 0.9}, "lease_s must be at least 1: workers send three heartbeats in that time; got 0.9"),
    "anchors": ({"anchor_every": 0}, "anchor_every must be at least 1"),
    "room": ({"max_running": 0}, "max_running must be at least 1"),
    "open page": ({"admin": "0.0.0.0:8791"}, "opening the page needs no token: use '127.0.0.1:8791'"),
    "page without port": ({"admin": "localhost"}, "admin must look like '127.0.0.1:8791', got 'localhost'"),
    "relay": ({"blob_urls": ("ftp://x",)}, "blob_urls must look like"),
    "port of a relay": ({"blob_urls": ("https://127.0.0.1:87955/v1/blobs",)}, "blob_urls must look like"),
    "host of a relay": ({"blob_urls": ("https://relay..lan/x",)}, "blob_urls must look like"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused(name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        SwarmConfig(**settings)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:8790", "[::1]:8790", "127.8.9.1:1"])
def test_this_machine_needs_no_certificate(listen: str) -> None:
    assert SwarmConfig(listen=listen).address[1] == int(listen.rpartition(":")[2])


def test_the_page_is_switched_off_by_none() -> None:
    assert SwarmConfig().admin_address == ("127.0.0.1", 0)
    assert SwarmConfig(admin="[::1]:8791").admin_address == ("::1", 8791)
    config = build_config("quickstart", ["--engine.kind", "swarm", "--engine.admin", "none"])
    assert isinstance(config.engine, SwarmConfig) and config.engine.admin_address is None


def test_a_cut_distribution_is_warned_of_since_it_hides_lies() -> None:
    swarm = ["--engine.kind", "swarm", "--engine.listen", "127.0.0.1:0"]
    for cut in ([], ["--rollout.top_p", "0.9"], ["--rollout.top_k", "20"]):
        warned = [
            line for line in check_engine(build_config("quickstart", [*swarm, *cut])) if "nothing verifies" in line
        ]
        assert len(warned) == bool(cut)
