"""Values that no setting, option or file can have: each is one line and exit code 2, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollover import cli
from rollover.errors import RolloverError
from rollover.hf.config import read_model_config
from rollover.hf.weights import weight_files
from rollover.report.metrics import read_metrics
from rollover.report.record import read_config
from rollover.run.directory import derived_config
from rollover.run.prepare import check_began_with
from rollover.swarm.coordinator.status.snapshot import read_status
from rollover.swarm.coordinator.trust import Credentials
from rollover.trainer.checkpoint import read_manifest
from rollover.weights.adapters import AdapterSource
from tests import runs
from tests.runs import Say

pytestmark = pytest.mark.usefixtures("experiment")

BIG = str(10**30)
LONG = "x" * 300
TRAIN = ["train", "run.toml", "--run-dir", "out"]
SIMULATE = ["simulate", "light-8k", "--steps", "3", "--seeds", "1"]
PLAN = ["plan", "desk", "--model", "model", "--quick"]
VLLM = [*TRAIN, "--engine.kind", "vllm"]

NOT_FINITE = (
    "rollout.temperature", "rollout.top_p", "rollout.stall_timeout_s", "trainer.learning_rate",
    "trainer.max_grad_norm", "trainer.weight_decay", "algorithm.clip_low",
    "algorithm.kl_coef", "algorithm.advantage_eps", "eval.temperature", "engine.command_timeout_s",
    "tasks.train.0.weight", "tasks.train.0.reward.timeout_s", "tasks.train.0.reward.pass_score", "sft.bare_answers",
)  # fmt: skip
HUGE = (
    "steps", "seed", "rollout.rollout_batch_size", "rollout.group_size", "rollout.max_new_tokens", "eval.num_prompts",
    "engine.kv_cache_bytes", "trainer.micro_batch_tokens", "checkpoint.every_steps", "tasks.max_prompt_tokens",
)  # fmt: skip
WRONG: list[tuple[list[str], str]] = [
    *(([*TRAIN, f"--{key}", "nan"], "this must be a finite number, got the number nan") for key in NOT_FINITE),
    *(([*TRAIN, f"--{key}", "inf"], "this must be a finite number, got the number inf") for key in ("trainer.learning_rate", "rollout.temperature", "algorithm.clip_high")),
    *(([*TRAIN, f"--{key}", BIG], "whole numbers are limited to 64 bits") for key in HUGE),
    *(([*TRAIN, "--steps", number], f'expected a whole number, got the string "{number[:50]}') for number in ("9" * 5000, "[" * 5000)),
    ([*TRAIN, "--steps", "0x" + "f" * 5000], "whole numbers are limited to 64 bits, got the whole number with thousands of digits"),
    ([*VLLM, "--engine.launch", "true", "--engine.launch_env", '{"A=B" = "1"}'], "launch_env: 'A=B' is not the name of an environment variable"),
    ([*TRAIN, "--rollout.rollout_batch_size", str(2**62)], "samples, more than a batch can hold: lower one of the two"),
    ([*TRAIN, "--rollout.group_size", str(2**62)], "samples, more than a batch can hold: lower one of the two"),
    ([*TRAIN, "--engine.max_running", str(2**62)], "max_running must be at most 65536"),
    ([*TRAIN, "--engine.prefill_chunk_tokens", str(2**62)], "prefill_chunk_tokens must be at most 16777216"),
    ([*TRAIN, "--model.path", "none", "--model.scratch", "{hidden_size = 4611686018427387904}"], "hidden_size must be at most 1048576"),
    ([*TRAIN, "--trainer.device", "abacus"], "trainer.device 'abacus' cannot be used"),
    ([*TRAIN, "--rollout.stop_strings", '[""]'], "stop_strings must not hold an empty string, which every response completes at once"),
    ([*TRAIN, "--rollout.stop_strings", '["a\\u0000"]'], "this text contains the null character"),
    ([*TRAIN, "--tasks.train.0.path", "a\udcffb"], r"'a\udcffb' is not text in UTF-8"),
    (["train", "a\udcffb.toml"], r"'a\udcffb.toml' is not text in UTF-8"),
    (["report", "a\udcff"], r"'a\udcff' is not text in UTF-8"),
    (["train", "run.toml", "--run-dir", LONG], "cannot become a run directory: File name too long"),
    *(([*command, LONG], "ile name too long") for command in (["train"], ["train", "--resume"], ["eval"])),
    ([*TRAIN, "--model.path", LONG], "cannot be accessed: [Errno 36] File name too long"),
    ([*TRAIN, "--model.path", "~nobody-of-this-name/x"], "cannot be accessed: Could not determine home directory"),
    ([*TRAIN, "--tasks.train.²", "x"], "tasks.train is a list of 1; write an index from 0 to 1"),
    ([*TRAIN, "--tasks.train.99999999999999999999.name", "x"], "tasks.train is a list of 1; write an index from 0 to 1"),
    *(([*VLLM, "--engine.urls", json.dumps([url])], "urls must name a host, and a port from 1 to 65535 or none") for url in ("http://h:0", "http://h:65536", "http://h:99999", "http://h:x", "http://[::1]:70000", "http://:80")),
    *(([*TRAIN, "--rollout.strategy", "rollover", f"--rollout.strategy.{key}", "nan"], "this must be a finite number, got the number nan") for key in ("lag_target", "prefill_tokens_per_iteration")),
    ([*TRAIN, "--rollout.strategy", "fast_lane"], "'fast_lane' is not allowed: it is simulated only (rollover simulate --strategies fast_lane); to train, use 'concurrency'"),
    ([*VLLM, "--engine.urls", '["http://h"]', "--rollout.strategy", "inflight"], "set engine.kv_on_update = 'keep', or choose a strategy that does not need it"),
    ([*SIMULATE, "--lag", "nan"], "nan is not a finite number"),
    ([*SIMULATE, "--lag", "1e999"], "inf is not a finite number"),
    ([*SIMULATE, "--strategies", ""], "'' is an empty list"),
    *(([*SIMULATE, option, BIG], "is not in the range") for option in ("--steps", "--seeds", "--cap", "--replicas", "--jobs", "--max-staleness", "--batch-size")),
    ([*SIMULATE, "--out", LONG], "cannot be written: File name too long"),
    ([*SIMULATE, "--json", LONG], "cannot be written: File name too long"),
    ([*PLAN, "--reward-s", "inf"], "inf is not a finite number"),
    ([*PLAN, "--reward-s", "nan"], "nan is not a finite number"),
    ([*PLAN, "--budget", "nan"], "nan is not a finite number"),
    ([*PLAN, "--aim", "cost", "--target", "inf"], "inf is not a finite number"),
    ([*PLAN, "--group-size", BIG], "is not in the range"),
    ([*PLAN, "--cap", BIG], "is not in the range"),
    ([*PLAN, "--max-staleness", BIG], "is not in the range"),
    (["workload", "fit", "9" * 5000], "9...9"),
    ([*PLAN, "--html", LONG], "cannot be written: File name too long"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), WRONG)
def test_a_value_that_cannot_be_is_one_line_and_leaves_nothing(refused: Say, argv: list[str], message: str) -> None:
    before = set(Path().iterdir())
    said = refused(*argv)
    assert message in said
    assert len(said.splitlines()) <= 2, "the second line says where help is"
    assert len(said) < 1500, "a word of thousands of characters is not repeated"
    assert set(Path().iterdir()) <= before | {Path("__pycache__")}


FILES = [
    ("run.toml", "steps = " + "9" * 5000, ["train", "run.toml"], "run.toml: a number has thousands of digits"),
    ("run.toml", "a = " + "[" * 5000, ["train", "run.toml"], "run.toml: lists or tables are nested too deeply"),
    ("s.toml", "[engine]\nc0_s = nan", [*SIMULATE, "--scenario", "s.toml"], "s.toml:2: engine.c0_s: this must be a finite number"),
    ("s.toml", "[engine]\nreplicas = 4611686018427387904", [*SIMULATE, "--scenario", "s.toml"], "replicas must be at most 10000"),
    ("l.toml", "preset = 'light-8k'\nsigma = nan", ["simulate", "l.toml"], "l.toml:2: sigma: this must be a finite number"),
    ("f.jsonl", f'{{"prompt": "a", "length": {BIG}}}', ["workload", "fit", "f.jsonl"], "f.jsonl:1: a length of 1000000000000000000000000000000 is above the maximum of 16777216 tokens"),
    ("f.jsonl", f'{{"prompt": "a", "length": 5, "prompt_tokens": {BIG}}}', ["simulate", "f.jsonl"], "f.jsonl:1: 'prompt_tokens' must be a whole number from 1 to 16777216"),
    ("f.jsonl", "[" * 20000, ["workload", "fit", "f.jsonl"], "f.jsonl:1: not JSON: lists or tables are nested too deeply"),
    ("f.jsonl", '{"prompt": "a", "length": NaN}', ["workload", "fit", "f.jsonl"], "f.jsonl:1: a length must be a whole number of tokens, got nan"),
    ("p.toml", "budget_per_hour = nan\n[[nodes]]\ndevice = 'h100-sxm'\nnum_devices = 1", ["plan", "p.toml", "--model", "model"], "p.toml:1: budget_per_hour: this must be a finite number"),
]  # fmt: skip


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", read_config),
    ("config.json", derived_config),
    ("config.json", read_model_config),
    ("metrics.jsonl", read_metrics),
    ("trainer.json", read_manifest),
    ("model.safetensors.index.json", weight_files),
    ("began_with.json", lambda folder: check_began_with(folder, folder)),
    ("adapter_config.json", lambda folder: AdapterSource.read(1, folder)),
    ("status.json", read_status),
    ("workers.json", lambda folder: Credentials(folder / "workers.json").hashes()),
]


@pytest.mark.parametrize(("file", "read"), READERS)
def test_nesting_of_thousands_of_brackets_is_refused(tmp_path: Path, file: str, read: Callable[[Path], object]) -> None:
    for levels in (101, 5000):
        (tmp_path / file).write_text('{"a":' * levels + "1" + "}" * levels + "\n")
        with pytest.raises(RolloverError, match=r"nested too deeply|damaged|cannot be read|status\.json"):
            read(tmp_path)


@pytest.mark.parametrize(("file", "content", "argv", "message"), FILES)
def test_a_wrong_value_names_its_file(refused: Say, file: str, content: str, argv: list[str], message: str) -> None:
    Path(file).write_text(content)
    assert message in refused(*argv)


NAMES = ("../x", "a/b", "", ".", "..", "checkpoints", "began_with.json", "swarm", "y" * 200, "-x", " ", "a\\u0000")
NO_NAME = "cannot name a variant, because its run gets a directory of that name"
VARIANTS = [
    *((f'[variants."{name}"]\n[variants.other]', NO_NAME) for name in NAMES),
    ("[variants.only]", "'only' is the only variant, and a comparison needs two: add another"),
    ("[variants.short]\n[variants.long.sft]\nnum_steps = 9", "variants.long.sft cannot differ: all variants start from one policy; start two runs"),
]  # fmt: skip


@pytest.mark.parametrize(("variants", "message"), VARIANTS)
def test_variants_that_cannot_be_compared_are_refused(refused: Say, variants: str, message: str) -> None:
    with Path("run.toml").open("a") as file:
        file.write(f"\n{variants}\n")
    assert message in refused(*TRAIN)
    assert not Path("out").exists()


def changed(**keys: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def written(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content)


def edited(file: str, old: str, new: str) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return edit


MODELS: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, "model 'wrong' is not a folder here and could not be fetched from the hub"),
    (lambda folder: (folder / "config.json").unlink(), "model folder 'wrong' has no config.json"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "wrong: no tokenizer (tokenizer.json, "),
    (written("tokenizer.json", "{"), "wrong: the tokenizer cannot be loaded ("),
    (edited("tokenizer_config.json", '"eos_token"', '"eos"'), "names no end token (eos_token in tokenizer_config.json)"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model folder 'wrong' has no *.safetensors weights"),
    (changed(model_type="bert"), "model_type 'bert' cannot be trained"),
    (written("generation_config.json", "{"), "wrong/generation_config.json cannot be read: "),
    (written("generation_config.json", "[]"), "wrong/generation_config.json does not hold a table of keys; fix or delete it"),
    (written("generation_config.json", '{"eos_token_id": "x"}'), "eos_token_id must be a token id or a list of them, got 'x'"),
    (written("tokenizer_config.json", "{"), "wrong: the tokenizer cannot be loaded ("),
    (written("config.json", "("), "wrong/config.json is not a model config"),
    (written("config.json", "[]"), "wrong/config.json is not a model config: expected a table of keys, got list"),
    (changed(eos_token_id=[0, "x"]), "eos_token_id must be a token id or a list of them, got [0, 'x']"),
    (changed(model_type="foo"), "model_type 'foo' cannot be trained: Unrecognized model identifier: foo"),
    (changed(layer_types=3), "layer_types must be a list, got 3"),
    (changed(hidden_size="x"), "hidden_size must be a whole number above 0, got 'x'"),
    (changed(hidden_size=-1), "hidden_size must be a whole number above 0, got -1"),
    (changed(vocab_size=None), "vocab_size must be a whole number above 0, got None"),
    (changed(num_key_value_heads=3), "3 key-value heads do not divide 4 heads"),
    (changed(head_dim=7), "head_dim must be even"),
    (changed(rms_norm_eps="x"), "rms_norm_eps must be a number from 0, got 'x'"),
    (changed(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (changed(mlp_bias=True), "mlp_bias is not supported"),
    (changed(rope_parameters={"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4}), "rope type 'longrope' is not supported"),
    (changed(partial_rotary_factor=0.5), "partial_rotary_factor other than 1 is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message", "dry"),
    [
        *((*row, dry) for row in MODELS for dry in ([], ["--dry-run"])),
        # A dry run does not look at weights.
        pytest.param(written("model.safetensors", "x"), "model folder 'wrong' cannot be loaded: ", [], id="no weights"),
        pytest.param(changed(intermediate_size=64), "weights do not fit config.json", [], id="other weights"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_the_warm_up(
    refused: Say, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], message: str, dry: list[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=ConnectionError("no network")))
    shutil.copytree("model", "wrong")
    change(Path("wrong"))
    said = refused(*TRAIN, "--model.path", "wrong", "--sft.num_steps", "1", *dry)
    assert message in said
    assert "\n" not in said
    assert not Path("out").exists()


def test_several_end_tokens_of_the_models_configs_all_end_a_response(experiment: Path) -> None:
    from rollover.hf.tokenizer import open_tokenizer, stop_token_ids

    shutil.copytree("model", "several")
    changed(eos_token_id=[0, 5])(Path("several"))
    written("generation_config.json", '{"eos_token_id": 7}')(Path("several"))
    assert stop_token_ids(Path("several"), open_tokenizer(Path("several"))) == (0, 7, 5)


DRY: list[tuple[dict[str, Any], list[str], str]] = [
    ({"text": "a"}, [], "none of the columns prompt, question, problem, query, instruction, input, messages,"),
    ({"prompt": ""}, [], "the prompt is blank"),
    ({"messages": [{"role": "user", "content": "a"}], "answer": "a"}, [], "chat template"),
    ({"prompt": "a"}, ["--tasks.train.0.reward", "{kind = 'exact'}"], "none of the columns answer, label"),
    ({"prompt": "a", "answer": "a"}, ["--tasks.chat_template", "on"], "the tokenizer has no chat template"),
    ({"prompt": "a", "answer": "a"}, ["--engine.kv_cache_bytes", "1000"], "kv_cache_bytes = 1000 holds 0 tokens"),
    ({"prompt": "a", "answer": "a"}, ["--engine.max_context_tokens", "90"], "is more than the model's 80 positions"),
]


@pytest.mark.parametrize(("row", "argv", "message"), DRY)
def test_a_dry_run_looks_at_rows_and_engine(refused: Say, row: dict[str, Any], argv: list[str], message: str) -> None:
    Path("letters.jsonl").write_text(json.dumps({"answer": "a", **row} if not argv else row) + "\n")
    assert message in refused("train", "run.toml", "--dry-run", *argv)


def test_a_dry_run_of_fine_tuning_asks_for_what_is_to_be_learned(refused: Say) -> None:
    Path("letters.jsonl").write_text('{"prompt": "a", "letter": "a"}\n')
    Path("letter_reward.py").write_text("async def share_now(prompts, completions, **columns): return [0.0]")
    assert "no column to learn from; set answer_column" in refused("sft", "run.toml", "--dry-run")
    assert cli.main(["train", "run.toml", "--dry-run"]) == 0


def test_fine_tuning_and_its_dry_run_ask_for_examples_that_fit_and_for_no_engine(refused: Say) -> None:
    argv = ["sft", "run.toml", "--run-dir", "out", "--sft.num_steps", "1", "--engine.max_context_tokens", "90"]
    argv += ["--eval.max_new_tokens", "1000"]  # of a model with 80 positions
    letters = Path("letters.jsonl").read_text()
    Path("letters.jsonl").write_text(json.dumps({"prompt": "ab", "answer": "b" * 78}) + "\n")
    for dry in ([], ["--dry-run"]):
        said = refused(*argv, *dry)
        assert "letters/0@0 and the response to learn have 81 tokens, but the model's context holds 80: shorten" in said
    Path("letters.jsonl").write_text(letters + json.dumps({"prompt": "ab", "answer": "b" * 78}) + "\n")
    longer = ("--sft.num_steps", str(letters.count("\n") + 1), "--sft.batch_size", "1", "--run-dir", "longer")
    assert "and the response to learn have 81 tokens" in refused(*argv, *longer)
    assert not Path("longer/metrics.jsonl").exists() or not runs.rows(Path("longer"), "warmup")
    Path("letters.jsonl").write_text(letters)
    for dry in ([], ["--dry-run"]):
        assert cli.main([*argv, *dry]) == 0
