"""Turns the prompt of a row into token ids, once and for all.

``Prompt.text`` is exactly the string that was tokenised. A chat template writes its own special tokens, so
after it the tokenizer adds none; plain text gets those the tokenizer adds by itself (a leading BOS, say).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollover.environments.columns import is_messages
from rollover.errors import DataError
from rollover.hf.tokenizer import Tokenizer
from rollover.tasks.config import TasksConfig


class Encoded(NamedTuple):
    """A prompt as it was written out, and its token ids.

    Example: with Qwen3's tokenizer and no template, ``Encoded(text="1+8", token_ids=(16, 10, 23))``.
    """

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Writes prompts out and tokenises them. Raises ``DataError`` when a needed chat template is missing.

    Example: with a chat template, ``encode("1+1", where="row 0").text`` is ``"<user>1+1\\n<assistant>"``, say.
    """

    def __init__(self, tokenizer: Tokenizer, config: TasksConfig) -> None:
        has_template = bool(tokenizer.chat_template)
        if not has_template and config.chat_template == "on":
            raise DataError("tasks.chat_template = 'on', but the tokenizer has no chat template; set it to 'off'")
        if not has_template and config.system_prompt is not None:
            raise DataError("tasks.system_prompt needs a tokenizer with a chat template; omit it")
        self._tokenizer = tokenizer
        self._config = config
        self._templated = has_template and config.chat_template != "off"

    @property
    def max_tokens(self) -> int:
        return self._config.max_prompt_tokens

    def fits(self, token_ids: Sequence[int], where: str) -> bool:
        """Return whether a prompt is short enough. Raises ``DataError`` when it is not and ``long_prompts`` is
        ``"error"``."""
        fits = len(token_ids) <= self.max_tokens
        if not fits and self._config.long_prompts == "error":
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens, tasks.max_prompt_tokens is "
                f"{self.max_tokens}; set tasks.long_prompts = 'skip', or raise it before the run begins"
            )
        return fits

    def encode(self, content: Any, *, where: str) -> Encoded:
        """Tokenise one prompt: text, or messages ``[{"role", "content"}, ...]``."""
        return self.encode_many([(content, where)])[0]

    def encode_many(self, contents: Sequence[tuple[Any, str]]) -> list[Encoded]:
        """Tokenise (content, where) pairs in one call, which fast tokenizers do in parallel."""
        texts = [self._render(content, where) for content, where in contents]
        ids = self._tokenizer(texts, add_special_tokens=not self._templated)["input_ids"]
        for one, (_, where) in zip(ids, contents, strict=True):
            if not one:
                raise DataError(f"{where}: the prompt is empty")
        return [Encoded(text, tuple(one)) for text, one in zip(texts, ids, strict=True)]

    def _render(self, content: Any, where: str) -> str:
        if isinstance(content, str):
            if not self._templated:
                return content + self._config.prompt_suffix
            messages = [{"role": "user", "content": content}]
        elif is_messages(content):
            messages = [dict(message) for message in content]
            if not self._templated:
                raise DataError(
                    f"{where}: the prompt is a list of messages, which needs a chat template; use a "
                    "tokenizer that has one and chat_template = 'auto' or 'on', or a column of plain text"
                )
        else:
            raise DataError(
                f"{where}: a prompt is text or a list of messages with role and content, "
                f"got {type(content).__name__}: {str(content)[:60]!r}"
            )
        return self._apply_template(messages, where)

    def _apply_template(self, messages: list[dict[str, Any]], where: str) -> str:
        if self._config.prompt_suffix:
            last = messages[-1]
            if last["role"] != "user" or not isinstance(last["content"], str):
                raise DataError(f"{where}: tasks.prompt_suffix needs a last message of plain text by the user")
            last["content"] += self._config.prompt_suffix
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise jinja's errors, and their own on roles they refuse
            raise DataError(f"{where}: the chat template rejects these messages: {error}") from error
        return str(text)
