"""slime's data source as a source of prompts by number.

A data source of slime is a stream: it returns the next groups and keeps its own position. Our cursor is the number of
groups drawn. Invariants: the position of the stream and the cursor agree, even after a restart, when a
checkpoint restores the stream's position and the groups that the journal has since then are drawn again and skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rollover.errors import DataError, RunError
from rollover.integrations.slime.samples import prompt_of
from rollover.types import Prompt


class GivesGroups(Protocol):
    """The part of slime's data sources that is used."""

    def get_samples(self, num_samples: int) -> list[list[Any]]: ...


class SlimeSource:
    """Implements ``Source`` over a data source of slime.

    Args:
        position: number of groups already drawn from the data source, as the cursor counts them.
        group_size: samples that each group must have.
    """

    def __init__(
        self, groups: GivesGroups, encode: Callable[[str], Sequence[int]], *, position: int, group_size: int
    ) -> None:
        self._groups = groups
        self._encode = encode
        self._position = position
        self._group_size = group_size
        self._last: Prompt | None = None
        self._drawing = threading.Lock()
        """Needed because one thread saves checkpoints and another draws prompts, in miles even during a rollout."""

    def save(self, save_groups: Callable[[], None]) -> int:
        """Call ``save_groups`` to save the data source while nothing is drawn. Returns the number of groups drawn until
        then."""
        with self._drawing:
            save_groups()
            return self._position

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of the group with this number. Numbers must be requested in order; the last one may be
        repeated.

        Raises:
            RunError: the data source is past it.
            DataError: it returns no group, a group of another size, or a group that cannot be rolled out.
        """
        with self._drawing:
            return self._prompt(index)

    def _prompt(self, index: int) -> Prompt:
        if self._last is not None and index == self._position - 1:
            return self._last
        if index < self._position:
            raise RunError(
                f"the rollout needs group {index} of the data source, which has given {self._position} already:"
                " something else has drawn from it, or it was not restored from the same checkpoint"
            )
        while True:
            group = self._draw()
            self._position += 1
            if self._position > index:
                self._last = prompt_of(group, index, self._encode)
                return self._last

    def _draw(self) -> list[Any]:
        groups = self._groups.get_samples(1)
        if len(groups) != 1:
            raise DataError(
                f"the data source gave {len(groups)} groups where one was asked for: check that --prompt-data names a"
                " file with prompts"
            )
        (group,) = groups
        if len(group) != self._group_size:
            raise DataError(
                f"the data source gave a group of {len(group)} samples, and --n-samples-per-prompt is"
                f" {self._group_size}"
            )
        return group
