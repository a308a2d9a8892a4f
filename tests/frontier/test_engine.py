from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest

from rollover.devices import catalogue
from rollover.devices.costs.rollout import engine_model, replica_costs
from rollover.devices.model_shape import read_shape
from rollover.devices.records import Link
from rollover.devices.workload import specify
from rollover.errors import ConfigError, ModelError
from rollover.frontier.engine import assumed, of_device
from rollover.frontier.setup import EngineSection
from rollover.rollout.config import RolloutConfig
from rollover.workload.source import PRESETS

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LENGTHS = PRESETS["qwen3-16k"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "qwen3-4b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return str(folder)


def test_a_device_and_a_model_are_a_replica(model: str) -> None:
    replica, note = of_device("h100-sxm", model, LENGTHS, RolloutConfig(), tp=1)
    # Weights of 8 GB read once, a cache of 147,456 bytes per token read per sample, at the catalogue's bandwidth.
    bandwidth = 3350e9 * 0.65
    assert replica.c0_s == pytest.approx(0.002 + 8.04e9 / bandwidth, rel=0.03)
    context = replica.c0_s / replica.b0 * bandwidth / 147_456
    assert 4000 < context < 7000  # of a token of responses of 8,091 tokens on average
    assert replica.kv_tokens == pytest.approx((0.9 * 80 * 2**30 - 8.04e9) / 147_456, rel=0.01)
    assert "H100" in note
    halved, _ = of_device("h100-sxm", model, LENGTHS, RolloutConfig(), tp=2)
    assert halved.kv_tokens > 2 * replica.kv_tokens
    assert 0.5 < halved.c0_s / replica.c0_s < 0.9


def test_devices_and_models_that_cannot_be_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="unknown device 'h100-smx'; did you mean 'h100-sxm'"):
        of_device("h100-smx", model, LENGTHS, RolloutConfig(), tp=1)
    with pytest.raises(ConfigError, match="--tp must be between 1 and 8"):
        of_device("h100-sxm", model, LENGTHS, RolloutConfig(), tp=16)
    with pytest.raises(ConfigError, match=r"--tp 3: the 32 attention heads of .* cannot be divided by 3"):
        of_device("h100-sxm", model, LENGTHS, RolloutConfig(), tp=3)
    (Path(model) / "config.json").write_text(json.dumps(QWEN3_4B | {"num_hidden_layers": 3600}))
    with pytest.raises(ConfigError, match="do not fit on 1 x h100-sxm; raise --tp"):
        of_device("h100-sxm", model, LENGTHS, RolloutConfig(), tp=1)
    with pytest.raises(ModelError, match="config"):
        of_device("h100-sxm", str(Path(model).parent), LENGTHS, RolloutConfig(), tp=1)


def test_a_pipeline_with_no_more_samples_than_stages_has_a_pace(model: str) -> None:
    network = Link(bytes_per_s=1e10, latency_s=1e-5)
    device = catalogue.packaged().surroundings(
        "rtx-4090", name="4090", node_size=1, network=network, price_per_hour=None
    )
    workload = specify("lengths", LENGTHS, num_groups=4, group_size=4)
    for stages, at_most in itertools.product((1, 2, 4), range(1, 9)):
        costs = replica_costs(read_shape(model), workload, device, 1, stages)
        replica = engine_model(costs, pause_s=1.0, max_running=at_most)
        assert replica.c0_s > 0 and math.isfinite(replica.b0)


def test_without_an_engine_a_batch_loads_the_replicas_as_published() -> None:
    config = RolloutConfig(rollout_batch_size=32, group_size=8)
    replica, note = assumed(config, 2, EngineSection(), None)
    assert 2 * replica.b0 * 2.4 == pytest.approx(256)
    assert replica.c0_s == 1
    assert "No engine given" in note
    timed, note = assumed(config, 2, EngineSection(c0_s=0.01), Path("s.toml"))
    assert timed.prefill_tokens_per_s * timed.c0_s == replica.prefill_tokens_per_s
    assert re.fullmatch(r"Engine as in s\.toml: B0 = 53 samples .*; 1,600 tokens are prefilled per c0\.", note)
    _, note = assumed(config, 2, EngineSection(b0=54.0, prefill_tokens_per_s=1e4), Path("s.toml"))
    assert note == "Engine as in s.toml: times are in iterations over an empty batch (c0)."
    _, note = assumed(config, 2, EngineSection(c0_s=0.01, b0=54.0, prefill_tokens_per_s=1e4), Path("s.toml"))
    assert note == "Engine as in s.toml."
