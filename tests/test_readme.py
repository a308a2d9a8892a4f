"""What the README tells a new user to type works as it stands there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from rollover import cli
from rollover.engine.kind import EngineFacts
from rollover.hf.architecture import Architecture
from rollover.run.building import build_config
from rollover.run.config import longest_tokens
from rollover.run.kinds import ENGINES
from tests import runs

README = (Path(__file__).parent.parent / "README.md").read_text()
SECTION = README[README.index("## Your model, your data") : README.index("## Before you rent a GPU")]
(TOML,) = re.findall(r"```toml\n(.*?)```", SECTION, re.DOTALL)
COMMANDS = re.findall(r"^\$ rollover (.*?)(?:  +#.*)?$", SECTION, re.MULTILINE)
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
RUN = "runs/run-20261121-101500"

QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 28, "rope_scaling": None, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
"""``config.json`` of the model that the README trains."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's file with a model and a batch small enough for a test, and data with the columns that it names."""
    monkeypatch.chdir(tmp_path)
    runs.save_model(Path("tiny"), max_position_embeddings=8192)
    rows = [{"prompt": f"{i}+{j}=", "answer": f"{i + j}"} for i in range(5) for j in range(5)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "steps": "2",
        "over_sampling_batch_size": "4",
        "path": '"tiny"',
        "rollout_batch_size": "2",
        "kv_cache_bytes": "64_000_000",
    }
    text = TOML
    for key, value in small.items():
        text, count = re.subn(rf"^{key} = \S+", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
        assert count == 1, key
    Path("run.toml").write_text(text)
    return tmp_path


def test_all_commands_of_the_readme_work_on_its_own_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry, train, resume, evaluate, report, live, samples, sft = (shlex.split(command) for command in COMMANDS)
    assert live == [*report, "--serve"], "which runs until it is stopped"
    assert resume[:2] == ["train", "--resume"]
    names = [command[0] for command in (dry, evaluate, report, samples, sft)]
    assert names == ["train", "eval", "report", "samples", "sft"]
    assert cli.main(dry) == 0
    assert "# train source math: jsonl, 25 rows, scored by math_verify" in capsys.readouterr().out
    assert not Path("runs").exists()
    assert cli.main(train) == 0, capsys.readouterr().err
    (made,) = Path("runs").iterdir()
    made.rename(RUN)
    for command in (resume, evaluate, report, samples, [*sft, "--sft.num_steps", "2"]):
        assert cli.main(command) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "all 2 steps are done" in said.out
    assert "measured on prompts that it may have been trained on (tasks.train)" in said.err
    assert "pass@1" in said.out
    assert f"report: {RUN}/report.html" in said.out
    assert "step 1 trained" in said.out
    assert [p for p in Path("runs").glob("run-sft-*/model/model.safetensors")]


def test_the_config_of_the_readme_fits_the_model_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    config = build_config(file)
    shape = Architecture.from_config(QWEN3_600M)
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.engine.kind == "embedded"
    facts = EngineFacts(read_model=lambda: shape, longest_tokens=longest_tokens(config))
    ENGINES[config.engine.kind].preflight(config.engine, facts)


def test_the_python_of_the_readme_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"Qwen/Qwen3-0.6B": "tiny", "steps = 20": "steps = 2", "max_new_tokens = 64": "max_new_tokens = 32"}
    program = PROGRAM
    for given, instead in small.items():
        assert program.count(given) == 1
        program = program.replace(given, instead)
    modules = {node.names[0].name for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import)}
    assert modules - {*sys.stdlib_module_names} == {"rollover"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    runs.save_model(Path("tiny"), max_position_embeddings=8192)
    exec(program, {})
    (made,) = Path("runs").iterdir()
    assert (made / "report.html").is_file()
    assert [path.name for path in (made / "checkpoints").iterdir()] == ["step_2"]
