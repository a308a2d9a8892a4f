"""Finds engines that do not sample from the trainer's policy, by checking each engine and examining each batch.

==============  ==============================================  =====================================================
               when                                            what it finds
==============  ==============================================  =====================================================
log-prob check  at the start, after every weight load, and      another model, number format or version; log-probs
                before a server that was out is used again      from before the temperature
sampling check  once, before an engine's first call, and        greedy decoding, a truncated distribution, another
                before a server that was out returns           temperature, with log-probs that are right
drift           after every batch, over at least 64 tokens      the same, and what happens between two checks or to
                that the weights in force sampled, from as      some tokens only: a reload by another process, for
                many batches as that takes                      example
==============  ==============================================  =====================================================

Invariants: an engine gets no call under weights for which it has not passed the log-prob check, unless its
calls continue during the load; once it has failed, none of its tokens is trained any more. A mismatch at the start ends
the run, since it is easily fixed; later the run continues with the engines that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollover.batch import Drift
from rollover.engine.base import Engine
from rollover.engine.config import EngineConfig
from rollover.engine.kind import OpenedEngine
from rollover.engine.logprob_check import (
    TEMPERATURES,
    Reference,
    check_logprobs,
    check_prompts,
    default_tolerance,
    some_prompts,
)
from rollover.engine.sampling_check import check_sampling
from rollover.errors import EngineError, EngineMismatch
from rollover.rollout.config import RolloutConfig

_NUM_REFERENCES = (8, 24)
"""Fewest and most versions under which members can be checked: 14 MB each with a vocabulary of 150,000."""
MIN_TOKENS = 64
"""The fewest tokens of an engine that are meaningful: in half precision, single tokens can be far off."""


class Trust:
    """Decides for one run which engines are trusted.

    Args:
        next_logits: returns the trainer's logits of the token after each prompt, shape (prompts, vocabulary).
        vocab_size: number of tokens that both the tokenizer and the model have.
        trainer_format: the number format in which the trainer computes log-probs.
        replayed: steps whose batches an earlier process sampled and judged.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        engine: EngineConfig,
        opened: OpenedEngine,
        *,
        next_logits: Callable[[Sequence[Sequence[int]]], NDArray[np.float32]],
        vocab_size: int,
        trainer_format: str,
        replayed: Collection[int],
    ) -> None:
        capabilities = opened.engine.capabilities
        self._engine = opened.engine
        self._pool = opened.trust
        self._next_logits = next_logits
        self._prompts = check_prompts(vocab_size, capabilities.max_context_tokens)
        self._temperature = rollout.temperature
        number_format = capabilities.number_format
        self._tolerance = engine.logprob_tolerance or default_tolerance(number_format, trainer_format)
        """Mean distance of log-probs, in nats, that counts as rounding."""
        self._remedy = engine.mismatch_remedy(number_format)
        """Advice for the user about an engine beyond the tolerance."""
        self._judges_drift = not rollout.accept_truncation_bias
        """Otherwise engines are right to report other log-probs than the trainer computes."""
        self._windows = DriftWindows(self._tolerance)
        if opened.placement is not None:
            opened.placement.on_distrust(self._windows.forget)
        self._replayed = frozenset(replayed)
        least, most = _NUM_REFERENCES
        behind = 0 if opened.placement is None else rollout.staleness_bound  # of a swarm
        self._num_references = max(least, min(behind + 2, most))
        self._references: dict[int, Reference] = {}
        """The newest references by version: a member may be checked under an older one while a newer one is loaded."""
        self.has_checked = False
        """True once all engines have passed the check."""
        if self._pool is not None:
            self._pool.check_logprobs_with(self._check)

    def expect(self, version: int) -> None:
        """Compute the log-probs of the check's prompts with the trainer's weights, which must not change meanwhile."""
        if self._pool is None and self.has_checked:
            return  # same memory, same process: after the first check, drift is enough
        reference = Reference(version=version, prompts=self._prompts, logits_PV=self._next_logits(self._prompts))
        self._references = dict([*self._references.items(), (version, reference)][-self._num_references :])

    async def check(self, version: int, *, strict: bool = False) -> Sequence[str]:
        """Check the log-probs of each engine under the weights that it was given last. Returns the names of the engines
        that were excluded. Raises ``EngineMismatch`` if one fails at the start, or later if ``strict``; otherwise when
        all do."""
        failed: Mapping[str, EngineError] = {}
        if self._pool is not None:
            failed = await self._pool.check_logprobs(strict=strict or not self.has_checked)
        elif not self.has_checked:
            await self._check(self._engine, version)
        self.has_checked = True
        return list(failed)

    def verdicts(self, step: int, drift: Mapping[str, Drift]) -> dict[str, str]:
        """Return the engines, by name, that can no longer be trusted after the batch of ``step``, each with the reason.
        A replayed batch shows nothing, since the engine that sampled it may have been fixed meanwhile. So a resumed run
        begins with empty windows."""
        if not self._judges_drift or step in self._replayed:
            return {}
        return {
            name: f"the log-probs it reported of {found.num_tokens:,} tokens, up to step {step} and each sampled by the"
            f" newest weights as it says, are {found.mean_abs:.3g} nats from the trainer's on average"
            f" (engine.logprob_tolerance is {self._tolerance:g}); {self._remedy}"
            for name, found in self._windows.add(drift).items()
        }

    def part_with(self, name: str, reason: str) -> None:
        """Stop sending calls to this engine. Raises ``EngineMismatch`` when none is left."""
        if self._pool is None:
            raise EngineMismatch(f"{self._engine!r} cannot be trusted: {reason}")
        self._pool.distrust(name, reason)

    async def _check(self, engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        reference = self._references.get(version)
        if reference is None:
            raise EngineError(f"{engine!r} cannot be checked: nothing to compare weights version {version} with")
        await check_logprobs(
            engine,
            reference,
            tolerance=self._tolerance,
            remedy=self._remedy,
            temperatures=(self._temperature,) if self.has_checked else TEMPERATURES,
            first=some_prompts(version) if is_known else (),
        )
        if draws:
            await check_sampling(engine, reference, temperature=self._temperature)


class DriftWindows:
    """The drift of each engine, by name, over batches until there are enough tokens to judge it: a batch of an
    asynchronous run has few tokens that the newest weights sampled, about twenty per worker with three workers and
    ``max_staleness`` 3.

    An engine is judged over at least ``MIN_TOKENS`` tokens, of which fewer than ``MIN_TOKENS`` are from earlier batches
    than the newest; each token is judged once. So an engine that begins to lie is found by the end of the second window
    that it fills, and its earlier tokens cannot hide its present ones.

    Args:
        tolerance: mean distance of log-probs, in nats, that rounding explains.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._open: dict[str, Drift] = {}

    def add(self, drift: Mapping[str, Drift]) -> dict[str, Drift]:
        """Add the drift of one batch. Returns, by engine, the windows that it fills and whose mean is beyond the
        tolerance. A full window starts again."""
        too_far: dict[str, Drift] = {}
        for name, found in drift.items():
            window = _together(self._open.pop(name, None), found)
            if window.num_tokens < MIN_TOKENS:
                self._open[name] = window
            elif not window.mean_abs <= self._tolerance:  # a mean that is not a number is beyond it too
                too_far[name] = window
        return too_far

    def forget(self, name: str) -> None:
        """Start the window of an engine again, since none of the tokens that it has sampled so far will be trained."""
        self._open.pop(name, None)


def _together(first: Drift | None, second: Drift) -> Drift:
    if first is None or not second.num_tokens:
        return first or second
    num_tokens = first.num_tokens + second.num_tokens
    total = first.num_tokens * first.mean_abs + second.num_tokens * second.mean_abs
    return Drift(num_tokens, total / num_tokens)
