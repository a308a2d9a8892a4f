"""Weight sync: the trainer's weights go into the engines, and each engine is checked to sample from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rollover.batch import Batch, TrainedStep
from rollover.engine.base import Sleeps
from rollover.rollout.driver import RolloutDriver
from rollover.run.engine_trust import Trust
from rollover.run.observers import Notice
from rollover.weights.base import WeightSource
from rollover.weights.publisher import Publisher

if TYPE_CHECKING:
    from rollover.trainer.base import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """Publishes weights and stops using engines that do not sample from them."""

    trainer: Trainer
    publisher: Publisher
    trust: Trust
    driver: RolloutDriver
    reloads_after_check: bool
    """True to load the weights once more after the first log-prob check, which leaves prompts in the engine's prefix
    cache that a resumed run would not find there."""
    sleeper: Sleeps | None = None
    """The engine, if it shares the trainer's devices."""
    notify: Callable[[Notice], None]
    """Called with what was dropped along with an engine."""
    measured: Callable[[str, float], None]
    """Called with the metrics of ``publish``: ``weights/bytes`` that each engine is given, before a swarm casts and
    compresses them; ``weights/stage_s`` until they are ready, and ``weights/load_s`` that engines take to load them."""

    async def make_room(self) -> None:
        """Let an engine on the trainer's devices release its memory until weights are published; one on devices of its
        own is left alone. Raises ``EngineError`` naming the process that still holds memory."""
        if self.sleeper is not None:
            await self.sleeper.sleep()

    async def pass_over(self) -> None:
        """Count the trainer's version as published without loading it, since nothing is sampled before the next one."""

        async def load() -> None:
            pass

        await self.driver.update_weights(self.trainer.version, load)

    async def publish(self) -> None:
        """Load the trainer's weights into the engines under the trainer's version, and check the engines' log-probs.
        Raises ``EngineError`` when no engine takes the weights, or none samples from them."""
        version, began_s = self.trainer.version, time.perf_counter()
        weights = await self.publisher.stage(await asyncio.to_thread(self._weights))
        self.measured("weights/bytes", self.publisher.num_bytes(weights))
        self.measured("weights/stage_s", time.perf_counter() - began_s)
        await asyncio.to_thread(self.trust.expect, version)
        if self.sleeper is not None:  # the trainer's last computation before the engine's turn
            await asyncio.to_thread(self.trainer.rest)
        failed: Sequence[str] = ()

        async def load() -> None:
            nonlocal failed
            load_began_s = time.perf_counter()
            await self.publisher.publish(weights)
            self.measured("weights/load_s", time.perf_counter() - load_began_s)
            is_first = not self.trust.has_checked
            failed = await self.trust.check(version)
            for name in failed:  # on record before anything is waited for, as an interrupt may come
                self.driver.distrust(name, version)
            if is_first and self.reloads_after_check:
                await self.publisher.publish(weights)

        await self.driver.update_weights(version, load)
        for name in failed:  # it may have continued sampling during the load, before the check
            self._dropped(name, await self.driver.drop_tokens_of(name, lambda: None, since=version))

    def _weights(self) -> WeightSource:
        sent = self.trainer.weights_to_send() if self.publisher.sends else None
        return sent if sent is not None else self.trainer.weight_source()

    async def judge_engines(self, batch: Batch, trained: TrainedStep) -> None:
        """Stop using the engines whose log-probs in ``batch`` are not the trainer's, and drop their tokens. Raises
        ``EngineError`` when no engine is left."""
        for name, reason in self.trust.verdicts(batch.step, trained.drift).items():
            take_out = partial(self.trust.part_with, name, reason)
            self._dropped(name, await self.driver.drop_tokens_of(name, take_out))

    def _dropped(self, name: str, num_tokens: int) -> None:
        if num_tokens:
            self.notify(Notice(f"groups with tokens of {name} are dropped, {num_tokens:,} tokens in all"))
