"""Whole runs, from the command line to the report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollover import cli
from rollover.batch import WasteCause
from rollover.engine.embedded.core import CPU_PREFILL_TOKENS
from rollover.report.measures import windows
from rollover.report.record import read_run
from rollover.report.run_report import WINDOW_STEPS, most_resumed
from rollover.report.timeline_figure import gantt
from rollover.rollout.config import RolloutConfig
from rollover.run.building import build_config
from rollover.run.layout import RUN_FILES
from rollover.run.prepare import initial_policy
from tests import runs
from tests.runs import Say

LOGPROB_TOLERANCE = 1e-4
"""Between the engine's decode with a cache and the trainer's packed forward, both float32; nats."""


EVERY_VERSION = ("--checkpoint.every_steps", "1", "--checkpoint.keep_last", "10")
"""A checkpoint of each stays."""


def train(*argv: str) -> Path:
    """A run of ``run.toml`` in ``out``, or a run that resumes there."""
    new = [] if argv[:1] == ("--resume",) else ["run.toml", "--run-dir", "out"]
    assert cli.main(["train", *new, *argv]) == 0
    return Path("out")


@pytest.fixture(scope="module")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run under ``april`` with a checkpoint of every version."""
    folder = tmp_path_factory.mktemp("finished")
    with runs.working_in(folder, tiny_model):
        with (folder / "run.toml").open("a") as file:
            file.write(runs.UNSEEN)
        # In lockstep who is parked does not depend on the speed of the machine.
        train(*EVERY_VERSION, "--logging.tensorboard", "true", "--deterministic", "true")
    yield folder / "out"


def test_a_finished_run_leaves_everything_in_its_directory(finished: Path) -> None:
    assert json.loads((finished / "config.json").read_text())["rollout"]["strategy"]["kind"] == "april"
    assert [p.name for p in sorted((finished / "checkpoints").iterdir())] == [f"step_{v}" for v in (1, 2, 3, 4)]
    meta = json.loads((finished / "config.json").read_text())["meta"]
    assert (meta["max_running"], meta["prefill_tokens_per_iteration"]) == (24, CPU_PREFILL_TOKENS), "of the engine"
    assert list((finished / "tensorboard").glob("events.out.tfevents.*"))
    assert (finished / "report.html").read_text().count('<details class="card sample">') >= 8
    assert not (finished / "model").exists(), "the model is the user's own folder"
    assert {entry.name for entry in finished.iterdir()} <= {*RUN_FILES}, "no variant can take one of these names"


def test_a_finished_run_measures_every_step_and_before_and_after(finished: Path) -> None:
    steps = runs.rows(finished)
    assert [row["step"] for row in steps] == [0, 1, 2, 3]
    for name in ("loss", "grad_norm", "reward/mean", "time/step_s", "perf/trained_tokens_per_s"):
        assert all(math.isfinite(row[name]) for row in steps), name
    assert all(row["grad_norm"] > 0 for row in steps)
    assert [row["step"] for row in runs.rows(finished, "eval")] == [0, 4]


def test_a_finished_run_parks_and_resumes_samples_and_conserves_them(finished: Path) -> None:
    assert any(t.num_resumes and len(set(t.policy_versions)) > 1 for t in runs.trajectories(finished))
    ledger = runs.ledger(finished)
    assert (+ledger.tokens.wasted).keys() <= {WasteCause.ZERO_ADVANTAGE}, "nothing was thrown away"
    assert not ledger.running and not ledger.unscored, "a finished run has parked what it had begun"
    bound = RolloutConfig().staleness_bound
    assert all(
        0 <= b.step - v <= bound for b in runs.batches(finished) for t in b.trajectories for v in t.policy_versions
    )


def test_the_first_timeline_of_a_report_shows_parked_samples(finished: Path) -> None:
    timeline = read_run(finished).timeline
    found = windows(timeline, num_steps=WINDOW_STEPS, max_windows=6)
    shown = found[most_resumed(found)]
    drawn = gantt(timeline, shown, origin_s=shown.start_s)
    bars = {bar["name"]: bar for bar in drawn["data"] if bar["type"] == "bar"}
    assert shown.num_resumes > 0 and len(bars["parked"]["x"]) > 0
    rows = [set(bar["y"]) for name, bar in bars.items() if name != "parked"]
    assert any(a & b & set(bars["parked"]["y"]) for a, b in pairwise(rows)), "a row that changes its colour"


def test_a_finished_run_recorded_the_logprobs_of_each_version(finished: Path) -> None:
    assert (
        runs.largest_logprob_error(finished, finished.parent / "model", runs.trajectories(finished)) < LOGPROB_TOLERANCE
    )


def test_a_finished_run_is_reported_anew_on_request(finished: Path, done: Say) -> None:
    (finished / "report.html").unlink()
    assert done("report", str(finished)) == f"report: {finished / 'report.html'}\n"
    assert "letters" in (finished / "report.html").read_text()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_weights_change_under_running_samples_and_each_token_knows_its_own(experiment: Path, kv: str) -> None:
    run = train(
        *("--rollout.strategy", "bounded_async", "--engine.kv_on_update", kv, "--steps", "5"),
        *("--rollout.strategy.num_running", "6", "--rollout.rollout_batch_size", "2", *EVERY_VERSION),
        # So much may be in flight that the engine never rests: some sample is running whenever weights change.
        *("--rollout.max_staleness", "200"),
    )
    samples = [s.trajectory for g in runs.ledger(run).groups.values() for s in g.samples]
    mixed = [t for t in samples if len(set(t.policy_versions)) > 1]
    assert mixed
    stale_kv = [s for t in mixed for s in t.segments if s.kv_version < s.policy_version]
    if kv == "keep":
        assert stale_kv
    else:
        assert not stale_kv
        assert runs.largest_logprob_error(run, Path("model"), mixed) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", ["gspo", "reinforce++"])
def test_an_algorithm_trains(experiment: Path, name: str) -> None:
    kl = ["--algorithm.kl_coef", "0.01"]
    estimator = ["--algorithm.kl_estimator", "k1", "--algorithm.kl_in", "reward"] if name == "reinforce++" else []
    run = train("--algorithm.name", name, "--steps", "2", *kl, *estimator)
    rows = runs.rows(run)
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["kl/ref"] == pytest.approx(0, abs=1e-6) and rows[1]["kl/ref"] != 0


# -- what users bring -----------------------------------------------------------------------------------------------


def test_a_model_dataset_and_reward_of_the_user_work_by_config_alone(experiment: Path) -> None:
    """The function is synchronous, so it runs in processes; its module lies in the working directory alone."""
    runs.save_model(Path("my-model"), "llama")
    table = [{"task": {"text": f"{i}{letter}="}, "answer": letter} for i, letter in enumerate(runs.LETTERS)]
    Path("my-data.jsonl").write_text("\n".join(map(json.dumps, table)))
    source = {"path": "my-data.jsonl", "prompt_column": "task.text", "reward.workers": "1"}
    source["reward.function"] = "letter_reward:share"
    settings = [word for key, value in source.items() for word in (f"--tasks.train.0.{key}", value)]
    run = train("--model.path", "my-model", "--steps", "2", *settings)
    for t in runs.trajectories(run):
        text = runs.decode(t.token_ids)
        assert t.reward == pytest.approx(text.count(t.prompt.columns["answer"]) / max(1, len(text)))
    assert json.loads((run / "checkpoints/step_2/config.json").read_text())["model_type"] == "llama"


def test_a_model_from_scratch_is_built_once_and_found_by_a_resumed_run(tmp_path: Path) -> None:
    config = build_config("quickstart", ["--sft", "none"])
    said: list[str] = []
    progress, metrics = cast(Any, SimpleNamespace(message=said.append)), cast(Any, None)
    folder = initial_policy(config, tmp_path / "model", progress, metrics)
    before = (folder / "model.safetensors").stat()
    assert initial_policy(config, tmp_path / "model", progress, metrics) == folder
    assert said == ["building a tokenizer and a model from scratch"]
    assert (folder / "model.safetensors").stat() == before


def test_sft_alone_learns_the_answers_and_leaves_a_model_folder(experiment: Path) -> None:
    settings = ("--sft.num_steps", "60", "--sft.batch_size", "8", "--sft.learning_rate", "1e-2")
    assert cli.main(["sft", "run.toml", "--run-dir", "taught", *settings]) == 0
    losses = [row["loss"] for row in runs.rows(Path("taught"), "warmup")]
    assert len(losses) == 60 and sum(losses[-5:]) < sum(losses[:5]) / 2
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    for model in ("model", "taught/model"):
        assert cli.main(["eval", "run.toml", "--run-dir", f"of-{model[:3]}", "--model.path", model]) == 0
    before, after = (runs.rows(Path(run), "eval")[0]["accuracy"] for run in ("of-mod", "of-tau"))
    assert after > before


def test_a_chat_dataset_is_asked_compared_and_taught_by_its_turns(experiment: Path, done: Say) -> None:
    from transformers import AutoTokenizer

    runs.save_model(Path("chat"))
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}#{% endif %}"
    )
    tokenizer.save_pretrained("chat")
    turns = [[{"role": "user", "content": f"{n}{c}"}, {"role": "assistant", "content": c}] for n, c in enumerate("abc")]
    Path("letters.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    Path("chat_reward.py").write_text(
        "async def share(completions, answer):\n"
        "    text = completions[0][0]['content']\n"
        "    return [text.count(answer[0]) / max(1, len(text))]\n"
    )
    model = ("--model.path", "chat", "--tasks.train.0.reward.function", "chat_reward:share")
    said = done("train", "run.toml", "--dry-run", *model)
    assert "scored by function; the assistant's last turn is the reference answer and" in said
    for t in runs.trajectories(train("--steps", "1", *model)):
        asked, response = runs.decode(t.prompt.token_ids), runs.decode(t.token_ids)
        assert asked in ("0a\n#", "1b\n#", "2c\n#")
        assert t.reward == pytest.approx(response.count(asked[1]) / max(1, len(response)))
    taught = ("--sft.num_steps", "60", "--sft.batch_size", "3", "--sft.learning_rate", "1e-2")
    assert cli.main(["sft", "run.toml", "--run-dir", "taught", *model, *taught]) == 0
    assert runs.rows(Path("taught"), "warmup")[-1]["loss"] < 0.1


def test_eval_reports_pass_at_k_on_every_source(experiment: Path, done: Say) -> None:
    more = runs.UNSEEN.replace('name = "unseen"', 'name = "seen"').replace("unseen.jsonl", "letters.jsonl")
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN + more)
    argv = ["--run-dir", "out", "--eval.samples_per_prompt", "4", "--eval.k", "[1, 2, 4]", "--eval.num_prompts", "5"]
    table = done("eval", "run.toml", *argv)
    [row] = runs.rows(Path("out"), "eval")
    for source in ("/unseen", "/seen", ""):
        rates = [row[f"{name}{source}"] for name in ("accuracy", "pass@2", "pass@4")]
        assert 0 < rates[0] < rates[1] < rates[2] <= 1
    assert row["accuracy"] == pytest.approx((row["accuracy/unseen"] + row["accuracy/seen"]) / 2)
    assert "pass@4" in table and "│ unseen │ 5 x 4   │ " in table and "│ all    │ 10 x 4  │ " in table
    assert "…" not in table, "it fits 80 columns"


def test_a_dry_run_of_an_evaluation_needs_no_rows_to_train_on(experiment: Path, refused: Say, done: Say) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN.replace("unseen.jsonl", "letters.jsonl"))
    argv = ["run.toml", "--dry-run", "--eval.max_new_tokens", "8"]
    assert "is an evaluation prompt" in refused("train", *argv)
    out = done("eval", *argv, "--rollout.max_new_tokens", "100")
    assert "# eval source unseen: jsonl" in out and "# each step trains" not in out and "# train source" not in out


def test_eval_of_a_run_measures_its_newest_checkpoint(experiment: Path) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    run = train("--steps", "2")
    assert cli.main(["eval", "out", "--run-dir", "again"]) == 0
    [measured] = runs.rows(Path("again"), "eval")
    assert measured["accuracy"] == runs.rows(run, "eval")[-1]["accuracy"]


def test_the_best_stays_and_a_settled_run_ends(experiment: Path, done: Say, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    plain = ("--logging.progress", "plain")
    judged = ("--eval.every_steps", "1", "--eval.keep_best", "true", "--eval.patience", "3", "--steps", "40")
    run = train(*judged, "--checkpoint.keep_last", "1", "--checkpoint.every_steps", "1", *plain)
    rows = runs.rows(run, "eval")
    best = max(rows, key=lambda row: (row["accuracy"], -row["step"]))["step"]
    last = rows[-1]["step"]
    assert last == best + 3 < 40 and len(runs.batches(run)) == last
    assert best > 0
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_{best}", f"step_{last}"}
    assert f"no better accuracy (eval.patience); the best step was {best};" in capsys.readouterr().out
    assert f"(step_{best})" in done("export", "out", "model-best", "--best")
    train("--resume", "out")
    assert len(runs.batches(run)) == last  # it has settled
    train("--resume", "out", "--eval.patience", "0", "--steps", str(last + 1))
    assert len(runs.batches(run)) == last + 1


def test_evaluation_goes_on_beside_training_and_knows_its_versions(experiment: Path) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    run = train("--rollout.strategy", "bounded_async", "--eval.every_steps", "2", "--steps", "6")
    rows = runs.rows(run, "eval")
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    for row in rows:
        assert row["step"] == row["eval/oldest_version"] <= row["eval/newest_version"] <= row["step"] + 2
    assert rows[0]["eval/newest_version"] == 0 and rows[-1]["eval/newest_version"] == 6


def test_the_checkpoint_that_is_kept_has_the_weights_that_were_measured(experiment: Path) -> None:
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN)
    kept = ("--eval.keep_best", "true", "--checkpoint.keep_last", "1")
    often = ("--eval.every_steps", "2", "--eval.samples_per_prompt", "8")
    run = train("--rollout.strategy", "inflight", "--steps", "6", *often, *kept)
    rows = runs.rows(run, "eval")
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert all(row["eval/oldest_version"] == row["eval/newest_version"] == row["step"] for row in rows)
    best = max(rows, key=lambda row: (row["accuracy"], -row["step"]))["step"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {f"step_{s}" for s in {best, 6} - {0}}


def test_variants_start_from_one_policy_and_are_compared(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = '[variants.plain.rollout]\nstrategy = "sync"\n[variants.rolling.rollout]\nstrategy = "april"\n'
    Path("run.toml").write_text(runs.CONFIG + runs.UNSEEN + variants)
    run = train("--steps", "2")
    assert "plain" in (table := capsys.readouterr().out) and "rolling" in table
    assert "</html>" in (run / "plain" / "report.html").read_text()
    first = [{t.sample_id: t for t in runs.batches(run / name)[0].trajectories} for name in ("plain", "rolling")]
    assert (both := first[0].keys() & first[1].keys())
    assert all(first[0][i].token_ids == first[1][i].token_ids for i in both), "the same policy, prompt and noise"
    train("--resume", "out", "--steps", "3")
    assert [len(runs.batches(run / name)) for name in ("plain", "rolling")] == [3, 3]
    metrics = run / "plain" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))  # stopped in its last evaluation
    train("--resume", "out")
    said = capsys.readouterr().out
    assert "variant rolling is done; for more: rollover" in said and "variant plain is done" not in said


def test_a_variant_that_cannot_run_ends_a_comparison_before_any_trains(experiment: Path, refused: Say) -> None:
    Path("run.toml").write_text(runs.CONFIG + "[variants.a]\n[variants.b.eval]\nmax_new_tokens = 100_000\n")
    assert "eval.max_new_tokens (100000) make" in refused("train", "run.toml", "--run-dir", "out", "--steps", "1")
    assert not Path("out", "a").exists()


def test_a_comparison_keeps_its_settings_if_a_variant_refuses_others(experiment: Path, refused: Say) -> None:
    Path("run.toml").write_text(runs.CONFIG + '[variants.a]\n[variants.b.trainer]\nschedule = "linear"\n')
    train("--steps", "1")
    assert "out/b: steps cannot change when a run is resumed" in refused("train", "--resume", "out", "--steps", "2")
    train("--resume", "out")
    assert [len(runs.batches(Path("out", name))) for name in "ab"] == [1, 1]
