"""Runs rewards in a process of its own: ``python -m rollover.environments.worker DESCRIPTOR``, started by the pool.

It speaks JSON lines with its parent over the socket ``DESCRIPTOR``. The first line in has the reward specs; the first
line out is ``{"ready": true}``, or ``{"error": reason}``, after which the process ends. Then each line in has the
samples of one scoring with an ``id``, and each line out its result with the same ``id``. Anything that reward functions
print goes to standard error. A keeper (see ``keeper.py``) ensures that nothing is left when this process ends or must
end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import asdict

from rollover.environments.channel import Channel
from rollover.environments.keeper import keep
from rollover.environments.rewards import spec_from_json
from rollover.environments.rewards.base import GroupReward, Reward, RewardSample
from rollover.environments.scoring import ScoringResult, Values, begin_score, failed, scored, settled
from rollover.errors import RolloverError


def main() -> None:
    channel = Channel(int(sys.argv[1]))
    try:
        specs = [spec_from_json(value) for value in channel.receive()["specs"]]
        rewards = {spec.key: spec.config.build(spec) for spec in specs}
    except RolloverError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"ready": True})
    with asyncio.Runner() as runner:
        while True:
            request = channel.receive()
            samples = [RewardSample.from_json(sample) for sample in request["samples"]]
            result = _score(rewards[request["reward"]], samples, channel, runner)
            channel.send({"id": request["id"], **asdict(result)})


def _score(
    reward: Reward | GroupReward, samples: Sequence[RewardSample], channel: Channel, runner: asyncio.Runner
) -> ScoringResult:
    """Score outside any event loop, which the function may start itself; in ``runner`` only what must be awaited."""

    async def settle(values: Awaitable[Values]) -> ScoringResult:
        try:
            return await settled(values, own_process=True)
        finally:
            channel.leave_in_a_child()

    try:
        values = begin_score(reward, samples)
    except BaseException as error:  # Ctrl-C does not reach this process, so any interrupt comes from the reward itself
        return failed(error)
    finally:
        channel.leave_in_a_child()
    if not isinstance(values, Awaitable):
        return scored(values)
    try:
        return runner.run(settle(values))
    except RuntimeError as error:  # the reward stopped the event loop
        for task in asyncio.all_tasks(runner.get_loop()):
            task.cancel()
        return failed(error)


if __name__ == "__main__":
    keep(main)
