"""Configs that earlier versions recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig, VerifierConfig
from rollover.errors import ConfigError
from rollover.run.loading import load, restore
from rollover.run.old_config import upgraded
from rollover.settings.plain import resolved
from rollover.tasks.sources import HubConfig, JsonlConfig, ReasoningGymConfig

REWARD: dict[str, Any] = {
    "kind": "verifier", "function": None, "params": {}, "extract": None, "answer_pattern": None,
    "reference_extract": "whole", "timeout_s": 10.0, "workers": 2, "retries": 1, "pass_score": 1.0,
}  # fmt: skip
SOURCE: dict[str, Any] = {
    "kind": "reasoning_gym", "name": "s", "dataset": None, "config": {}, "path": None, "split": None, "subset": None,
    "prompt_column": None, "answer_column": None, "keep_columns": None, "limit": None, "weight": 1.0, "reward": REWARD,
}  # fmt: skip
FUNCTION = {**REWARD, "kind": "function", "function": "m:f", "params": {"a": 1}}
STORED: dict[str, Any] = {
    "model": {"path": "m", "scratch": None},
    "tasks": {
        "train": [
            {**SOURCE, "config": {"max_terms": 3}, "reward": {**REWARD, "extract": "hashes"}},
            {**SOURCE, "kind": "jsonl", "name": "f", "path": "f.jsonl", "reward": FUNCTION},
        ],
        "eval": [
            {**SOURCE, "kind": "hf", "path": "a/b", "split": "test", "reward": {**REWARD, "kind": "exact"}},
        ],
    },
    "sft": None,
}  # fmt: skip


def test_what_an_earlier_version_stored_is_the_same_config() -> None:
    before = copy.deepcopy(STORED)
    config = restore(STORED, "config.json")
    assert before == STORED
    assert config.tasks.train == (
        ReasoningGymConfig(name="s", config={"max_terms": 3}, reward=VerifierConfig(extract="hashes")),
        JsonlConfig(name="f", path="f.jsonl", reward=FunctionConfig(function="m:f", params={"a": 1})),
    )
    assert config.tasks.eval == (HubConfig(name="s", path="a/b", split="test", reward=ExactConfig()),)
    now = resolved(config)
    assert upgraded(now) == now, "what this version stores stays as it is"


def test_a_key_of_another_kind_that_says_something_is_refused_still() -> None:
    stored = copy.deepcopy(STORED)
    stored["tasks"]["train"][1]["split"] = "test"
    with pytest.raises(ConfigError, match=r"tasks.train.1.split: unknown key of kind 'jsonl'; it belongs to kind 'hf'"):
        restore(stored, "config.json")


@pytest.mark.parametrize("damaged", [{}, {"tasks": 3}, {"tasks": {"train": [7, {"kind": "zip"}]}, "sft": []}])
def test_damaged_settings_are_left_for_the_schema_to_refuse(damaged: dict[str, Any]) -> None:
    assert upgraded(damaged) == damaged


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        (
            {"strategy": "april", "over_sampling_batch_size": 64, "drop_surplus": False, "lag_target": None},
            {"strategy": {"kind": "april", "over_sampling_batch_size": 64}},
        ),
        ({"strategy": "rollover", "lag_target": 0.0}, {"strategy": {"kind": "rollover", "lag_target": 0.0}}),
        ({"group_size": 4, "num_running": None}, {"group_size": 4}),
        ({"strategy": {"kind": "april", "drop_surplus": True}}, {"strategy": {"kind": "april", "drop_surplus": True}}),
        ({"num_running": 8}, {"strategy": {"num_running": 8}}),  # of a variant that changes no more than this
    ],
)
def test_options_of_a_strategy_are_put_into_its_table(stored: dict[str, Any], now: dict[str, Any]) -> None:
    assert upgraded({"rollout": stored}) == {"rollout": now}
    assert upgraded({"rollout": now}) == {"rollout": now}


SWARM = {"kind": "swarm", "listen": "127.0.0.1:0"}
OLD = {"transport": "websocket", "nats_url": "nats://127.0.0.1:4222/rollover", "nats_bucket": None}
OLD |= {"blob_store": None, "blob_query_env": None, "reexecute": 0.1, "verifiable_only": False}


def test_a_run_that_did_not_need_removed_settings_is_read_without_them() -> None:
    assert upgraded({"engine": {**SWARM, **OLD}}) == {"engine": SWARM}
    stored = resolved(load("quickstart", ["--engine.kind", "swarm"]))
    stored["engine"] |= OLD
    stored["cluster"] = {"address": "auto", "engine_lease_s": 600.0}
    assert restore(stored, "config.json").engine.kind == "swarm"


@pytest.mark.parametrize(
    ("key", "value"), [("transport", "nats"), ("blob_store", "s3://bucket/run"), ("verifiable_only", True)]
)
def test_a_run_that_needs_a_removed_setting_is_refused_by_its_name(key: str, value: object) -> None:
    stored = resolved(load("quickstart", ["--engine.kind", "swarm"]))
    with pytest.raises(ConfigError, match=key):
        restore({**stored, "engine": {**stored["engine"], **OLD, key: value}}, "config.json")
