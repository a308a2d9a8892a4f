"""Environments of episodes: what tools and classes of the user's may do, in their process and to it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollover.environments.episodes import ClassConfig, ToolsConfig
from rollover.environments.episodes.base import EnvironmentSettings
from rollover.environments.episodes.worker import Holder
from rollover.errors import DataError
from tests.environments.games import LOOPS, Session

HERE = "tests.environments.games"
NAMES = ("add", "wait", "fail", "echo", "half", "leave", "stop_here", "hog", "interrupt", "give")
TOOLS = ToolsConfig(functions=tuple(f"{HERE}:{name}" for name in NAMES))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def stepped(config: EnvironmentSettings, *texts: str, seed: int = 7) -> list[dict[str, Any]]:
    return stepped_in(config, {"start": 5}, *texts, seed=seed)


def stepped_in(config: EnvironmentSettings, row: Any, *texts: str, seed: int = 7) -> list[dict[str, Any]]:
    """Return the answers of an environment to turns; to an empty one first, if it writes a part of the prompt."""
    holder, answers = Holder(config), []
    for turn, text in enumerate([""] * config.writes_prompts + [*texts]):
        request = {"key": "g0.0", "row": row, "seed": seed, "num_turns": turn}
        answers.append(holder.answer(request | {"action": {"text": text, "token_ids": []}}))
    holder.forget("g0.0")
    return answers


pytestmark = pytest.mark.usefixtures("harmless_modules")


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (call("add", a=1, b=2), ["3"]),
        (f"so {call('add', a=1, b=2)} and {call('wait', seconds=0)}", ["3", "waited"]),
        (call("add", a=1), ["Error: TypeError: add() missing 1 required positional argument: 'b'"]),
        (call("ad", a=1, b=2), ["Error: there is no tool 'ad'; did you mean 'add'?"]),
        ("<tool_call>{nonsense}</tool_call>", ["Error: the call is no JSON"]),
        ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', ["Error: the arguments of the call are no"]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', ["3"]),
        (call("fail"), ["Error: ZeroDivisionError: division by zero"]),
        (call("stop_here"), ["Error: SystemExit: 3"]),
        (call("interrupt"), ["Error: KeyboardInterrupt"]),
        (call("add", a=1, b=2) * 35, [*["3"] * 32, "Error: the last 3 calls were not made: a turn may have 32"]),
        (call("echo", text="a\ud83d\ude00b\ud83d"), ["a😀b\ufffd"]),
        (call("half"), ["a\ufffdb"]),
        ('<tool_call>{"name": "echo", "arguments": "{\\"text\\": \\"a\\\\ud83d\\"}"}</tool_call>', ["a\ufffd"]),
        ("#### 46", []),
        (f"<think>within <tool_call></tool_call>: {call('fail')}</think>{call('add', a=1, b=2)}", ["3"]),
        (f"The <tool_call> tag, then. {call('add', a=1, b=2)}", ["3"]),
        (call("echo", text="a <tool_call>"), ["a <tool_call>"]),
        (f'<tool_call>{{"name": "add"{call("add", a=1, b=2)}', ["Error: the call is no JSON", "3"]),
        ("<tool_call>add(1, 2)</tool_call>", ["Error: the call is no JSON"]),
        ("<think>I need no <tool_call></think>It is 4, without a <tool_call>.", []),
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
    assert stepped(TOOLS, call("give", what=value))[0]["text"].startswith(answer)


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
    two = '```json\n[{"name": "add", "parameters": {"a": 1, "b": 2}}, {"name": "fail"}]\n```'
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
    texts = ["'hello'", "[{'role': 'system', 'content': 'be brief'}]", end]
    first, second, third = stepped(ClassConfig(factory=f"{HERE}:Says"), *texts)
    assert first["messages"] == [{"role": "user", "content": "hello"}]
    assert second["messages"] == [{"role": "system", "content": "be brief"}]
    assert (third["done"], third["reward"], third["text"]) == (True, 2.0, "last")
    assert stepped(ClassConfig(factory=f"{HERE}:Says"), "None")[0]["done"]


def test_random_numbers_belong_to_the_episode() -> None:
    config = ClassConfig(factory=f"{HERE}:Dice")
    holder, alone, mixed = Holder(config), [a["text"] for a in stepped(config, "", "", "")], []
    for turn in range(3):
        for key, seed in (("g0.0", 7), ("g1.0", 8)):
            request = {"key": key, "row": {}, "seed": seed, "num_turns": turn, "action": {"text": "", "token_ids": []}}
            answer = holder.answer(request)
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


def test_a_lost_episode_is_repeated_and_a_difference_is_refused() -> None:
    config = ClassConfig(factory=f"{HERE}:Dice")
    known = stepped(config, "a", "b", "c")
    request = {"key": "g0.0", "row": {}, "seed": 7, "num_turns": 2, "action": {"text": "c", "token_ids": []}}
    holder = Holder(config)
    assert holder.answer(request) == {"missing": True}
    history = [
        ({"text": t, "token_ids": []}, {"text": a["text"], "reward": None})
        for t, a in zip("ab", known[:2], strict=True)
    ]
    assert holder.answer(request | {"history": history}) == known[2]
    history[1][1]["text"] = "another"
    again = Holder(config).answer(request | {"history": history})
    assert "repeated after a restart, it answered turn 2 with" in again["reason"]


@pytest.mark.parametrize("recovery", ["replay", "none"])
def test_a_prompt_that_reset_writes_otherwise_after_a_restart_is_refused(recovery: Any) -> None:
    config = ClassConfig(factory=f"{HERE}:Opens", reset_in_prompt=True, recovery=recovery)
    turn = {"text": "", "token_ids": []}
    request = {"key": "g0.0", "row": {"opening": "'a board'"}, "seed": 7, "num_turns": 1, "action": turn}
    history = [(turn, {"text": "a board", "reward": None})]
    assert Holder(config).answer(request | {"history": history})["text"] == "1"
    history[0][1]["text"] = "another board"
    again = Holder(config).answer(request | {"history": history})
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
    turn: dict[str, Any] = {"text": "", "token_ids": []}
    for number in range(3):
        request = {"key": "g0.0", "row": {}, "seed": 7, "num_turns": number, "action": turn}
        whole.append(holder.answer(request))
        history.append((turn, {"text": whole[-1]["text"], "reward": None}))
    assert ("state" in whole[0]) and (json.loads(whole[1]["state"] or "{}") == {"turns": 2}) is config.keeps_state
    past = {"history": history[:2], "state": whole[1]["state"]}
    for asked, expected in [(Holder(config), done_again), (holder, done_after_a_lost_answer)]:
        Session.log.clear()
        again = asked.answer(request | past)
        assert Session.log == expected
        assert again == whole[2] if recovery != "none" else again["text"].startswith("1, ")


def test_a_snapshot_that_cannot_be_recorded_fails_its_sample() -> None:
    config = ClassConfig(factory=f"{HERE}:Unsaved", recovery="snapshot")
    (unfit,) = stepped(config, "a")
    assert "set is not JSON serializable" in unfit["reason"]
    config = replace(config, reset_in_prompt=True)
    (long,) = stepped(config)
    assert long["reason"] == "its snapshot has more than 1,000,000 characters"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToolsConfig(functions=()), "functions names no tool"),
        (lambda: ToolsConfig(functions=("add",)), "'add' must read 'module:function'"),
        (lambda: ToolsConfig(functions=("a:f", "b:f")), "two tools are called 'f'"),
        (lambda: replace(TOOLS, max_turns=0), "max_turns must be at least 1, got 0"),
        (lambda: replace(TOOLS, turn_timeout_s=0.0), "turn_timeout_s must be above 0"),
        (lambda: ClassConfig(factory="games"), "factory must read 'module:Class'"),
    ],
)
def test_wrong_settings_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_tools_are_described_by_their_docstrings() -> None:
    (schema,) = replace(TOOLS, functions=(f"{HERE}:add",)).schemas()
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    with pytest.raises(DataError, match=r"unexplained cannot be described to the model .* under 'Args:'"):
        replace(TOOLS, functions=(f"{HERE}:unexplained",)).schemas()


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
        (
            ClassConfig(factory=f"{HERE}:OffersNothing"),
            f"environment.factory: offered_tools of {HERE}:OffersNothing failed (KeyError: 'no config')",
        ),
    ],
)
def test_tools_that_cannot_be_offered_are_named(config: Any, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        config.schemas()
