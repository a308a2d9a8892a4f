"""The actions that the scheduler asks a shell for: the closed set of actions.

A shell (the asyncio driver, the simulator, or a loop of your own) asks ``Scheduler.decide`` after everything that it
reported, and carries the actions out in order. It needs to know nothing about strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rollover.types import SampleId


class StartSample(NamedTuple):
    """Send a sample to the engine, to continue after the tokens that it has.

    A tuple, as the events are, because a simulation makes millions.

    Examples:
        Start or resume the first sample of group 3, to be parked after 1,024 more tokens unless it ends before:

        >>> sample_id, token_budget = StartSample(SampleId(3, 0), token_budget=1024)
        >>> str(sample_id), token_budget
        ('g3.0', 1024)
    """

    sample_id: SampleId
    token_budget: int | None
    """Tokens it may decode in this call before it is parked. ``None`` lets it run to its end."""


@dataclass(frozen=True, slots=True)
class StopAll:
    """Stop every running sample, report what each decoded, then ask again.

    Example: ``april`` asks for it as soon as a batch is full; each sample comes back with ``FinishReason.ABORT``.
    """


@dataclass(frozen=True, slots=True)
class ConsumeBatch:
    """A batch is ready: take it with ``Scheduler.consume`` as soon as you can use it.

    It is repeated until that is done. An answer without it withdraws it: a group may have been started since that has
    to be in the batch.

    Example: ``case ConsumeBatch(): batch = scheduler.consume(now_s)``
    """


Action = StartSample | StopAll | ConsumeBatch
