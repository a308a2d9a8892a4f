from __future__ import annotations

import math
import re
from typing import Any

import pytest

from rollover.environments.rewards import ExactConfig, VerifierConfig
from rollover.errors import ConfigError
from rollover.run.sections import WarmupConfig
from rollover.settings import toml
from rollover.settings.schema import build
from rollover.settings.shape import kinds
from rollover.tasks.config import CurriculumConfig, TasksConfig
from rollover.tasks.sources import SourceConfig

GYM: dict[str, Any] = {"kind": "reasoning_gym", "name": "chain_sum"}
FILE: dict[str, Any] = {"kind": "jsonl", "name": "f", "path": "f.jsonl", "reward": ExactConfig()}


def source(**fields: Any) -> SourceConfig:
    made: SourceConfig = kinds(SourceConfig)[fields["kind"]](**fields)
    return made


def loaded(text: str) -> TasksConfig:
    return build(TasksConfig, toml.parse(text, "tasks.toml"))


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (source, {**GYM, "name": "a/b"}, "'a/b'"),
        (source, {**GYM, "config": {"seed": 1}}, "config.seed"),
        (source, {**GYM, "config": {"size": 1}}, "use limit"),
        (source, {**GYM, "limit": 0}, "limit must be at least 1, got 0"),
        (source, {**GYM, "weight": 0.0}, "weight must be above 0"),
        (source, {**GYM, "weight": float("nan")}, "weight must be above 0 and finite, got nan"),
        (source, {**FILE, "path": ""}, "path is empty, and kind 'jsonl' needs one"),
        (source, {**FILE, "rewards": (ExactConfig(),)}, "set reward or rewards, not both"),
        (source, {**GYM, "rewards": (VerifierConfig(), VerifierConfig())}, "two rewards are called 'verifier'"),
        (source, {**GYM, "rewards": (VerifierConfig(weight=0.0),)}, "all weights of its rewards are 0"),
        (source, {**FILE, "reward": ExactConfig(weight=2.0)}, "a name and a weight are for one of several rewards"),
        (
            TasksConfig,
            {"eval": (source(**{**FILE, "reward": VerifierConfig(), "rewards": (ExactConfig(), VerifierConfig())}),)},
            "eval.0: source 'f': reward kind 'verifier' belongs to reasoning_gym",
        ),
        (source, {**FILE, "reward": ExactConfig(), "prompt_column": ()}, "prompt_column is empty; name a column"),
        (TasksConfig, {"train": (source(**GYM), source(**GYM))}, "two sources are called 'chain_sum'"),
        (WarmupConfig, {"sources": (source(**GYM), source(**GYM))}, "sft.sources: two sources are called 'chain_sum'"),
        (TasksConfig, {"chat_template": "off", "system_prompt": "x"}, "system_prompt has no effect"),
        (TasksConfig, {"chat_template": "off", "chat_template_file": "x"}, "chat_template_file has no effect"),
        (TasksConfig, {"chat_template": "off", "chat_template_date": "2026-11-27"}, "chat_template_date has no effect"),
        (TasksConfig, {"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        (TasksConfig, {"eval_seed": -1}, "eval_seed"),
        (TasksConfig, {"system_prompt": " "}, "tasks.system_prompt is blank; omit it"),
        (CurriculumConfig, {"min_visits": 0}, "tasks.curriculum.min_visits must"),
        *((CurriculumConfig, {"revisit": share}, "tasks.curriculum.revisit must") for share in (-0.1, 1.1, math.nan)),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**fields)


EXACT = "reward = { kind = 'exact' }"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = 'reasoning_gym'\nname = 'a'\npath = 'x'", ":4: train.0.path: unknown key of kind 'reasoning_gym'; it belongs to kind 'jsonl' or 'parquet' or 'hf'"),
        (f"kind = 'jsonl'\nname = 'a'\npath = 'x'\n{EXACT}\nconfig = {{ a = 1 }}", ":6: train.0.config: unknown key of kind 'jsonl'; it belongs to kind 'reasoning_gym'"),
        (f"kind = 'jsonl'\nname = 'a'\n{EXACT}", ":1: train.0.path: this key is required"),
        (f"name = 'a'\npath = 'x'\n{EXACT}", ":1: train.0.kind: this key is required"),
        ("kind = 'json'\nname = 'a'", ":2: train.0.kind: 'json' is not allowed; did you mean 'jsonl'?"),
        ("kind = 'reasoning_gym'\nname = 'g'\n[[train]]\nkind = 'jsonl'\nname = 'a'\npath = 'x'", ":4: train.1: source 'a': no reward is set; set reward.kind to"),
        ("kind = 'reasoning_gym'\nname = 'a'\nreward = { kind = 'math_verify', extract = 'tag' }", ":4: train.0.reward.extract: unknown key of kind 'math_verify'; it belongs to kind 'verifier' or 'exact'"),
        ("kind = 'reasoning_gym'\nname = 'a'\nreward = { kind = 'function' }", ":4: train.0.reward.function: this key is required"),
        ("kind = 'reasoning_gym'\nname = 'a'\nreward = { kind = 'function', function = 'm:f', retries = -1 }", ":4: train.0.reward.retries must be at least 0, got -1"),
    ],
)  # fmt: skip
def test_a_key_of_another_kind_is_refused_with_its_line_and_kind(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(f"[[train]]\n{text}")
    assert str(caught.value).startswith(f"tasks.toml{message}")
    assert "\n" not in str(caught.value)


def test_generated_items_are_scored_by_their_verifier() -> None:
    tasks = loaded(
        "[[train]]\nkind = 'reasoning_gym'\nname = 'chain_sum'\nreward = { extract = 'hashes' }\n"
        "[[train]]\nkind = 'jsonl'\nname = 'f'\npath = 'f.jsonl'\n[train.reward]\nkind = 'exact'"
    )
    assert tasks.train == (source(**GYM, reward=VerifierConfig(extract="hashes")), source(**FILE))


@pytest.mark.parametrize(
    "rewards", ["{ kind = 'exact' }, { kind = 'math_verify' }", "{ kind = 'function', function = 'm:f', group = true }"]
)
def test_an_evaluation_has_one_reward_that_looks_at_one_response(rewards: str) -> None:
    with pytest.raises(ConfigError, match=r"source 'a' must have one reward, which does not compare siblings"):
        loaded(f"[[eval]]\nkind = 'jsonl'\nname = 'a'\npath = 'x'\nrewards = [{rewards}]")
