"""A judge behind a real HTTP server that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import re
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.rewards import JudgeConfig, judge
from rollover.environments.rewards.base import RewardSpec
from rollover.environments.scorer import RewardScorer
from rollover.errors import DataError, RewardError
from rollover.tasks.columns import ColumnMap
from rollover.tasks.sources import JsonlConfig
from tests.environments.judges import Answer, JudgeServer, Script, completion, judge_server
from tests.environments.test_scorer import prompt, trajectory
from tests.environments.words import char_tokenizer

pytestmark = pytest.mark.real_time
SETTINGS = {"model": "m", "template": "{prompt}|{response}|{rubric}"}


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_FIRST_BACK_OFF_S", 0.0)


@asynccontextmanager
async def judging(
    script: Script, folder: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[RewardScorer, JudgeServer]]:
    async with judge_server(script) as server:
        config = JudgeConfig(**({"url": server.url} | SETTINGS | settings))
        spec = RewardSpec(source="s", config=config, prompt_column="q", answer_column="a", columns=("q", "a"))
        scorer = RewardScorer([spec], char_tokenizer(), folder)
        try:
            yield scorer, server
        finally:
            await scorer.close()


async def score_of(script: Script, text: str = "abc", columns: dict[str, Any] | None = None, **settings: Any) -> float:
    async with judging(script, **settings) as (scorer, _):
        return await scorer.score(trajectory(prompt(**(columns or {"q": "1+1?", "a": "2"})), text))


async def test_a_request_holds_all_that_decides_the_reply() -> None:
    template = "{prompt}|{response}|{rubric}|{answer}|{low}|{high}"
    options = {"rubric": "Be kind.", "seed": 3, "max_tokens": 50, "params": {"think": False}, "template": template}
    async with judging(lambda body: "Because.\nScore: 0.5", **options) as (scorer, server):
        assert await scorer.score(trajectory(prompt(q="1+1? {response}", a="2"), "{rubric} abc")) == 0.5
        assert server.requests == [
            {
                "model": "m",
                "messages": [{"role": "user", "content": "1+1? {response}|{rubric} abc|Be kind.|2|0|1"}],
                "temperature": 0,
                "seed": 3,
                "max_tokens": 50,
                "think": False,
            }
        ]
        assert {name: cost for name, cost in scorer.costs().items() if name.startswith("judge/")} == {
            "judge/requests": 1.0,
            "judge/recalled": 0.0,
            "judge/prompt_tokens": 100.0,
            "judge/reply_tokens": 7.0,
        }


async def test_messages_reach_the_judge_without_the_chat_template() -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert await score_of(
        lambda body: f"score: {len(body['messages'][0]['content'])}",
        columns={"q": asked, "a": "2"},
        range=(0, 99),
        template="{prompt}{response}",
    ) == len("system: Be brief.\n\nuser: 1+1?abc")


@pytest.mark.parametrize(
    ("reply", "settings", "score"),
    [
        ("Score: 0.25", {}, 0.25),
        ("first score 0.1, but then: **Score**: 1", {}, 1.0),
        ("x=0.7; x=0.9", {"pattern": r"x=(\S+?)(?:;|$)"}, 0.9),
        ('Well. {"points": 0.5} Done.', {"json_key": "points"}, 0.5),
        ("0.125!", {"parser": "tests.environments.functions:parsed"}, 0.125),
        ("Score: -3", {"range": (-5, 5)}, -3.0),
        ("Score: \u2212.5", {"range": (-5, 5)}, -0.5),
        ("Score: 0.8/1.0.", {}, 0.8),
        ("Score: **4** out of 5", {"range": (0, 5)}, 4.0),
        ("Score (0-1): 0.8", {}, 0.8),
        ("Score [0, 1]: **0.9**", {}, 0.9),
        ("score (1 to 10) = 8", {"range": (1, 10)}, 8.0),
        ("Score (1 = bad, 5 = acceptable, 10 = excellent work): 7", {"range": (1, 10)}, 7.0),
        ("Score: (0.3)", {}, 0.3),
        ("<think>Score: 1?</think>\nThe <think> is empty. Score: 0.5", {}, 0.5),
        ('{"points": 1}</think>{"points": 0.5}', {"json_key": "points"}, 0.5),
        ("1</think>0.125!", {"parser": "tests.environments.functions:parsed"}, 0.125),
    ],
)
async def test_the_score_is_read_by_pattern_key_or_function(reply: str, settings: dict[str, Any], score: float) -> None:
    assert await score_of(lambda body: reply, **settings) == score


@pytest.mark.parametrize(
    ("reply", "settings", "message"),
    [
        ("I refuse.", {}, "the judge's reply has no score: I refuse."),
        ("Score: 7", {}, "the judge's score of 7 is outside reward.range"),
        *(
            (f"Score: {odd}", {}, "has no score")
            for odd in ("1/10", "1 out of 10", "1%", "1e-1", "0,5", "1.0.1", "0.5-0.7", "0 to 1")
        ),
        ("Underscore 1", {}, "has no score"),
        ("Score: 1e400", {"pattern": r"\S+$"}, "the judge's score of inf is outside"),
        ("nan", {"pattern": r"\S+$"}, "the judge's score of nan is outside"),
        ("Score: x", {"pattern": r"Score: (\w)"}, "the judge's score is no number: 'x'"),
        ("<think>Score: 1</think>\nno idea", {}, "the judge's reply has no score: no idea"),
        ("\n<think>Score: 1", {}, "the judge's reply ends within a thought"),
        ('{"a": 1}', {"json_key": "b"}, "no JSON object with 'b'"),
        ('{"b": true}', {"json_key": "b"}, "the judge's score is no number: 'True'"),
        ("[" * 100_000, {"json_key": "b"}, "no JSON object with 'b'"),
        (None, {}, "the judge replied without text"),
        (completion("Score: 1", "length"), {}, "was cut at 1024 tokens (reward.max_tokens)"),
        ("?", {"parser": "tests.environments.functions:parsed"}, "could not convert string to float"),
    ],
)
async def test_a_reply_without_a_usable_score_fails_its_sample_alone(reply: Any, settings: Any, message: str) -> None:
    with pytest.raises(RewardError, match=rf"^reward judge m of source 's': .*{re.escape(message)}"):
        await score_of(lambda body: reply, retries=0, **settings)


async def test_a_parser_that_returns_text_is_told_what_to_return() -> None:
    parser = "tests.environments.functions:spelled"
    told = f"reward.parser {parser} must return a number, a dict of numbers or None, got str '0.5'"
    with pytest.raises(DataError, match=told):
        await score_of(lambda body: "0.5", parser=parser)


BAD = [
    Answer(500, b"oops"),
    Answer(429, b"busy", headers="Retry-After: 0\r\n"),
    Answer(503, b"", headers="Retry-After: soon\r\n"),
    Answer(200, b"{not json"),
    Answer(200, b"[" * 100_000),
    Answer(200, b'{"choices": []}'),
    Answer(200, b'{"choices": [{"message": null}]}'),
    Answer(200, b'{"choices": [{"message"', cut=True),
    Answer(200, b"x" * (judge._MOST_BYTES + 1)),
]


async def test_failures_that_may_pass_are_tried_again_until_the_server_is_well() -> None:
    for number in range(len(BAD)):
        answers = iter([BAD[number], BAD[number - 1], "Score: 1"])
        assert await score_of(lambda body, answers=answers: next(answers), retries=2) == 1.0
    for retries in (0, 1, 2):
        async with judging(lambda body: BAD[0], retries=retries) as (scorer, server):
            with pytest.raises(RewardError, match=r"/v1/chat/completions answered 500: oops \(prompt s/0@0\)"):
                await scorer.score(trajectory(prompt(q="1+1?", a="2"), "abc"))
            assert len(server.requests) == retries + 1


async def test_a_server_is_asked_again_when_it_says_however_short_the_deadline_is() -> None:
    loop = asyncio.get_running_loop()
    answers, asked_at_s = iter([Answer(429, b"busy", headers="Retry-After: 1\r\n"), "Score: 1"]), list[float]()

    def answer(body: Any) -> Any:
        asked_at_s.append(loop.time())
        return next(answers)

    assert await score_of(answer, timeout_s=0.5, retries=1) == 1.0
    assert len(asked_at_s) == 2 and asked_at_s[1] - asked_at_s[0] >= 1


async def test_a_judge_on_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    assert await score_of(lambda body: "Score: 1", retries=0) == 1.0


@pytest.mark.parametrize("status", [301, 400, 401, 404])
async def test_a_request_that_the_server_refuses_ends_the_run_at_once(status: int) -> None:
    answers = iter([Answer(status, b"no such model"), "Score: 1", Answer(status, b"too long")])
    async with judging(lambda body: next(answers)) as (scorer, server):

        async def score(text: str) -> float:
            return await scorer.score(trajectory(prompt(q="?", a="2"), text))

        with pytest.raises(DataError, match=f"answered {status}: no such model") as caught:
            await score("abc")
        assert not isinstance(caught.value, RewardError)
        assert await score("abc") == 1.0
        with pytest.raises(RewardError, match=f"answered {status}: too long"):
            await score("abcd")
        assert len(server.requests) == 3, "and is not tried again"


async def test_what_a_judge_has_proved_outlasts_a_restart(tmp_path: Path) -> None:
    answers = iter(["Score: 1", Answer(400, b"too long"), Answer(401, b"wrong key")])
    async with judging(lambda body: next(answers), folder=tmp_path) as (scorer, _):
        assert await scorer.score(trajectory(prompt(q="?", a="2"), "abc")) == 1.0
    async with judging(lambda body: next(answers), folder=tmp_path) as (scorer, _):
        with pytest.raises(RewardError, match="answered 400: too long"):
            await scorer.score(trajectory(prompt(q="?", a="2"), "abcd"))
        with pytest.raises(DataError, match="answered 401: wrong key"):
            await scorer.score(trajectory(prompt(q="?", a="2"), "abcd"))


async def test_a_judge_that_is_silent_or_gone_fails_its_sample_by_name() -> None:
    async def silent(body: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RewardError, match=r"timed out after 0.05 s \(reward.timeout_s\)"):
        await score_of(silent, timeout_s=0.05, retries=1)
    with pytest.raises(RewardError, match=r"http://127.0.0.1:9/v1/chat/completions: ConnectError"):
        await score_of(silent, url="http://127.0.0.1:9/v1", retries=1)


async def test_no_more_requests_are_open_than_the_config_allows() -> None:
    release = asyncio.Event()

    async def held(body: Any) -> str:
        await release.wait()
        return "Score: 1"

    async with judging(held, concurrency=3) as (scorer, server):
        texts = ["a" * n for n in range(1, 13)]
        tasks = [asyncio.create_task(scorer.score(trajectory(prompt(q="?", a="2"), text))) for text in texts]
        while server.num_open < 3:
            await asyncio.sleep(0)
        release.set()
        assert await asyncio.gather(*tasks) == [1.0] * 12
        assert server.most_open == 3


async def test_a_reply_is_not_asked_for_again_after_a_restart(tmp_path: Path) -> None:
    scores = iter("123456789")
    script: Script = lambda body: f"Score: 0.{next(scores)}"  # noqa: E731

    async def once(**settings: Any) -> float:
        return await score_of(script, folder=tmp_path, **settings)

    gone = {"url": "http://127.0.0.1:1/v1"}
    assert await once() == 0.1
    assert await once(**gone) == 0.1
    changes = ({"text": "other"}, {"seed": 1}, {"template": "{response}"}, {"model": "n"})
    assert [await once(**change) for change in changes] == [0.2, 0.3, 0.4, 0.5]
    assert await once(**gone, pattern=r"0\.(.)", range=(0, 9)) == 1.0, "a reply is read anew"
    assert stat.S_IMODE((tmp_path / "judge.sqlite").stat().st_mode) == 0o600


async def test_the_key_reaches_the_server_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-4711")
    caplog.set_level("DEBUG", logger="rollover")
    rejected = Answer(401, b"bad key secret-4711")
    async with judging(lambda body: rejected, tmp_path, api_key_env="JUDGE_KEY") as (scorer, server):
        with pytest.raises(DataError, match=r"answered 401: bad key \[hidden\]") as caught:
            await scorer.score(trajectory(prompt(q="?", a="2"), "abc"))
        assert "authorization: bearer secret-4711" in server.headers[0].lower()
    assert "4711" not in str(caught.value)
    assert "4711" not in caplog.text
    assert b"4711" not in (tmp_path / "judge.sqlite").read_bytes()
    monkeypatch.setenv("JUDGE_KEY", "secret-4711\n")
    with pytest.raises(DataError, match=r"the environment variable JUDGE_KEY holds no key") as caught:
        await score_of(lambda body: "Score: 1", api_key_env="JUDGE_KEY")
    assert "4711" not in str(caught.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(DataError, match=r"reward.api_key_env: the environment variable JUDGE_KEY is not set"):
        await score_of(lambda body: "Score: 1", api_key_env="JUDGE_KEY")


def test_a_dry_run_finds_out_whether_the_address_of_a_judge_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        config = JudgeConfig(url=f"http://{place}/v1", model="m")
        assert [*config.findings()] == [f"judge m: something listens at {place}"]
    assert [*config.findings()] == [f"warning: judge m: nothing answers at {place} (Connection refused)"]


def test_a_template_that_asks_for_an_answer_needs_the_column() -> None:
    config = JudgeConfig(url="http://h/v1", model="m", template="{response} {answer}")
    assert config.needs_answer
    assert not JudgeConfig(url="http://h/v1", model="m").needs_answer


def test_a_judge_reads_the_question_without_the_chat_template() -> None:
    config = JsonlConfig(name="s", path="s.jsonl", reward=JudgeConfig(url="http://127.0.0.1:1/v1", model="m"))
    row = {"question": "1+1?", "answer": "2"}
    kept = ColumnMap(config.column_settings(), row, "row 1").kept(row, "row 1")
    assert kept == row


async def test_a_score_that_was_missing_is_asked_for_again_from_a_mended_judge(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has no score"):
        await score_of(lambda body: "I refuse.", folder=tmp_path)
    async with judging(lambda body: "Score: 1", folder=tmp_path) as (scorer, _):
        assert await scorer.score(trajectory(prompt(q="?", a="2"), "abc")) == 1.0
        assert scorer.costs()["judge/requests"] == 1.0 and scorer.costs()["judge/recalled"] == 0.0
