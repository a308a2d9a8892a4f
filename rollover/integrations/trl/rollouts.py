"""The rollouts of one training run of TRL: weights published and compared, batches handed out and measured.

Invariants: a batch is handed out under the weights that train it; an engine that does not sample from the
trainer's weights is found before its tokens are trained; a batch counts as trained once the trainer is done with it; an
engine that loads weights from folders finds each version in one, written while samples decode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rollover.batch import Batch, Drift, WasteCause
from rollover.clock import SystemClock
from rollover.engine.base import Capabilities
from rollover.engine.devices import numbered
from rollover.engine.kind import EngineSetup, OpenedEngine
from rollover.errors import EngineMismatch
from rollover.integrations.feed import Deadlines, Feed, FeedParts, ScoredByHost
from rollover.integrations.hosted import HostedConfig, check_capabilities
from rollover.integrations.record import HostedRun
from rollover.integrations.steps import AskedSteps
from rollover.integrations.trl.weights import next_logits, policy_source
from rollover.rollout.events import Event
from rollover.rollout.scheduler import Source
from rollover.run.engine_trust import Trust
from rollover.run.kinds import open_engine
from rollover.run.meter import peak_memory_bytes
from rollover.weights.publisher import Publisher


class HostedRollouts:
    """Hands out batches and accounts for them. Raises ``RolloverError`` if the engine cannot be opened.

    Args:
        model: the policy in training.
        folder: of the model, for the engine to open.
        make_source: returns the prompts, given the engine's capabilities.
        stop_token_ids: tokens that end a response.
        num_tokens: size of the tokenizer's vocabulary; models may have more rows.
        number_format: the one in which the trainer computes log-probs, by torch's name.
        step: how many batches the trainer's checkpoint includes.
        observer: called on the feed's thread after each event.
    """

    def __init__(
        self,
        config: HostedConfig,
        run: HostedRun,
        model: Any,
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
        self._model = model
        self._folder = folder
        self._make_source = make_source
        self._stop_token_ids = stop_token_ids
        self._batch: Batch | None = None
        """The trainer's present batch."""
        self._opened: OpenedEngine
        """Opened on the feed's thread."""
        timeout_s = config.engine.publish_timeout_s
        self.feed = Feed(
            self._open_parts,
            config.rollout,
            journal=run.journal,
            step=step,
            seed=config.seed,
            # The publisher's own deadline comes first, and names the server.
            deadlines=Deadlines(update_timeout_s=2 * timeout_s, away_timeout_s=config.engine.away_timeout_s),
            observer=observer,
        )
        shares = any(numbered(parameter.device) in config.engine.devices() for parameter in model.parameters())
        run.note_engine(
            self._opened.engine.capabilities, takes_turns=shares, knows_rewards=False, model=str(folder.resolve())
        )
        self._publisher = Publisher(self._opened.weights, folders=self._opened.folders, timeout_s=timeout_s)
        """Created in this thread, used on the feed's."""
        self._steps = AskedSteps(
            self.feed, run, knows_rewards=False, overlaps_training=config.rollout.strategy.overlaps_training
        )
        self._trust = Trust(
            config.rollout,
            config.engine,
            self._opened,
            next_logits=partial(next_logits, model),
            vocab_size=min(num_tokens, model.get_input_embeddings().weight.shape[0]),
            trainer_format=number_format,
            replayed=self.feed.replayed,
        )

    def take(self, version: int) -> Batch:
        """Publish the model as ``version`` and return the batch that it trains. Raises like ``Feed``, and raises
        ``EngineMismatch`` when the engine does not sample from the model."""
        self.finish_step()
        self._steps.begin(version)
        self._publish(version)
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
        Raises ``EngineMismatch`` if their log-probs are further apart than rounding explains."""
        assert self._batch is not None, "no batch is underway"
        for reason in self._trust.verdicts(self._batch.step, {"": drift}).values():
            raise EngineMismatch(f"{self._opened.engine!r} cannot be trusted: {reason}")

    def finish_step(self) -> None:
        """Record that the last batch is trained. Does nothing if that is already recorded."""
        if self._batch is None:
            return
        done, self._batch = self._batch, None
        self._steps.measured({"memory/peak_bytes": peak_memory_bytes()})
        self._steps.trained_before(done.step + 1)
        self._steps.close()

    def set_aside(self) -> AbstractContextManager[None]:
        """Exclude TRL's evaluation within this context from the step, unless samples decode meanwhile."""
        return self._steps.set_aside()

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

    def _publish(self, version: int) -> None:
        self._trust.expect(version)
        source = policy_source(self._model, version)
        if self._opened.folders is not None:  # while samples may still be decoding, since it can take a while
            source = self._opened.folders.write(source)

        async def load() -> None:
            await self._publisher.publish(source)
            await self._trust.check(version, strict=True)

        self.feed.publish(version, load)

    # -- the engine ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        setup = EngineSetup(
            folder=self._folder,
            run=self._run.identity(),
            root=self._run.path,
            clock=SystemClock(),
            weights_name=self._run.identity(),
        )
        self._opened = opened = await open_engine(self._config.engine, setup)
        engine = opened.engine
        try:
            check_capabilities(self._config, engine.capabilities)
            yield FeedParts(
                engine=engine,
                source=self._make_source(engine.capabilities),
                scorer=ScoredByHost(),
                stop_token_ids=self._stop_token_ids,
            )
        finally:
            await engine.close()
