"""The rollouts of one training run of TRL: directory, engine and feed, weights published, batches measured.

What it keeps true: a batch is handed out under the weights that train it; an engine that does not sample from the
trainer's weights is found before its tokens are trained; a batch counts as trained once the trainer is done with it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.clock import SystemClock
from rollover.engine.base import Capabilities, Engine
from rollover.engine.logprob_check import (
    CheckedMembers,
    Reference,
    check_logprobs,
    check_prompts,
    default_tolerance,
    some_prompts,
)
from rollover.engine.open import EngineSetup, TrainedEngine, open_engine
from rollover.errors import EngineError, EngineMismatch
from rollover.integrations.feed import Deadlines, Feed, FeedParts, ScoredByHost
from rollover.integrations.hosted import HostedConfig, check_capabilities
from rollover.integrations.record import HostedRun
from rollover.integrations.trl.weights import next_logits, policy_source
from rollover.report import throughput
from rollover.rollout.events import Event
from rollover.rollout.metrics import batch_metrics
from rollover.rollout.scheduler import Source
from rollover.run.drift_windows import DriftWindows
from rollover.run.meter import peak_memory_bytes
from rollover.types import Batch, Drift, WasteCause
from rollover.weights.folders import WeightFolders, untied
from rollover.weights.publisher import Publisher
from rollover.weights.sources import MemoryWeights

_NUM_REFERENCES = 2
_REMEDY = (
    "set engine.dtype = 'float32' where the engine is embedded; a server must serve this model in its own number"
    " format, without quantisation, and nothing else may load weights into it"
)


@dataclass(slots=True)
class _Underway:
    """The batch that the trainer has."""

    batch: Batch
    began_s: float
    publish_s: float
    rollout_s: float
    decoded_before: float
    untrained: Mapping[WasteCause, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class HostedRollouts:
    """Hands out batches and keeps the account of them.

    Example: one step of a trainer::

        batch = rollouts.take(7, model)                        # version 7 is published; Batch(step=7, groups=(...))
        ...                                                    # train it
        rollouts.report({"reward/mean": 0.4}, untrained={})
        rollouts.finish_step()                                 # version 8 can be taken

    Args:
        folder: of the model, for the engine to open.
        make_source: the prompts, for an engine that can do so much.
        stop_token_ids: tokens that end a response.
        num_tokens: what the tokenizer knows; models may have more rows.
        number_format: in which the trainer computes log-probs, by torch's name.
        step: how many batches the trainer's checkpoint has seen.
        observer: called on the feed's thread after each event.
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
        self._number_format = number_format
        self._folders: WeightFolders | None = None
        self._references: dict[int, Reference] = {}
        """The newest by version: a server may be checked under an older one while a newer one is loaded."""
        self._has_checked = False
        self._underway: _Underway | None = None
        timeout_s = config.engine.publication_timeout_s
        self._feed = Feed(
            self._open_parts,
            config.rollout,
            journal=run.journal,
            step=step,
            seed=config.seed,
            deadlines=Deadlines(
                update_timeout_s=2 * timeout_s
            ),  # the publisher's own comes first, and names the server
            observer=observer,
        )
        self._publisher = Publisher([self._engine], folders=self._folders, timeout_s=timeout_s)
        """Made in this thread, used on the feed's."""
        self._tolerance = config.engine.logprob_tolerance or default_tolerance(
            self._engine.capabilities.number_format, number_format
        )
        self._windows = DriftWindows(self._tolerance)

    @property
    def feed(self) -> Feed:
        return self._feed

    def take(self, version: int, model: Any) -> Batch:
        """Publish ``model`` as ``version`` and return the batch that it trains. Raises as ``Feed`` does, and
        ``EngineMismatch`` when the engine does not sample from ``model``."""
        self.finish_step()
        decoded_before = self._feed.account()["rollout/decoded_tokens"]
        began_s = time.perf_counter()
        self._publish(version, model)
        published_s = time.perf_counter()
        batch = self._feed.batch(version)
        done_s = time.perf_counter()
        self._underway = _Underway(
            batch=batch,
            began_s=began_s,
            publish_s=published_s - began_s,
            rollout_s=done_s - published_s,
            decoded_before=decoded_before,
        )
        return batch

    def report(self, metrics: Mapping[str, float], untrained: Mapping[WasteCause, int]) -> Mapping[str, float]:
        """Add what the host has measured of the batch that it has, and return what was measured here."""
        assert self._underway is not None, "no batch is underway"
        self._underway.untrained = untrained
        account = self._feed.account()
        ours = {
            **{name: v for name, v in batch_metrics(self._underway.batch).items() if not name.startswith("reward/")},
            **account,
            "time/publish_s": self._underway.publish_s,
            "time/rollout_s": self._underway.rollout_s,
        }
        self._underway.metrics = {**ours, **metrics}
        return ours

    def judge(self, drift: Drift) -> None:
        """Compare log-probs of the batch that the current weights sampled with the trainer's.

        Raises:
            EngineMismatch: they are further apart than rounding makes them.
        """
        assert self._underway is not None, "no batch is underway"
        if self._underway.batch.step in self._feed.replayed:
            return
        for found in self._windows.add({"": drift}).values():
            raise EngineMismatch(
                f"{self._engine!r} does not sample from the trainer's weights: the log-probs of"
                f" {found.num_tokens:,} tokens, up to step {self._underway.batch.step} and each sampled from the newest"
                f" weights, are {found.mean_abs:.3g} nats from TRL's on average (engine.logprob_tolerance is"
                f" {self._tolerance:g}); {_REMEDY}"
            )

    def finish_step(self) -> None:
        """Say that the batch which was taken last is trained. Does nothing when that was said already."""
        if self._underway is None:
            return
        done, self._underway = self._underway, None
        self._feed.trained(done.batch.step, done.untrained)
        step_s = time.perf_counter() - done.began_s
        overlaps = self._config.rollout.strategy.overlaps_training
        account = self._feed.account()
        metrics = {
            **done.metrics,
            **throughput.of_step(
                trained_tokens=done.batch.num_tokens - sum(done.untrained.values()),
                decoded_tokens=int(account["rollout/decoded_tokens"] - done.decoded_before),
                step_s=step_s,
                decoding_s=step_s if overlaps else done.rollout_s,
            ),
            "time/train_s": step_s - done.publish_s - done.rollout_s,
            "memory/peak_bytes": peak_memory_bytes(),
        }
        self._run.step_ended(done.batch.step, self._feed.now_s(), metrics)

    def saved(self, step: int) -> None:
        """Say that no restart will come back to a checkpoint before ``step``."""
        self.finish_step()
        self._feed.saved(step)

    def close(self) -> None:
        """Stop what runs and close everything. The batch that is underway, if any, does not count as trained."""
        try:
            self._feed.close()
        finally:
            self._run.close()

    # -- weights ---------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> TrainedEngine:
        engine: Any = self._feed.parts.engine
        checked: TrainedEngine = engine
        return checked

    def _publish(self, version: int, model: Any) -> None:
        source = policy_source(model, version)
        if self._folders is not None:  # while samples may go on decoding: it can take a while
            tensors = dict(source.tensors())
            source = MemoryWeights(version, tensors, folder=self._folders.write(version, tensors))
        if isinstance(self._engine, CheckedMembers) or not self._has_checked:
            capabilities = self._engine.capabilities
            vocab_size = min(self._num_tokens, model.get_input_embeddings().weight.shape[0])
            prompts = check_prompts(vocab_size, capabilities.max_context_tokens)
            reference = Reference(version=version, prompts=prompts, logits_PV=next_logits(model, prompts))
            self._references = dict([*self._references.items(), (version, reference)][-_NUM_REFERENCES:])

        async def load() -> None:
            await self._publisher.publish_to_all(source)
            if isinstance(self._engine, CheckedMembers):
                await self._engine.check_logprobs(strict=True)
            elif not self._has_checked:
                await self._check(self._engine, version)
            self._has_checked = True

        self._feed.publish(version, load)

    async def _check(self, engine: Engine, version: int, *, is_known: bool = False) -> None:
        if version not in self._references:
            raise EngineError(f"{engine!r} cannot be checked: nothing to compare weights version {version} with")
        await check_logprobs(
            engine,
            self._references[version],
            tolerance=self._tolerance,
            remedy=_REMEDY,
            first=some_prompts(version) if is_known else (),
        )

    # -- on the feed's event loop ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        config, folder = self._config.engine, self._folder
        if (root := config.weights_root(self._run.path / "weights", self._run.identity)) is not None:
            if config.unties_first:
                folder = untied(folder, root / "initial")
            self._folders = WeightFolders(root, like=folder)
        setup = EngineSetup(folder=folder, run=self._run.identity, logs=self._run.path / "logs", clock=SystemClock())
        engine = await open_engine(config, setup)
        try:
            check_capabilities(self._config, engine.capabilities)
            if isinstance(engine, CheckedMembers):
                engine.check_logprobs_with(self._check)
            yield FeedParts(
                engine=engine,
                source=self._make_source(engine.capabilities),
                scorer=ScoredByHost(),
                stop_token_ids=self._stop_token_ids,
            )
        finally:
            await engine.close()
