from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest

from rollover.environments.episodes import AgentConfig, ClassConfig, ToolsConfig
from rollover.environments.rewards import ExactConfig, FunctionConfig, JudgeConfig, MathVerifyConfig, VerifierConfig

FUNCTION = partial(FunctionConfig, function="m:f")
JUDGE = partial(JudgeConfig, url="http://h/v1", model="m")
TOOLS = partial(ToolsConfig, functions=("m:f",))


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (FUNCTION, {"function": "m.f"}, "'module:function', got 'm.f'"),
        (FUNCTION, {"params": {"prompts": []}}, "reward.params.prompts cannot be set"),
        (VerifierConfig, {"extract": "pattern"}, "set both or neither"),
        (ExactConfig, {"answer_pattern": "x"}, "set both or neither"),
        (ExactConfig, {"extract": "pattern", "answer_pattern": "("}, "not a regular expression"),
        (VerifierConfig, {"timeout_s": 0.0}, "reward.timeout_s must be above 0 and finite, got 0.0"),
        (ExactConfig, {"timeout_s": math.nan}, "reward.timeout_s must be above 0 and finite, got nan"),
        (MathVerifyConfig, {"timeout_s": math.inf}, "reward.timeout_s must be above 0 and finite, got inf"),
        (ExactConfig, {"pass_score": math.nan}, "reward.pass_score must be a finite number, got nan"),
        (ExactConfig, {"weight": math.nan}, "reward.weight must be a finite number, got nan"),
        (ExactConfig, {"weight": math.inf}, "reward.weight must be a finite number, got inf"),
        (ExactConfig, {"name": "a/b"}, "reward.name must be letters, digits, '_', '-' and '.', got 'a/b'"),
        (FUNCTION, {"workers": -1}, "reward.workers"),
        (MathVerifyConfig, {"workers": 0}, "only a process can be stopped"),
        (VerifierConfig, {"retries": -1}, "reward.retries"),
        (JUDGE, {"url": "127.0.0.1:8000/v1"}, "reward.url must be"),
        (JUDGE, {"url": "http://me:key@host/v1"}, "a key belongs in reward.api_key_env"),
        (JUDGE, {"workers": 1}, "use reward.concurrency"),
        (JUDGE, {"concurrency": 0}, "must be at least 1"),
        (JUDGE, {"range": (1.0, 0.0)}, "must hold a number and a higher one"),
        (JUDGE, {"template": "{response} {grade}"}, "has no value for {grade}"),
        (JUDGE, {"template": "{prompt}"}, "must contain {response}"),
        (JUDGE, {"pattern": "x", "json_key": "y"}, "exclude each other"),
        (JUDGE, {"pattern": "("}, "is not a regular expression"),
        (JUDGE, {"parser": "mine"}, "must read 'module:function'"),
        (JUDGE, {"api_key_env": "sk-4711"}, "never the key itself"),
        (JUDGE, {"params": {"temperature": 1.5, "top_p": 0.9}}, "must not hold temperature, which other settings"),
        (TOOLS, {"functions": ()}, "functions names no tool"),
        (TOOLS, {"functions": ("add",)}, "'add' must read 'module:function'"),
        (TOOLS, {"functions": ("a:f", "b:f")}, "two tools are called 'f'"),
        (TOOLS, {"max_turns": 0}, "max_turns must be at least 1, got 0"),
        (TOOLS, {"turn_timeout_s": 0.0}, "turn_timeout_s must be above 0"),
        (ClassConfig, {"factory": "games"}, "factory must read 'module:Class'"),
        (AgentConfig, {}, "set command or function, and not both"),
        (AgentConfig, {"command": ("a",), "function": "a:b"}, "set command or function, and not both"),
        (AgentConfig, {"function": "a"}, "'a' must read 'module:function'"),
        (AgentConfig, {"function": "a:b", "parser": "xml"}, "'xml' must read 'module:function'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(make: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make(**fields)
    assert re.search(r"\breward\.|\benvironment\b", str(caught.value))
