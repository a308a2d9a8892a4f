"""Writes the answers of environments out in tokens, and finds the environments of a run's sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollover.environments.episodes.actor import EpisodeActor, SourceEnvironment
from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.messages import row_arguments
from rollover.tasks.prompts import PromptEncoder
from rollover.tasks.sources.base import SourceSettings


def encoder_of(source: SourceSettings, config: TasksConfig, tokenizer: Any) -> PromptEncoder:
    """Return the encoder of a source's prompts, which offer its tools."""
    encoder = PromptEncoder(tokenizer, config, source.chat_template_kwargs)
    if source.environment is None or not encoder.has_template or not (tools := source.environment.schemas()):
        return encoder
    return PromptEncoder(tokenizer, config, source.chat_template_kwargs, tools)


class AnswerWriter:
    """Writes the answers of a source's environment with the chat template of its prompts.

    Example: behind a turn that ended with ``<|im_end|>``, ``write([{"role": "tool", "content": "46"}], last_id, {})``
    returns the ids of ``"\\n<|im_start|>user\\n<tool_response>\\n46\\n</tool_response><|im_end|>\\n..."``.
    """

    def __init__(self, encoder: PromptEncoder, source: str) -> None:
        self._encoder = encoder
        self._where = f"environment of source {source!r}"

    def write(self, messages: Sequence[Mapping[str, Any]], last_id: int, columns: Mapping[str, Any]) -> tuple[int, ...]:
        ids = self._encoder.answer(messages, row_arguments(columns, self._where), where=self._where)
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
    writer = AnswerWriter(encoder, config.name)
    try:
        writer.write([{"role": environment.role, "content": "Qt0sZ"}], -1, {})
    except DataError as error:
        mend = '; set environment.tool_role = "user"' if environment.role == "tool" else ""
        raise DataError(f"{error}{mend}") from None


def open_environments(config: TasksConfig, tokenizer: Any, *, limit: Callable[[str], int], seed: int) -> EpisodeActor:
    """Open the environments of a run. ``limit`` returns the largest number of tokens of a response to the prompts of a
    source, whose name is ``eval/...`` for evaluation."""
    found = {}
    for prefix, sources in (("", config.train), ("eval/", config.eval)):
        for source in sources:
            if source.environment is not None:
                encoder = encoder_of(source, config, tokenizer)
                check_environment(source, encoder)
                writer = AnswerWriter(encoder, source.name)
                name = f"{prefix}{source.name}"
                found[name] = SourceEnvironment(source.environment, writer, limit(name))
    return EpisodeActor(found, tokenizer, seed=seed)
