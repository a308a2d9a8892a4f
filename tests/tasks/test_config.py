from __future__ import annotations

from typing import Any

import pytest

from rollover.environments.config import RewardConfig
from rollover.tasks.config import SourceConfig, TasksConfig

GYM: dict[str, Any] = {"kind": "reasoning_gym", "name": "chain_sum"}
FILE: dict[str, Any] = {"kind": "jsonl", "name": "f", "path": "f.jsonl", "reward": RewardConfig(kind="exact")}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "function"}, "reward.function"),
        ({"function": "m:f"}, "reward.function"),
        ({"kind": "function", "function": "m.f"}, "'module:function', got 'm.f'"),
        ({"params": {"a": 1}}, "reward.params"),
        ({"kind": "function", "function": "m:f", "params": {"prompts": []}}, "reward.params.prompts cannot be set"),
        ({"kind": "math_verify", "extract": "tag"}, "reward.extract has no effect with kind 'math_verify'"),
        ({"reference_extract": "hashes"}, "reward.reference_extract"),
        ({"extract": "pattern"}, "set both or none"),
        ({"answer_pattern": "x"}, "set both or none"),
        ({"extract": "pattern", "answer_pattern": "("}, "no regular expression"),
        ({"timeout_s": 0.0}, "reward.timeout_s must be above 0 and finite, got 0.0"),
        ({"timeout_s": float("nan")}, "reward.timeout_s must be above 0 and finite, got nan"),
        ({"timeout_s": float("inf")}, "reward.timeout_s must be above 0 and finite, got inf"),
        ({"pass_score": float("nan")}, "reward.pass_score must be a finite number, got nan"),
        ({"workers": -1}, "reward.workers"),
        ({"kind": "math_verify", "workers": 0}, "only a process can be stopped"),
        ({"retries": -1}, "reward.retries"),
    ],
)
def test_a_reward_setting_that_cannot_work_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RewardConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**GYM, "name": "a/b"}, "'a/b'"),
        ({**GYM, "path": "x"}, "path has no effect with kind 'reasoning_gym'"),
        ({**GYM, "prompt_column": "x"}, "prompt_column has no effect"),
        ({**GYM, "config": {"seed": 1}}, "config.seed"),
        ({**GYM, "config": {"size": 1}}, "use limit"),
        ({**GYM, "limit": 0}, "limit must be at least 1, got 0"),
        ({**GYM, "weight": 0.0}, "weight must be above 0"),
        ({**GYM, "weight": float("nan")}, "weight must be above 0 and finite, got nan"),
        ({**FILE, "path": None}, "needs a path"),
        ({**FILE, "config": {"a": 1}}, "config has no effect with kind 'jsonl'"),
        ({**FILE, "split": "train"}, "split has no effect with kind 'jsonl'"),
        ({**FILE, "reward": RewardConfig()}, "'verifier' belongs to reasoning_gym"),
    ],
)
def test_a_source_setting_that_cannot_work_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SourceConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": (SourceConfig(**GYM), SourceConfig(**GYM))}, "two sources are called 'chain_sum'"),
        ({"chat_template": "off", "system_prompt": "x"}, "system_prompt has no effect"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ({"eval_seed": -1}, "eval_seed"),
    ],
)
def test_tasks_that_contradict_themselves_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TasksConfig(**fields)
    assert message in str(caught.value)


def test_train_and_eval_may_name_the_same_source() -> None:
    TasksConfig(train=(SourceConfig(**GYM),), eval=(SourceConfig(**GYM),))
