"""What reward functions give back, in the types of Python, numpy and torch."""

from __future__ import annotations

import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rollover.environments.reward_value import MisshapenReward, RefusedReward, read_rewards, usable_reward
from rollover.environments.scoring import failed
from rollover.errors import RewardError

HALVES = [
    [0.5],
    (0.5,),
    [Fraction(1, 2)],
    [Decimal("0.5")],
    [np.float32(0.5)],
    [np.array(0.5)],
    [np.array([0.5])],
    np.array([0.5]),
    np.array([0.5], dtype=np.float16),
    [torch.tensor(0.5)],
    [torch.tensor([0.5])],
    torch.tensor([0.5]),
    torch.tensor([0.5], dtype=torch.bfloat16),
    torch.tensor([0.5], requires_grad=True),
]
ONES = [[True], [1], [np.bool_(True)], [np.int64(1)], np.array([1]), np.array([True]), torch.tensor([True])]


@pytest.mark.parametrize(
    ("returned", "number"), [*((one, 0.5) for one in HALVES), *((one, 1.0) for one in ONES)], ids=repr
)
def test_a_list_array_or_tensor_of_one_number_is_that_number(returned: Any, number: float) -> None:
    [reward] = read_rewards(returned, "f")
    assert (reward, type(reward)) == (number, float)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (0.5, "got float 0.5"),
        (np.float32(0.5), "got float32 np.float32(0.5)"),
        (torch.tensor(0.5), "got Tensor tensor(0.5000)"),
        (None, "got NoneType None"),
        ("0.5", "got str '0.5'"),
        ([], "got list []"),
        ([0.5, 0.5], "got list [0.5, 0.5]"),
        (np.array([[0.5]]), "got a list of list [0.5]"),
        (np.array([0.5, 0.5]), "got ndarray array([0.5, 0.5])"),
        (["0.5"], "got a list of str '0.5'"),
        ([[0.5]], "got a list of list [0.5]"),
        ([1j], "got a list of complex 1j"),
        ([torch.zeros(2)], "got a list of Tensor tensor([0., 0.])"),
        ((x for x in [0.5]), "got generator <generator"),
        (["x" * 10**6], "got a list of str 'xxx"),
    ],
)
def test_a_return_of_another_form_is_refused_with_function_and_value(returned: Any, shown: str) -> None:
    with pytest.raises(MisshapenReward) as caught:
        read_rewards(returned, "reward function m:f")
    assert str(caught.value).startswith("reward function m:f must return a list of 1 number, " + shown)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "f returned nan, which is not finite"),
        (-math.inf, "f returned -inf, which is not finite"),
        (np.float32("nan"), "f returned nan"),
        (torch.tensor(math.inf), "f returned inf"),
        (1e308, "f returned 1e+308, which the trainer's float32 cannot square and sum; stay within 1e+15"),
        (-1e19, "f returned -1e+19, which the trainer's float32"),
        (10**400, "f returned int 1000"),
        (10**5000, "f returned int, which"),
        (Decimal("1e400"), "f returned inf"),
    ],
    ids=lambda value: str(type(value)),
)
def test_a_number_that_cannot_be_trained_on_is_refused_with_its_value(value: Any, message: str) -> None:
    with pytest.raises(RefusedReward) as caught:
        read_rewards([value], "f")
    assert message in str(caught.value)
    assert not isinstance(caught.value, MisshapenReward)
    assert isinstance(caught.value, RewardError)


def test_float32_sums_the_squares_of_a_million_largest_rewards() -> None:
    largest = usable_reward(1e15, "f")
    assert torch.isfinite(torch.full((10**6,), largest, dtype=torch.float32).square().sum())


def test_neither_tasks_nor_reading_a_return_import_the_large_libraries() -> None:
    code = (
        "import sys, rollover.tasks; from rollover.environments.reward_value import read_rewards; read_rewards([1], 'f');"
        "large = ('torch', 'transformers', 'reasoning_gym', 'datasets', 'pyarrow', 'math_verify', 'numpy');"
        "print([m for m in large if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_message_of_the_users_code_moves_no_cursor() -> None:
    assert failed(RuntimeError("BT \x1b]0;pwn\x07 \u202ex")).reason == r"RuntimeError: BT \x1b]0;pwn\x07 \u202ex"
