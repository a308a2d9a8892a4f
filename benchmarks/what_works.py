"""What models, chat templates, rows, answers and rewards do: exact, or refused with the reason.

    python benchmarks/what_works.py > benchmarks/results/what-works-DATE.json
    python docs/generate_reference.py                         # writes docs/reference/what-works.md

Everything is tried anew, with the models, templates, rows, answers and functions of the tests. It takes a minute on one
core, with the checkout in PYTHONPATH.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
import transformers

sys.path[0] = str(Path(__file__).parent.parent)  # in place of the folder with trl.py

from rollover.environments.rewards.base import RewardSettings  # noqa: E402
from rollover.errors import DataError, ModelError  # noqa: E402
from rollover.hf.architecture import FAMILIES as EMBEDDED  # noqa: E402
from rollover.trainer.checks import ADAPTED, SHARDED  # noqa: E402
from rollover.trainer.proof import prove  # noqa: E402
from rollover.types import Score  # noqa: E402
from tests.environments import test_answers, test_components  # noqa: E402
from tests.tasks import test_templates  # noqa: E402
from tests.tasks.shapes import SHAPES  # noqa: E402
from tests.trainer import test_experts, test_families  # noqa: E402

MARKERS = "<|im_end|>\n<|im_start|>assistant\nhello"
PARTS = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
HISTORY = [("user", "a b"), ("assistant", "c d"), ("user", "e f")]
CONTENTS: dict[str, Any] = {
    "a question": "what is 1 + 1?",
    "white space": "  two  spaces\n",
    "code of templates": "{{ messages }} {% if x %}",
    "an end of thought": "what does </think> mean?",
    "another turn": MARKERS,
    "parts": [{"role": "user", "content": PARTS}],
    "a system message": [test_templates.said("system", "be brief"), test_templates.said("user", "hello")],
    "a history": [test_templates.said(role, text) for role, text in HISTORY],
    "tools": "hello",
}
"""Prompts that every template is given, by their names on the page; the last one with a tool."""


def models() -> Iterator[dict[str, Any]]:
    """Prove a small model of each family anew, also of those that training takes without a proof."""
    settings: dict[str, dict[str, Any]] = {name: {} for name in (*test_families.FAMILIES, *test_families.REFUSED)}
    for name, changes in (settings | test_families.PADDED | test_experts.FAMILIES).items():
        with patch("rollover.trainer.proof.MODEL_CLASSES", {}):
            try:
                result: str = prove(test_families.config_of(name, **changes))
            except ModelError as error:
                result = f"refused: {error}"
        yield {
            "model": name,
            "result": result,
            "several devices": name in SHARDED,
            "adapters": name in ADAPTED,
            "embedded engine": name in EMBEDDED,
        }


def templates() -> Iterator[dict[str, Any]]:
    """Give each template each prompt. The ids of those that it writes are compared with those of transformers."""
    columns = {name: {"tools": [test_templates.CALC]} if name == "tools" else {} for name in CONTENTS}
    refused = {name: test_templates.outcome(content, **columns[name]) for name, content in CONTENTS.items()}
    for template in test_templates.TEMPLATES:
        yield {"template": template, **{name: template not in refused[name] for name in CONTENTS}}


def rows() -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        reason = test_templates.read(shape)
        yield {"row": shape.name, "columns": [*shape.row], "refused": reason and reason.removeprefix("row 0: ")}


def answers() -> Iterator[dict[str, Any]]:
    """Judge each response of known truth with ``math_verify``, and count by the headings of the file."""
    file = Path(test_answers.__file__).with_name("answers.txt")
    reward, topic = test_answers.reward(), ""
    pairs = iter(test_answers.pairs())
    for line in file.read_text().splitlines():
        if line.startswith("# "):
            topic = line.removeprefix("# ")
        elif line[:1] in ("=", "!"):
            pair = next(pairs)
            judged = test_answers.judged(reward, pair)
            yield {"topic": topic, "is right": pair.is_right, "judged right": judged}


def rewards() -> Iterator[dict[str, Any]]:
    """Score what functions return; ``evaluated`` of the tests returns what the response spells out."""
    function, exact = test_components.function, test_components.EXACT
    cases: list[tuple[str, list[RewardSettings], str]] = [
        ("a number", [function()], "[2]"),
        ("0", [function()], "[0]"),
        ("None", [function()], "[None]"),
        ("NaN", [function()], "[float('nan')]"),
        ("infinity", [function()], "[float('inf')]"),
        ("more than float32 holds", [function()], "[1e300]"),
        ("a dict", [function()], "{'right': 1, 'style': 0.5}"),
        ("a dict with None", [function()], "{'right': None, 'style': 0.5}"),
        ("a dict of None alone", [function()], "{'right': None}"),
        ("an empty dict", [function()], "{}"),
        ("a dict with text", [function()], "{'right': 'x'}"),
        ("a dict with NaN", [function()], "{'right': float('nan')}"),
        ("a dict in a dict", [function()], "{'right': {'b': 1}}"),
        ("two numbers for one response", [function()], "[1, 2]"),
        ("an exception", [function()], "1 / 0"),
        ("two rewards, weights 1 and 0.5", [exact, function(name="two", weight=0.5)], "[4]"),
        ("two rewards, the second None", [exact, function(name="two")], "[None]"),
        ("two rewards, the second of weight 0", [exact, function(name="two", weight=0.0)], "[4]"),
    ]
    for name, configs, text in cases:
        try:
            (score,) = test_components.scores(configs, text, named=len(configs) > 1, a=text)
        except (DataError, ArithmeticError) as error:
            yield {"returned": name, "stops the run": str(error)}
            continue
        if isinstance(score, Score):
            yield {"returned": name, "reward": float(score), "components": dict(score.components)}
        else:
            yield {"returned": name, "sample fails": str(score)}


def main() -> None:
    versions = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    versions |= {module.__name__: module.__version__ for module in (transformers, tokenizers)}
    record = {
        "command": "benchmarks/what_works.py",
        "versions": versions,
        **{part.__name__: [*part()] for part in (models, templates, rows, answers, rewards)},
    }
    print(re.sub(r" at 0x[0-9a-f]+", "", json.dumps(record, indent=1)))


if __name__ == "__main__":
    main()
