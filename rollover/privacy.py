"""Secrets are blanked before anything is shown, written for others to read, or sent away.

Invariants: a value is hidden when its name says that it is a secret (``api_key``, ``HF_TOKEN``, ``--password``,
``Cookie``), when it is an environment variable of a server that a run starts, when it is the login or the query of a
URL, or when it looks like a well-known kind of token. Names are judged word by word, so ``max_new_tokens``,
``tokenizer`` and ``num_key_value_heads`` are not secrets; when in doubt, the value is hidden. A text is redacted before
it is cut to length, since half a secret is no longer recognised as one.

In prose (prompts and responses), only names that mean nothing else are judged (``password``, ``api_key``, but not
``key``), so that ``sorted(words, key=len)`` stays, and of ``password: value`` one word is blanked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = "[hidden]"
_OWNER_ONLY = 0o600

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}|(?=\w{1,64}\Z)_*[A-Za-z]+[0-9]*(?:_+[A-Za-z]+[0-9]*)*_*")
"""Pattern of an environment variable's name. Capitals may be mixed with digits; small letters mixed with digits are
more likely a key that was put where the name of its variable belongs."""
_TOKEN = (
    r"hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|rw1\.[\w-]{1,64}\.[\w-]{16,}(?:\.[0-9a-f]{64})?"
    r"|xox[abeprs]-[\w-]{10,}|[sr]k[-_][\w-]{16,}|A[KS]IA[A-Z0-9]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"
    r"|AIza[\w-]{30,}|nvapi-[\w-]{16,}|npm_\w{20,}|pypi-[\w-]{20,}|gsk_\w{16,}|xai-[\w-]{16,}|r8_\w{16,}"
    r"|ya29\.[\w-]{16,}|dckr_pat_[\w-]{16,}|dapi[0-9a-f]{32}|AGE-SECRET-KEY-\w{16,}"
)
"""The forms of well-known tokens."""
_GLUED = (
    r"(?:hf_|gh[opsur]_|sk-(?:[a-z0-9]{2,8}-){0,4}|gsk_|xai-|nvapi-|AIza|glpat-)"
    r"(?=[A-Za-z0-9]{0,19}\d)(?=[A-Za-z0-9]{0,19}[A-Z])(?=[A-Za-z0-9]{0,19}[a-z])[A-Za-z0-9]{20}[\w-]*"
)
"""Such forms that are recognised within a word too: what follows a ``task-`` is rarely a mixture like theirs."""
_ENVIRONMENT = "launch_env"
"""The table whose values are all hidden, because most of them are keys and logins for the programs that a run
starts."""
_MIN_KNOWN_CHARACTERS = 8
"""Shorter values are not searched for in other texts: ``1`` and ``cuda`` appear everywhere with other meanings."""

_UNMISTAKABLE = re.compile(
    r"\w*(?:password|passwd|passphrase)s?|pwd"
    r"|\w*(?:api|access|secret|private|auth|ssh|license|master|encryption|signing)(?:key|token)s?"
)
"""Words that make a name a secret's even in prose."""
_ALWAYS = re.compile(
    rf"{_UNMISTAKABLE.pattern}|\w*(?:secret|passcode|credential|cookie)s?|pwds|auth|oauth|authentication|authorization"
    r"|(?:pw|jwt|sas|otp|totp|mfa|dsn|webhook|cred|psk|hmac|pem|csrf|xsrf|mnemonic)s?"
    r"|connstr(?:ing)?s?|(?:pass|app|shared)keys?|bearer"
)
"""Words that make a name a secret's wherever they stand in it."""
_LAST = re.compile(
    r"keys?|pass|\w*token|(?:db|pg|my|user|smtp|mysql|proxy)pass|(?:sig(?:nature)?|session(?:id)?|sid|pat|pin)s?"
)
"""Words that do at the end of a name, unless one of ``_OF_LANGUAGE`` is before them."""
_OF_LANGUAGE = re.compile(
    r"eos|bos|pad|unk|sep|cls|mask|stop|end|start|begin|first|last|next|special|image|audio|video|new|prompt|response"
    r"|additional|per|max|min|num|sort|group|primary|foreign"
)
_TOGETHER = re.compile(
    r"\b(?:conn(?:ection)? str(?:ing)?|(?:seed|recovery|backup|secret) ?(?:phrase|word|code|seed)|pin ?(?:code|number)"
    r"|(?:wallet|master|mnemonic) ?seed|session id|id (?:rsa|ed25519))s?\b"
)
"""Words that do if they follow each other."""
_OWNERS = re.compile(
    r"api|access|secret|private|auth|hf|hub|bearer|refresh|session|signing|encryption|ssh|client|user|service|account"
    r"|wandb|github|gitlab|aws|azure|gcp|openai|anthropic|license|master|webhook|bot"
)
"""Words that do wherever ``key``, ``token``, ``secret`` or their plural follows."""

_VALUE = re.compile(
    r'"""(?:.|\n)*?(?:"""|\Z)|"(?:\\.|[^"\\\n])*"?|\'[^\'\n]*\'?|\\+["\'][^"\'\n]*["\']?|\[[^\]\n]*\]?|\{[^}\n]*\}?'
    r'|[^\s,;&}\])"\']+'
)
"""Pattern of a value: text in quotes or brackets, whose end may have been forgotten, or one word."""
_NAMED = (
    re.compile(r"(?<![\w.])(?:--?)?(?<!\w-)(?P<name>[A-Za-z_][\w.-]*)\s*==?\s*"),
    re.compile(r"(?<!\\)(?P<quote>\\{0,8}[\"'])(?P<name>[^\"'\n\\]+)(?P=quote)\s*[:=]\s*"),
    re.compile(r"(?<![\w.-])(?P<name>--?[A-Za-z][\w.-]*)[\"']?(?:\s*,\s*|[ \t]+)"),
)
"""Beginnings of ``name = value``, ``"name": value`` and ``--name value``."""
_IN_PROSE = re.compile(
    r"(?<![\w.])(?:--?)?(?<!\w-)(?P<name>(?:[A-Za-z]{1,20} )?[A-Za-z_][\w.-]*)[ \t]*[:=]=?[ \t]*+"
    r"(?!(?i:str|string|int|bytes|bool|any|optional|none|null|true|false|input|getpass)\b)"
)
"""Beginning of ``name: value`` and ``name = value`` on one line, but for types and other words of code."""
_BARE = (
    re.compile(r"(?i:(?:proxy-)?authorization|(?:set-)?cookie(?=[^\"'\n]*=)|(?<![\w-])x-[a-z-]*(?:key|token|secret|auth)[a-z-]*)\s*:\s*"
               r"(?P<value>[^\"'\n]+)"),
    re.compile(r"(?i:\bbearer)\s+(?P<value>[\w.~+/=-]{8,})"),
    re.compile(r"://(?P<value>[^/?#\s\"']{0,999})@"),
    re.compile(r"://(?P<value>[^/?#\s\"'@:]{1,99}:[^\s\"'@]{1,99})@"),
    re.compile(r"://[^\s?#\"'<>]{0,499}\?(?P<value>[^\s\"'<>]+)"),
    re.compile(r"://[^\s#\"'<>]{0,499}#(?P<value>[^\s\"'<>=]{0,499}=[^\s\"'<>]*)"),
    re.compile(r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/(?P<value>[\w/-]{16,})"),
    re.compile(rf"\b(?P<value>{_TOKEN})"),
    re.compile(rf"(?P<value>{_GLUED})"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<value>(?s:.*?))(?:-----END|\Z)"),
)  # fmt: skip
"""Headers, bearer tokens, logins and queries of URLs, and the forms of well-known tokens. Lengths are bounded where
a text of many beginnings would take time that grows with its square."""


def is_secret(name: str) -> bool:
    """Return whether a key, a dotted key, a command-line flag, an environment variable or a header names a secret."""
    return any(part == _ENVIRONMENT or _names_secret(part) for part in name.replace("-", "_").split("."))


def redacted(value: Any, name: str = "") -> Any:
    """Return ``value`` (nested mappings, lists and scalars), which belongs to ``name``, without its secrets."""
    return Redactor().value(value, name)


def redacted_text(text: str) -> str:
    """Return a message, a log or part of a file without the secrets in it."""
    return Redactor().text(text)


def redacted_command(arguments: Sequence[str]) -> str:
    """Return a command line, quoted for a shell, without its secrets."""
    return shlex.join(Redactor().value(list(arguments)))


class Redactor:
    """Blanks secrets, also without their names if it has seen them before.

    Example: ``Redactor(prose=True).text("max(x, key=len), my password: hunter2")`` is ``"max(x, key=len), my password:
    [hidden]"``.
    """

    def __init__(self, *known: Any, prose: bool = False) -> None:
        """Start with the secrets in ``known`` (configs, command lines) as if they had been redacted already. ``prose``:
        texts are prompts and responses, and what is blanked in one is not looked for in others; keys are judged as
        ever."""
        self._met: set[str] = set()
        self._prose = False
        for value in known:
            self.value(value)
        self._prose = prose

    def value(self, value: Any, name: str = "") -> Any:
        """Redact a value, as ``redacted`` does."""
        if is_secret(name) and not _is_harmless(name, value):
            return self._blanked(value)
        if isinstance(value, Mapping):
            return {key: self.value(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return list(self._arguments(value))
        return self._string(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Redact a text, as ``redacted_text`` does."""
        for secret in sorted(self._met, key=len, reverse=True):
            for form in (secret, json.dumps(secret)[1:-1]):
                text = text.replace(form, HIDDEN)
        for pattern in (_IN_PROSE, *_NAMED[1:]) if self._prose else _NAMED:
            text = "".join(self._named(pattern, text))
        for pattern in _BARE:
            text = pattern.sub(lambda match: self._without(match), text)
        return text

    def _string(self, text: str) -> str:
        """Redact a string; a table or list that is written out (``--engine '{...}'``) is judged by its parts."""
        flag, equals, value = text.partition("=") if text.startswith("-") else ("", "", text)
        if value[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                parsed = tomllib.loads(f"value = {value}")["value"]
                blanked = self.value(parsed, flag.lstrip("-"))
                return text if blanked == parsed else f"{flag}{equals}{json.dumps(blanked, default=str)}"
        return self.text(text)

    def _arguments(self, values: Sequence[Any]) -> Iterator[Any]:
        """Yield the redacted elements of a list; the element after a flag that names a secret is its value."""
        flag, first = "", False
        for value in values:
            is_flag = isinstance(value, str) and value.startswith("-")
            if flag and (first or not is_flag):
                yield value if _is_harmless(flag, value) else self._blanked(value)
                first = False
            else:
                flag = value if is_flag and "=" not in value and is_secret(value.lstrip("-")) else ""
                first = bool(flag)
                yield self.value(value)

    def _named(self, pattern: re.Pattern[str], text: str) -> Iterator[str]:
        """Yield the parts of ``text`` with the values of secret names blanked; other values may hold further names."""
        judge = (lambda name: _names_secret(name, prose=True)) if self._prose else is_secret
        shown = at = 0
        while found := pattern.search(text, at):
            name, at = found["name"].lstrip("-"), found.end()
            if judge(name) and (value := _VALUE.match(text, at)) and not _is_harmless(name, value[0].strip("\"'")):
                yield text[shown:at] + self._hidden(value[0])
                shown = at = value.end()
        yield text[shown:]

    def _without(self, match: re.Match[str]) -> str:
        """Return the match with its value blanked."""
        start, end = match.start("value") - match.start(), match.end("value") - match.start()
        return f"{match[0][:start]}{self._hidden(match['value'])}{match[0][end:]}"

    def _hidden(self, value: str) -> str:
        """Blank a value, inside its quotes if it has any."""
        quote = value[0] if value[:1] in ("'", '"') else ""
        self._meet(value.strip("\"'\\"))
        return f"{quote}{HIDDEN}{quote}"

    def _blanked(self, value: Any) -> Any:
        """Return what remains of a value that is secret as a whole: which keys it has, and whether it is set."""
        if isinstance(value, Mapping):
            return {key: self._blanked(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._blanked(inner) for inner in value]
        if value is None or isinstance(value, bool) or value == "":
            return value
        self._meet(str(value))
        return HIDDEN

    def _meet(self, secret: str) -> None:
        if len(secret) >= _MIN_KNOWN_CHARACTERS and HIDDEN not in secret and not self._prose:
            self._met.add(secret)


def _names_secret(key: str, *, prose: bool = False) -> bool:
    words = [word.rstrip("0123456789") for word in _words(key)]
    if words[-2:] == ["tls", "key"]:
        return False  # the path of a file, which a message about it must name
    for before, word in zip(["", *words], words, strict=False):
        is_owned = _OWNERS.fullmatch(before) and word.removesuffix("s") in ("key", "token", "secret")
        if is_owned or (_UNMISTAKABLE if prose else _ALWAYS).fullmatch(word):
            return True
    if prose:
        return False
    if words == ["tokens"] or _TOGETHER.search(" ".join(words)):
        return True
    *_, before, last = ["", "", *words]
    return bool(_LAST.fullmatch(last)) and not _OF_LANGUAGE.fullmatch(before)


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a value under the name of a secret is none: the name of an environment variable (``api_key_env =
    "MY_KEY"``), or a number of tokens."""
    words = _words(name)
    if words == ["tokens"]:
        return bool(re.fullmatch(r"[\d.,]+", str(value)))
    if words[-1:] != ["env"] or _ENVIRONMENT in name.replace("-", "_").split("."):
        return False
    return isinstance(value, str) and bool(_VARIABLE.fullmatch(value)) and not re.match(_TOKEN, value)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower())


def make_private(file: Path) -> None:
    """Create an empty ``file`` that others cannot read; if it exists, take away their permission to read it.

    Raises ``OSError`` when it cannot be created. A file of another owner is left as it is.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWNER_ONLY))
    except FileExistsError:
        with suppress(PermissionError):
            if not file.is_dir():
                file.chmod(_OWNER_ONLY)
