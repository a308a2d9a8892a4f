"""The first two messages of a connection: what a worker says of itself, and what it makes of the answer."""

from __future__ import annotations

import asyncio
from enum import Enum

from rollover.swarm.wire.address import CoordinatorAddress
from rollover.swarm.wire.messages import PROTOCOL, Hello, Welcome
from rollover.swarm.worker.connection import CoordinatorConnection, Disconnected, Refused


class Since(Enum):
    """Tells what has become of the run since the last connection.

    Example: a coordinator that was killed and started again welcomes a worker to ``Since.NEW_EPOCH``.
    """

    SAME_EPOCH = "same epoch"
    NEW_EPOCH = "new epoch"
    """The run was started again, perhaps from an older checkpoint: versions may have gone back."""
    NEW_RUN = "new run"
    """Another run, or the first."""


class OlderEpoch(Disconnected):
    """A coordinator of an earlier start of the run answers, which may be about to go."""


async def greet(
    connection: CoordinatorConnection, hello: Hello, address: CoordinatorAddress, timeout_s: float
) -> Welcome:
    """Say hello and return the answer. Raises ``Refused`` and ``Disconnected``."""
    await connection.send(hello)
    try:
        async with asyncio.timeout(timeout_s):
            welcome = await connection.receive()
    except TimeoutError:
        raise Disconnected(f"{address} did not answer a Hello within {timeout_s:g} s") from None
    if not isinstance(welcome, Welcome):
        raise Disconnected(f"{address} answered a Hello with a {type(welcome).__name__}, not with a Welcome")
    if welcome.protocol != PROTOCOL:
        raise Refused(
            f"{address} chose version {welcome.protocol} of the protocol, but this worker speaks"
            f" {PROTOCOL}: install the same version of Rollover on both sides"
        )
    if not welcome.ttl_s > 0:
        raise Disconnected(f"{address} gave a lease of {welcome.ttl_s:g} s, which is not a valid time")
    return welcome


def since(last: Welcome | None, welcome: Welcome, address: CoordinatorAddress) -> Since:
    """Compare a welcome with the one before. Raises ``OlderEpoch`` when the run has gone back in time."""
    if last is None or last.run_id != welcome.run_id:
        return Since.NEW_RUN
    if welcome.run_epoch < last.run_epoch:
        raise OlderEpoch(
            f"{address} is at epoch {welcome.run_epoch} of {welcome.run_id}, but was at"
            f" {last.run_epoch} before: an old coordinator must still be running"
        )
    return Since.SAME_EPOCH if welcome.run_epoch == last.run_epoch else Since.NEW_EPOCH
