"""A reward is one file and one row: the config, the processes that score and the documentation then know it."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import PackageCopy

REWARD = '''
"""``kind = "brief"``: 1 for a response of few words, else 0."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BriefConfig(RewardSettings):
    """Scores 1 for a response of few words, else 0."""

    kind: Literal["brief"] = "brief"
    """``"brief"`` chooses this reward."""
    most_words: int = 5
    """Words that a response of reward 1 may have."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        if self.most_words < 1:
            raise ValueError(f"reward.most_words must be at least 1, got {self.most_words}")

    def build(self, spec: RewardSpec) -> BriefReward:
        return BriefReward(self.most_words)


class BriefReward:
    def __init__(self, most_words: int) -> None:
        self._most_words = most_words

    async def score(self, sample: RewardSample) -> float:
        with open("scored_by", "a") as file:
            print(os.getpid(), file=file)
        return float(len(sample.completion.split()) <= self._most_words)
'''

USE = """
import asyncio, os
from pathlib import Path
import rollover
from rollover.environments.scorer import RewardScorer
from rollover.errors import ConfigError
from rollover.settings import toml
from rollover.settings.schema import build
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import train_source
from tests.environments.test_scorer import trajectory
from tests.environments.words import char_tokenizer

assert Path(rollover.__file__).is_relative_to(os.getcwd())
SOURCE = "[[train]]\\nkind = 'reasoning_gym'\\nname = 'chain_sum'\\n"

def tasks(reward):
    return build(TasksConfig, toml.parse(SOURCE + f"reward = {{ {reward} }}", "run.toml"))

for wrong in ("kind = 'brief', most_word = 3", "kind = 'exact', most_words = 3", "kind = 'brief', most_words = 0", "kind = 'bref'"):
    try:
        tasks(wrong)
    except ConfigError as error:
        print(error)

async def main():
    source = train_source(tasks("kind = 'brief', most_words = 2, workers = 1"), char_tokenizer(), seed=0)
    scorer = RewardScorer(source.reward_specs, char_tokenizer())
    for text in ("two words", "these are three"):
        print(await scorer.score(trajectory(source.prompt(0), text)))
    await scorer.close()
    assert str(os.getpid()) not in Path("scored_by").read_text().split()

asyncio.run(main())
"""


def test_a_reward_is_one_file_and_one_row(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)
    package.add_kind("rollover/environments/rewards/brief.py", REWARD, name="BriefConfig", last="FunctionConfig")
    assert package.run(USE).splitlines() == [
        "run.toml:4: train.0.reward.most_word: unknown key; did you mean 'most_words'?",
        "run.toml:4: train.0.reward.most_words: unknown key of kind 'exact'; it belongs to kind 'brief'",
        "run.toml:4: train.0.reward.most_words must be at least 1, got 0",
        "run.toml:4: train.0.reward.kind: 'bref' is not allowed; did you mean 'brief'?",
        "1.0",
        "0.0",
    ]
    page = package.configuration_page()
    assert '## `[tasks.train.reward]` of kind `"brief"`\n\nScores 1 for a response of few words, else 0.\n' in page
    assert "- **`most_words`** (whole number; default `5`). Words that a response of reward 1 may have.\n" in page
