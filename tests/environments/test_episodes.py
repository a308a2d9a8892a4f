"""Environments of episodes: what tools and classes of the user's may do, in their process and to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rollover.environments.episodes import ClassConfig, ToolsConfig
from rollover.environments.episodes.arguments import fitted
from rollover.environments.episodes.base import EnvironmentSettings
from rollover.environments.episodes.worker import Holder
from rollover.errors import DataError
from tests.environments.games import LOOPS, Session

HERE = "tests.environments.games"
TOOLS = ToolsConfig(functions=(f"{HERE}:add", f"{HERE}:give", f"{HERE}:move"))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def given(what: str) -> str:
    """A call of the tool that computes what it is given."""
    return call("give", what=what)


def stepped(config: EnvironmentSettings, *texts: str, seed: int = 7) -> list[dict[str, Any]]:
    return stepped_in(config, {"start": 5}, *texts, seed=seed)


def stepped_in(config: EnvironmentSettings, row: Any, *texts: str, seed: int = 7) -> list[dict[str, Any]]:
    """Return the answers of an environment to turns; to an empty one first, if it writes a part of the prompt."""
    holder, turns = Holder(config), [""] * config.writes_prompts + [*texts]
    answers = [holder.answer(request(turn, text, row=row, seed=seed)) for turn, text in enumerate(turns)]
    holder.forget("g0.0")
    return answers


def request(turn: int, text: str = "", *, key: str = "g0.0", row: Any = MappingProxyType({}), seed: int = 7) -> Any:
    action = {"text": text, "token_ids": []}
    return {"key": key, "row": row, "seed": seed, "num_turns": turn, "action": action}


def test_a_tool_that_cannot_be_hashed_gets_its_arguments_too() -> None:
    @dataclass
    class Adder:
        by: int

        def __call__(self, a: int) -> int:
            return a + self.by

    assert fitted(Adder(2), {"a": "3"}) == {"a": 3}


pytestmark = pytest.mark.usefixtures("harmless_modules")


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (call("add", a=1, b=2), ["3"]),
        (f"so {call('add', a=1, b=2)} and {given('asyncio.sleep(0, 4)')}", ["3", "4"]),
        (call("add", a=1), ["Error: TypeError: add() missing 1 required positional argument: 'b'"]),
        (call("ad", a=1, b=2), ["Error: there is no tool 'ad'; did you mean 'add'?"]),
        (call("move", by="3", way="down", speed=2, at={"a": ["1", 2.0]}, word="3"), ["3 DOWN 2 {'a': [1, 2]} '3'"]),
        (call("move", by=3.0, speed="-0.5", at='{"a": null}', word=None), ["3 UP -0.5 {'a': None} None"]),
        (call("move", by="three"), ["Error: TypeError: argument 'by': Input should be a valid integer, unable to"]),
        (call("move", by=1, way="left"), ["Error: TypeError: argument 'way': Input should be 'up' or 'down', got 'l"]),
        (call("move", by=1, word=3), ["Error: TypeError: argument 'word': Input should be a valid string, got 3"]),
        (call("move", by=1, at={"a": [0.5]}), ["Error: TypeError: argument 'at': Input should be a valid integer, g"]),
        ("<tool_call>{nonsense}</tool_call>", ["Error: the call is no JSON"]),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', ["Error: the arguments of the call are no"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', ["3"]),
        (given("1 / 0"), ["Error: ZeroDivisionError: division by zero"]),
        (given("sys.exit(3)"), ["Error: SystemExit: 3"]),
        (given("(_ for _ in ()).throw(KeyboardInterrupt)"), ["Error: KeyboardInterrupt"]),
        (call("add", a=1, b=2) * 35, [*["3"] * 32, "Error: the last 3 calls were not made: a turn may have 32"]),
        (given("'a\ud83d\ude00b\ud83d'"), ["a😀b\ufffd"]),
        (given(r"'a\udc80b'"), ["a\ufffdb"]),
        ('<tool_call>{"name": "give", "arguments": "{\\"what\\": \\"\'a\\\\ud83d\'\\"}"}</tool_call>', ["a\ufffd"]),
        ("#### 46", []),
        (f"<think>within <tool_call></tool_call>: {given('1 / 0')}</think>{call('add', a=1, b=2)}", ["3"]),
        (f"The <tool_call> tag, then. {call('add', a=1, b=2)}", ["3"]),
        (given("'a <tool_call>'"), ["a <tool_call>"]),
        (f'<tool_call>{{"name": "add"{call("add", a=1, b=2)}', ["Error: the call is no JSON", "3"]),
        ("<tool_call>add(1, 2)</tool_call>", ["Error: the call is no JSON"]),
        ("<think>I need no <tool_call></think>It is 4, without a <tool_call>.", []),
        (f"<think>{call('ad')} or <tool_call>{{</think>" + given("'a </think> b'"), ["a </think> b"]),
    ],
)
def test_calls_are_answered_and_mistakes_are_answers(text: str, answers: Sequence[str]) -> None:
    (found,) = stepped(TOOLS, text)
    assert found["done"] is not bool(answers)
    assert len(found["messages"]) == len(answers)
    for message, expected in zip(found["messages"], answers, strict=True):
        assert message["role"] == "tool" and message["content"].startswith(expected)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("[Point(1.5), {2, 1}, None]", '[{"x": 1.5}, [1, 2], null]'),
        ("__import__('decimal').Decimal('0.1')", '"0.1"'),
        ("[np.int64(3), np.eye(2)]", "[3, [[1.0, 0.0], [0.0, 1.0]]]"),
        ("[Bare()]", "Error: TypeError: the tool has returned Bare; return text or JSON"),
        ("len.__call__", "Error: TypeError: the tool has returned method-wrapper; return text or JSON"),
        ("float('nan')", "Error: ValueError: Out of range float values are not JSON compliant"),
    ],
)
def test_what_a_tool_returns_is_read_alike_in_every_process(value: str, answer: str) -> None:
    assert stepped(TOOLS, given(value))[0]["text"].startswith(answer)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[(7, {})]", "it has returned (7, {})"),
        ("[('add', [1])]", "it has returned ('add', [1])"),
        ("None", "'NoneType' object is not iterable"),
    ],
)
def test_a_parser_that_returns_no_calls_is_named(returned: str, problem: str) -> None:
    (found,) = stepped(replace(TOOLS, parser=f"{HERE}:give"), returned)
    expected = f"environment.parser {HERE}:give must return a list of (name, arguments), a text and a table (TypeError"
    assert found["reason"] == f"{expected}: {problem})"


def test_a_parser_reads_calls_in_json_or_in_the_user_s_own_way() -> None:
    in_json = replace(TOOLS, parser="json")
    assert stepped(in_json, '{"name": "add", "arguments": {"a": 1, "b": 2}}')[0]["text"] == "3"
    two = '```json\n[{"name": "add", "parameters": {"a": 1, "b": 2}}, {"name": "give"}]\n```'
    assert stepped(in_json, two)[0]["text"].startswith("3\nError")
    assert stepped(in_json, f"```python\nadd(1, 2)\n```\nand now\n{two}")[0]["text"].startswith("3\nError")
    for said in ("done.", "```python\n1\n```\nor\n```python\n2\n```", f"<think>{two}</think>done."):
        assert stepped(in_json, said)[0]["done"]
    own = replace(TOOLS, parser=f"{HERE}:plus")
    assert [a["text"] for a in stepped(own, "1+2", "nothing")] == ["3", ""]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("12", "it returned int: return a text, messages, a table with messages, reward and done, or None"),
        ("{'messages': 'a', 'reward': float('nan')}", "its reward is nan: not a finite number within 1e+15"),
        ("{'messages': 'a', 'reward': 'good'}", "its reward is 'good', which is no number"),
        ("{'reward': 1}", "its answer has no message although the episode is not done"),
        ("[{'role': 'user', 'content': [1]}]", "a message of its answer is no text and has none"),
        ("{'content': 'a', 'at': {1}}", "a message of its answer has what JSON does not have (Object of type set"),
        ("'a' * 1_000_001", "its answer has more than 1,000,000 characters"),
        ("{'messages': 'a', 'score': 1}", "its answer has 'score'; it may have messages, reward and done"),
        ("{'messages': 'a', 'done': 1}", "done is 1: it must be True or False"),
        ("{'messages': 'a', 'reward': 10**400}", "its reward is 1000"),
        ("('a', 1.0, False, {})", "a message of its answer is no text and has none: 1.0: return a text, messages"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_answer_that_cannot_be_used_fails_with_the_reason(answer: str, reason: str) -> None:
    (found,) = stepped(ClassConfig(factory=f"{HERE}:Says"), answer)
    assert found["failure"] in ("raised", "refused") and found["reason"].startswith(reason)


def test_answers_of_a_class_are_texts_messages_or_the_end() -> None:
    end = "{'messages': 'last', 'reward': 2, 'done': True}"
    calls = "[{'tool_calls': [{'name': 'f'}], 'name': None}]"
    texts = ["'hello'", "[{'role': 'system', 'content': 'be brief'}]", end, calls]
    first, second, third, called = stepped(ClassConfig(factory=f"{HERE}:Says"), *texts)
    assert called["messages"] == [{"role": "user", "content": "", "tool_calls": [{"name": "f"}]}]
    assert first["messages"] == [{"role": "user", "content": "hello"}]
    assert second["messages"] == [{"role": "system", "content": "be brief"}]
    assert (third["done"], third["reward"], third["text"]) == (True, 2.0, "last")
    assert stepped(ClassConfig(factory=f"{HERE}:Says"), "None")[0]["done"]


def test_random_numbers_belong_to_the_episode() -> None:
    config = ClassConfig(factory=f"{HERE}:Dice")
    holder, alone, mixed = Holder(config), [a["text"] for a in stepped(config, "", "", "")], []
    for turn in range(3):
        for key, seed in (("g0.0", 7), ("g1.0", 8)):
            answer = holder.answer(request(turn, key=key, seed=seed))
            if key == "g0.0":
                mixed.append(answer["text"])
    assert mixed == alone
    assert alone != [a["text"] for a in stepped(config, "", "", "", seed=8)]


def test_a_module_is_imported_before_its_process_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the time of the import is not an answer's."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("class Game:\n    pass\n")
    Holder(ClassConfig(factory="slow_to_import:Game"))
    assert sys.modules.pop("slow_to_import").Game


@pytest.mark.parametrize("recovery", ["replay", "none"])
def test_a_prompt_that_reset_writes_otherwise_after_a_restart_is_refused(recovery: Any) -> None:
    config = ClassConfig(factory=f"{HERE}:Opens", reset_in_prompt=True, recovery=recovery)
    turn = request(1, row={"opening": "'a board'"})
    history = [(turn["action"], {"text": "a board", "reward": None})]
    assert Holder(config).answer(turn | {"history": history})["text"] == "1"
    history[0][1]["text"] = "another board"
    again = Holder(config).answer(turn | {"history": history})
    assert "it answered reset with 'a board' and not with 'another board'" in again["reason"]


@pytest.mark.parametrize(
    ("recovery", "done_again", "done_after_a_lost_answer"),
    [
        ("none", ["reset", "step 2"], ["close", "reset", "step 2"]),
        ("replay", ["reset", "step 0", "step 1", "step 2"], ["close", "reset", "step 0", "step 1", "step 2"]),
        ("snapshot", ["restore", "step 2"], ["close", "restore", "step 2"]),
        ("live", ["restore", "step 2"], ["restore", "step 2"]),
    ],
)
def test_a_lost_episode_comes_back_as_declared(
    recovery: Any, done_again: list[str], done_after_a_lost_answer: list[str]
) -> None:
    config = ClassConfig(factory=f"{HERE}:Session", recovery=recovery)
    whole, history, holder = [], [], Holder(config)
    for number in range(3):
        turn = request(number)
        whole.append(holder.answer(turn))
        history.append((turn["action"], {"text": whole[-1]["text"], "reward": None}))
    assert ("state" in whole[0]) and (json.loads(whole[1]["state"] or "{}") == {"turns": 2}) is config.keeps_state
    past = {"history": history[:2], "state": whole[1]["state"]}
    for asked, expected in [(Holder(config), done_again), (holder, done_after_a_lost_answer)]:
        Session.log.clear()
        again = asked.answer(turn | past)
        assert Session.log == expected
        assert again == whole[2] if recovery != "none" else again["text"].startswith("1, ")


def test_a_snapshot_that_cannot_be_recorded_fails_its_sample() -> None:
    config = ClassConfig(factory=f"{HERE}:Unsaved", recovery="snapshot")
    (unfit,) = stepped(config, "a")
    assert "set is not JSON serializable" in unfit["reason"]
    config = replace(config, reset_in_prompt=True)
    (long,) = stepped(config)
    assert long["reason"] == "its snapshot has more than 1,000,000 characters"


def test_tools_are_described_by_their_docstrings() -> None:
    (schema,) = replace(TOOLS, functions=(f"{HERE}:add",)).schemas()
    assert schema["function"]["parameters"]["required"] == ["a", "b"]


def test_what_async_code_keeps_can_be_used_at_the_next_turn() -> None:
    counting = ToolsConfig(functions=(f"{HERE}:loops",))
    LOOPS.clear()
    turns = [call("loops")] * 2
    assert [answer["text"] for answer in stepped(counting, *turns)] == ["1", "1"]
    with ThreadPoolExecutor(2) as threads:
        answers = [
            turn["text"] for found in threads.map(lambda _: stepped(counting, *turns), range(2)) for turn in found
        ]
    assert answers == ["1"] * 4, "all of it has one loop"


def test_a_tool_is_offered_under_the_name_that_calls_of_it_have() -> None:
    renamed = ToolsConfig(functions=(f"{HERE}:sum_up",))
    (schema,) = renamed.schemas()
    assert stepped(renamed, call(schema["function"]["name"], a=1, b=2))[0]["text"] == "3"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ToolsConfig(functions=(f"{HERE}:plus_one",)), "environment: tool plus_one cannot be described to the model"),
        (ToolsConfig(functions=(f"{HERE}:unexplained",)), "unexplained cannot be described to the model .* 'Args:'"),
        (ClassConfig(factory=f"{HERE}:OffersNothing"), "offered_tools of .*:OffersNothing failed .KeyError:"),
    ],
)
def test_tools_that_cannot_be_offered_are_named(config: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        config.schemas()
