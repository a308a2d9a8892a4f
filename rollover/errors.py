"""The mistakes a user can make, each told in one message.

Tree::

    RolloverError                 the command line prints the message alone and exits with code 2
      ConfigError                 a key of the run's TOML file or a command-line override
      DataError                   a dataset, a row or a reward function
        RewardError               ... one response that cannot be scored; its sample fails and the run goes on
      ModelError                  a model folder, a tokenizer or a checkpoint
      RunError                    the run directory: in use, of another config, not resumable
      EngineError                 an inference engine that answers wrongly, late or not at all
        EngineTimeout             ... named with whom we waited for
        EngineMismatch            ... that samples from another policy than the trainer's
      PlanError                   no plan can do what was asked of the fleet; the message says which limit is in the way
      ResourceError               disk or memory ran out; the message says what to lower

Invariants are ``assert`` statements and never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RolloverError(Exception):
    """A failure whose message tells the user what was wrong, where, and what to do about it."""


class ConfigError(RolloverError, ValueError):
    """A configuration value that cannot work."""


class DataError(RolloverError, ValueError):
    """A dataset, row or reward function that cannot be used."""


class RewardError(DataError):
    """A response that could not be scored; the message is the reason its sample failed."""


class ModelError(RolloverError, ValueError):
    """A model folder, tokenizer or checkpoint that cannot be used."""


class RunError(RolloverError, RuntimeError):
    """A run directory that cannot be used as asked."""


class EngineError(RolloverError, RuntimeError):
    """An inference engine that broke its contract."""


class EngineTimeout(EngineError, TimeoutError):
    """An engine call that did not return within its deadline; the message names the call."""


class EngineMismatch(EngineError):
    """An engine whose log-probs are not those of the trainer's policy; the message holds the numbers."""


class PlanError(RolloverError, ValueError):
    """A fleet, model and aim that no plan can meet."""


class ResourceError(RolloverError, RuntimeError):
    """Disk or memory ran out; the message says what to lower."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'april'?"`` when some known name is close, else ``"; known: ..."``."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
