"""Writes the answers of environments out in tokens, and finds the environments of a run's sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollover.environments.episodes import AgentConfig
from rollover.environments.episodes.actor import EpisodeActor, environment_seed
from rollover.environments.episodes.agents import SourceEnvironment
from rollover.environments.episodes.base import Action, EnvironmentSettings, Messages, awaited, step
from rollover.errors import DataError
from rollover.hf.tokenizer import FastTokenizer
from rollover.tasks.columns import ColumnMap
from rollover.tasks.config import TasksConfig
from rollover.tasks.messages import Question, messages_of, row_arguments
from rollover.tasks.prompt_source import Example, reply_ids
from rollover.tasks.prompts import PromptEncoder, RowEncoder
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt


def encoder_of(source: SourceSettings, config: TasksConfig, tokenizer: FastTokenizer) -> PromptEncoder:
    """Return the encoder of a source's prompts, which offer its tools."""
    environment = source.environment
    kind = RowEncoder if environment is not None and environment.writes_prompts else PromptEncoder
    encoder = kind(tokenizer, config, source.chat_template_kwargs)
    if environment is None or not encoder.has_template or not (tools := environment.schemas()):
        return encoder
    return kind(tokenizer, config, source.chat_template_kwargs, tools)


class AnswerWriter:
    """Writes the answers of a source's environment with the chat template of its prompts.

    Example: after a turn that ended with ``<|im_end|>``, ``write([{"role": "tool", "content": "46"}], last_id, {})``
    returns the ids of ``"\\n<|im_start|>user\\n<tool_response>\\n46\\n</tool_response><|im_end|>\\n..."``.
    """

    def __init__(self, encoder: PromptEncoder, source: SourceSettings) -> None:
        self._encoder = encoder
        self._source = source
        self._where = f"environment of source {source.name!r}"

    def open(self, messages: Messages, columns: Mapping[str, Any]) -> tuple[int, ...]:
        """Write a row's prompt out with messages after it. A text without a role is added to the last one."""
        question = ColumnMap(self._source.column_settings(), columns, self._where).question(columns, self._where)
        content: Any = question.content
        if not self._encoder.has_template:
            content += "".join(message["content"] for message in messages)
        elif any(message["role"] for message in messages):
            content = [{"role": "user", "content": content}] if isinstance(content, str) else content
            content = [*content, *messages_of(messages, "reset")]
        elif isinstance(content, str):
            content += messages[0]["content"]
        else:
            content = [*content[:-1], content[-1] | {"content": content[-1]["content"] + messages[0]["content"]}]
        assert isinstance(self._encoder, RowEncoder)
        return self._encoder.encode_whole(question._replace(content=content), where=self._where).token_ids

    def begin(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], columns: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Write a conversation out from its beginning. Without a template, the texts alone."""
        texts = "".join(message["content"] for message in messages)
        content = list(messages) if self._encoder.has_template else texts
        if not self._encoder.has_template and not texts.strip():
            raise DataError("messages: all are blank")
        question = Question(content, tuple(tools), row_arguments(columns, "messages"))
        return self._encoder.encode(question, where="messages").token_ids

    def write(
        self, messages: Sequence[Mapping[str, Any]], last_id: int, columns: Mapping[str, Any], tools: Sequence[Any] = ()
    ) -> tuple[int, ...]:
        arguments, read = row_arguments(columns, "messages"), messages_of(messages, "messages")
        ids = self._encoder.answer(read, arguments, tools=tools, where="messages")
        return ids[1:] if ids[:1] == (last_id,) and self._encoder.has_template else ids


def check_environment(config: SourceSettings, encoder: PromptEncoder | None) -> None:
    """Check the environment of a source, and that the chat template has a place for its answers.

    Raises:
        DataError: as a run would.
    """
    environment = config.environment
    if environment is None:
        return
    environment.check()
    if encoder is None:
        return
    writer = AnswerWriter(encoder, config)
    try:
        writer.write([{"role": environment.role, "content": "0"}], -1, {})
    except DataError as error:
        mend = '; set environment.tool_role = "user"' if environment.role == "tool" else ""
        raise DataError(f"environment of source {config.name!r}, {error}{mend}") from None


def begin_episode(config: EnvironmentSettings, writer: AnswerWriter, prompt: Prompt) -> tuple[Any, tuple[int, ...]]:
    """Begin an episode in this process, and return it with the ids of its prompt.

    Raises:
        DataError: ``reset`` fails.
    """
    with _named(prompt, "reset"):
        live = config.begin(prompt.columns, environment_seed(0, prompt))
        if not config.writes_prompts:
            return live, prompt.token_ids
        opening = step(live, Action(text=""), config.role)
    return live, writer.open(opening.messages, prompt.columns)


@contextmanager
def _named(prompt: Prompt, method: str) -> Iterator[None]:
    """Raise whatever the user's code raises as a ``DataError`` with its place."""
    try:
        yield
    except Exception as error:
        where = f"environment of prompt {prompt.prompt_id}, {method}"
        raise DataError(f"{where}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The lesson of an environment whose objects have ``demonstrate(row)``, which returns the turns of a good episode;
    the answers between them are the environment's own.
    """

    config: EnvironmentSettings
    writer: AnswerWriter
    tokenizer: FastTokenizer
    end: int
    """The token that ends a turn."""

    def example(self, prompt: Prompt, *, is_bare: bool) -> Example:
        live, prompt_ids = begin_episode(self.config, self.writer, prompt)
        with _named(prompt, "demonstrate"):
            turns = list(awaited(live.demonstrate(dict(prompt.columns))))
        response, is_own = tuple[int, ...](), tuple[bool, ...]()
        for text in turns[-1:] if is_bare else turns:
            turn = reply_ids(self.tokenizer, text, self.end)
            with _named(prompt, "step"):
                outcome = step(live, Action(text=text, token_ids=turn), self.config.role)
            answer = () if outcome.done else self.writer.write(outcome.messages, self.end, prompt.columns)
            response += (*turn, *answer)
            is_own += (True,) * len(turn) + (False,) * len(answer)
        awaited(live.close())
        return prompt_ids, response, is_own


def demonstrations(
    sources: Sequence[SourceSettings], config: TasksConfig, tokenizer: FastTokenizer, *, end: int
) -> dict[str, Demonstration]:
    """Return the lessons of the sources whose environments give any."""
    found = {}
    for source in sources:
        if source.environment is not None and source.environment.demonstrates:
            writer = AnswerWriter(encoder_of(source, config, tokenizer), source)
            found[source.name] = Demonstration(source.environment, writer, tokenizer, end)
    return found


def open_environments(
    config: TasksConfig, tokenizer: FastTokenizer, *, limit: Callable[[str], int], seed: int, eval_seed: int
) -> EpisodeActor:
    """Open the environments of a run. ``limit`` returns the largest number of tokens of a response to the prompts of a
    source, whose name is ``eval/...`` for evaluation."""
    found = {}
    for prefix, sources, own_seed in (("", config.train, seed), ("eval/", config.eval, eval_seed)):
        for source in sources:
            if source.environment is not None:
                encoder = encoder_of(source, config, tokenizer)
                if isinstance(source.environment, AgentConfig):  # nothing is added to what it writes
                    bare = replace(config, prompt_suffix="", system_prompt=None)
                    encoder = PromptEncoder(tokenizer, bare, source.chat_template_kwargs)
                check_environment(source, encoder)
                writer = AnswerWriter(encoder, source)
                name = f"{prefix}{source.name}"
                must_post = any(reward.kind == "environment" and reward.weight for reward in source.all_rewards)
                found[name] = SourceEnvironment(source.environment, writer, limit(name), must_post, own_seed)
    return EpisodeActor(found, tokenizer)
