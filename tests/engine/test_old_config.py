"""Settings of removed features in the configs of recorded runs."""

from __future__ import annotations

import pytest

from rollover.engine.old_config import without_removed
from rollover.errors import ConfigError
from rollover.run.loading import load, resolved, restore

SWARM = {"kind": "swarm", "listen": "127.0.0.1:0"}
OLD = {"transport": "websocket", "nats_url": "nats://127.0.0.1:4222/rollover", "nats_bucket": None}
OLD |= {"blob_store": None, "reexecute": 0.1, "verifiable_only": False}


def test_a_recorded_run_that_did_not_need_them_is_read_without_them() -> None:
    assert without_removed({**SWARM, **OLD}) == SWARM
    stored = resolved(load("quickstart", ["--engine.kind", "swarm"]))
    assert restore({**stored, "engine": {**stored["engine"], **OLD}}, "config.json").engine.kind == "swarm"


@pytest.mark.parametrize(
    ("key", "value"), [("transport", "nats"), ("blob_store", "s3://bucket/run"), ("verifiable_only", True)]
)
def test_a_recorded_run_that_needs_one_is_refused_by_its_name(key: str, value: object) -> None:
    stored = resolved(load("quickstart", ["--engine.kind", "swarm"]))
    with pytest.raises(ConfigError, match=key):
        restore({**stored, "engine": {**stored["engine"], **OLD, key: value}}, "config.json")
