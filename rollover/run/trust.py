"""Which engines sample from the policy that the trainer holds: each is asked by itself, and each batch is looked at.

==========  ==================================================  =====================================================
           when                                                what it finds
==========  ==================================================  =====================================================
proof       at the start, after every weight load, and before   another model, number format or version; log-probs
            a server that was out is taken in again             from before the temperature
drift       in every batch, over tokens of the weights in       the same, and what happens between two proofs or to
            force                                               some tokens only: a reload by somebody else, say
==========  ==================================================  =====================================================

What it keeps true: an engine gets no call under weights for which it has not proved itself, unless its calls go on
over the load; once it has failed, no token of it is trained any more. A mistake at the start ends the run, since it is
easily mended; later the run goes on with the engines that are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollover.engine.base import Engine
from rollover.engine.logprob_check import TEMPERATURES, Reference, check_logprobs, check_prompts, default_tolerance
from rollover.engine.open import TrainedEngine
from rollover.engine.servers.config import ServerConfig
from rollover.engine.servers.pool import EnginePool
from rollover.errors import EngineError, EngineMismatch
from rollover.run.config import RunConfig
from rollover.types import Drift

MIN_TOKENS = 64
"""Fewer of an engine in a batch say nothing: single tokens are far off in half precision."""


class Policy(Protocol):
    """What the trainer has."""

    @property
    def vocab_size(self) -> int: ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits ``[num_prompts, vocab]`` of the token after each prompt, by the weights of now."""
        ...


def too_far(drift: Mapping[str, Drift], tolerance: float) -> dict[str, Drift]:
    """Those of engines, by name, that are beyond ``tolerance`` over enough tokens."""
    return {
        name: found
        for name, found in drift.items()
        if found.num_tokens >= MIN_TOKENS and not found.mean_abs <= tolerance
    }


class Trust:
    """Proofs and verdicts of one run.

    Args:
        num_tokens: what the tokenizer knows; models may have more rows, or fewer.
        tolerance: mean distance of log-probs in nats that is taken for rounding.
        remedy: what a user can do about an engine beyond it.
        temperature: of the run's sampling.
        judges_drift: false where engines rightly report other log-probs than the trainer computes.
        replayed: steps whose batches were sampled, and judged, by an earlier process.
    """

    def __init__(
        self,
        engine: TrainedEngine,
        policy: Policy,
        *,
        num_tokens: int,
        temperature: float,
        tolerance: float,
        remedy: str,
        judges_drift: bool,
        replayed: Collection[int],
    ) -> None:
        self._engine = engine
        self._pool = engine if isinstance(engine, EnginePool) else None
        self._policy = policy
        self._prompts = check_prompts(min(num_tokens, policy.vocab_size), engine.capabilities.max_context_tokens)
        self._later = (temperature,)
        self._tolerance = tolerance
        self._remedy = remedy
        self._judges_drift = judges_drift
        self._replayed = replayed
        self._references: dict[int, Reference] = {}
        """The two newest by version: a server may be proved under the older one while the newer one is loaded."""
        self.has_begun = False
        """Whether all have proved themselves once."""
        if self._pool is not None:
            self._pool.check_logprobs_with(self._prove)

    async def expect(self, version: int) -> None:
        """Note what the trainer's weights, of this version, say of the proving prompts. They must rest meanwhile."""
        if self._pool is None and self.has_begun:
            return  # one memory, one process: what fitted once is looked at by its drift
        logits_PV = await asyncio.to_thread(self._policy.next_logits, self._prompts)
        references = [*self._references.items(), (version, self._as_reference(version, logits_PV))]
        self._references = dict(references[-2:])

    async def prove(self, version: int) -> Sequence[str]:
        """Have each engine prove itself under the weights that it has just been given. Returns the names of those that
        were taken out for it.

        Raises:
            EngineMismatch: one fails at the start, or all do later.
        """
        failed: Mapping[str, EngineError] = {}
        if self._pool is not None:
            failed = await self._pool.check_logprobs(strict=not self.has_begun)
        elif not self.has_begun:
            await self._prove(self._engine, version)
        self.has_begun = True
        return list(failed)

    def verdicts(self, step: int, drift: Mapping[str, Drift]) -> dict[str, str]:
        """Engines, by name, not to be trusted after the batch of ``step``, with the reason."""
        if not self._judges_drift or step in self._replayed:
            return {}
        return {
            name: f"the log-probs it reported of {found.num_tokens:,} tokens, sampled by weights version {step} as it"
            f" says, are {found.mean_abs:.3g} nats from the trainer's on average (engine.logprob_tolerance is"
            f" {self._tolerance:g}); {self._remedy}"
            for name, found in too_far(drift, self._tolerance).items()
        }

    def part_with(self, name: str, reason: str) -> None:
        """No call goes to this engine any more. Raises ``EngineMismatch`` when none is left."""
        if self._pool is None:
            raise EngineMismatch(f"{self._engine!r} cannot be trusted: {reason}")
        self._pool.distrust(name, reason)

    async def _prove(self, engine: Engine, version: int) -> None:
        reference = self._references.get(version)
        if reference is None:
            raise EngineError(f"{engine!r} cannot be proved: nothing to compare weights version {version} with")
        await check_logprobs(
            engine,
            reference,
            tolerance=self._tolerance,
            remedy=self._remedy,
            temperatures=self._later if self.has_begun else TEMPERATURES,
        )

    def _as_reference(self, version: int, logits_PV: NDArray[np.float32]) -> Reference:
        return Reference(version=version, prompts=self._prompts, logits_PV=logits_PV)


def open_trust(
    config: RunConfig, engine: TrainedEngine, policy: Policy, *, num_tokens: int, replayed: Collection[int]
) -> Trust:
    """As ``config`` asks for; for the rest see ``Trust``."""
    number_format = engine.capabilities.number_format
    if isinstance(config.engine, ServerConfig):
        remedy = (
            f"it must serve this run's model with --dtype {number_format}, without quantisation, and no other run or"
            " process may load weights into it"
        )
    else:
        remedy = "set engine.dtype = 'float32', or use engine.kind 'vllm' or 'sglang' for this model"
    rollout = config.rollout
    return Trust(
        engine,
        policy,
        num_tokens=num_tokens,
        temperature=rollout.temperature,
        tolerance=config.engine.logprob_tolerance or default_tolerance(number_format, config.trainer.dtype),
        remedy=remedy,
        judges_drift=rollout.top_p == 1 and rollout.top_k == 0,
        replayed=frozenset(replayed),
    )
