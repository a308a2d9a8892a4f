from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover.batch import WasteCause
from rollover.errors import DataError, RunError
from rollover.report.record import read_run as report_of
from rollover.report.samples import read_batch
from rollover.rollout.events import Event, GroupDropped, GroupOpened, Observed, SegmentEnded
from rollover.rollout.journal import Journal
from rollover.types import FinishReason, Observation, Prompt, SampleId
from rollover.workload.source import read_run
from rollover.workload.trace import TracePrompt
from tests.segments import segment


def opened(group: int, prompt: str) -> Event:
    asked = Prompt(prompt_id=prompt, token_ids=(1, 2, 3), text="", source="s")
    return GroupOpened(time_s=0.0, group_id=group, prompt=asked, group_size=2, cursor=group + 1)


def ended(group: int, index: int, tokens: int, reason: FinishReason | None) -> Event:
    return SegmentEnded(1.0, SampleId(group, index), segment(tokens, reason))


def run_of(folder: Path, *events: Event, config: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"rollout": {"max_new_tokens": 40}, "meta": {}}))
    journal = Journal(folder / "journal.sqlite")
    journal.append(events)
    journal.close()
    return folder


def test_a_response_is_as_long_as_its_segments_together(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        opened(0, "a"),
        ended(0, 0, 4, FinishReason.ABORT),
        ended(0, 1, 40, FinishReason.LENGTH),
        ended(0, 0, 3, None),
        ended(0, 0, 2, FinishReason.STOP),
        opened(1, "b"),
        ended(1, 1, 6, FinishReason.ABORT),
    )
    trace = read_run(run)
    assert trace.cap_tokens == 40
    assert trace.prompts == (
        TracePrompt(prompt_id="a", prompt_tokens=3, lengths=(9, 40)),
        TracePrompt(prompt_id="b", prompt_tokens=3, lengths=(6,), unfinished=frozenset({0})),
    )


def test_the_prompt_of_an_episode_that_its_environment_begins_is_the_opening(tmp_path: Path) -> None:
    asked = Prompt(prompt_id="a", token_ids=(), text="", source="s")
    openings = [Observed(0.5, SampleId(0, 0), Observation(ids, end_s=0.3)) for ids in ((5, 6, 7, 8), (9,))]
    first, answer = openings
    run = run_of(
        tmp_path / "run",
        GroupOpened(time_s=0.0, group_id=0, prompt=asked, group_size=1, cursor=1),
        ended(0, 0, 0, FinishReason.TURN),
        first,
        ended(0, 0, 6, FinishReason.TURN),
        answer,
        ended(0, 0, 2, FinishReason.STOP),
    )
    assert read_run(run).prompts == (TracePrompt(prompt_id="a", prompt_tokens=4, lengths=(8,)),)
    assert read_run(run).held_s == pytest.approx(2 * 0.3), "its environment acted twice"


@pytest.mark.parametrize("by", ["tokens", "turns"])
def test_the_length_of_an_episode_that_reached_a_limit_is_a_lower_bound(tmp_path: Path, by: str) -> None:
    answer = Observation((9,), "user", end=FinishReason.LENGTH if by == "turns" else None)
    events = (opened(0, "a"), ended(0, 0, 6, FinishReason.TURN), Observed(0.5, SampleId(0, 0), answer))
    last = (ended(0, 0, 2, FinishReason.LENGTH),) if by == "tokens" else ()
    (prompt,) = read_run(run_of(tmp_path / "run", *events, *last)).prompts
    assert prompt.lengths == (8 if last else 6,) and prompt.unfinished == {0}


def test_dropped_samples_count_and_a_prompt_drawn_again_is_the_same(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        opened(0, "a"),
        ended(0, 0, 4, FinishReason.STOP),
        ended(0, 1, 9, FinishReason.ABORT),
        GroupDropped(time_s=2.0, group_id=0, cause=WasteCause.DISCARDED_ON_ABORT, prompt_returned=True),
        opened(1, "a"),
        ended(1, 0, 7, FinishReason.STOP),
        ended(1, 1, 8, FinishReason.STOP),
    )
    (prompt,) = read_run(run).prompts
    assert prompt.lengths == (4, 9, 7, 8)
    assert prompt.unfinished == {1}


def test_directories_that_hold_no_trace_say_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run directory: it has no config.json"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="the trace is empty"):
        read_run(run_of(tmp_path / "fresh"))
    both = run_of(tmp_path / "both", config={"variants": {"x": {}, "y": {}}, "meta": {}})
    (both / "journal.sqlite").unlink()
    for read in (read_run, read_batch, report_of):
        with pytest.raises(RunError, match=rf"is a comparison; give one of its runs: {both / 'x'} or {both / 'y'}$"):
            read(both)
    with pytest.raises(RunError, match=r"lacks rollout.max_new_tokens"):
        read_run(run_of(tmp_path / "odd", opened(0, "a"), config={"rollout": {}, "meta": {}}))
