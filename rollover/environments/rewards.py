"""From a response to a number, behind one interface: ``Reward.score(sample)``.

A reward is rebuilt from its ``RewardSpec`` (plain JSON) wherever it runs: on the event loop or in a process
of its own. What it returns is a finite number; anything else is a ``RewardError`` that names it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rollover.environments.columns import REPLY, read_messages, read_reference
from rollover.environments.config import Extraction, RewardConfig
from rollover.environments.function import accepted_names, load_function
from rollover.environments.reasoning_gym import GymDataset, thaw
from rollover.environments.returns import single_reward, usable_reward
from rollover.errors import DataError, RewardError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """All that is needed to score the samples of one source."""

    source: str
    config: RewardConfig
    gym_dataset: str | None = None
    gym_config: Mapping[str, Any] = field(default_factory=dict)
    prompt_column: str | None = None
    answer_column: str | None = None
    columns: tuple[str, ...] = ()
    """Columns that travel with the prompts, for the check of a function's signature."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardSpec:
        config = RewardConfig(**value["config"])
        return cls(**{**value, "config": config, "columns": tuple(value["columns"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSample:
    """One finished response, as rewards see it."""

    prompt: str
    """As the model saw it."""
    columns: Mapping[str, Any]
    completion: str
    """Decoded, without special tokens."""
    completion_ids: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "columns": dict(self.columns)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RewardSample:
        return cls(**{**value, "completion_ids": tuple(value["completion_ids"])})


class Reward(Protocol):
    async def score(self, sample: RewardSample) -> float: ...


def build_reward(spec: RewardSpec) -> Reward:
    """Raises ``DataError`` when the reward cannot be used: missing library, function or wrong signature."""
    match spec.config.kind:
        case "verifier":
            return VerifierReward(spec)
        case "exact":
            return ExactReward(spec)
        case "math_verify":
            return MathReward(spec)
        case "function":
            return FunctionReward(spec)


def extract_answer(text: str, how: Extraction, pattern: str | None = None) -> str | None:
    """The answer within a response, stripped; ``None`` when there is none. The last occurrence counts."""
    match how:
        case "whole":
            return text.strip()
        case "hashes":
            _, mark, rest = text.rpartition("####")
            return rest.strip().partition("\n")[0].strip() if mark else None
        case "last_line":
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else None
        case "tag":
            found = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
            return found[-1].strip() if found else None
        case "pattern":
            assert pattern is not None
            matches = list(re.finditer(pattern, text))
            if not matches:
                return None
            last = matches[-1]
            return ((last.group(1) if last.re.groups else last.group(0)) or "").strip()


class VerifierReward:
    """reasoning-gym's ``score_answer`` on the entry that travelled with the prompt."""

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.gym_dataset is not None
        self._dataset = GymDataset(spec.gym_dataset, spec.gym_config)
        self._config = spec.config

    async def score(self, sample: RewardSample) -> float:
        answer = extract_answer(sample.completion, self._config.extraction, self._config.answer_pattern)
        return usable_reward(self._dataset.score(answer, thaw(sample.columns)), f"verifier of {self._dataset.name!r}")


class ExactReward:
    """1 when the answer equals the reference, or one of a list of references, up to white space; else 0."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec

    async def score(self, sample: RewardSample) -> float:
        config = self._spec.config
        answer = extract_answer(sample.completion, config.extraction, config.answer_pattern)
        if answer is None:
            return 0.0
        return float(any(_squeezed(answer) == _squeezed(text) for text in _references(self._spec, sample)))


class MathReward:
    """1 when math-verify finds the response's final expression equal to the reference; else 0.

    math-verify's own time limits use signals and are switched off: the process has a deadline. A response that
    cannot be judged by then is not right, and neither is one on which the library fails.
    """

    def __init__(self, spec: RewardSpec) -> None:
        try:
            import math_verify
        except ImportError:
            raise DataError("reward kind 'math_verify' needs the package: pip install math-verify") from None
        import logging

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
        self._library = math_verify
        self._spec = spec
        self._parse("$1$")  # loads the grammar, which must not count against the deadline of the first response

    async def score(self, sample: RewardSample) -> float:
        references = [self._reference(text) for text in _references(self._spec, sample)]
        try:
            answer = self._parse(sample.completion)
            return float(any(self._library.verify(r, answer, timeout_seconds=None) for r in references))
        except Exception:  # a number of more digits than Python reads, say
            return 0.0

    def _reference(self, text: str) -> list[Any]:
        reference = self._parse(_as_latex(text))
        if not reference:
            raise RewardError(f"the reference answer {text[:80]!r} is no mathematics; use reward kind 'exact'")
        return reference

    def _parse(self, text: str) -> list[Any]:
        parsed: list[Any] = self._library.parse(text, parsing_timeout=None)
        return parsed


class FunctionReward:
    """The user's function in TRL's form: ``f(prompts, completions, completion_ids=..., **columns)``.

    It is called once per response, with lists of one element, because a response is scored when it is
    finished and not when its siblings are. Prompts given as messages arrive as messages, with the completion
    as ``[{"role": "assistant", "content": ...}]``. Where their last turn is the reference it is not among them but
    in ``answer``. ``None`` ("does not apply") fails the sample: the function is
    the only reward of its source.
    """

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.config.function is not None
        self._spec = spec
        self._name = spec.config.function
        self._function = load_function(self._name)
        self._wanted = accepted_names(self._name, self._function, spec.columns, spec.config.params)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    async def score(self, sample: RewardSample) -> float:
        """Raises ``MisshapenReward`` and ``RefusedReward`` for what cannot be used, and what the function raises."""
        prompt, completion = self._texts(sample)
        arguments: dict[str, Any] = {}
        if self._spec.answer_column == self._spec.prompt_column is not None:
            arguments[REPLY] = [_reference(self._spec, sample)]
        arguments |= {k: [v] for k, v in sample.columns.items() if k != self._spec.prompt_column}
        arguments |= self._spec.config.params
        arguments |= {
            "prompts": [prompt],
            "completions": [completion],
            "completion_ids": [list(sample.completion_ids)],
        }
        if self._wanted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._wanted}
        result = self._function(**arguments)
        if inspect.isawaitable(result):
            result = await result
        return single_reward(result, f"reward function {self._name}")

    def _texts(self, sample: RewardSample) -> tuple[Any, Any]:
        messages = read_messages(sample.columns, self._spec.prompt_column)
        if messages is not None:
            return messages, [{"role": "assistant", "content": sample.completion}]
        return sample.prompt, sample.completion


def _reference(spec: RewardSpec, sample: RewardSample) -> Any:
    assert spec.answer_column is not None
    return read_reference(sample.columns, answer=spec.answer_column, prompt=spec.prompt_column)


def _references(spec: RewardSpec, sample: RewardSample) -> list[str]:
    value = _reference(spec, sample)
    texts: list[str] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, (str, int, float)):
            raise RewardError(f"the reference answer in {spec.answer_column!r} is a {type(one).__name__}, not text")
        text = extract_answer(str(one), spec.config.reference_extract)
        if text is None:
            raise RewardError(f"the reference answer {str(one)[-60:]!r} has no '####' (reward.reference_extract)")
        texts.append(text)
    return texts


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _as_latex(text: str) -> str:
    """math-verify reads LaTeX between its delimiters only; a bare reference gets them."""
    delimited = any(mark in text for mark in ("$", "\\(", "\\[", "\\boxed"))
    return text if delimited else f"${text}$"
