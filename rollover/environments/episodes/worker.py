"""Holds the environments of episodes in a process of its own: ``python -m rollover.environments.episodes.worker
DESCRIPTOR``, started by ``host.py``.

The first line in has the settings of the environment. Then each line in is a turn to answer, or an episode to forget,
and each line out the answer to a turn with the same ``id``. A line of an ``id`` alone asks which episodes' turns are
being answered. A turn names how many turns came before it. If this process does not have the episode at that point, it
asks for what is recorded (``{"missing": true}``), and brings the episode back as its settings say. After each turn that
it repeats for that, it writes a line with ``repeated``, since a turn has the time of one answer.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from rollover.environments.channel import Channel
from rollover.environments.episodes import ClassConfig, EnvironmentConfig, EnvironmentSettings
from rollover.environments.episodes.base import (
    MOST_CHARACTERS,
    Action,
    LiveEpisode,
    Outcome,
    RefusedAnswer,
    awaited,
    step,
)
from rollover.environments.keeper import keep, limit_memory
from rollover.environments.scoring import failed
from rollover.environments.user_function import import_function
from rollover.errors import DataError
from rollover.settings.shape import kinds


@dataclass(slots=True)
class _Held:
    """An episode that this process holds."""

    live: LiveEpisode
    randomness: _Randomness
    seed: int
    num_turns: int = 0
    """Number of turns that it has answered."""


class Holder:
    """Answers turns of episodes.

    Args:
        repeated: called with the turn to answer after each turn that is repeated before it.
    """

    def __init__(
        self, config: EnvironmentSettings, repeated: Callable[[Mapping[str, Any]], None] = lambda request: None
    ) -> None:
        self._config = config
        self._repeated = repeated
        self._held: dict[str, _Held] = {}
        if isinstance(config, ClassConfig):
            import_function(config.factory)  # the time of an import is not an answer's
        self._only = None if config.has_state else config.begin({}, 0)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a turn in JSON, ``{"missing": true}`` if the history is needed, or the failure."""
        try:
            if self._only is not None:
                return _in_json(self._step(self._only, request["action"], 0))
            held = self._at(request)
            if held is None:
                return {"missing": True}
            if self._config.keeps_state:  # the state of the generators is no part of it
                held.randomness = _Randomness(held.seed + held.num_turns + 1)
            held.randomness.take_over()
            answer = _in_json(self._step(held.live, request["action"], held.num_turns))
            held.num_turns += 1
            return answer | {"state": self._state(held.live)} if not answer["done"] else answer
        except BaseException as error:  # Ctrl-C does not reach this process: any interrupt comes from the user's code
            self.forget(request["key"])
            return asdict(failed(error))

    def _state(self, live: LiveEpisode) -> str:
        state = json.dumps(awaited(live.snapshot())) if self._config.keeps_state else ""
        if len(state) > MOST_CHARACTERS:
            raise RefusedAnswer(f"its snapshot has more than {MOST_CHARACTERS:,} characters")
        return state

    def forget(self, key: str) -> None:
        """Close an episode if it is here."""
        if (held := self._held.pop(key, None)) is not None:
            held.randomness.take_over()
            try:
                awaited(held.live.close())
            except Exception as error:
                print(f"an environment failed while it was closed: {error!r}", file=sys.stderr)

    def _at(self, request: Mapping[str, Any]) -> _Held | None:
        """Return the episode as it was before the turn, repeated from its history if need be."""
        held = self._held.get(request["key"])
        if held is not None and held.num_turns == request["num_turns"]:
            return held
        if self._config.recovers_by == "live":
            self._held.pop(request["key"], None)
        self.forget(request["key"])
        if request["num_turns"] and "history" not in request:
            return None
        randomness = _Randomness(request["seed"])
        randomness.take_over()
        live = self._config.begin(request["row"], request["seed"], request.get("state", ""))
        held = self._held[request["key"]] = _Held(live, randomness, request["seed"], request["num_turns"])
        num_repeated = {"replay": request["num_turns"], "none": int(self._config.writes_prompts)}
        past = request.get("history", ())[: num_repeated.get(self._config.recovers_by, 0)]
        for number, (action, recorded) in enumerate(past):
            self._repeat(live, number, action, recorded)
            self._repeated(request)
        return held

    def _repeat(self, live: LiveEpisode, number: int, action: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
        answer = _in_json(self._step(live, action, number))
        if any(answer[name] != value for name, value in recorded.items()):
            turn = number + 1 - self._config.writes_prompts
            raise RefusedAnswer(
                f"repeated after a restart, it answered {f'turn {turn}' if turn else 'reset'} with"
                f" {answer['text']!r:.60} and not with"
                f" {recorded['text']!r:.60}: it must depend on row, seed and turns alone"
            )

    def _step(self, live: LiveEpisode, action: Mapping[str, Any], num_turns: int) -> Outcome:
        return step(live, Action(**action, turn=max(num_turns - self._config.writes_prompts, 0)), self._config.role)


class _Randomness:
    """Global random numbers of one episode, of ``random`` and NumPy."""

    _in_use: ClassVar[_Randomness | None] = None

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(seed)

    def take_over(self) -> None:
        """Have everything drawn from these numbers from now on; the numbers of the episode before stay as it left
        them."""
        before = _Randomness._in_use
        if before is self:
            return
        if before is not None:
            before._state = random.getstate()
        random.setstate(self._state)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        _Randomness._in_use = self


def _in_json(answer: Outcome) -> dict[str, Any]:
    return {"messages": answer.messages, "done": answer.done, "reward": answer.reward, "text": answer.text}


def main() -> None:
    channel = Channel(int(sys.argv[1]))
    settings = channel.receive()["environment"]
    limit_memory(settings["max_memory_gib"])
    try:
        config = kinds(EnvironmentConfig)[settings["kind"]](**settings)
        holder = Holder(config, lambda request: send(request["id"], {"repeated": True}))
    except DataError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"ready": True})
    sending = threading.Lock()
    at_work = set[str]()

    def serve(request: Mapping[str, Any]) -> None:
        at_work.add(request["key"])
        send(request["id"], holder.answer(request))
        at_work.discard(request["key"])

    def send(number: int, answer: Mapping[str, Any]) -> None:
        channel.leave_in_a_child()
        with sending:
            channel.send({"id": number, **answer})

    with ThreadPoolExecutor(config.concurrency) as threads:
        while True:
            request = channel.receive()
            if "forget" in request:
                holder.forget(request["forget"])
                send(request["id"], {})
            elif "key" not in request:
                send(request["id"], {"at_work": list(at_work)})
            elif config.concurrency == 1:
                serve(request)  # in the main thread, where code that is not async may do anything
            else:
                threads.submit(serve, request)


if __name__ == "__main__":
    keep(main)
