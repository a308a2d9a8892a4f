"""slime's samples, there and back; and the prompts of its data source by number."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from rollover.errors import DataError, RewardError, RunError
from rollover.integrations.slime.rewards import SlimeScorer
from rollover.integrations.slime.samples import account_for_versions, failed_sample, new_sample, prompt_of, respond
from rollover.integrations.slime.source import SlimeSource
from rollover.types import FinishReason, Prompt, SampleId, Segment, Trajectory
from tests.integrations.slime.recorded import Letters, Sample
from tests.speed import within
from tests.virtual_time import run

ARGS = Namespace(reward_key=None)
LETTERS = Letters()


def encode(text: str) -> list[int]:
    return LETTERS.encode(text)


def group(number: int = 0, **changes: Any) -> list[Sample]:
    return [
        Sample(group_index=number, index=2 * number + i, prompt="ab", label="AB", metadata={"row": number}, **changes)
        for i in range(2)
    ]


def trajectory(*segments: tuple[int, tuple[int, ...], FinishReason | None], prompt: Prompt | None = None) -> Trajectory:
    made = tuple(
        Segment(version, ids, tuple(-0.5 for _ in ids), reason, version, 0.0, 1.0) for version, ids, reason in segments
    )
    prompt = prompt or prompt_of(group(), 0, encode)
    return Trajectory(sample_id=SampleId(0, 1), prompt=prompt, segments=made, reward=1.0)


def sample_of(done: Trajectory) -> Sample:
    sample: Sample = new_sample(Sample, done.prompt, 1)
    respond(sample, done, ARGS, decode=lambda ids: LETTERS.decode([*ids]), label=lambda version: str(version + 1))
    return sample


def test_a_sample_comes_back_from_its_prompt_as_the_data_source_gave_it() -> None:
    given = group(3)
    prompt = prompt_of(given, 7, encode)
    assert prompt.token_ids == tuple(LETTERS.encode("ab")) and prompt.prompt_id == "slime/7@0"
    for place, sample in enumerate(given):
        assert new_sample(Sample, prompt, place) == replace(sample, tokens=LETTERS.encode("ab"))


def test_siblings_that_differ_come_back_as_they_were() -> None:
    given = group(3)
    given[1].metadata = {"row": 3, "hint": "x"}
    prompt = prompt_of(given, 7, encode)
    assert [new_sample(Sample, prompt, place).metadata for place in (0, 1)] == [{"row": 3}, {"row": 3, "hint": "x"}]


def test_no_two_samples_share_a_table() -> None:
    prompt = prompt_of(group(), 0, encode)
    new_sample(Sample, prompt, 0).metadata["touched"] = True
    assert new_sample(Sample, prompt, 1).metadata == {"row": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multimodal_inputs": {"images": ["x.png"]}}, "has images"),
        ({"response_length": 3}, "has a response already"),
        ({"status": Sample.Status.COMPLETED}, "has a response already"),
        ({"apply_chat_template_kwargs": {"tool": {1, 2}}}, "cannot be written as JSON"),
    ],
)
def test_a_group_that_cannot_be_rolled_out_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as refusal:
        prompt_of(group(5, **changes), 0, encode)
    assert "group 5 of the data source" in str(refusal.value) and message in str(refusal.value)


def test_a_list_of_messages_is_refused_with_the_flag_that_helps() -> None:
    given = group()
    for sample in given:
        sample.prompt = [{"role": "user", "content": "a"}]
    with pytest.raises(DataError, match="--apply-chat-template"):
        prompt_of(given, 0, encode)


def test_a_response_of_two_versions_has_the_label_of_each() -> None:
    done = trajectory((4, (10, 11), FinishReason.ABORT), (6, (12,), FinishReason.STOP))
    sample = sample_of(done)
    assert sample.tokens == [*done.prompt.token_ids, 10, 11, 12]
    assert (sample.response_length, sample.response) == (3, LETTERS.decode([10, 11, 12]))
    assert sample.rollout_log_probs == [-0.5, -0.5, -0.5] and sample.loss_mask == [1, 1, 1]
    assert sample.weight_versions == ["5", "7"] and sample.status is Sample.Status.COMPLETED
    account_for_versions(sample, done, version=6, first_rollout=100, masks_stale=False)
    assert sample.metadata["rollover"] == {"versions": [(4, 2), (6, 1)], "resumes": 1}
    assert sample.metadata["start_rollout_id"] == 104 and sample.loss_mask == [1, 1, 1]


def test_a_response_at_its_limit_is_truncated_whatever_ended_it() -> None:
    done = trajectory((4, (10,), FinishReason.ABORT), (5, (), FinishReason.LENGTH))
    assert sample_of(done).status is Sample.Status.TRUNCATED


def test_a_failed_sample_among_tables_of_rewards_has_the_mean_at_the_key() -> None:
    siblings = [Sample(reward={"score": score, "kind": "x"}) for score in (1.0, 0.0)]
    sample = new_sample(Sample, prompt_of(group(), 0, encode), 0)
    failed_sample(sample, siblings, Namespace(reward_key="score"), filler=0)
    assert sample.reward == {"score": 0.5, "kind": "x"}


class Stream:
    """A data source that counts."""

    def __init__(self) -> None:
        self.drawn = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.drawn += num_samples
        return [group(self.drawn - num_samples + i) for i in range(num_samples)]


def test_prompts_are_drawn_in_order_and_each_once() -> None:
    stream = Stream()
    source = SlimeSource(stream, encode, position=0, group_size=2)
    assert [source.prompt(i).columns["group_index"] for i in (0, 0, 1, 2, 2)] == [0, 0, 1, 2, 2]
    assert stream.drawn == source.save(lambda: None) == 3


def test_groups_that_the_journal_knows_are_passed_over() -> None:
    stream = Stream()
    stream.drawn = 40  # the checkpoint's
    source = SlimeSource(stream, encode, position=40, group_size=2)
    assert source.prompt(43).columns["group_index"] == 43
    assert source.save(lambda: None) == 44


def test_a_stream_is_not_saved_in_the_middle_of_a_draw() -> None:
    stream = Stream()
    drawing, go_on = threading.Event(), threading.Event()

    def slowly(num_samples: int) -> list[list[Sample]]:
        stream.drawn += num_samples
        drawing.set()
        assert go_on.wait(within(30.0))
        return [group(0)]

    stream.get_samples = slowly  # type: ignore[method-assign]
    source = SlimeSource(stream, encode, position=0, group_size=2)
    saved: list[int] = []
    draw = threading.Thread(target=source.prompt, args=[0])
    save = threading.Thread(target=lambda: saved.append(source.save(lambda: saved.append(stream.drawn))))
    draw.start()
    assert drawing.wait(within(30.0))
    save.start()
    save.join(0.05)
    assert not saved, "the stream has given a group that is not counted yet"
    go_on.set()
    for thread in (draw, save):
        thread.join(within(30.0))
    assert saved == [1, 1]


def test_a_stream_that_is_past_the_cursor_is_refused() -> None:
    source = SlimeSource(Stream(), encode, position=5, group_size=2)
    with pytest.raises(RunError, match=r"needs group 3 .* has given 5 already"):
        source.prompt(3)


def test_a_data_source_that_gives_too_little_is_refused() -> None:
    stream = Stream()
    with pytest.raises(DataError, match="a group of 2 samples, and --n-samples-per-prompt is 4"):
        SlimeSource(stream, encode, position=0, group_size=4).prompt(0)
    stream.get_samples = lambda num_samples: []  # type: ignore[method-assign]
    with pytest.raises(DataError, match="gave 0 groups"):
        SlimeSource(stream, encode, position=0, group_size=2).prompt(0)


def test_after_a_restart_samples_are_judged_again_all_at_once() -> None:
    """Twelve tables of rewards from a judge that needs 0.9 s for each, and then from one that forgets one."""
    forgotten: list[int] = []

    async def judge(sample: Sample) -> Sample:
        await (asyncio.Event().wait() if sample.response_length in forgotten else asyncio.sleep(0.9))
        sample.reward = {"score": 0.5, "length": float(sample.response_length)}
        return sample

    async def first_and_again() -> None:
        loop, args = asyncio.get_running_loop(), Namespace(reward_key="score")
        before, after, last = (
            SlimeScorer(args, respond=sample_of, judge=judge, loop=loop, timeout_s=1.0) for _ in range(3)
        )
        done = [replace(trajectory((0, n * (10,), FinishReason.STOP)), sample_id=SampleId(0, n)) for n in range(1, 13)]
        scored = [replace(each, reward=await before.score(each)) for each in done]
        began_s = loop.time()
        assert await after.take(scored) == await before.take(scored)
        assert loop.time() - began_s == pytest.approx(0.9)
        forgotten.append(7)
        with pytest.raises(RewardError, match=r"g0\.7 was scored before .* took longer than 1 s \(reward_timeout_s\)"):
            await last.take(scored)

    run(first_and_again())
