from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollover.environments.rewards import ExactConfig, FunctionConfig, JudgeConfig, MathVerifyConfig, VerifierConfig
from rollover.environments.rewards.base import RewardSample
from rollover.environments.rewards.judge import JudgeReward
from rollover.environments.scoring import score_once
from rollover.errors import DataError
from rollover.tasks.config import TasksConfig
from rollover.tasks.open import check_source, eval_sources, held_out_texts, train_source
from rollover.tasks.prompt_source import PromptSource
from rollover.tasks.sources import HubConfig, JsonlConfig, ParquetConfig, ReasoningGymConfig, SourceConfig
from tests.environments.words import CHAT, char_tokenizer, ids
from tests.tasks.kit import EXACT, jsonl, opened, sums


def gym(name: str = "chain_sum", **fields: Any) -> SourceConfig:
    return ReasoningGymConfig(name=name, **fields)


def rows_of(source: PromptSource, indices: range) -> list[int]:
    return [int(source.prompt(i).prompt_id.split("/")[-1].split("@")[0]) for i in indices]


# Purity and order


def test_a_prompt_depends_on_config_seed_and_index_alone(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *sums(5))
    configs = ((gym(),), (gym(limit=4),), (file,), (gym(weight=2.0), file))
    for sources in configs:
        one, other = opened(*sources, seed=3), opened(*sources, seed=3)
        forward = [one.prompt(i) for i in range(14)]
        backward = [other.prompt(i) for i in reversed(range(14))]
        assert forward == backward[::-1]
        assert forward != [opened(*sources, seed=4).prompt(i) for i in range(14)]


def test_a_prompt_survives_the_journal(tmp_path: Path) -> None:
    for source in (opened(gym("chain_sum")), opened(jsonl(tmp_path / "a.jsonl", *sums(1)))):
        columns = source.prompt(0).columns
        assert json.loads(json.dumps(columns)) == columns


def test_every_epoch_holds_each_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", *sums(20)))
    epochs = [rows_of(source, range(20 * e, 20 * (e + 1))) for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(range(20))}) == 4
    assert source.prompt(41).prompt_id.endswith("@2")


def test_without_shuffle_rows_come_in_file_order(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", *sums(3)), shuffle=False)
    assert rows_of(source, range(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_generated_source_never_ends_and_asks_what_the_library_asks() -> None:
    source = opened(gym(config={"max_terms": 2, "max_digits": 3}))
    assert rows_of(source, range(2000, 2003)) == [2000, 2001, 2002]
    prompt = source.prompt(2001)
    assert prompt.text == prompt.columns["question"]
    assert prompt.token_ids == (0, *ids(prompt.text))
    left, sign, right = prompt.columns["metadata"]["expression"].split()
    assert int(prompt.columns["answer"]) == int(left) + (1 if sign == "+" else -1) * int(right)


def test_a_limit_makes_the_first_rows_the_whole_dataset(tmp_path: Path) -> None:
    for config in (gym(limit=3), jsonl(tmp_path / "a.jsonl", *sums(9), limit=3)):
        source = opened(config)
        assert source.num_rows == 3
        assert sorted(rows_of(source, range(3))) == [0, 1, 2]


def test_a_mixture_keeps_its_weights_and_names_its_sources(tmp_path: Path) -> None:
    source = opened(gym(weight=3.0), jsonl(tmp_path / "a.jsonl", *sums(2), weight=1.0))
    assert Counter(source.prompt(i).source for i in range(40)) == {"chain_sum": 30, "file": 10}
    assert [spec.source for spec in source.reward_specs] == ["chain_sum", "file"]


def test_evaluation_is_the_same_for_every_seed_and_never_a_training_item(tmp_path: Path) -> None:
    config = TasksConfig(train=(gym(),), eval=(gym(), jsonl(tmp_path / "a.jsonl", *sums(9))))
    generated, file = eval_sources(config, char_tokenizer(), num_prompts=5)
    assert (generated.num_rows, file.num_rows) == (5, 5)
    assert [file.prompt(i).prompt_id for i in range(2)] == ["eval/file/0@0", "eval/file/1@0"]
    assert generated.reward_specs[0].source == generated.prompt(0).source == "eval/chain_sum"
    again = eval_sources(config, char_tokenizer(), num_prompts=2)[0]
    assert again.prompt(1) == generated.prompt(1)
    training = train_source(config, char_tokenizer(), seed=0)
    assert not {generated.prompt(i).text for i in range(5)} & {training.prompt(i).text for i in range(50)}


# Long prompts


def test_long_rows_are_left_out_before_the_epoch_is_counted(tmp_path: Path) -> None:
    rows = [*sums(3), {"question": "x" * 40, "answer": "1"}, *sums(2)]
    source = opened(jsonl(tmp_path / "a.jsonl", *rows), max_prompt_tokens=20)
    assert source.num_rows == 5
    assert source.left_out == "source 'file' leaves out 1 of 6 rows, each longer than 20 tokens"
    assert sorted(rows_of(source, range(5))) == [0, 1, 2, 4, 5]


def test_a_check_shows_the_first_prompt_that_a_run_takes(tmp_path: Path) -> None:
    rows = [{"question": "x" * 40, "answer": "1"}, *sums(2), {"question": "y" * 40, "answer": "1"}]
    file, config = jsonl(tmp_path / "a.jsonl", *rows), TasksConfig(max_prompt_tokens=20, shuffle=False)
    source, first = check_source(file, config, char_tokenizer()) or (None, None)
    assert source is not None and first is not None and (first.text, source.references(first)) == ("0+1", ["1"])
    assert source.left_out == "source 'file' leaves out 2 of 4 rows, each longer than 20 tokens"
    refusing: dict[str, Any]
    for refusing in ({"max_prompt_tokens": 3}, {"max_prompt_tokens": 20, "long_prompts": "error"}):
        with pytest.raises(DataError) as in_a_run:
            opened(file, **refusing)
        with pytest.raises(DataError, match=f"^{re.escape(str(in_a_run.value))}$"):
            check_source(file, TasksConfig(**refusing), char_tokenizer())


@pytest.mark.parametrize("cause", ["long", "held out"])
def test_an_endless_source_puts_another_item_in_place_of_one_left_out(cause: str) -> None:
    config = gym(config={"max_terms": 6, "max_digits": 1})
    texts = [opened(config).prompt(i).text for i in range(40)]
    left_out = texts[:9] if cause == "held out" else [text for text in texts if len(text) + 1 > 76]
    tasks = TasksConfig(train=(config,), max_prompt_tokens=76 if cause == "long" else 1024)
    held_out = left_out if cause == "held out" else ()
    source = train_source(tasks, char_tokenizer(), seed=0, held_out=held_out)
    prompts = [source.prompt(i) for i in range(40)]
    assert [p.text == text for p, text in zip(prompts, texts, strict=True)] == [text not in left_out for text in texts]
    assert left_out and not {p.text for p in prompts} & {*left_out}
    assert all(len(p.token_ids) <= tasks.max_prompt_tokens for p in prompts)
    assert len({p.prompt_id for p in prompts}) == 40
    assert [source.prompt(i) for i in range(40)] == prompts


def test_long_prompts_can_be_an_error_with_file_and_line(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *sums(2), {"question": "x" * 40, "answer": "1"})
    with pytest.raises(DataError, match=r"a.jsonl, line 3: the prompt has 41 tokens, tasks.max_prompt_tokens is 20"):
        opened(file, max_prompt_tokens=20, long_prompts="error")
    with pytest.raises(DataError, match=r"chain_sum.*item 0: the prompt has"):
        opened(gym(), max_prompt_tokens=20, long_prompts="error").prompt(0)


def test_an_endless_source_of_long_prompts_gives_up() -> None:
    with pytest.raises(DataError, match="each of 16 items in a row is longer than 20 tokens"):
        opened(gym(), max_prompt_tokens=20).prompt(0)


# Columns and formats


def test_keep_columns_keeps_those_and_the_answer(tmp_path: Path) -> None:
    row = {"question": "1+1", "answer": "2", "essay": "x" * 99, "level": 3}
    source = opened(jsonl(tmp_path / "a.jsonl", row, keep_columns=("level",)))
    assert source.prompt(0).columns == {"answer": "2", "level": 3}


def test_parquet_and_saved_datasets_read_like_json_lines(tmp_path: Path) -> None:
    import datasets

    rows = sums(4)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows, split="test")}).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    lines = opened(jsonl(tmp_path / "a.jsonl", *rows))
    for config in (
        ParquetConfig(name="file", path=str(tmp_path / "a.parquet"), reward=EXACT),
        HubConfig(name="file", path=str(tmp_path / "saved"), split="test", reward=EXACT),
        HubConfig(name="file", path=str(tmp_path / "one"), split="any", reward=EXACT),
        HubConfig(name="file", path=str(tmp_path / "saved" / "test"), reward=EXACT),
    ):
        assert [opened(config).prompt(i) for i in range(5)] == [lines.prompt(i) for i in range(5)]


# What is told when it does not work


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([], {}, "a.jsonl contains no rows"),
        ([gzip.compress(b"{}")], {}, "a.jsonl is compressed by gzip, not JSON lines in UTF-8; convert it"),
        (["{}".encode("utf-16")], {}, "a.jsonl is UTF-16, not JSON lines in UTF-8; convert it"),
        (['{"question": "1", "answer": 1' + "0" * 5000 + "}"], {}, "a.jsonl, line 1: not valid JSON (Exceeds"),
        (["[" * 200_000], {}, "a.jsonl, line 1: not valid JSON (lists or tables are nested too deeply"),
        ([r'{"question": "1", "answer": "2", "a": [{"b\ud83d": 1}]}'], {}, r"line 1: '\ud83d' is half a char"),
        ([*sums(1), r'{"question": "1\uDE00+", "answer": "2"}'], {}, r"line 2: '\ude00' is half a character"),
        (['{"question": "1"', "{}"], {}, "a.jsonl, line 1: not valid JSON"),
        ([*sums(1), '{"question": "1", "answer": "2", "answer": "3"}'], {}, "a.jsonl, line 2: not valid JSON (the key"),
        (['{"question": "1", "answer": "2", "more": [{"a": 1, "a": 1}]}'], {}, "line 1: not valid JSON (the key 'a'"),
        ([*sums(1), "", "  ", "[1]"], {}, "a.jsonl, line 4: expected a JSON object, got list"),
        (
            [{"text": "1+1", "answer": "2"}],
            {},
            "line 1: none of the columns prompt, question, problem, query, instruction, input, messages, conversations exists; "
            "the columns are text, answer; set prompt_column of source 'file'",
        ),
        ([{"question": "1+1", "result": "2"}], {}, "columns are question, result; set answer_column of source 'file'"),
        ([{"question": "1", "prompt": "2", "answer": "3"}], {}, "'prompt' and 'question' are both candidates; set"),
        ([*sums(1), {"question": None, "answer": "1"}], {}, "line 2: column 'question' is null"),
        ([{"question": None, "answer": "3"}], {}, "line 1: column 'question' is null; the columns are question,"),
        (['{"question": "1+1", "answer": NaN}'], {}, "line 1: column 'answer' is null"),
        ([{"question": "1", "reward_model": {"ground_truth": None}}], {}, "'reward_model.ground_truth' is null; the"),
        ([{"question": "1", "answer": {"text": None}}], {"answer_column": "answer.text"}, "'answer.text' is null"),
        (sums(1), {"prompt_column": "text"}, "column 'text' is missing; the columns are question, answer"),
        (sums(1), {"prompt_column": ("question", "text")}, "column 'text' is missing; the columns are question"),
        (sums(1), {"keep_columns": ("level",)}, "column 'level' is missing"),
        (sums(1), {"answer_column": "answer.text"}, "column 'answer.text' is missing"),
    ],
)
def test_a_broken_file_is_told_by_line(tmp_path: Path, rows: list[Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(jsonl(tmp_path / "a.jsonl", *rows, **fields))
    assert message in str(caught.value)
    assert str(tmp_path / "a.jsonl") in str(caught.value)


MATH, HASHES = MathVerifyConfig(), ExactConfig(workers=0, reference_extract="hashes")
LAST = ExactConfig(workers=0, extract="hashes")
WORKED = "1+1\n#### 2"


def test_a_row_without_a_response_to_learn_is_left_out_of_a_warm_up(tmp_path: Path) -> None:
    judge = JudgeConfig(url="http://h/v1", model="m")
    rows = [{"instruction": "1+1", "output": output} for output in ("2", None, ["2"], 2)]
    config = TasksConfig(train=(jsonl(tmp_path / "a.jsonl", *rows, reward=judge),))
    assert train_source(config, char_tokenizer(), seed=0).left_out == ""
    left_out = train_source(config, char_tokenizer(), seed=0, taught=config.train).left_out
    assert "leaves out 2 of 4 rows" in left_out and "a.jsonl, line 2: no column to learn from" in left_out


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [
        (EXACT, {"value": "2"}, """the reference answer {"value": "2"} is neither text nor a number"""),
        (EXACT, [1.5, None], "the reference answer null is neither"),
        (MATH, True, "the reference answer true is neither"),
        (EXACT, [], "the reference answer [] is neither"),
        (MATH, None, "column 'answer' is null; the columns are question, answer; fix the row or change answer_column"),
        (MATH, " ", "the reference answer ' ' is blank"),
        (HASHES, "no hashes", "the reference answer 'no hashes' has no '####'"),
        (LAST, WORKED, "no answer that reward.extract = 'hashes' finds equals the reference '1+1 #### 2'; set reward."),
        (EXACT, "2</answer>", "no answer that reward.extract = 'tag' finds equals the reference '2</answer>'"),
        (MATH, "$", "the reference answer '$' is not mathematics; use reward kind 'exact'"),
        *((MATH, text, "is not mathematics") for text in (r"\$", r"\text{ }", r"\boxed{5", "answer: $$")),
    ],
)
def test_rows_without_a_usable_answer_are_left_out(tmp_path: Path, reward: Any, answer: Any, message: str) -> None:
    right = {"question": "2+2", "answer": "4" if reward == LAST else "#### 4"}
    wrong = {"question": "1+1", "answer": answer}
    for lines, place in (((wrong, right, wrong), 1), ((right, wrong, right), 2)):
        source = opened(jsonl(tmp_path / "a.jsonl", *lines, reward=reward))
        assert {source.prompt(i).text for i in range(9)} == {"2+2"}
        left_out = f"leaves out {lines.count(wrong)} of 3 rows, each without a reference answer that a response can mat"
        assert left_out in source.left_out and message in source.left_out
        assert f"a.jsonl, line {place}: " in source.left_out
    with pytest.raises(DataError) as caught:
        opened(jsonl(tmp_path / "a.jsonl", wrong, reward=reward))
    assert message in str(caught.value) and "each of its 1 prompts is without a ref" in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "row", "shown"),
    [
        (HASHES, {"answer": "24 * 3 = 72\n#### 72"}, ["72"]),
        (EXACT, {"answer": ["a", 1.5]}, ["a", "1.5"]),
        (EXACT, {"reward_model": '{"ground_truth": "34"}'}, ["34"]),
    ],
)
def test_a_check_reads_the_reference_as_the_reward_will(
    tmp_path: Path, reward: Any, row: dict[str, Any], shown: list[str]
) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"question": "q"} | row, reward=reward)
    found, first = check_source(file, TasksConfig(), char_tokenizer()) or (None, None)
    assert found is not None and first is not None and found.references(first) == shown


def test_a_chosen_column_ends_the_ambiguity(tmp_path: Path) -> None:
    row = {"question": "1", "prompt": "2", "answer": "3"}
    source = opened(jsonl(tmp_path / "a.jsonl", row, prompt_column="prompt"))
    assert source.prompt(0).text == "2"
    assert source.prompt(0).columns == {"question": "1", "answer": "3"}


def test_all_columns_of_a_prompt_reach_its_rewards(tmp_path: Path) -> None:
    functions = FunctionConfig(function="tests.environments.functions:titled", workers=1)
    judge = JudgeConfig(url="http://127.0.0.1:1/v1", model="m")
    for names in (("title", "body"), ("instruction", "input")):
        row = {names[0]: "Add.", names[1]: "1, 2", "answer" if "title" in names else "output": "3"}
        chosen = {"prompt_column": names} if "title" in names else {}
        rewards = (functions, judge) if "title" in names else (judge,)
        source = opened(jsonl(tmp_path / "a.jsonl", row, reward=VerifierConfig(), rewards=rewards, **chosen))
        prompt = source.prompt(0)
        sample = RewardSample(prompt="<chat>", columns=prompt.columns, completion="3", completion_ids=())
        assert source.solution(prompt) == "3"
        *first, asked = source.reward_specs
        assert "Add.\n\n1, 2\n\nResponse:\n3" in JudgeReward(judge, asked)._body(sample)["messages"][0]["content"]
        assert [asyncio.run(score_once(s.config.build(s), [sample])).rewards() for s in first] == [[8.0]] * len(first)


def test_a_missing_or_foreign_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no parquet")
    for config, name, message in (
        (JsonlConfig, "none.jsonl", "source 'file': no file"),
        (ParquetConfig, "none.parquet", "source 'file': no file"),
        (ParquetConfig, "a.parquet", "a.parquet: not a readable Parquet file"),
    ):
        with pytest.raises(DataError, match=message):
            opened(config(name="file", path=str(tmp_path / name), reward=EXACT))


def test_a_dataset_that_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_list(sums(1), split="test")}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="has no split 'train'; it has: test"):
        opened(HubConfig(name="file", path=str(tmp_path / "saved"), reward=EXACT))
    with pytest.raises(DataError, match="has no split 'eval'; it has: test"):
        opened(HubConfig(name="file", path=str(tmp_path / "saved" / "test"), split="eval", reward=EXACT))
    with pytest.raises(DataError, match="keeps no subsets: leave subset out"):
        opened(HubConfig(name="file", path=str(tmp_path / "saved"), split="test", subset="easy", reward=EXACT))
    offline = Mock(side_effect=ConnectionError("no route to the hub\nand more"))
    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    for use in (opened, lambda source: check_source(source, TasksConfig(), char_tokenizer())):
        with pytest.raises(DataError) as caught:
            use(HubConfig(name="file", path="owner/set", reward=EXACT))
        message = "dataset 'owner/set' (subset None, split 'train') cannot be loaded: no route to the hub; check"
        assert message in str(caught.value)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, subset: None)
    hub = HubConfig(name="file", path="owner/set", reward=EXACT)
    assert check_source(hub, TasksConfig(), char_tokenizer()) is None


def test_a_character_written_in_two_halves_is_text(tmp_path: Path) -> None:
    source = opened(jsonl(tmp_path / "a.jsonl", r'{"question": "1", "answer": "\ud83d\ude00"}'))
    assert source.prompt(0).columns == {"answer": "\N{GRINNING FACE}"}


def test_text_of_a_parquet_file_that_is_none_is_told_with_its_row(tmp_path: Path) -> None:
    broken = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"question": ["1"], "answer": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 0: 'utf-8' codec can't decode .*; fix the row"):
        opened(ParquetConfig(name="p", path=str(tmp_path / "a.parquet"), reward=EXACT))


def test_a_column_json_cannot_hold_is_told(tmp_path: Path) -> None:
    table = pa.table({"question": ["1"], "answer": ["2"], "scan": [b"\x00"]})
    pq.write_table(table, tmp_path / "a.parquet")
    config = ParquetConfig(name="p", path=str(tmp_path / "a.parquet"), reward=EXACT)
    with pytest.raises(DataError, match=r"a.parquet, row 0: column 'scan' cannot travel.*keep_columns"):
        opened(config)
    assert opened(replace(config, keep_columns=())).prompt(0).columns == {"answer": "2"}


def test_a_run_without_sources_is_told() -> None:
    with pytest.raises(DataError, match=r"tasks.train names no source"):
        opened()


def test_evaluation_prompts_are_kept_out_of_training(tmp_path: Path) -> None:
    config = jsonl(tmp_path / "rows.jsonl", *({"question": f"q{i}", "answer": "1"} for i in range(20)))
    tasks = TasksConfig(train=(config,), eval=(config,), chat_template="off")
    evaluation = eval_sources(tasks, char_tokenizer(), num_prompts=5)
    held_out = held_out_texts(tasks, evaluation)
    source = train_source(tasks, char_tokenizer(), seed=0, held_out=held_out)
    assert held_out == {f"q{i}" for i in range(5)}
    assert {source.prompt(i).text for i in range(15)} == {f"q{i}" for i in range(5, 20)}
    assert source.num_rows == 15
    assert held_out_texts(replace(tasks, keep_eval_out=False), evaluation) == frozenset()


@pytest.mark.parametrize(
    "row",
    [
        {"question": " 1 +\n1 "},
        {"question": "1 + 1", "chat_template_kwargs": {"deep": True}},
        {"question": [{"role": "user", "content": "1 + 1"}]},
        {"question": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]},
    ],
)
def test_a_question_is_held_out_whatever_is_around_it(tmp_path: Path, row: dict[str, Any]) -> None:
    train = jsonl(tmp_path / "a.jsonl", row | {"answer": "2"}, {"question": "1+1", "answer": "2"})
    config = TasksConfig(train=(train,), eval=(jsonl(tmp_path / "b.jsonl", {"question": "1 + 1", "answer": "2"}),))
    tokenizer = char_tokenizer(chat_template=CHAT + "{% if deep %}!{% endif %}")
    held_out = held_out_texts(config, eval_sources(config, tokenizer, num_prompts=5))
    source = train_source(config, tokenizer, seed=0, held_out=held_out)
    assert (source.prompt(0).prompt_id, source.prompt(1).prompt_id) == ("file/1@0", "file/1@1")
    assert source.left_out == "source 'file' leaves out 1 of 2 rows, each an evaluation prompt"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("q", "q"), "is an evaluation prompt; set tasks.keep_eval_out = false"),
        (("long", "lengthy"), "is longer than 3 tokens; raise tasks.max_prompt_tokens or ask for smaller items"),
        (
            ("q", "long", "lengthy"),
            "is an evaluation prompt (1) or longer than 3 tokens (2); raise tasks.max_prompt_tokens or ask for smaller"
            " items, or set tasks.keep_eval_out = false",
        ),
    ],
)
def test_a_source_of_which_nothing_is_left_says_why(tmp_path: Path, texts: tuple[str, ...], reason: str) -> None:
    config = jsonl(tmp_path / "rows.jsonl", *({"question": text, "answer": "1"} for text in texts))
    tasks = TasksConfig(train=(config,), max_prompt_tokens=3)
    told = re.escape(f"source 'file': each of its {len(texts)} prompts {reason}")
    with pytest.raises(DataError, match=f"^{told}$"):
        train_source(tasks, char_tokenizer(), seed=0, held_out={"q"})
