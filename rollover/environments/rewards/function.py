"""``kind = "function"``: a function of the user, called in the form that TRL has established."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rollover.environments.columns import REPLY, read_conversation
from rollover.environments.reward_value import RewardValue, read_rewards
from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec
from rollover.environments.rewards.extraction import reference_answer
from rollover.environments.user_function import (
    ALWAYS_GIVEN,
    PATH,
    accepted_names,
    import_function,
    import_in_run,
    is_async,
    required_names,
)
from rollover.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionConfig(RewardSettings):
    """Scores with a function of your own.

    Example: ``function = "mine:length", params = {most = 100}`` calls ``length(prompts=["..."], completions=["..."],
    completion_ids=[[7, 9]], most=100)`` of ``mine.py``, which returns ``[0.5]``, say.
    """

    late_scores_zero: ClassVar[bool] = False

    kind: Literal["function"] = "function"
    """``"function"`` chooses this reward."""
    function: str
    """``"module:function"``, called as ``f(prompts, completions, completion_ids=..., **columns)`` with lists
    of one element each; returns a list, array or tensor of one number, at most 1e15. In place of a number it may return
    a dict of numbers, the components that the reward is the sum of, or ``None`` if the reward does not apply. NaN and
    infinity fail the sample, which then counts as waste. An ``async`` function is awaited in an event loop; any other
    runs outside every loop, in the main thread of its process, and may call ``asyncio.run``. As in TRL, ``prompts[0]``
    and ``completions[0]`` are texts where the prompt column holds text; where it holds messages, ``prompts[0]`` is a
    list of messages and ``completions[0]`` a list of messages, ``[{"role": "assistant", "content": ...}]``. Of an
    episode the text is the last turn, and the messages are all turns and the environment's answers, which
    ``transcripts[0]`` has in either case, with the ``reward`` of each answer."""
    params: dict[str, Any] = field(default_factory=dict)
    """Additional keyword arguments for ``function``. They take precedence over columns of the same name; the
    arguments that every function receives take precedence over both."""

    group: bool = False
    """If true, the function is called once for all responses of a group when the last one is finished, with lists of
    as many elements, and returns as many numbers: it can rank them, for example."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        if not PATH.fullmatch(self.function):
            raise ValueError(f"reward.function must read 'module:function', got {self.function!r}")
        if given := sorted({*ALWAYS_GIVEN} & self.params.keys()):
            raise ValueError(f"reward.params.{given[0]} cannot be set: every reward function receives it")

    @property
    def label(self) -> str:
        return self.function

    @property
    def component(self) -> str:
        return self.name or self.function.partition(":")[2]

    @property
    def compares_siblings(self) -> bool:
        return self.group

    def build(self, spec: RewardSpec) -> FunctionReward | GroupFunctionReward:
        return GroupFunctionReward(self, spec) if self.group else FunctionReward(self, spec)

    def needed_columns(self) -> tuple[str, ...]:
        """Return the arguments without a default, except the arguments that every function receives."""
        import_in_run(self.function)
        return required_names(self.function, given=self.params)

    def check(self, spec: RewardSpec) -> None:
        import_in_run(self.function)
        self.build(spec)


class FunctionReward:
    """Calls the user's function once per response, with lists of one element: a response is scored when it is finished,
    without waiting for its siblings.

    Prompts given as messages arrive as messages, with the completion as ``[{"role": "assistant", "content": ...}]``.
    If their last turn is the reference, it is not among them but in ``answer``.
    """

    def __init__(self, config: FunctionConfig, spec: RewardSpec) -> None:
        self._config = config
        self._spec = spec
        self._function = import_function(config.function)
        whose = f"source {spec.source!r}: reward function {config.function}"
        self._accepted = accepted_names(config.function, self._function, spec.columns, config.params, whose)
        if config.workers == 0 and not is_async(self._function):
            raise DataError(f"{whose} is not async and would block the run; set reward.workers to 1 or more")

    def score(self, sample: RewardSample) -> RewardValue | Awaitable[RewardValue]:
        """Call the function. Raises ``MisshapenReward`` and ``RefusedReward`` for values that cannot be used, and any
        error that the function raises."""

        async def awaited(values: Awaitable[list[RewardValue]]) -> RewardValue:
            return (await values)[0]

        values = self._call([sample])
        return values[0] if isinstance(values, list) else awaited(values)

    def _call(self, samples: Sequence[RewardSample]) -> list[RewardValue] | Awaitable[list[RewardValue]]:
        texts = [self._texts(sample) for sample in samples]
        arguments: dict[str, Any] = {}
        if self._spec.answer_column == self._spec.prompt_column is not None:
            arguments[REPLY] = [reference_answer(self._spec, sample.columns) for sample in samples]
        columns = [name for name in samples[0].columns if name != self._spec.prompt_column]
        arguments |= {name: [sample.columns[name] for sample in samples] for name in columns}
        arguments |= self._config.params
        arguments |= {
            "prompts": [prompt for prompt, _ in texts],
            "completions": [completion for _, completion in texts],
            "completion_ids": [list(sample.completion_ids) for sample in samples],
            "transcripts": [[dict(message) for message in sample.transcript] for sample in samples],
        }
        if self._accepted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        result = self._function(**arguments)
        whose = f"reward function {self._config.function}"

        async def awaited() -> list[RewardValue]:
            return read_rewards(await result, whose, len(samples))

        return awaited() if inspect.isawaitable(result) else read_rewards(result, whose, len(samples))

    def _texts(self, sample: RewardSample) -> tuple[Any, Any]:
        found = read_conversation(sample.columns, self._spec.prompt_column)
        if found is not None:
            return found.prompt, sample.messages
        return sample.prompt, sample.completion


class GroupFunctionReward(FunctionReward):
    """Calls the user's function once per group, with lists of one element per response."""

    def score_group(self, samples: Sequence[RewardSample]) -> list[RewardValue] | Awaitable[list[RewardValue]]:
        """Call the function. Raises as ``score`` does."""
        return self._call(samples)
