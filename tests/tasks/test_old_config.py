"""Stored settings of earlier versions, which held the keys of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig, VerifierConfig
from rollover.errors import ConfigError
from rollover.run.loading import restore
from rollover.settings.plain import resolved
from rollover.tasks.old_config import without_keys_of_other_kinds
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
    assert without_keys_of_other_kinds(now) == now, "what this version stores stays as it is"


def test_a_key_of_another_kind_that_says_something_is_refused_still() -> None:
    stored = copy.deepcopy(STORED)
    stored["tasks"]["train"][1]["split"] = "test"
    with pytest.raises(ConfigError, match=r"tasks.train.1.split: unknown key of kind 'jsonl'; it belongs to kind 'hf'"):
        restore(stored, "config.json")


@pytest.mark.parametrize("damaged", [{}, {"tasks": 3}, {"tasks": {"train": [7, {"kind": "zip"}]}, "sft": []}])
def test_damaged_settings_are_left_for_the_schema_to_refuse(damaged: dict[str, Any]) -> None:
    assert without_keys_of_other_kinds(damaged) == damaged
