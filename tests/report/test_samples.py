from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollover import cli
from rollover.algorithms import AlgorithmConfig, resolve
from rollover.algorithms.config import algorithm
from rollover.batch import WasteCause
from rollover.hf.pieces import pieces
from rollover.privacy import HIDDEN, Redactor, redacted_text
from rollover.report.sample_cards import read_cards, sample_cards
from rollover.report.samples import (
    TrainedBatch,
    TrainedSample,
    algorithm_of,
    blanked,
    chosen,
    compared,
    in_order,
    read_batch,
)
from rollover.rollout.events import BatchConsumed, BatchTrained, Event, GroupOpened, SampleScored, SegmentEnded
from rollover.rollout.journal import Journal
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment
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
        components = {"exact": 1.0, "style": 0.5} if index == 0 else {}
        events.append(SampleScored(2.0, SampleId(7, index), parts[-1][1], components=components))
    events += [BatchConsumed(3.0, 3, (7,)), BatchTrained(4.0, 3, {})]
    journal = Journal(tmp_path / "journal.sqlite")
    journal.append(events)
    journal.close()
    config = {"meta": {}, "model": {"path": "m"}, "logging": {"api_key": "abcdefgh12345678"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def more_of(run: Path, *events: Event) -> None:
    journal = Journal(run / "journal.sqlite")
    list(journal.read())
    journal.append(events)
    journal.close()


def test_a_batch_is_read_with_what_was_learned_from_it(run: Path) -> None:
    batch = read_batch(run)
    assert (batch.step, batch.is_trained) == (3, True)
    right, parked = batch.samples
    assert (right.relative, parked.relative) == (0.5, -0.5)
    assert (right.components, parked.components) == ({"exact": 1.0, "style": 0.5}, {})
    assert (right.lag, parked.lag) == (1.0, 7 / 12)
    assert parked.breaks(str) == [(7, "parked, version 2 → 3")]
    turns = tuple(segment._replace(finish_reason=FinishReason.TURN) for segment in parked.segments)
    answers = (Observation((), "a", parent=0), Observation((), "b", end=FinishReason.STOP))
    begun = (turns[0]._replace(token_ids=(), rollout_logprobs=()), *turns)
    tree = replace(parked, segments=begun, observations=(Observation(ids("8+1"), "p"), *answers))
    described = [text for _, text in tree.breaks(str)]
    assert described == ["turn 2, from the beginning: a", "environment: b"]  # an opening is the prompt
    assert tree.prompt_read(char_tokenizer()) == "8+1" and parked.prompt_read(char_tokenizer()) == "1+8"
    assert in_order(batch.samples, "length") == [parked, right]
    assert in_order(batch.samples, "reward") == [right, parked]


def test_samples_are_shown_with_their_interruptions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["samples", str(run), "--sort", "length", "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "step 3 trained 2 samples" in shown
    assert "g7.1  sums/4@0  reward 0  against its group -0.500  12 tokens  lag 0.58" in shown
    assert "one and⟦parked, version 2 → 3⟧ 8[2J" in shown
    assert '{"answer": "9"}' in shown
    assert cli.main(["samples", str(run), "--show", "1"]) == 0
    assert "g7.0  sums/4@0  reward 1 (exact 1, style 0.5)  against its group +0.500" in capsys.readouterr().out
    more_of(run, BatchTrained(5.0, 3, {WasteCause.SKIPPED: 13}))
    assert cli.main(["samples", str(run)]) == 0
    assert "step 3 skipped 2 samples" in capsys.readouterr().out and ', batch skipped"' in read_cards(run)


def test_a_run_from_scratch_without_a_warm_up_is_read_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model").rename(run / "model-untrained")
    (run / "config.json").write_text('{"meta": {}, "model": {"path": null}}')
    assert cli.main(["samples", str(run)]) == 0
    assert "one and⟦parked, version 2 → 3⟧" in capsys.readouterr().out


@pytest.mark.parametrize(("fact", "known"), [("model", {"knows_rewards": False}), ("hf_checkpoint", {"job": "trl"})])
def test_a_run_inside_another_trainer_is_read_and_its_rewards_are_not_made_up(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fact: str, known: dict[str, Any]
) -> None:
    folder = (run / "model").rename(tmp_path / "elsewhere")
    (run / "config.json").write_text(json.dumps({"meta": {fact: str(folder)} | known}))
    assert cli.main(["samples", str(run)]) == 0
    shown, cards = capsys.readouterr().out, read_cards(run)
    assert "g7.1  sums/4@0  reward not on record  12 tokens  lag 0.58" in shown
    assert "<b>longest</b> g7.1: 12 tokens, lag 0.58" in cards and "<b>worst</b>" not in cards
    assert "not on record: the trainer has computed it from the batch" in cards
    assert "against its group" not in shown + cards and "nan" not in shown + cards
    assert cli.main(["samples", str(run), "--sort", "advantage"]) == 2
    assert "no sample of step 3 is compared with its group" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        {"name": "dapo", "advantage": "turn_std", "group_filter": "none"},
        {"advantage": "whitened", "kl_in": "reward", "kl_estimator": "k1", "kl_coef": 0.01},
        {"name": "reinforce++", "kl_in": "loss", "kl_estimator": "k3"},
        {"correction_bounds": (0.0, math.inf), "guard": (0.5, 2.0)},
    ],
)
def test_a_run_s_algorithm_is_known_whatever_was_set(given: dict[str, Any]) -> None:
    written = json.loads(json.dumps({"algorithm": asdict(config := AlgorithmConfig(**given))}))
    assert algorithm_of(written) == resolve(config)
    assert algorithm_of({"algorithm": {"adv_estimator": "grpo"}}) is algorithm_of({}) is None


def test_a_checkpoint_has_the_tokenizer_of_a_model_that_is_no_longer_there(run: Path) -> None:
    (run / "config.json").write_text('{"meta": {}, "model": {"path": "moved/or/relative/model"}}')
    (run / "checkpoints").mkdir()
    (run / "model").rename(run / "checkpoints/step_10")
    (run / "checkpoints/step_9").mkdir()
    assert "1+8" in read_cards(run)


def trained(run: Path, prompt: Prompt, decoded: Segment) -> None:
    """Let the run train one sample more, in step 4."""
    one = SampleId(8, 0)
    begun = (GroupOpened(5.0, 8, prompt, 1, 2), SegmentEnded(6.0, one, decoded))
    more_of(run, *begun, SampleScored(6.0, one, 0.0), BatchConsumed(7.0, 4, (8,)))


def test_what_a_model_writes_cannot_steer_a_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = Prompt(prompt_id="sums/5@0", token_ids=(3,), text="\x1b[31mabcdefgh12345678", source="other")
    trained(run, prompt, segment(3, "key abcdefgh12345678.", FinishReason.LENGTH))
    assert cli.main(["samples", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[31m" in shown and "\x1b[31m" not in shown
    assert "abcdefgh12345678" not in shown
    assert "cut at the limit" in shown


def test_secrets_of_a_row_are_shown_nowhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"meta": {"password": "zzz1", "deep": [{"token": "zzz2"}]}, "note": "api_key: zzz3", "code": "key=len"}
    prompt = Prompt(prompt_id="s/5@0", token_ids=(3,), text="password: zzz4, key=len", source="other", columns=columns)
    trained(run, prompt, segment(3, "1", FinishReason.STOP))
    assert cli.main(["samples", str(run)]) == 0
    for shown in (capsys.readouterr().out, read_cards(run)):
        assert "zzz" not in shown and shown.count(HIDDEN) == 4 and shown.count("key=len") == 2


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


def sample(
    index: int, *texts: str, reward: float = 0.0, relative: float = 0.5, step: int = 3, cut: bool = False
) -> TrainedSample:
    """A sample of some segments, each sampled by a version of its own, the last by the version of the step."""
    last = len(texts) - 1
    reasons = [FinishReason.ABORT] * last + [FinishReason.LENGTH if cut else FinishReason.STOP]
    return TrainedSample(
        sample_id=SampleId(7, index),
        prompt=Prompt(prompt_id="sums/4@0", token_ids=ids("1+8"), text="1+8", source="sums"),
        segments=tuple(segment(step - last + i, text, reasons[i]) for i, text in enumerate(texts)),
        step=step,
        reward=reward,
        shaping=0.0,
        relative=relative,
    )


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["my pass", "word = hun", "ter2222!"], ["my pass", "word = [hidden]", ""]),
        (["hf_", "a" * 16, " and ", "hf_" + "b" * 16, " end"], ["[hidden]", "", " and ", "[hidden]", " end"]),
        (["no", "thing"], ["no", "thing"]),
        (["aa hf_", "a" * 20, "\naa"], ["aa [hidden]", "", "\naa"]),
    ],
)
def test_a_secret_over_several_tokens_is_blanked(parts: list[str], expected: list[str]) -> None:
    assert blanked(parts, redacted_text) == expected
    assert "".join(expected) == redacted_text("".join(parts))


def test_a_text_that_a_secret_begins_with_hides_nothing_of_it() -> None:
    shown = blanked(["xa", "b", "xx", "ab"], lambda text: text.replace("xab", HIDDEN))
    assert shown == ["[hidden]", "", "x[hidden]", ""]


def test_samples_are_chosen_by_length_reward_lag_and_at_random() -> None:
    samples = [sample(i, "x" * (i + 1), reward=float(i)) for i in range(20)]
    samples += [sample(20 + i, *["y"] * (i + 2), reward=50.0) for i in range(4)]
    found = chosen(samples)
    by_reason = {reason: [s.sample_id.index for why, s in found if why == reason] for reason, _ in found}
    assert by_reason["longest"] == [19, 18, 17]
    assert by_reason["worst"] == [0, 1, 2]
    assert by_reason["most changed"] == [23, 22, 21]
    assert len(by_reason["random"]) == 3 and found == chosen(samples)
    assert len({s.sample_id for _, s in found}) == 12
    assert chosen([]) == []


def test_tokens_without_a_gradient_are_known_from_the_algorithm() -> None:
    old = sample(0, "a", "b")
    assert old.untrained(algorithm("grpo")) == ["", ""]
    assert old.untrained(algorithm("grpo", correction="mask_stale")) == ["masked: stale", ""]
    assert sample(0, "a", cut=True).untrained(algorithm("grpo", mask_truncated=True)) == ["masked: cut at the limit"]
    for number in (1, 3, 6):  # a mean of three is not 0.1
        equal = compared([sample(i, "a", reward=0.1) for i in range(number)])
        assert {each.relative for each in equal} == {None if number == 1 else 0.0}
        assert equal[0].untrained(algorithm("grpo")) == ["advantage 0"]
    assert sample(0, "a", relative=0.0).untrained(algorithm("grpo", kl_coef=0.1)) == [""]
    assert old.untrained(None) == ["", ""]


EVIL = "</div></textarea><script>alert(1)</script>\u202eevil"


def test_what_a_model_writes_is_shown_as_text(run: Path) -> None:
    tokens = list(EVIL) + [" hf_"] + ["a"] * 16
    tokenizer = SimpleNamespace(decode=lambda token_ids, **_: "".join(tokens[i] for i in token_ids))
    reasons = (FinishReason.ABORT, FinishReason.STOP)
    segments = [
        Segment(3 + i, tuple(part), (-0.05,) * len(part), reason, 3 + i, 0.0, 1.0)
        for i, (part, reason) in enumerate(zip((range(5), range(5, len(tokens))), reasons, strict=True))
    ]
    key = f"{EVIL} hf_{'a' * 16}"
    prompt = Prompt(prompt_id=EVIL, token_ids=(3,), text=key, source=EVIL, columns={EVIL: key})
    one = replace(sample(0, "x", step=4), prompt=prompt, segments=tuple(segments), components={EVIL: 0.25})
    page = sample_cards(TrainedBatch(4, (one,), True), algorithm("grpo"), tokenizer, Redactor(prose=True))
    assert "<script" not in page and "</textarea" not in page and "\u202e" not in page
    assert "aaaaa" not in re.sub("<[^>]*>", "", page) and page.count("[hidden]") == 3
    assert page.count("\\u202eevil") == 5, "prompt, its id, two of its column and the component"
    assert "<mark>parked, version 3 → 4</mark>" in page
    assert '<i class="p0" title="-0.05">&lt;</i>' in page
    assert re.search(r'title="version 3, lag 1".*title="version 4, lag 0"', page)


def test_the_middle_of_a_long_response_is_left_out() -> None:
    text = "a" * 400 + "b" * 5000 + "c" * 400
    page = sample_cards(TrainedBatch(3, (sample(0, text),), True), None, char_tokenizer(), Redactor(prose=True))
    shown = re.findall(r"<i [^>]*>(.)</i>|<mark>([^<]*)</mark>", page)
    assert [t or mark for t, mark in shown] == [*"a" * 400, "5,000 tokens are left out", *"c" * 400]
