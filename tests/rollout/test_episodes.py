"""Episodes: turns, parks, restarts and environments that take their time or fail, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.batch import Batch, WasteCause
from rollover.engine.base import GenerateRequest
from rollover.errors import RewardError
from rollover.rollout.config import Limits
from rollover.rollout.events import SampleFailed, SampleScored
from rollover.rollout.generation import sample_seed
from rollover.rollout.journal import Journal, restart
from rollover.rollout.metrics import batch_metrics
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment, Trajectory
from tests.engine.fake import logprob_at, token_at
from tests.rollout.kit import SEED, ParityScorer, Rig, content, lognormal, make_rig, play, with_stop
from tests.segments import segment
from tests.virtual_time import run

LIMIT = 60
"""Tokens of an episode."""


def drawn(sample_id: SampleId, turn: int) -> random.Random:
    return random.Random(f"{sample_id}/{turn}")


class Game:
    """Answers with tokens that depend on the sample and its turn alone; the episodes have one to five turns."""

    def __init__(self, delay_s: float = 3.0, fails: float = 0.0) -> None:
        self.delay_s, self.fails = delay_s, fails
        self.acted: Counter[tuple[SampleId, int]] = Counter()
        self.open: set[SampleId] = set()
        self.most_at_once = self.acting = 0

    def turn_limit(self, prompt: Prompt) -> int | None:
        return 20

    def answer(self, sample_id: SampleId, turn: int) -> Observation:
        draw = drawn(sample_id, turn)
        if draw.random() < 0.3 or turn == 5:
            return Observation((), f"end {turn}", 1.0, FinishReason.STOP)
        return Observation(tuple(draw.randrange(9000, 9999) for _ in range(draw.randint(1, 6))), f"{turn}", None)

    async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
        sample_id, turn = trajectory.sample_id, trajectory.num_turns
        assert trajectory.finish_reason is FinishReason.TURN and len(trajectory.observations) == turn - 1
        self.open.add(sample_id)
        self.acting += 1
        self.most_at_once = max(self.most_at_once, self.acting)
        try:
            await asyncio.sleep(self.delay_s * drawn(sample_id, turn + 100).random())
        finally:
            self.acting -= 1
        self.acted[sample_id, turn] += 1
        if drawn(sample_id, turn + 200).random() < self.fails:
            raise RewardError("the game has broken")
        answer = self.answer(sample_id, turn)
        if len(trajectory.response_ids) + len(answer.token_ids) >= LIMIT:
            answer = Observation((), answer.text, None, FinishReason.LENGTH)
        return answer._replace(start_s=now_s)

    def leave(self, sample_id: SampleId) -> None:
        self.open.discard(sample_id)


def assert_decoded(trajectory: Trajectory) -> None:
    """Every token of every turn is what the engine's script has there."""
    turn = position = 0
    for part in trajectory.segments:
        seed = sample_seed(SEED, trajectory.sample_id, turn)
        for token, logprob in zip(part.token_ids, part.rollout_logprobs, strict=True):
            assert token == token_at(seed, position, part.policy_version)
            assert logprob == logprob_at(seed, position, part.policy_version)
            position += 1
        if part.finish_reason is FinishReason.TURN:
            turn, position = turn + 1, 0


def assert_episode(trajectory: Trajectory, game: Game) -> None:
    """Every token is the engine's, and every answer the game's."""
    assert_decoded(trajectory)
    for turn, answer in enumerate(trajectory.observations, start=1):
        wanted = game.answer(trajectory.sample_id, turn)
        assert answer.token_ids == wanted.token_ids or answer.end is FinishReason.LENGTH
    assert len(trajectory.observations) == trajectory.num_turns
    assert trajectory.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert len(trajectory.response_ids) <= LIMIT
    assert len(trajectory.turns) == max(1, trajectory.num_turns + (trajectory.segments[-1].finish_reason != "turn"))


def assert_good(batches: dict[int, Batch], rig: Rig, game: Game | None = None) -> None:
    ids = [g.group_id for b in batches.values() for g in b.groups]
    assert len(set(ids)) == len(ids), "a group was trained twice"
    for step, batch in batches.items():
        for trajectory in batch.trajectories:
            assert_episode(trajectory, game or Game())
            assert all(0 <= step - v <= rig.strategy.max_staleness for v in trajectory.policy_versions)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("slow", ["environment", "scorer"])
def test_slow_environments_and_rewards_are_no_stall(slow: str, lockstep: bool) -> None:
    """They have deadlines of their own."""
    limits, given = Limits(stall_timeout_s=10.0), {slow: {"environment": Game, "scorer": ParityScorer}[slow](20.0)}
    _, batches = play(2, "sync", lockstep=lockstep, max_new_tokens=LIMIT, limits=limits, **given)
    assert set(batches) == {0, 1}


def test_the_length_that_is_punished_is_the_one_that_is_limited() -> None:
    rig, batches = play(4, environment=Game(), max_new_tokens=LIMIT, shaping=lambda n: -float(n))
    trained = {t.sample_id: -len(t.response_ids) for b in batches.values() for t in b.trajectories}
    scored = {e.sample_id: e.shaping for e in rig.events if isinstance(e, SampleScored)}
    assert trained == {sample_id: scored[sample_id] for sample_id in trained}


class Killed(Exception):
    pass


def killed_and_resumed(
    name: str, environment: Callable[[], Game], stop_after: int, **given: Any
) -> tuple[Rig, dict[int, Batch], dict[SampleId, Trajectory], Game]:
    """Break a run off after so many events, as a killed process is one whose journal ends after any event, and let
    another process finish it. Returns what that has made, what the first one had recorded, and the second environment."""

    async def until_killed(journal: Journal) -> None:
        left = stop_after

        def watch(event: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed

        rig = make_rig(name, environment=environment(), journal=journal, observer=watch, **given)
        try:
            while True:
                await rig.publish((await rig.driver.next_batch()).step + 1)
        except (Killed, RewardError):
            pass

    async def rest(journal: Journal) -> tuple[Rig, dict[int, Batch], dict[SampleId, Trajectory], Game]:
        state = restart(journal, step=0, redo_round=False)
        recorded = {s.sample_id: s.trajectory for g in state.ledger.groups.values() for s in g.samples}
        game = environment()
        rig = make_rig(name, environment=game, state=state, journal=journal, **given)
        return rig, await with_stop(rig, rig.train(4)), recorded, game

    journal = Journal(Path(":memory:"))
    run(until_killed(journal))
    fresh = Journal(Path(":memory:"))
    fresh.append([event for _, event in journal.read()])
    fresh._is_known = False
    return run(rest(fresh))


def assert_goes_on(batches: dict[int, Batch], recorded: dict[SampleId, Trajectory], game: Game) -> None:
    """Everything recorded is in what was trained, and no recorded turn was answered again."""
    for trajectory in (t for b in batches.values() for t in b.trajectories):
        if (before := recorded.get(trajectory.sample_id)) is not None:
            assert trajectory.response_ids[: len(before.response_ids)] == before.response_ids
            assert trajectory.observations[: len(before.observations)] == before.observations
            answered = {turn for i, turn in game.acted if i == trajectory.sample_id}
            assert answered.isdisjoint(range(1, len(before.observations) + 1))


def test_an_environment_that_fails_fails_its_sample_alone() -> None:
    rig, batches = play(5, "april", environment=Game(fails=0.2), group_size=4, max_new_tokens=LIMIT)
    assert_good(batches, rig)
    failures = [e for e in rig.events if isinstance(e, SampleFailed)]
    assert failures and {e.reason for e in failures} == {"the game has broken"}
    assert rig.ledger.num_failed == len(failures)
    assert rig.ledger.tokens.wasted[WasteCause.FAILED] > 0 and rig.ledger.tokens.observed_dropped > 0


def test_a_full_batch_does_not_wait_for_an_environment() -> None:
    class Slow(Game):
        async def act(self, trajectory: Trajectory, now_s: float) -> Observation:
            if trajectory.sample_id.group == 0:
                await asyncio.sleep(10_000)
            return await super().act(trajectory, now_s)

    rig, batches = play(1, "april", environment=Slow(0.0), max_new_tokens=LIMIT)
    assert 0 not in [g.group_id for g in batches[0].groups]
    assert all(i.group == 0 for i in rig.ledger.acting) and rig.ledger.acting


async def test_an_answer_starts_no_call_while_weights_are_loaded() -> None:
    """Also if no call was open when the load began."""
    given: dict[str, Any] = {"in_flight_update": False, "length": lognormal(3, 0.5)}
    rig = make_rig("bounded_async", environment=Game(30.0), max_new_tokens=LIMIT, **given)
    acted_alone = 0
    for version in range(1, 6):
        await rig.driver.next_batch()
        acted_alone += not rig.ledger.running and bool(rig.ledger.acting)
        await rig.publish(version, load_s=20.0)
    assert acted_alone
    await with_stop(rig, asyncio.sleep(0))


def test_a_deterministic_run_decides_alike_whatever_the_environment_takes() -> None:
    def played(delay_s: float) -> list[Any]:
        rig, batches = play(5, "april", environment=Game(delay_s), max_running=6, lockstep=True, max_new_tokens=LIMIT)
        assert_good(batches, rig)
        return [
            (content(b), [t.observations[-1].text for t in b.trajectories if t.observations]) for b in batches.values()
        ]

    assert played(0.0) == played(25.0)


def test_turns_are_limited_and_a_limit_ends_the_episode() -> None:
    def long(request: GenerateRequest) -> int:
        return 50

    _, batches = play(1, "sync", environment=Game(), length=long, max_new_tokens=LIMIT)
    for trajectory in batches[0].trajectories:
        assert [len(turn) for turn in trajectory.turns] == [20]
        assert trajectory.finish_reason is FinishReason.LENGTH and not trajectory.observations


def test_metrics_of_a_batch_describe_its_episodes() -> None:
    _, batches = play(1, "sync", environment=Game(), max_new_tokens=LIMIT)
    found, values = batches[0].trajectories, batch_metrics(batches[0])
    assert values["episode/turns"] == sum(len(t.turns) for t in found) / len(found) > 1
    observed = sum(len(t.response_ids) - t.num_tokens for t in found)
    assert values["episode/observed_tokens"] == observed / len(found) > 0
    assert values["episode/environment_s"] > 0
    ask, opening = Segment(0, (), (), FinishReason.TURN, 0, 0.0, 0.0), Observation((5, 6), "a prompt")
    begun = [replace(t, segments=(ask, *t.segments), observations=(opening, *t.observations)) for t in found]
    groups = tuple(
        replace(group, trajectories=tuple(t for t in begun if t.sample_id.group == group.group_id))
        for group in batches[0].groups
    )
    assert batch_metrics(replace(batches[0], groups=groups)) == values  # nobody acts in an opening


def test_an_engine_sees_each_turn_as_a_prompt_of_its_own() -> None:
    rig, batches = play(2, "sync", environment=Game(), max_new_tokens=LIMIT)
    trajectory = next(t for b in batches.values() for t in b.trajectories if len(t.observations) > 1)
    requests = [r for r in rig.engine.requests if r.sample_key.startswith(str(trajectory.sample_id))]
    first, second = trajectory.turns[0], trajectory.observations[0].token_ids
    assert requests[1].prompt_ids == (*trajectory.prompt.token_ids, *first, *second)
    assert not requests[1].response_ids and requests[1].seed != requests[0].seed
    assert requests[1].params.max_new_tokens <= 20


def test_what_a_trajectory_says_of_its_turns() -> None:
    prompt = Prompt(prompt_id="p/0@0", token_ids=(1,), text="p", source="p")
    parts = (segment((2, 3), FinishReason.ABORT), segment((4,), FinishReason.TURN), segment((7,), FinishReason.ABORT))

    def after(num_segments: int, *answers: Observation) -> Trajectory:
        ended = parts[:num_segments]
        return Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=ended, observations=answers)

    acting, answered, parked = after(2), after(2, Observation((5, 6))), after(3, Observation((5, 6)))
    assert (acting.turns, acting.turn_ids, acting.finish_reason) == (((2, 3, 4),), (2, 3, 4), FinishReason.TURN)
    assert (answered.turn_ids, answered.finish_reason) == ((), None)
    assert answered.response_ids == (2, 3, 4, 5, 6)
    assert (parked.turn_ids, parked.response_ids) == ((7,), (2, 3, 4, 5, 6, 7))
    assert parked.finish_reason is FinishReason.ABORT
