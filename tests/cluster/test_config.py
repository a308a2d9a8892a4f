"""The section ``[cluster]``: what is accepted, what is refused and how, and that Ray is not imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollover.cluster.config import ClusterConfig, EngineGroup
from rollover.errors import ConfigError
from rollover.run.building import build_config, restore
from rollover.run.config import RunConfig
from rollover.settings.plain import resolved
from tests.speed import within

SECTION = """\
[model.scratch]
max_position = 2048
[trainer]
num_devices = 2
[engine]
kind = "vllm"
launch = true
[cluster]
address = "10.0.0.1:6379"
trainer_resources = { h100 = 1 }
[[cluster.engines]]
count = 2
max_running = 256
resources = { a10 = 0.5 }
[[cluster.engines]]
devices = 2
"""


def test_a_section_is_read_and_restored(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(SECTION)
    config = build_config(file)
    assert config.cluster == ClusterConfig(
        address="10.0.0.1:6379",
        trainer_resources={"h100": 1.0},
        engines=(EngineGroup(count=2, max_running=256, resources={"a10": 0.5}), EngineGroup(devices=2)),
    )
    assert config.cluster.num_engines == 3
    assert restore(resolved(config), "config.json") == config


def test_a_number_of_engines_and_the_command_line_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model.scratch]\nmax_position = 2048\n[engine]\nkind = 'vllm'\nlaunch = true\n")
    overrides = ["--cluster.engines", "4", "--cluster.engine_resources.a10", "1"]
    config = build_config(file, overrides).cluster
    assert config is not None and (config.num_engines, config.engine_resources) == (4, {"a10": 1.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://10.0.0.1:10001"}, "belongs to Ray Client, which cannot be used to control ranks"),
        ({"address": "10.0.0.1"}, r"must be 'auto' or HOST:PORT, got '10\.0\.0\.1'"),
        ({"address": "10.0.0.1:99999"}, "must be 'auto' or HOST:PORT"),
        ({"engines": -1}, "engines must be at least 0, got -1"),
        ({"engines": [{"count": 0}]}, "engines.count must be at least 1, got 0"),
        ({"trainer_resources": {"h100": 0}}, "trainer_resources: 'h100' must be a name with an amount above 0"),
        ({"placement_timeout_s": 0}, "placement_timeout_s must be above 0"),
        ({"adress": "auto"}, "adress"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(cluster=settings)


def test_ray_is_not_imported_to_read_it() -> None:
    code = (
        "import sys; from tests.cluster.test_config import config; config(cluster={});"
        "print({'ray', 'torch'} & {*sys.modules})"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=within(120))
    assert done.stdout.strip() == "set()", done.stderr


def config(**sections: Any) -> RunConfig:
    return restore({"model": {"scratch": {"max_position": 2048}}, "trainer": {"num_devices": 2}, **sections}, "x")
