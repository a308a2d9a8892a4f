"""The protocol of a workload: response lengths by prompt, sample and attempt."""

from __future__ import annotations

from typing import Protocol


class Workload(Protocol):
    """Response lengths as a pure function of (seed, prompt, sample, attempt): every strategy that is simulated on a
    workload meets the same lengths, in whatever order it asks for them."""

    @property
    def cap(self) -> int:
        """Longest response, in tokens."""
        ...

    def prompt_id(self, index: int) -> str:
        """``"<source>/<row>@<epoch>"`` of the ``index``-th prompt drawn from the source."""
        ...

    def prompt_tokens(self, index: int) -> int:
        """Length of the ``index``-th prompt."""
        ...

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        """Response lengths, at least one token each, of the group opened for the ``index``-th prompt. ``attempt``
        counts how often the prompt was discarded and drawn again: its samples then differ, it does not."""
        ...
