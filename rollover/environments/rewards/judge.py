"""``kind = "judge"``: a language model behind an OpenAI-compatible server scores the response.

Invariants: every request has a deadline, and no answer takes more memory than ``_MOST_BYTES``; the API key leaves this
process in the ``Authorization`` header only; a reply that is on record is not asked for again, also after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import socket
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx

from rollover.environments.columns import joined, read_column, read_conversation, text_of
from rollover.environments.reward_value import MisshapenReward, RefusedReward, RewardValue, read_rewards
from rollover.environments.rewards.base import RewardSample, RewardSettings, RewardSpec
from rollover.environments.rewards.extraction import captured, reference_answer
from rollover.environments.user_function import import_function, import_in_run
from rollover.errors import DataError, RewardError
from rollover.privacy import HIDDEN, make_private
from rollover.settings.changes import Changeable

_TEMPLATE = """Judge the response to the task by this rubric: {rubric}

Task:
{prompt}

Response:
{response}

Explain your judgement briefly. Then write one last line, "Score: x", where x is a number from {low} to {high}."""
_PATTERN = (
    r"(?i)(?<![a-z])score(?:\s*[(\[][^)\]\n]{0,400}[)\]])?\W{0,5}?(?<![\d.,])([-\u2212]?(?:\d+(?:\.\d+)?|\.\d+))"
    r"(?![\w%]|[.,]\d|[-\u2013]\d|\s+to\s+\d|\s*(?:/|%|out of|of)\s*)"
)
_PLACES = re.compile(r"\{(prompt|response|answer|rubric|low|high)\}")
_ANY_PLACE = re.compile(r"\{(\w+)\}")
_FILE = "judge.sqlite"
_MOST_BYTES = 1 << 22
_MOST_WAIT_S = 30.0
_FIRST_BACK_OFF_S = 0.5
_NO_PROXY = ("all://localhost", "all://127.0.0.1", "all://[::1]")
_PROBE_S = 3.0
"""Seconds within which a judge's machine must answer in a dry run."""
_OWN_ENTRIES = frozenset({"model", "messages", "temperature", "seed", "max_tokens", "n", "stream"})
"""Entries of a request that the judge's settings decide."""
_ABOUT_US = (401, 403, 404)
"""Refusals of a key, an address or a model, whatever the request says."""
_TRANSIENT = (408, 409, 425, 429)
"""Refusals of a server that may be over at the next attempt, as all from 500 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig(RewardSettings):
    """Scores with a language model, asked through ``POST {url}/chat/completions`` at temperature 0 and with a seed.

    Example: ``JudgeConfig(url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B", rubric="The proof has no gap.")``
    scores 0.8 when the reply ends with ``Score: 0.8``.
    """

    reads_question: ClassVar[bool] = True
    late_scores_zero: ClassVar[bool] = False

    kind: Literal["judge"] = "judge"
    """``"judge"`` chooses a language model as the judge."""
    url: Changeable[str]
    """Base URL of the server, up to ``/v1``."""
    model: str
    """Name of the model at the server."""
    template: str = _TEMPLATE
    """The message to the judge. ``{prompt}``, ``{response}``, ``{answer}``, ``{rubric}``, ``{low}`` and ``{high}`` are
    filled in; ``{response}`` must be there, and ``{answer}`` needs an answer column."""
    rubric: str = "the response solves the task correctly and completely."
    """The criterion of the judge."""
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score. A score outside, which the response may have talked the judge into, fails its
    sample."""
    pattern: Changeable[str | None] = None
    """Regular expression whose last match in the reply has the score in its first group (or is it). Unset, with
    neither ``json_key`` nor ``parser``: a number after the word ``score``."""
    json_key: Changeable[str | None] = None
    """Key of the score in the JSON object that the reply contains."""
    parser: Changeable[str | None] = None
    """``"module:function"`` of yours that gets the reply without its thought and returns a number, a dict
    of numbers or ``None``."""
    max_tokens: int = 1024
    """Longest reply. One that is cut there fails its sample."""
    seed: int = 0
    """Sent with each request."""
    params: dict[str, Any] = field(default_factory=dict)
    """Further entries of the request, such as ``{ chat_template_kwargs = { enable_thinking = false } }``."""
    concurrency: Changeable[int] = 8
    """Number of requests of a source that are open at the same time."""
    api_key_env: Changeable[str | None] = None
    """Name of the environment variable that holds the API key."""
    timeout_s: Changeable[float] = 120.0
    """Seconds that one request may take."""
    workers: Changeable[int] = 0
    """A judge needs no process; only 0 is possible."""
    retries: Changeable[int] = 5
    """Number of times that a request that failed or was late is sent again, after waits that double from half a
    second."""

    def __post_init__(self) -> None:
        RewardSettings.__post_init__(self)
        address = httpx.URL(self.url)
        if address.scheme not in ("http", "https") or not address.host or address.userinfo or address.query:
            raise ValueError("reward.url must be http(s)://host:port/v1; a key belongs in reward.api_key_env")
        if self.workers:
            raise ValueError("reward.workers must be 0 for 'judge', which needs no process; use reward.concurrency")
        if taken := sorted(_OWN_ENTRIES & self.params.keys()):
            raise ValueError(f"reward.params must not hold {', '.join(taken)}, which other settings of a judge decide")
        if self.concurrency < 1 or self.max_tokens < 1:
            raise ValueError("reward.concurrency and reward.max_tokens must be at least 1")
        if not (math.isfinite(self.range[1] - self.range[0]) and self.range[0] < self.range[1]):
            raise ValueError(f"reward.range must hold a number and a higher one, got {list(self.range)}")
        unknown = [place for place in _ANY_PLACE.findall(self.template) if not _PLACES.fullmatch("{" + place + "}")]
        if unknown or "{response}" not in self.template:
            problem = f"has no value for {{{unknown[0]}}}" if unknown else "must contain {response}"
            raise ValueError(f"reward.template {problem}; it knows prompt, response, answer, rubric, low and high")
        if sum(way is not None for way in (self.pattern, self.json_key, self.parser)) > 1:
            raise ValueError("reward.pattern, reward.json_key and reward.parser exclude each other: set one")
        if self.parser is not None and not re.fullmatch(r"[\w.]+:\w+", self.parser):
            raise ValueError(f"reward.parser must read 'module:function', got {self.parser!r}")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            raise ValueError("reward.api_key_env must be the name of an environment variable, never the key itself")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"reward.pattern {self.pattern!r} is not a regular expression: {error}") from None

    @property
    def needs_answer(self) -> bool:
        """Return whether the message contains the reference answer."""
        return "{answer}" in self.template

    @property
    def label(self) -> str:
        return f"judge {self.model}"

    @property
    def most_at_once(self) -> int:
        return self.concurrency

    def back_off_s(self, num_retried: int) -> float:
        return float(min(_FIRST_BACK_OFF_S * 2**num_retried, _MOST_WAIT_S))

    def check(self, spec: RewardSpec) -> None:
        if self.parser is not None:
            import_in_run(self.parser)
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise DataError(f"reward.api_key_env: the environment variable {self.api_key_env} is not set")
        if self.api_key_env is not None and not re.fullmatch(r"[!-~]+", os.environ[self.api_key_env]):
            raise DataError(
                f"reward.api_key_env: the environment variable {self.api_key_env} holds no key: it has a blank, a line"
                " break or another character that no header can carry"
            )

    def findings(self) -> Iterator[str]:
        address = httpx.URL(self.url)
        place = address.host, address.port or {"http": 80, "https": 443}[address.scheme]
        try:
            socket.create_connection(place, timeout=_PROBE_S).close()
            yield f"{self.label}: something listens at {address.host}:{place[1]}"
        except OSError as error:
            yield f"warning: {self.label}: nothing answers at {address.host}:{place[1]} ({error.strerror or error})"

    def build(self, spec: RewardSpec) -> JudgeReward:
        return JudgeReward(self, spec)


class JudgeReward:
    """Asks the judge, unless its reply to the same request is on record, and reads the score in the reply."""

    def __init__(self, config: JudgeConfig, spec: RewardSpec) -> None:
        self._config = config
        self._spec = spec
        self._parser: Callable[[str], Any] | None = import_function(config.parser) if config.parser else None
        self._key = os.environ.get(config.api_key_env or "", "")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, mounts=dict.fromkeys(_NO_PROXY))
        self._replies = _Replies(None if spec.folder is None else Path(spec.folder) / _FILE)
        self.used: Counter[str] = Counter(dict.fromkeys(("requests", "recalled", "prompt_tokens", "reply_tokens"), 0))
        """Number of ended requests, of replies that were on record, and of tokens."""
        self.ready_at_s = 0.0

    async def score(self, sample: RewardSample) -> RewardValue:
        body = self._body(sample)
        if (reply := self._replies.get(body)) is not None:
            with suppress(RewardError):  # asked again if it has no score: the judge may have been mended since
                value = await self._read(reply)
                self.used["recalled"] += 1
                return value
        reply = await self._ask(body)
        self._replies.put(body, reply)
        return await self._read(reply)

    async def close(self) -> None:
        await self._http.aclose()
        self._replies.close()

    def _body(self, sample: RewardSample) -> dict[str, Any]:
        config, spec = self._config, self._spec
        values = {
            "prompt": _question(spec, sample),
            "response": sample.completion,
            "rubric": config.rubric,
            "low": f"{config.range[0]:g}",
            "high": f"{config.range[1]:g}",
        }
        if config.needs_answer:
            values["answer"] = str(reference_answer(spec, sample.columns))
        text = _PLACES.sub(lambda place: values[place[1]], config.template)  # in one pass: no value is filled in itself
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "seed": config.seed,
            "max_tokens": config.max_tokens,
            **config.params,
        }

    async def _ask(self, body: dict[str, Any]) -> str:
        """Send the request. Raises ``RewardError`` for a failure that may pass, ``RefusedReward`` for a reply that was
        cut, and ``MisshapenReward`` when the server refuses the request itself and none is known to have succeeded."""
        url, content = f"{self._config.url.rstrip('/')}/chat/completions", bytearray()
        try:
            async with self._http.stream("POST", url, json=body) as answer:
                async for part in answer.aiter_bytes():
                    content += part
                    if len(content) > _MOST_BYTES:
                        raise RewardError(f"{url} answered with more than {_MOST_BYTES >> 20} MiB")
        except httpx.HTTPError as error:
            raise RewardError(f"{url}: {self._shown(f'{type(error).__name__} {error}')}") from None
        finally:
            self.used["requests"] += 1  # with its tokens below, so that no row of metrics has one without the other
        if answer.status_code != 200:
            problem = f"{url} answered {answer.status_code}: {self._shown(content.decode(errors='replace'))}"
            if answer.status_code < 500 and answer.status_code not in _TRANSIENT:
                is_about_us = answer.status_code in _ABOUT_US or not self._replies.has_any()
                raise (MisshapenReward if is_about_us else RefusedReward)(problem)
            wait_s = _seconds(answer.headers.get("Retry-After", ""))
            self.ready_at_s = max(self.ready_at_s, asyncio.get_running_loop().time() + wait_s)
            raise RewardError(problem)
        try:
            found = json.loads(content)
            (choice, *_), usage = found["choices"], found.get("usage") or {}
            reply, was_cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            self.used["prompt_tokens"] += int(usage.get("prompt_tokens") or 0)
            self.used["reply_tokens"] += int(usage.get("completion_tokens") or 0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            shown = self._shown(content.decode(errors="replace"))
            raise RewardError(f"{url} answered with no chat completion: {shown}") from None
        if was_cut:
            raise RefusedReward(f"the judge's reply was cut at {self._config.max_tokens} tokens (reward.max_tokens)")
        if not isinstance(reply, str):
            raise RefusedReward("the judge replied without text")
        return reply

    async def _read(self, reply: str) -> RewardValue:
        config = self._config
        reply = reply.rpartition("</think>")[2]  # a score that the judge considers in its thought is not its score
        if reply.lstrip().startswith("<think>"):
            raise RefusedReward("the judge's reply ends within a thought")
        if self._parser is not None:
            found = await asyncio.to_thread(self._parser, reply)
            wanted = "a number, a dict of numbers or None"
            (value,) = read_rewards([found], f"reward.parser {config.parser}", wanted=wanted)
        elif config.json_key is not None:
            try:
                found = json.loads(reply[reply.find("{") : reply.rfind("}") + 1])[config.json_key]
            except (ValueError, TypeError, KeyError, RecursionError):
                lacking = f"the judge's reply has no JSON object with {config.json_key!r} (reward.json_key)"
                raise RefusedReward(lacking) from None
            value = _number(found)
        else:
            if config.pattern is None:  # "4 out of 5" is 4 where 5 is the highest score
                reply = re.sub(rf"\s*(?:/|out of)\s*{config.range[1]:g}(?:\.0+)?(?![\w.,]*\d)", "", reply)
            matches = list(re.finditer(config.pattern or _PATTERN, reply))
            if not matches:
                raise RefusedReward(f"the judge's reply has no score: {self._shown(reply[-200:])}")
            value = _number(captured(matches[-1]))
        for number in value.values() if isinstance(value, dict) else () if value is None else (value,):
            if not config.range[0] <= number <= config.range[1]:
                raise RefusedReward(f"the judge's score of {number:g} is outside reward.range {list(config.range)}")
        return value

    def _shown(self, text: str) -> str:
        """Shorten what a server said for a message; the key is blanked before that."""
        return " ".join((text.replace(self._key, HIDDEN) if self._key else text).split())[:200]


class _Replies:
    """Replies by the request that they answer, in a private SQLite file, or in memory without one."""

    def __init__(self, path: Path | None) -> None:
        try:
            if path is not None:
                make_private(path)
            self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS replies (request BLOB PRIMARY KEY, reply TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"{path} is no record of a judge's replies ({error}); move it away") from None

    def get(self, body: dict[str, Any]) -> str | None:
        row = self._db.execute("SELECT reply FROM replies WHERE request = ?", (_digest(body),)).fetchone()
        return None if row is None else str(row[0])

    def has_any(self) -> bool:
        return bool(self._db.execute("SELECT EXISTS (SELECT 1 FROM replies)").fetchone()[0])

    def put(self, body: dict[str, Any], reply: str) -> None:
        with suppress(sqlite3.OperationalError):  # a full disk: the reply counts, and may be asked for again
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (_digest(body), reply))

    def close(self) -> None:
        self._db.close()


def _digest(body: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()


def _question(spec: RewardSpec, sample: RewardSample) -> str:
    """Return the prompt without its chat template: the text of the row, or its messages line by line."""
    if spec.prompt_parts:
        return joined(sample.columns, spec.prompt_parts, "the row")
    found = read_conversation(sample.columns, spec.prompt_column)
    if found is not None:
        return "\n\n".join(f"{message['role']}: {text_of(message.get('content'))}" for message in found.prompt)
    try:
        text = read_column(sample.columns, spec.prompt_column or "")
    except KeyError:
        return sample.prompt
    return text if isinstance(text, str) else sample.prompt


def _number(text: Any) -> float:
    try:
        if isinstance(text, bool):
            raise TypeError
        number = float(text.replace("\u2212", "-") if isinstance(text, str) else text)
    except (TypeError, ValueError):
        raise RefusedReward(f"the judge's score is no number: {str(text)[:40]!r}") from None
    return number


def _seconds(retry_after: str) -> float:
    return min(float(retry_after), _MOST_WAIT_S) if re.fullmatch(r"\d{1,6}", retry_after) else 0.0
