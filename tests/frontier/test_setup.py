from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.errors import ConfigError
from rollover.frontier.setup import ScenarioFile, build_scenario, read_scenario, shaped
from rollover.frontier.study import Study, theory
from rollover.rollout.strategies import AprilConfig, ConcurrencyConfig
from rollover.sim.scenario import Latency, Scenario
from rollover.sim.strategies import SimulatedRollout
from tests.frontier.kit import LAW, REPLICA, small

KNOWN = Scenario(replicas=(REPLICA,))


def read(tmp_path: Path, text: str) -> tuple[ScenarioFile, int | None]:
    file = tmp_path / "scenario.toml"
    file.write_text(text)
    return read_scenario(file)


def test_what_a_scenario_file_says_is_simulated(tmp_path: Path) -> None:
    file, cap = read(
        tmp_path,
        """
        kv_on_update = "keep"
        [rollout]
        strategy = { kind = "concurrency", num_running = 40 }
        max_new_tokens = 200
        [engine]
        b0 = 33.0
        replicas = 3
        fast_lane_replicas = 1
        [trainer]
        base_s = 4.0
        s_per_token = 0.001
        """,
    )
    assert cap == 200
    assert file.rollout is not None
    scenario = build_scenario(KNOWN, file, file.engine.replicas or 1)
    assert scenario.replicas == (replace(REPLICA, b0=33.0),) * 2 + (replace(REPLICA, b0=33.0, fast_lane=True),)
    assert scenario.trainer == Latency(base_s=4.0, s_per_token=0.001)
    assert scenario.kv_on_update == "keep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engine]\nb_0 = 3.0\n", "scenario.toml:2: engine.b_0: unknown key; did you mean 'b0'?"),
        ("[engine]\nb0 = -3.0\n", "scenario.toml:2: engine.b0 must be above 0, got -3.0"),
        ("[engine]\nswap_pause_s = -1.0\n", "scenario.toml:2: engine.swap_pause_s must be at least 0, got -1.0"),
        ("[trainer]\nbase_s = -1.0\n", "scenario.toml:2: trainer.base_s must be at least 0, got -1.0"),
        ("[rollout]\nstrategy = 'aprl'\n", "did you mean 'april'?"),
        ("kv_on_update = 'kept'\n", "scenario.toml:1: kv_on_update: 'kept' is not allowed"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert message in str(raised.value)


def test_the_fast_lane_leaves_a_replica_for_the_others(tmp_path: Path) -> None:
    file, _ = read(tmp_path, "[engine]\nfast_lane_replicas = 2\n")
    with pytest.raises(ConfigError, match=r"fast_lane_replicas \(2\) must be below the number of replicas \(2\)"):
        build_scenario(KNOWN, file, 2)


def test_another_batch_shape_keeps_the_setting_in_proportion() -> None:
    april = SimulatedRollout.of("april", rollout_batch_size=32, over_sampling_batch_size=48)
    assert shaped(april, batch_size=64, group_size=None).strategy == AprilConfig(over_sampling_batch_size=96)
    refill = SimulatedRollout.of("concurrency", rollout_batch_size=32, group_size=8, num_running=256)
    assert shaped(refill, batch_size=16, group_size=16).strategy == ConcurrencyConfig(num_running=256)
    assert shaped(april, batch_size=None, group_size=None) == april


def test_the_ceiling_is_caches_read_without_a_pause_or_a_busy_trainer() -> None:
    def ceiling(scenario: Scenario) -> float:
        fields: dict[str, Any] = dict.fromkeys(Study.__slots__)
        setup = small(scenario=scenario)
        return Study(**fields | {"setup": setup, "theory": theory(setup)}).ceiling

    assert ceiling(KNOWN) == pytest.approx(12 / 0.01)
    two = Scenario(replicas=(REPLICA, replace(REPLICA, c0_s=0.02)))
    assert ceiling(two) == pytest.approx(12 / 0.01 + 12 / 0.02)
    busy = replace(KNOWN, trainer=Latency(base_s=100.0))
    assert ceiling(busy) == pytest.approx(24 * LAW.mean_tokens / 100, rel=0.05)
