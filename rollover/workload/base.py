"""The protocol of a workload: response lengths by prompt, sample and attempt."""

from __future__ import annotations

from typing import Protocol


class Workload(Protocol):
    """Response lengths as a pure function of (seed, prompt, sample, attempt): every strategy that is simulated on a
    workload sees the same lengths, in any order of requests.

    Examples:
        One response in eight is ten times as long as the others, so a synchronous step takes 1,000 iterations:

        >>> class Stragglers:
        ...     cap = 1000
        ...     def prompt_id(self, index): return f"lengths/{index}@0"
        ...     def prompt_tokens(self, index): return 10
        ...     def group_lengths(self, index, group_size, attempt=0): return (1000, *(group_size - 1) * (100,))
        >>> scenario = Scenario(replicas=(ReplicaModel(c0_s=0.01, b0=64.0),))
        >>> sync = strategy("sync", scenario.capabilities, rollout_batch_size=4, group_size=8)
        >>> [round(step.iterations) for step in simulate(sync, Stragglers(), scenario, steps=2).steps]
        [1000, 1000]
    """

    @property
    def cap(self) -> int:
        """Return the length of the longest possible response, in tokens."""
        ...

    def prompt_id(self, index: int) -> str:
        """Return ``"<source>/<row>@<epoch>"`` of the ``index``-th prompt drawn from the source."""
        ...

    def prompt_tokens(self, index: int) -> int:
        """Return the length of the ``index``-th prompt."""
        ...

    def group_lengths(self, index: int, group_size: int, attempt: int = 0) -> tuple[int, ...]:
        """Return the response lengths, at least one token each, of the group opened for the ``index``-th prompt.
        ``attempt`` counts how often the prompt was discarded and drawn again: its samples then differ, but the prompt
        does not."""
        ...
