from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollover import cli
from rollover.hf.pieces import pieces
from rollover.report.samples import in_order, read_batch
from rollover.rollout.events import BatchConsumed, BatchTrained, Event, GroupOpened, SampleScored, SegmentEnded
from rollover.rollout.journal import Journal
from rollover.types import FinishReason, Prompt, SampleId, Segment
from tests.environments.words import char_tokenizer, ids


def segment(version: int, text: str, reason: FinishReason) -> Segment:
    return Segment(version, ids(text), (-0.5,) * len(text), reason, version, 0.0, 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that trained two samples in step 3; the second was parked once."""
    answers = {0: [("9", 1.0)], 1: [("one and", 0.0), (" 8\x1b[2J", 0.0)]}
    prompt = Prompt(prompt_id="sums/4@0", token_ids=ids("1+8"), text="1+8", source="sums", columns={"answer": "9"})
    events: list[Event] = [GroupOpened(0.0, 7, prompt, 2, 1)]
    for index, parts in answers.items():
        for number, (text, _) in enumerate(parts):
            last = number == len(parts) - 1
            reason = FinishReason.STOP if last else FinishReason.ABORT
            events.append(SegmentEnded(1.0, SampleId(7, index), segment(2 + number, text.replace("\x1b", ""), reason)))
        events.append(SampleScored(2.0, SampleId(7, index), parts[-1][1]))
    events += [BatchConsumed(3.0, 3, (7,)), BatchTrained(4.0, 3, {})]
    journal = Journal(tmp_path / "journal.sqlite")
    journal.append(events)
    journal.close()
    config = {"meta": {}, "model": {"path": "m"}, "logging": {"api_key": "abcdefgh12345678"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_batch_is_read_with_what_was_learned_from_it(run: Path) -> None:
    batch = read_batch(run)
    assert (batch.step, batch.is_trained) == (3, True)
    right, parked = batch.samples
    assert (right.relative, parked.relative) == (0.5, -0.5)
    assert (right.lag, parked.lag) == (1.0, 7 / 12)
    assert parked.breaks == [(7, "parked, version 2 → 3")]
    assert in_order(batch.samples, "length") == [parked, right]
    assert in_order(batch.samples, "reward") == [right, parked]


def test_samples_are_shown_with_their_interruptions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run), "--sort", "length", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 3 trained 2 samples" in shown
    assert "g7.1  sums/4@0  reward 0  against its group -0.500  12 tokens  lag 0.58" in shown
    assert "one and⟦parked, version 2 → 3⟧ 8[2J" in shown
    assert '{"answer": "9"}' in shown


def test_what_a_model_writes_cannot_steer_a_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(run / "journal.sqlite")
    list(journal.read())
    prompt = Prompt(prompt_id="sums/5@0", token_ids=(3,), text="\x1b[31mabcdefgh12345678", source="other")
    more = [GroupOpened(5.0, 8, prompt, 1, 2), SegmentEnded(6.0, SampleId(8, 0), segment(3, "x", FinishReason.LENGTH))]
    journal.append([*more, SampleScored(6.0, SampleId(8, 0), 0.0), BatchConsumed(7.0, 4, (8,))])
    journal.close()
    assert cli.main(["samples", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31m" in shown and "\x1b[31m" not in shown
    assert "abcdefgh12345678" not in shown
    assert "cut at the limit" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--step", "9"], "has no batch of step 9: it has the batches of steps 0 to 3"), (["--source", "x"], "no sample of source 'x'")],
)  # fmt: skip
def test_what_is_not_there_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["samples", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pieces_join_to_the_text() -> None:
    class Bytes:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return bytes(token_ids).decode(errors="replace")

    text = "a → 猫 b"
    found = pieces(Bytes(), list(text.encode()))
    assert "".join(found) == text
    assert found[2:5] == ["", "", "→"]
