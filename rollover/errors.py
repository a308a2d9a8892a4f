"""The failures that a user can fix, each reported in one message.

Tree::

    RolloverError                 the command line prints the message alone and exits with code 2
      ConfigError                 a key of the run's TOML file or a command-line override
      DataError                   a dataset, a row or a reward function
        RewardError               ... one response that cannot be scored; its sample fails and the run continues
          NoReward                ... or that no reward applies to
      ModelError                  a model folder, a tokenizer or a checkpoint
      RunError                    the run directory: in use, of another config, not resumable
      EngineError                 an inference engine that answers wrongly, late or not at all
        EngineTimeout             ... that did not answer in time; the message names the call
        EngineMismatch            ... that samples from another policy than the trainer's
      PlanError                   no plan meets the request; the message says which limit is in the way
      ResourceError               disk or memory ran out; the message says what to lower
      MissingExtra                a package that is not installed; the message holds the pip command

Invariants are ``assert`` statements and never one of these.
"""

from __future__ import annotations

import difflib
import errno
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any


class RolloverError(Exception):
    """A failure whose message tells the user what was wrong, where, and what to do about it.

    Examples:
        The message is all that a user needs; a traceback would not help:

        >>> try:
        ...     build_config("quickstart", ["--stepz", "5"])
        ... except RolloverError as error:
        ...     print(error)
        command line: --stepz: unknown key; did you mean 'steps'?
    """


class ConfigError(RolloverError, ValueError):
    """A configuration value that cannot work."""


class DataError(RolloverError, ValueError):
    """A dataset, row or reward function that cannot be used."""


class RewardError(DataError):
    """A response that could not be scored; the message is the reason its sample failed.

    Example: ``raise RewardError("the verifier has timed out")`` in ``Scorer.score`` fails this sample, and its tokens
    count as wasted. Any other error ends the run.
    """


class NoReward(RewardError):
    """A response that its reward does not apply to: a reward function returned ``None``."""


class ModelError(RolloverError, ValueError):
    """A model folder, tokenizer or checkpoint that cannot be used."""


class RunError(RolloverError, RuntimeError):
    """A run directory that cannot be used as asked."""


class EngineError(RolloverError, RuntimeError):
    """An inference engine that broke its contract, or a call to it that failed.

    Example: ``raise EngineError(f"{url} answers {status}")`` in ``Engine.generate`` has the driver open the call again,
    after its last token.
    """


class EngineTimeout(EngineError, TimeoutError):
    """An engine call that did not return within its deadline; the message names the call."""


class CallDisplaced(EngineError):
    """A call that ended for a reason outside it: it continues elsewhere, and this does not count as a failed
    attempt."""


class EnginesAway(EngineError):
    """No server of an engine came up within the time for which calls wait for one. Another call would wait as long
    again."""


class EngineMismatch(EngineError):
    """An engine whose log-probs differ from the trainer's; the message holds the numbers."""


class PlanError(RolloverError, ValueError):
    """A fleet, a model and a goal that no plan can meet."""


class ResourceError(RolloverError, RuntimeError):
    """Disk or memory ran out; the message says what to lower."""


class MissingExtra(RolloverError, ImportError):
    """A package that is needed but not installed, because its extra was not requested."""


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "train": ("torch", "transformers", "tokenizers", "safetensors"),
    "tasks": ("reasoning_gym", "math_verify", "datasets", "pyarrow"),
    "report": ("tensorboard",),
    "plan": ("scipy", "huggingface_hub"),
    "swarm": ("msgspec", "zstandard", "cryptography", "prometheus_client", "starlette", "uvicorn", "websockets"),
    "lora": ("peft",),
    "bitsandbytes": ("bitsandbytes",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "trl": ("trl",),
}
"""The modules that each optional part of the installation brings."""


def require(*modules: str, purpose: str) -> None:
    """Raise ``MissingExtra`` when one of ``modules`` is not installed.

    Example:
        Without torch, ``require("torch", purpose="rollover train")`` raises "rollover train needs torch, which is not
        installed: pip install 'rollover[train]'".
    """
    for module in modules:
        if sys.modules.get(module) is None and importlib.util.find_spec(module) is None:
            raise MissingExtra(_missing(module, purpose))


def missing_extra(error: ModuleNotFoundError) -> MissingExtra | None:
    """Return the error to show the user when ``error`` concerns a module of an extra; ``None`` for any other module,
    whose absence is a bug."""
    module = (error.name or "").partition(".")[0]
    return MissingExtra(_missing(module, "this")) if _extra_of(module) is not None else None


def _missing(module: str, purpose: str) -> str:
    return f"{purpose} needs {module}, which is not installed: pip install 'rollover[{_extra_of(module)}]'"


def _extra_of(module: str) -> str | None:
    return next((extra for extra, modules in EXTRAS.items() if module in modules), None)


_MAX_DEPTH = 100
"""Levels of nesting in JSON; functions that walk through the values would not survive thousands."""


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Parse JSON from a file that anything may have happened to. Raises ``ValueError`` for every fault, nesting too
    deep among them, and with ``unique_keys`` a key that a table has twice."""
    try:
        value = json.loads(text, object_pairs_hook=_table if unique_keys else None)
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None
    level, depth = [value], 0
    while level := [v for inner in level if isinstance(inner, dict | list) for v in _values(inner)]:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise ValueError("lists or tables are nested too deeply")
    return value


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} is there twice")
    return found


def _values(inner: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return inner.values() if isinstance(inner, dict) else inner


def printable(text: str) -> str:
    """Write out control characters and marks of direction, which a model or a user's code may send to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'april'?"`` when some known name is close, else ``"; known: ..."``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error behind ``error``, even where safetensors or shutil has kept only its text;
    ``None`` for errors of other kinds."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = re.search(r"\bos error (\d+)\)|\bOs \{ code: (\d+)|\[Errno (\d+)\]", str(error))
    return None if number is None else OSError(code := int(number[1] or number[2] or number[3]), os.strerror(code))


def is_full(error: BaseException) -> bool:
    """Return whether a disk or quota is used up."""
    found = system_error(error)
    return found is not None and found.errno in _FULL


def refusal(error: OSError) -> str:
    """Describe in one line what the operating system refused: which file, why, and what can be done."""
    file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    reason = error.strerror or str(error).partition("\n")[0]
    return f"{file}{reason[:1].lower()}{reason[1:]}; {_remedy(error)}"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "choose a place on a disk that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "a file is needed there: choose another place",
    errno.ENOTDIR: "a directory is needed there: choose another place",
    errno.EEXIST: "choose another place, or move it away",
    errno.ENOENT: "it is not there, or no longer: bring it back, or name another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit on open files",
    errno.EIO: "the disk or its connection is failing: look at the machine's log",
    errno.ESTALE: "the network file system has lost it: mount it again",
    errno.EAGAIN: "the limit on processes is reached (ulimit -u): raise it, or start fewer",
    errno.ENOMEM: "memory is short: free some",
}


def _remedy(error: OSError) -> str:
    if is_full(error):
        return "make room, or choose a place on another disk"
    return _REMEDIES.get(error.errno or 0, "the operating system refused it: see that the place is usable")
