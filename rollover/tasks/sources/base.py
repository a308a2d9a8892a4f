"""Defines what all kinds of task source share: their settings, and the questions that they answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rollover.environments.columns import has_value, parsed, read_column, read_conversation
from rollover.environments.episodes import EnvironmentConfig
from rollover.environments.rewards import RewardConfig, VerifierConfig
from rollover.environments.rewards.base import RewardSpec
from rollover.environments.rewards.extraction import answer_text
from rollover.errors import DataError, RewardError
from rollover.settings.changes import Changeable
from rollover.settings.shape import ByKind
from rollover.tasks.columns import ALPACA, ANSWER_COLUMNS, ColumnMap, ColumnSettings, NoAnswer, find_column
from rollover.tasks.fingerprint import DataFile, Fingerprint
from rollover.tasks.messages import FACTS, is_text
from rollover.tasks.rows import DatasetRows
from rollover.types import Prompt

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings(ABC):
    """Holds the settings that all kinds of task source share. Each kind adds its own, and ``open``."""

    kind: str
    name: str
    """Name of the source in prompt ids and metrics."""
    limit: int | None = None
    """Number of rows to use, from the first one. Unset: all; a reasoning-gym source then never repeats an item."""
    weight: float = 1.0
    """Share in the training mixture, relative to the other sources; ignored in evaluation."""
    reward: Annotated[RewardConfig, ByKind()] = field(default_factory=VerifierConfig)
    """The reward that scores responses."""
    rewards: tuple[Annotated[RewardConfig, ByKind()], ...] = ()
    """Several rewards in place of ``reward``: the reward of a response is their weighted sum. Each has a ``name``, a
    ``weight`` and a curve of its own."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this source, in addition to ``tasks.chat_template_kwargs``."""
    environment: Annotated[EnvironmentConfig, ByKind()] | None = None
    """The environment that answers the model's turns, with the results of tools, say. Each response is then an episode
    of several turns. Unset: each response is a single turn."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"source name must be letters, digits, '_', '-' and '.', got {self.name!r}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"source {self.name!r}: limit must be at least 1, got {self.limit}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"source {self.name!r}: weight must be above 0 and finite, got {self.weight}")
        if self.rewards and self.reward != VerifierConfig():
            raise ValueError(f"source {self.name!r}: set reward or rewards, not both")
        if self.rewards and not any(reward.weight for reward in self.rewards):
            raise ValueError(f"source {self.name!r}: all weights of its rewards are 0: every response would score 0")
        if self.reward.name or self.reward.weight != 1:
            raise ValueError(f"source {self.name!r}: a name and a weight are for one of several rewards; use rewards")
        if self.environment is None and any(reward.kind == "environment" for reward in self.all_rewards):
            raise ValueError(f"source {self.name!r}: reward kind 'environment' needs an environment; set one")
        names = [reward.component for reward in self.rewards]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"source {self.name!r}: two rewards are called {double[0]!r}; give each its own name")

    @property
    def all_rewards(self) -> tuple[RewardConfig, ...]:
        return self.rewards or (self.reward,)

    @property
    def lacking_reward(self) -> str:
        """Return why responses cannot be scored, as those to the prompts of a warm-up never are; empty if they can."""
        if self._verifier() or not any(reward.needs_verifier for reward in self.all_rewards):
            return ""
        is_unset = self.all_rewards == (VerifierConfig(),)
        found = "no reward is set" if is_unset else "reward kind 'verifier' belongs to reasoning_gym"
        mend = "set reward.kind to 'exact', 'math_verify', 'judge' or 'function'"
        return f"source {self.name!r}: {found}; {mend} (sft.sources need none)"

    def look_up(self) -> bool:
        """Return whether opening the dataset needs a download. Raises ``DataError`` when it could not be downloaded."""
        return False

    @abstractmethod
    def open(self, seed: int) -> DatasetRows:
        """Open the dataset; ``seed`` determines the content of a generated one. Raises ``DataError`` when it is
        missing, broken or empty."""

    @abstractmethod
    def column_settings(self) -> ColumnSettings:
        """Return which columns are the prompt and the answer, and which travel. Raises ``DataError`` when the reward
        function cannot be loaded."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint | None:
        """Take the fingerprint of the dataset as it is now; ``None`` if the config alone determines its content. Raises
        ``DataError`` when it cannot be read."""

    @abstractmethod
    def solution(self, prompt: Prompt, prompt_column: str | None) -> str:
        """Return the response that a prompt of this source should have. Raises ``DataError`` when the task has no
        worked solutions, or the row neither reply nor answer."""

    def reward_specs(self, columns: ColumnMap, name: str) -> tuple[RewardSpec, ...]:
        """Return how responses to the prompts called ``name`` are scored."""
        return tuple(
            RewardSpec(
                source=name,
                config=reward,
                component=reward.component if self.rewards else "",
                prompt_column=columns.prompt,
                prompt_parts=columns.parts,
                answer_column=columns.answer,
                columns=columns.travelling,
                **self._verifier(),
            )
            for reward in self.all_rewards
        )

    def references(self, columns: ColumnMap, row: Mapping[str, Any], where: str) -> list[str]:
        """Return the right answers of a row, as its rewards read them, or the reference answer that they do not read.
        Raises ``NoAnswer`` when there is none that a response can match."""
        answer = columns.reference(row, where)
        try:
            found = [t for s in self.reward_specs(columns, self.name) for t in s.config.references(s, row)]
        except RewardError as error:
            raise NoAnswer(f"{where}: {error}") from None
        return list(dict.fromkeys(found)) or ([] if answer is None else [answer])

    def _verifier(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSettings(SourceSettings):
    """Holds the settings of sources whose rows come from a dataset that the user names."""

    path: Changeable[str]
    """Path of the file (jsonl, parquet), or hub id or folder (hf)."""
    prompt_column: str | tuple[str, ...] | None = None
    """Column of the prompt, text or messages; dots address fields of structures. Several columns of text are joined by
    an empty line. Unset: the one column among ``prompt, question, problem, query, instruction, input, messages,
    conversations``. An assistant's turn that ends the messages is not part of the prompt: supervised
    fine-tuning teaches it, and it is the reference answer if there is no answer column."""
    answer_column: str | None = None
    """Column of the reference answer. Unset: the one among ``answer, label, ground_truth, solution,
    reward_model.ground_truth, reward_spec.ground_truth``, or else the assistant's turn that ends the messages, which
    reward functions get as ``answer``. The name of the prompt column selects that turn even if there are others."""
    keep_columns: tuple[str, ...] | None = None
    """Columns that travel with the prompt (to the reward function and into the journal). Unset: all."""

    def __post_init__(self) -> None:
        SourceSettings.__post_init__(self)
        if not self.path:
            raise ValueError(f"source {self.name!r}: path is empty, and kind {self.kind!r} needs one")
        if self.prompt_column in ((), ""):
            raise ValueError(f"source {self.name!r}: prompt_column is empty; name a column, or leave it out")

    def column_settings(self) -> ColumnSettings:
        return ColumnSettings(
            source=self.name,
            prompt=self.prompt_column,
            answer=self.answer_column,
            keep=self.keep_columns,
            keeps_prompt=any(reward.reads_question for reward in self.all_rewards)
            or (self.environment is not None and self.environment.has_state),
            needs_answer=any(reward.needs_answer for reward in self.all_rewards),
            needed=tuple(dict.fromkeys(name for reward in self.all_rewards for name in reward.needed_columns())),
        )

    def solution(self, prompt: Prompt, prompt_column: str | None) -> str:
        """Return the assistant's turn that ends the messages if there is one, and the answer column otherwise."""
        found = read_conversation(prompt.columns, prompt_column)
        if prompt_column is None or found is None or not found.reply:
            return self._answer(prompt)
        last = parsed(read_column(prompt.columns, prompt_column))[-1]
        for key in last:
            if key not in ("content", *FACTS) and (
                is_text(last, key) or (last[key] and isinstance(last[key], (list, Mapping)))
            ):
                raise DataError(
                    f"prompt {prompt.prompt_id}: sft would not teach {key!r} of the last message: move it into the"
                    " content, or delete it"
                )
        return found.reply

    def _answer(self, prompt: Prompt) -> str:
        where = f"prompt {prompt.prompt_id}"
        names = (*ANSWER_COLUMNS, ALPACA[2]) if ALPACA[0] in prompt.columns else ANSWER_COLUMNS
        key = f"source {self.name!r}: answer_column"
        column = self.answer_column or find_column(prompt.columns, names, where=where, key=key)
        if column is None or not has_value(prompt.columns, column):
            raise NoAnswer(
                f"{where}: no column to learn from; set answer_column of source {self.name!r}"
                f" (columns: {', '.join(prompt.columns)})"
            )
        if not isinstance(text := read_column(prompt.columns, column), str | int | float):
            raise NoAnswer(f"{where}: column {column!r} is {type(text).__name__}, and only text can be taught")
        return answer_text(text)

    def _not_empty(self, rows: DatasetRows) -> DatasetRows:
        if rows.num_rows == 0:
            raise DataError(f"source {self.name!r}: {self.path} contains no rows")
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings(DatasetSettings):
    """Holds the settings of sources that read one file."""

    def file(self) -> Path:
        """Find the file. Raises ``DataError`` when there is none."""
        path = Path(self.path)
        if not path.is_file():
            raise DataError(f"source {self.name!r}: no file {path} (relative to {Path.cwd()}); correct its path")
        return path

    def fingerprint(self) -> Fingerprint:
        return DataFile(self.file()).fingerprint()
