"""The process in which rewards run: ``python -m rollover.tasks.worker``.

Speaks JSON lines with its parent. First line in: the reward specs; first line out: ``{"ready": true}`` or
``{"error": ...}``. Then per line in one sample, per line out ``{"reward": x}`` or ``{"error": reason}``.
A thread watches the input, so that the process ends with its parent even while a reward hangs. What
reward functions print goes to standard error; standard output is the line to the parent.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

from rollover.errors import DataError
from rollover.tasks.rewards import Reward, RewardSample, RewardSpec, build_reward, reason


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    try:
        specs = [RewardSpec.from_json(value) for value in json.loads(requests.get())["specs"]]
        rewards = {spec.source: build_reward(spec) for spec in specs}
    except DataError as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(replies, {"ready": True})
    with asyncio.Runner() as runner:
        while True:
            _reply(replies, runner.run(_score(rewards, json.loads(requests.get()))))


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


async def _score(rewards: dict[str, Reward], request: dict[str, Any]) -> dict[str, Any]:
    sample = RewardSample(
        prompt=request["prompt"],
        columns=request["columns"],
        completion=request["completion"],
        completion_ids=tuple(request["completion_ids"]),
    )
    try:
        return {"reward": await rewards[request["source"]].score(sample)}
    except Exception as error:
        return {"error": reason(error)}


def _reply(replies: TextIO, value: dict[str, Any]) -> None:
    replies.write(json.dumps(value) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
