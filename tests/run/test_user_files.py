"""Short configs for the data that users bring, in the shapes that the hub has: each trains with defaults otherwise."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, GenerationConfig

from rollover import cli
from tests import runs
from tests.environments.judges import completion, judge_server
from tests.runs import Say
from tests.tasks.test_templates import tokenizer_of

ROWS = 40
SIZES = (
    *("--steps", "2", "--rollout.rollout_batch_size", "2", "--rollout.group_size", "2", "--logging.progress", "off"),
    *("--rollout.max_new_tokens", "12", "--engine.kv_cache_bytes", "4194304", "--run-dir", "out"),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluates an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def alpaca(i: int) -> dict[str, Any]:
    return {"instruction": "Add the numbers.", "input": f"{i} and 1" * (i % 2), "output": f"{i + 1}", "text": "..."}


def gsm8k(i: int) -> dict[str, Any]:
    answer = f"There are {i} apples and {i} pears. That makes {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i:,}"
    return {"question": f"Ann has {i} apples and as many pears. How many fruits has she?", "answer": answer}


def dapo_math(i: int) -> dict[str, Any]:
    ask = "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{ask} $Answer\n\nWhat is {i} times {i}?", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": f"{i * i}", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i:08x}-8b1f"},
    }


def conversation(i: int) -> dict[str, Any]:
    asked = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": f"What is {i} + {i}?"}]
    return {"messages": [*asked, {"role": "assistant", "content": f"{2 * i}"}], "tools": [TOOL]}


def write(name: str, row: Any) -> None:
    rows = [row(i) for i in range(1, ROWS)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), name)
    else:
        Path(name).write_text("".join(json.dumps(each) + "\n" for each in rows))


CASES = {
    "alpaca": ("alpaca.jsonl", alpaca, 'reward = { kind = "exact" }'),
    "dapo-math": ("dapo.parquet", dapo_math, 'reward = { kind = "math_verify" }'),
    "tools": ("tools.jsonl", conversation, 'reward = { kind = "exact" }'),
    "gsm8k, two rewards": (
        "gsm8k.parquet",
        gsm8k,
        'rewards = [{ kind = "math_verify" }, { kind = "function", function = "brief:brief", weight = 0.5 }]',
    ),
}


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 with a tokenizer of bytes and Qwen3's chat template."""
    tokenizer = tokenizer_of("qwen3")
    folder = runs.save_model(
        tmp_path_factory.mktemp("chat") / "model", vocab_size=len(tokenizer), max_position_embeddings=2048
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(chat_model: Path, tmp_path: Path, few_draws: None) -> Iterator[Path]:
    with runs.working_in(tmp_path, chat_model):
        Path("brief.py").write_text(
            "def brief(completions, **columns):\n    return [1 / (1 + len(c)) for c in completions]\n"
        )
        yield tmp_path


def config(path: str, rewards: str) -> str:
    kind = Path(path).suffix.removeprefix(".")
    text = f'steps = 200\nmodel.path = "model"\n[[tasks.train]]\nkind = "{kind}"\nname = "mine"\npath = "{path}"\n'
    text += f"{rewards}\n"
    assert text.count("\n") <= 12
    return text


def trained(done: Say) -> list[dict[str, Any]]:
    said = done("train", "run.toml", "--dry-run", *SIZES).replace("|", "")
    assert "<im_start>assistant" in said, "a dry run shows the end of the prompt"
    assert cli.main(["train", "run.toml", *SIZES]) == 0
    return runs.rows(Path("out"), "step")


@pytest.mark.parametrize("case", CASES)
def test_rows_of_the_hub_train(case: str, folder: Path, done: Say) -> None:
    path, row, rewards = CASES[case]
    write(path, row)
    Path("run.toml").write_text(config(path, rewards))
    assert len(trained(done)) == 2
    for batch in runs.batches(Path("out")):
        for group in batch.groups:
            index = int(group.prompt.prompt_id.partition("/")[2].partition("@")[0]) + 1
            texts = {
                "alpaca": ("Add the numbers.",),
                "dapo-math": (f"What is {index} times {index}?",),
                "tools": ("Use the tool.", f"What is {index} + {index}?", '"name": "calc"'),
            }.get(case, (f"Ann has {index} apples",))
            assert all(text in group.prompt.text for text in texts)


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


RESUMED = ("train", "--resume", "out", "--steps", "3", "--tasks.chat_template_file")


@pytest.mark.parametrize("trains", ["--sft.num_steps=1", "--trainer.lora.rank=2"])
def test_an_exported_model_knows_its_template_and_ends(trains: str, folder: Path, refused: Say, done: Say) -> None:
    Path("model").rename("linked")
    shutil.copytree("linked", "model")
    if "lora" in trains:
        Path("model/generation_config.json").unlink()
    write("gsm8k.jsonl", gsm8k)
    Path("run.toml").write_text(config("gsm8k.jsonl", 'reward = { kind = "math_verify" }'))
    Path("chat.jinja").write_text(CHAT)
    chat = ("--tasks.chat_template_file", "chat.jinja")
    assert cli.main(["train", "run.toml", *SIZES, *chat, trains]) == 0
    Path("chat.jinja").rename("moved.jinja")
    Path("other.jinja").write_text(CHAT + " ")
    for given, told in (("none", "cannot change when a run is resumed"), ("other.jinja", "has changed since the run")):
        assert told in refused(*RESUMED, given)
    assert cli.main([*RESUMED, "moved.jinja"]) == 0
    if "sft" in trains:  # its warm-up is done, and it never came to its first batch
        shutil.rmtree("out/checkpoints")
        Path("out/journal.sqlite").unlink()
        for dry in ((), ("--dry-run",)):
            assert "has changed since the run" in refused(*RESUMED, "other.jinja", *dry)
        assert cli.main([*RESUMED, "moved.jinja"]) == 0
    Path("moved.jinja").unlink()
    assert cli.main(["export", "out", "exported"]) == 0
    for left in ["exported", *(["out/model"] if "sft" in trains else [])]:
        tokenizer = AutoTokenizer.from_pretrained(left)
        end, turn_end = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
        assert GenerationConfig.from_pretrained(left).eos_token_id == [end, 0, turn_end]
        assert tokenizer.chat_template == CHAT
    said = done("train", "run.toml", *SIZES, "--run-dir", "again", "--model.path", "exported", "--dry-run")
    assert " or <|im_end|>\n" in said.partition("# a response ends with ")[2]


def test_a_dry_run_blanks_the_secrets_of_a_prompt(folder: Path, done: Say) -> None:
    key = "sk-aB3dE6gH9jK2mN5pQ8sT"
    write(
        "rows.jsonl", lambda i: {"question": f"{key}, password: zzz, sorted(x, key=len)\u202e", "answer": "api_key=zzz"}
    )
    Path("run.toml").write_text(config("rows.jsonl", 'reward = { kind = "exact" }'))
    shown = done("train", "run.toml", "--dry-run", *SIZES).replace("|", "")
    assert "[hidden], password: [hidden], sorted(x, key=len)\\u202e" in shown and '"api_key=[hidden]"' in shown
    assert key not in shown and "zzz" not in shown


@pytest.mark.real_time
async def test_a_judge_scores_beside_a_rule(folder: Path, done: Say) -> None:
    write("gsm8k.parquet", gsm8k)

    rows: list[dict[str, Any]] = []
    async with judge_server(lambda request: completion("It is fine. Score: 0.5")) as server:
        judge = f'{{ kind = "judge", url = "{server.url}", model = "m", rubric = "the sum is right." }}'
        Path("run.toml").write_text(config("gsm8k.parquet", f'rewards = [{{ kind = "math_verify" }}, {judge}]'))
        await asyncio.to_thread(lambda: rows.extend(trained(done)))
    assert [row["reward/component/judge"] for row in rows] == [0.5, 0.5]


EVAL = '[[tasks.eval]]\nkind = "jsonl"\nname = "held"\npath = "held.jsonl"\nreward = { kind = "exact" }\n'


def test_a_dry_run_reads_the_rows_of_a_run_and_names_the_rows_left_out(
    folder: Path, refused: Say, done: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollover.run.session.open_trainer", None)  # rows are read before weights are
    write("rows.jsonl", lambda i: {"question": f"What is {i}?", "answer": "" if i == 7 else f"{i}"})
    Path("held.jsonl").write_text('{"question": "What is 9?", "answer": "9"}\n{"question": "And?", "answer": "$"}\n')
    text = config("rows.jsonl", 'reward = { kind = "exact" }')
    Path("run.toml").write_text(text + EVAL.replace("exact", "math_verify"))
    said = done("train", "run.toml", "--dry-run", *SIZES)
    train, held = said.partition("# train source mine: ")[2].split("# eval source held: ")
    assert "source 'mine' leaves out 2 of 39 rows, each without a reference answer that a response can ma" in train
    assert "(1) or an evaluation prompt (1); rows.jsonl, line 7: the reference answer '' is blank" in train
    assert held.startswith("jsonl, 2 rows, scored by math_verify") and 'its reference answer: "9"' in held
    assert "leaves out 1 of 2 rows" in held and "line 2: the reference answer '$' is not mathematics" in held
    Path("held.jsonl").write_text('{"question": "What is 9?", "answer": "9"}\n{"question": " ", "answer": "1"}\n')
    messages = [refused("train", "run.toml", *SIZES, *dry) for dry in (["--dry-run"], [])]
    assert messages[0] == messages[1] and "held.jsonl, line 2: the prompt is blank" in messages[0]
    shutil.copy("rows.jsonl", "held.jsonl")
    messages = [refused("train", "run.toml", *SIZES, *dry) for dry in (["--dry-run"], [])]
    assert messages[0] == messages[1] and "is an evaluation prompt" in messages[0]


SCRATCH = """
tasks.max_prompt_tokens = 64
[model.scratch]
hidden_size = 16
num_layers = 1
num_heads = 1
num_kv_heads = 1
intermediate_size = 16
max_position = 128
"""


def test_a_model_from_scratch_needs_no_answers_unless_it_is_warmed_up(folder: Path, refused: Say, done: Say) -> None:
    write("rows.jsonl", lambda i: {"question": f"What is {i}?"})
    text = config("rows.jsonl", 'reward = { kind = "function", function = "brief:brief" }')
    text = text.replace('model.path = "model"\n', SCRATCH)
    Path("run.toml").write_text(text)
    for dry in (["--dry-run"], []):
        said = refused("train", "run.toml", *SIZES, *dry, "--sft.num_steps", "1")
        assert "no column to learn from; set answer_column of source 'mine'" in said
    assert "#   first prompt: What is 1?" in done("train", "run.toml", "--dry-run", *SIZES)
    assert cli.main(["train", "run.toml", *SIZES]) == 0
    assert len(runs.rows(Path("out"), "step")) == 2
    shutil.rmtree("out")
    write("rows.jsonl", lambda i: {"messages": [{"role": "user", "content": f"What is {i}?"}]})
    for dry in (["--dry-run"], []):
        assert "list of messages, which needs a chat template" in refused("train", "run.toml", *SIZES, *dry)


def test_a_comparison_goes_on_with_the_rows_of_its_warm_up(folder: Path, refused: Say) -> None:
    write("gsm8k.jsonl", gsm8k)
    Path("run.toml").write_text(
        config("gsm8k.jsonl", 'reward = { kind = "math_verify" }') + "\n[variants.a]\n[variants.b]\n"
    )
    assert cli.main(["train", "run.toml", *SIZES, "--sft.num_steps", "1"]) == 0
    for name in "ab":  # as if killed after the warm-up
        shutil.rmtree(f"out/{name}")
    rows = Path("gsm8k.jsonl").read_text()
    Path("gsm8k.jsonl").write_text(rows.replace("Ann", "Eve"))
    assert "gsm8k.jsonl" in (told := refused("train", "--resume", "out")) and "changed" in told
    Path("gsm8k.jsonl").write_text(rows)
    assert cli.main(["train", "--resume", "out"]) == 0
