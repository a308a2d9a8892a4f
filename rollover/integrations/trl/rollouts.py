"""The rollouts of one training run of TRL: weights published and compared, batches handed out and measured.

Invariants: a batch is handed out under the weights that train it; an engine that does not sample from the
trainer's weights is found before its tokens are trained; a batch counts as trained once the trainer is done with it; an
engine that loads weights from folders finds each version in one, written while samples decode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollover.clock import SystemClock
from rollover.engine.base import Capabilities, Engine
from rollover.engine.kind import EngineSetup, OpenedEngine
from rollover.engine.logprob_check import (
    Reference,
    check_logprobs,
    check_prompts,
    default_tolerance,
    some_prompts,
)
from rollover.engine.sampling_check import check_sampling
from rollover.errors import EngineError, EngineMismatch
from rollover.integrations.feed import Deadlines, Feed, FeedParts, ScoredByHost
from rollover.integrations.hosted import HostedConfig, check_capabilities
from rollover.integrations.record import HostedRun
from rollover.integrations.steps import AskedSteps
from rollover.integrations.trl.weights import next_logits, policy_source
from rollover.rollout.events import Event
from rollover.rollout.scheduler import Source
from rollover.run.drift_windows import DriftWindows
from rollover.run.kinds import open_engine
from rollover.run.meter import peak_memory_bytes
from rollover.types import Batch, Drift, WasteCause
from rollover.weights.publisher import Publisher
from rollover.weights.sources import MemoryWeights

_NUM_REFERENCES = 2
_REMEDY = (
    "set engine.dtype = 'float32' if the engine is embedded; a server must serve this model in its own number"
    " format, without quantisation, and nothing else may load weights into it"
)


class HostedRollouts:
    """Hands out batches and accounts for them.

    Example: one step of a trainer::

        batch = rollouts.take(7, model)                        # version 7 is published; Batch(step=7, groups=(...))
        ...                                                    # train it
        rollouts.report({"reward/mean": 0.4}, untrained={})
        rollouts.finish_step()                                 # version 8 can be taken

    Args:
        folder: of the model, for the engine to open.
        make_source: returns the prompts, given the engine's capabilities.
        stop_token_ids: tokens that end a response.
        num_tokens: size of the tokenizer's vocabulary; models may have more rows.
        number_format: the one in which the trainer computes log-probs, by torch's name.
        step: how many batches the trainer's checkpoint includes.
        observer: called on the feed's thread after each event.

    Raises:
        RolloverError: the engine cannot be opened; the message says what to do.
    """

    def __init__(
        self,
        config: HostedConfig,
        run: HostedRun,
        *,
        folder: Path,
        make_source: Callable[[Capabilities], Source],
        stop_token_ids: tuple[int, ...],
        num_tokens: int,
        number_format: str,
        step: int,
        observer: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._config = config
        self._run = run
        self._folder = folder
        self._make_source = make_source
        self._stop_token_ids = stop_token_ids
        self._num_tokens = num_tokens
        self._references: dict[int, Reference] = {}
        """The newest references by version: a server may be checked under an older one while a newer one is loaded."""
        self._has_checked = False
        self._batch: Batch | None = None
        """The trainer's present batch."""
        self._opened: OpenedEngine
        """Opened on the feed's thread."""
        timeout_s = config.engine.publication_timeout_s
        self.feed = Feed(
            self._open_parts,
            config.rollout,
            journal=run.journal,
            step=step,
            seed=config.seed,
            # The publisher's own deadline comes first, and names the server.
            deadlines=Deadlines(update_timeout_s=2 * timeout_s),
            observer=observer,
        )
        self._engine = self._opened.engine
        self._publisher = Publisher(self._opened.weights, folders=self._opened.folders, timeout_s=timeout_s)
        """Created in this thread, used on the feed's."""
        self._steps = AskedSteps(
            self.feed, run, knows_rewards=False, overlaps_training=config.rollout.strategy.overlaps_training
        )
        self._tolerance = config.engine.logprob_tolerance or default_tolerance(
            self._engine.capabilities.number_format, number_format
        )
        self._windows = DriftWindows(self._tolerance)

    def take(self, version: int, model: Any) -> Batch:
        """Publish ``model`` as ``version`` and return the batch that it trains. Raises like ``Feed``, and raises
        ``EngineMismatch`` when the engine does not sample from ``model``."""
        self.finish_step()
        self._steps.begin(version)
        self._publish(version, model)
        self._steps.published()
        self._batch = self.feed.batch(version)
        self._measured = self._steps.handed_out(self._batch)
        return self._batch

    def report(self, metrics: Mapping[str, float], untrained: Mapping[WasteCause, int]) -> Mapping[str, float]:
        """Add the host's measurements of its present batch, and return those made here."""
        self._steps.measured(metrics, untrained)
        return self._measured

    def judge(self, drift: Drift) -> None:
        """Check the distance between engine and trainer over the batch's tokens that the current weights sampled.

        Raises:
            EngineMismatch: their log-probs are further apart than rounding explains.
        """
        assert self._batch is not None, "no batch is underway"
        if self._batch.step in self.feed.replayed:
            return
        for found in self._windows.add({"": drift}).values():
            raise EngineMismatch(
                f"{self._engine!r} does not sample from the trainer's weights: the log-probs of"
                f" {found.num_tokens:,} tokens, up to step {self._batch.step} and each sampled from the newest"
                f" weights, are {found.mean_abs:.3g} nats from TRL's on average (engine.logprob_tolerance is"
                f" {self._tolerance:g}); {_REMEDY}"
            )

    def finish_step(self) -> None:
        """Record that the last batch is trained. Does nothing if that is already recorded."""
        if self._batch is None:
            return
        done, self._batch = self._batch, None
        self._steps.measured({"memory/peak_bytes": peak_memory_bytes()})
        self._steps.trained_before(done.step + 1)
        self._steps.close()

    def saved(self, step: int) -> None:
        """Record that no restart will return to a checkpoint before ``step``."""
        self.finish_step()
        self.feed.saved(step)

    def close(self) -> None:
        """Stop running samples and close everything. A batch that is in progress does not count as trained."""
        try:
            self.feed.close()
        finally:
            self._run.close()

    # -- weights ---------------------------------------------------------------------------------------------

    def _publish(self, version: int, model: Any) -> None:
        if self._opened.trust is not None or not self._has_checked:
            capabilities = self._engine.capabilities
            vocab_size = min(self._num_tokens, model.get_input_embeddings().weight.shape[0])
            prompts = check_prompts(vocab_size, capabilities.max_context_tokens)
            reference = Reference(version=version, prompts=prompts, logits_PV=next_logits(model, prompts))
            self._references = dict([*self._references.items(), (version, reference)][-_NUM_REFERENCES:])

        source = policy_source(model, version)
        if self._opened.folders is not None:  # while samples may still be decoding, since it can take a while
            tensors = dict(source.tensors())
            source = MemoryWeights(version, tensors, folder=self._opened.folders.write(version, tensors))

        async def load() -> None:
            await self._publisher.publish(source)
            if self._opened.trust is not None:
                await self._opened.trust.check_logprobs(strict=True)
            elif not self._has_checked:
                await self._check(self._engine, version)
            self._has_checked = True

        self.feed.publish(version, load)

    async def _check(self, engine: Engine, version: int, *, is_known: bool = False, draws: bool = True) -> None:
        if version not in self._references:
            raise EngineError(f"{engine!r} cannot be checked: nothing to compare weights version {version} with")
        await check_logprobs(
            engine,
            self._references[version],
            tolerance=self._tolerance,
            remedy=_REMEDY,
            first=some_prompts(version) if is_known else (),
        )
        if draws and not is_known:
            await check_sampling(engine, self._references[version], temperature=self._config.rollout.temperature)

    # -- the engine ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        setup = EngineSetup(
            folder=self._folder,
            run=self._run.identity,
            root=self._run.path,
            clock=SystemClock(),
            weights_name=self._run.identity,
        )
        self._opened = opened = await open_engine(self._config.engine, setup)
        engine = opened.engine
        try:
            check_capabilities(self._config, engine.capabilities)
            if opened.trust is not None:
                opened.trust.check_logprobs_with(self._check)
            yield FeedParts(
                engine=engine,
                source=self._make_source(engine.capabilities),
                scorer=ScoredByHost(),
                stop_token_ids=self._stop_token_ids,
            )
        finally:
            await engine.close()
