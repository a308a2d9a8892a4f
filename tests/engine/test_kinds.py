"""Each kind of engine has a config and a way of opening it, and its config answers what runs ask of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.config import EngineConfig, EngineDemands
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.embedded.config import EmbeddedServerConfig
from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.swarm.config import SwarmConfig

NOTHING = EngineDemands(
    strategy="april", staleness_bound=0, in_flight_update=False, deterministic=False, adapters=False, on_cluster=False
)


def test_a_publication_has_the_servers_deadline_or_ten_minutes() -> None:
    servers = VLLMConfig(launch=True)
    assert servers.publish_timeout_s == servers.update_timeout_s > 600
    assert VLLMConfig(launch=True, load_timeout_s=10.0).publish_timeout_s == servers.update_timeout_s - 290
    assert SwarmConfig(update_timeout_s=90.0).publish_timeout_s == 90
    assert EmbeddedConfig().publish_timeout_s == 600
    assert EmbeddedConfig().update_timeout_s is None


def test_servers_alone_take_weights_through_a_folder(tmp_path: Path) -> None:
    assert VLLMConfig(launch=True).weights_root(tmp_path, "a-run") == tmp_path
    assert VLLMConfig(launch=True, weights_dir=str(tmp_path)).weights_root(Path("w"), "a-run") == tmp_path / "a-run"
    assert EmbeddedConfig().weights_root(tmp_path, "a-run") is None
    assert SwarmConfig().weights_root(tmp_path, "a-run") is None


def test_started_vllm_and_sglang_servers_get_an_untied_output_matrix() -> None:
    started: list[EngineConfig] = [VLLMConfig(launch=True), SGLangConfig(launch=True)]
    assert [config.unties_first for config in started] == [True, True]
    others: list[EngineConfig] = [
        VLLMConfig(urls=("http://a:1",)),
        EmbeddedServerConfig(launch=True),
        EmbeddedConfig(),
        SwarmConfig(),
    ]
    assert [config.unties_first for config in others] == 4 * [False]


@pytest.mark.parametrize(
    ("config", "demands", "refusal"),
    [
        (EmbeddedConfig(), {"deterministic": True}, None),
        (EmbeddedConfig(kv_on_update="keep"), {"deterministic": True}, "needs engine.kv_on_update 'recompute'"),
        (VLLMConfig(launch=True), {"deterministic": True}, "needs engine.kind 'embedded', got 'vllm'"),
        (SwarmConfig(), {"deterministic": True}, "needs engine.kind 'embedded', got 'swarm'"),
        (VLLMConfig(launch=True), {"adapters": True}, None),
        (VLLMConfig(launch=True, kv_on_update="keep"), {"adapters": True}, "not work with engine.kv_on_update 'keep'"),
        (SGLangConfig(launch=True, colocated=True), {"adapters": True}, "has no benefit with engine.colocated"),
        (SGLangConfig(launch=True), {"adapters": True, "in_flight_update": True}, "'april' loads weights under"),
        (EmbeddedServerConfig(launch=True, kv_on_update="keep"), {"adapters": True}, None),
        (SwarmConfig(), {"adapters": True}, "workers of a swarm are sent the merged weights"),
        (SwarmConfig(mode="pull"), {}, None),
        (SwarmConfig(mode="pull"), {"staleness_bound": 4}, "trains tokens that are up to 4 versions older"),
        (SwarmConfig(), {"staleness_bound": 4}, None),
        (VLLMConfig(launch=True), {"on_cluster": True}, None),
        (VLLMConfig(launch=True, num_servers=2), {"on_cluster": True}, "engine.num_servers is for servers on this"),
        (VLLMConfig(urls=("http://a:1",)), {"on_cluster": True}, "engine.urls names running ones"),
        (EmbeddedConfig(), {"on_cluster": True}, "cluster.engines starts servers, but engine.kind is 'embedded'"),
    ],
)
def test_impossible_demands_are_refused(config: EngineConfig, demands: dict[str, object], refusal: str | None) -> None:
    found = list(config.refusals(replace(NOTHING, **demands)))  # type: ignore[arg-type]
    assert (len(found) == 1 and refusal in found[0]) if refusal else found == []


def test_without_a_stated_length_there_is_room_for_the_longest_sample() -> None:
    assert EmbeddedConfig().fitted(1000, 2048).max_context_tokens == 1000
    assert EmbeddedConfig(max_context_tokens=500).fitted(1000, 2048).max_context_tokens == 500
    assert EmbeddedConfig().fitted(1000, 512).max_context_tokens is None
    assert EmbeddedServerConfig(launch=True).fitted(1000, 2048).max_context_tokens == 1000
    assert EmbeddedServerConfig(urls=("http://a:1",)).fitted(1000, 2048).max_context_tokens is None


URLS = ("http://a:1",)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EmbeddedServerConfig, {}, "urls or launch = true: .*, got neither"),
        (EmbeddedServerConfig, {"urls": URLS, "kv_cache_bytes": 1}, "kv_cache_bytes has no effect without launch"),
        (EmbeddedServerConfig, {"urls": URLS, "dtype": "float32"}, "dtype has no effect without launch = true"),
        (EmbeddedServerConfig, {"urls": URLS, "transfer_host": "h"}, "no effect with weight_transfer = 'folder'"),
        (SGLangConfig, {"launch": True, "transfer_host": "h"}, "transfer_host has no effect with weight_transfer"),
        (SGLangConfig, {"launch": True, "api_key_env": "KEY"}, "api_key_env does not work with launch = true"),
        (SGLangConfig, {"urls": URLS, "colocated": True, "kv_on_update": "keep"}, "'keep' does not work with coloc"),
        (VLLMConfig, {"urls": URLS, "colocated": True, "kv_on_update": "keep"}, "'keep' does not work with colocated"),
        (VLLMConfig, {"urls": URLS, "max_running": (8, 32)}, "one for each of the 1 urls, got a list of 2"),
        (VLLMConfig, {"launch": True, "max_running": (8,)}, "one number for all servers"),
        (VLLMConfig, {"urls": URLS, "max_running": (0,)}, "max_running must be positive, got 0"),
        (VLLMConfig, {"urls": URLS, "max_running": -1}, "max_running must be positive, got -1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
