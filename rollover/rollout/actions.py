"""The actions that the scheduler requests from a shell, a closed set.

A shell (the asyncio driver, the simulator, or a loop of your own) calls ``Scheduler.decide`` after everything that it
reports, and carries out the actions in order. It needs to know nothing about strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rollover.types import SampleId


class StartSample(NamedTuple):
    """Send a sample to the engine, to continue after the tokens that it has.

    A tuple, like the events, because a simulation creates millions.

    Examples:
        Start or resume the first sample of group 3, to be parked after 1,024 more tokens unless it ends before:

        >>> sample_id, token_budget = StartSample(SampleId(3, 0), token_budget=1024)
        >>> str(sample_id), token_budget
        ('g3.0', 1024)
    """

    sample_id: SampleId
    token_budget: int | None
    """Tokens that it may decode in this call before it is parked. ``None`` lets it run to its end."""


@dataclass(frozen=True, slots=True)
class StopAll:
    """Stop every running sample, report what each decoded, then ask again.

    Example: ``april`` requests it as soon as a batch is full; each sample comes back with ``FinishReason.ABORT``.
    """


@dataclass(frozen=True, slots=True)
class ConsumeBatch:
    """A batch is ready: take it with ``Scheduler.consume`` as soon as you can use it.

    It is repeated until then. An answer without it withdraws it, since a group that has to be in the batch may have
    been started meanwhile.

    Example: ``case ConsumeBatch(): batch = scheduler.consume(now_s)``
    """


Action = StartSample | StopAll | ConsumeBatch
