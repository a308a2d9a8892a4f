"""Labels of the weights that slime gives its servers, read as policy versions. Pure.

slime counts its weight updates in each process from 1 and writes the count on every server as its ``weight_version``.
Our version is the number of batches that the weights were trained on, which continues over restarts. Both grow by one
with each training step, so their difference is constant within a process, and the first rollout of the process
determines it: the weights are then the checkpoint's.

Invariants: no rollout begins unless all servers report the same label; a version is never newer than the
batches that were handed out, and never older than the user allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollover.errors import EngineError

_MAX_SHOWN = 4


def agreed(labels: Mapping[str, str]) -> str:
    """Return the one label that all servers have. Raises ``EngineError`` if they differ, or the label is not a count;
    the message names the servers.

    Args:
        labels: the label of each server, by its address.
    """
    by_label: dict[str, list[str]] = {}
    for url, label in sorted(labels.items()):
        by_label.setdefault(label, []).append(url)
    if len(by_label) > 1:
        said = "; ".join(f"{label!r} by {_few(urls)}" for label, urls in sorted(by_label.items()))
        raise EngineError(
            f"the servers do not serve the same weights, by their weight_version: {said}. Some of them have missed the"
            " last weight update: look for it in the trainer's log, and restart those servers"
        )
    (label,) = by_label
    count(label)
    return label


def count(label: str) -> int:
    """Return the number of weight updates that a label stands for. Raises ``EngineError`` if it is not a number: the
    trainer has given the server no weights yet."""
    if not (label.isascii() and label.isdecimal()):
        raise EngineError(
            f"the servers call their weights {label!r}, where the trainer writes a number at each weight update: they"
            " have had no update yet, or one from something else; ask for rollouts after the trainer's first update,"
            " and let no other program update the servers"
        )
    return int(label)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelLine:
    """The difference between versions and labels in one process of slime."""

    shift: int
    """Version minus label."""
    max_lag: int
    """Number of batches that the weights of a rollout may be behind: 0 for ``train.py``, 1 for ``train_async.py``."""

    @classmethod
    def first(cls, *, step: int, label: str, max_lag: int) -> LabelLine:
        """Return the line of a process whose first rollout is for batch ``step``, which starts with current weights."""
        return cls(shift=step - count(label), max_lag=max_lag)

    def label(self, version: int) -> str:
        """Return the label that weights ``version`` have, or would have had, in this process."""
        return str(version - self.shift)

    def version(self, label: str, *, step: int) -> int:
        """Return the version of the weights that a rollout for batch ``step`` samples from. Raises ``EngineError`` if
        the label has not increased, or has increased too much."""
        version = count(label) + self.shift
        if version > step:
            raise EngineError(
                f"the servers say {label!r} at the rollout of batch {step}, where {self.label(step)!r} was due: there"
                " were more weight updates than batches. Something else updates them, or the trainer was restarted"
                " without them"
            )
        if version < step - self.max_lag:
            raise EngineError(
                f"the servers still say {label!r} at the rollout of batch {step}, where"
                f" {self.label(step - self.max_lag)!r} was due: their weights were not updated after the last training"
                " step. With train_async.py, set `weights_lag: 1` under `rollover` in the --custom-config-path file"
            )
        return version


def _few(urls: list[str]) -> str:
    more = len(urls) - _MAX_SHOWN
    return ", ".join(urls[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
