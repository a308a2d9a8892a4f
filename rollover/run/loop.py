"""The story on one page: prompts -> groups -> step -> publish.

One loop serves every strategy. Whether generation stops while the trainer trains is the strategy's decision, not a
second loop; the trainer always works in a thread of its own.

Invariants: a batch is journaled before it is trained; a checkpoint says how many batches it has seen; so after
any crash the journal and the newest checkpoint together are a state that the run can resume from.
"""

from __future__ import annotations

import asyncio
import math

from rollover.batch import Batch, TrainedStep
from rollover.errors import ConfigError, RolloverError, RunError
from rollover.garbage import rare_collections
from rollover.rollout.events import BatchTrained
from rollover.run.interrupt import Interrupt
from rollover.run.observers import Evaluated, Notice
from rollover.run.session import Session


async def train(session: Session, interrupt: Interrupt) -> None:
    """Train to ``config.steps`` from the session's current step. After a ``RolloverError`` the run can be resumed."""
    meter = session.meter
    with interrupt.deferred(), rare_collections(20_000):
        with meter.paused():
            await interrupt.unless(session.weights.publish())
        await _evaluate_when_due(session, interrupt)
        while session.version < session.config.steps and not interrupt.requested and not _is_settled(session):
            with meter.timed("time/rollout_s"):
                try:
                    batch = await interrupt.unless(session.driver.next_batch())
                except RunError:  # no prompt is left that could be trained
                    await session.checkpoints.save()
                    raise
            if batch is None:
                break
            if session.weights.sleeper is not None:
                with meter.timed("time/sleep_s"):
                    await session.weights.make_room()
            with meter.timed("time/train_s"):
                trained = await _train(session, batch)
            await session.weights.judge_engines(batch, trained)
            with meter.timed("time/publish_s"):
                if _goes_on_asleep(session):
                    await session.weights.pass_over()
                else:
                    await interrupt.unless(session.weights.publish())
            session.observe(meter.step_ended(batch, trained))
            await session.checkpoints.save_when_due()
            await _evaluate_when_due(session, interrupt)
        is_settled = _is_settled(session)
        if is_settled:
            session.evaluator.ends_at(session.version)
            await _evaluate_when_due(session, interrupt)
        await session.driver.stop()
        await session.checkpoints.save()
        if is_settled:
            scores, resume, patience = session.scores, session.resume_command, session.config.eval.patience
            last = "the last evaluation has" if patience == 1 else f"the last {patience} evaluations have"
            session.observe(
                Notice(
                    f"the run has ended: {last} found no better {scores.metric} (eval.patience); the best step was"
                    f" {scores.best}; to continue: {resume} --eval.patience 0"
                )
            )
        is_over = session.version >= session.config.steps or is_settled
        if is_over and session.evaluator.is_complete(session.version):  # one that was cut off comes on resume
            session.driver.run_ended()


async def _train(session: Session, batch: Batch) -> TrainedStep:
    """Train on ``batch``, or skip it if the user decided so, and journal what became of its tokens. Raises
    ``RolloverError`` when the batch cannot be trained, with a note about the way around it."""
    if batch.step in session.driver.ledger.skipped:
        trained = session.trainer.skip(batch)
        session.observe(
            Notice(
                f"step {batch.step}: its batch of {len(batch.groups)} groups was skipped, as asked by --skip-batch;"
                f" {batch.num_tokens:,} tokens are wasted, and the weights do not change"
            )
        )
    else:
        try:
            trained = await asyncio.to_thread(session.trainer.step, batch)
        except ConfigError:
            raise
        except RolloverError as error:
            way_around = f"{session.resume_command} --skip-batch {batch.step}"
            error.add_note(f"the batch of step {batch.step} was not trained; to resume without it: {way_around}")
            raise
    now_s = session.clock.now_s()
    session.driver.record(BatchTrained(time_s=now_s, step=batch.step, untrained=dict(trained.untrained)))
    return trained


def _goes_on_asleep(session: Session) -> bool:
    """Return whether an engine that has given its memory to the trainer need not wake: the next batch is there, and
    nothing uses these weights before they are trained."""
    return (
        session.weights.sleeper is not None
        and session.version < session.config.steps
        and session.driver.has_batch
        and not session.evaluator.is_due(session.version)
    )


async def _evaluate_when_due(session: Session, interrupt: Interrupt) -> None:
    keeps_best = session.config.eval.keep_best
    if keeps_best and session.evaluator.is_due(session.version):
        await session.checkpoints.save()  # it may turn out to be the best
    with session.meter.paused():
        ended = await interrupt.unless(session.evaluator.run_when_due(session.version)) or []
    for version, evaluation in ended:
        session.scores.add(version, evaluation.metrics().get(session.scores.metric, math.nan))
        session.observe(Evaluated(version=version, time_s=session.clock.now_s(), evaluation=evaluation))
    if keeps_best and ended:
        session.checkpoints.prune()
    if ended and session.evaluator.is_due(session.version):  # these are on record now, whatever stops the next
        await _evaluate_when_due(session, interrupt)


def _is_settled(session: Session) -> bool:
    """Return whether evaluations have stopped to improve for as long as ``eval.patience`` allows."""
    patience = session.config.eval.patience
    return bool(patience) and session.scores.num_since_best >= patience
