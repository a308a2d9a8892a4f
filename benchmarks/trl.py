"""TRL's trainer, TRL's trainer with our rollouts, and our own: time to accuracy on the quickstart's task.

    python benchmarks/trl.py --folder build/trl                  # 60 steps of each arm, one after the other
    python benchmarks/trl.py --folder build/trl --steps 4        # to see that it works
    python benchmarks/trl.py --folder build/trl --experiment tool --steps 30 --every 5 --seeds 2   # with a calculator

==========  =====================  ==================================  =============================
arm         trainer                rollouts                            strategy
==========  =====================  ==================================  =============================
``stock``   ``trl.GRPOTrainer``    ``model.generate`` of transformers  one batch, all at once
``hosted``  our subclass of it     embedded engine                     ``april``
``ours``    ``rollover train``     embedded engine                     ``april``
==========  =====================  ==================================  =============================

All arms start from the same warmed-up model, draw the same prompts, are rewarded by the same function and have the same
batch, limits, temperature, learning rate, optimizer and loss (a mean over responses of means over tokens, clipped at
0.2, without KL and filters); each runs in a process of its own, alone. Two settings differ: TRL adds 1e-4 to the
deviation that it divides by, we add 1e-6; and the learning rate of its five steps of warm-up rises from 0, ours from a
fifth. Checkpoints are saved while the clock stands still, and are evaluated afterwards by one and the same program.
What is compared: seconds of the training loop, seconds of its rollouts, and accuracy at equal steps and over time.

With ``--experiment tool`` the task is that of ``rollover train tool``, and the arms are ``stock`` and ``ours``. TRL
gets the calculator as ``tools``, and a chat template that writes messages as the warm-up had them: the turn, the marker
of its end, the answer. How a turn is read as a call is replaced: TRL knows the formats of some templates alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from engine import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# This file has the name of the package that it measures, and lies where Python looks first.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

ARMS = ("stock", "hosted", "ours")
SHAPES = {"quickstart": (24, 256, 2e-4), "tool": (16, 192, 3e-4)}
"""Prompts of a batch, tokens of a response and learning rate, as the experiments have them."""
GROUP_SIZE, WARMUP_STEPS, BETAS = 8, 5, (0.9, 0.99)
TEMPLATE = (
    "{%- for m in messages -%}{{- m['content'] -}}"
    "{%- if m['role'] == 'assistant' -%}{%- if not m['content'] -%}{{- m['tool_calls'] -}}{%- endif -%}"
    "{{- eos_token -}}{%- endif -%}{%- endfor -%}"
)
"""An assistant's message without a text is none of the model's: TRL renders one to find what surrounds an answer."""
MAX_RUNNING = 384


def warm_up(folder: Path, experiment: str, seed: int) -> Path:
    """The model from which all arms start."""
    run = folder / "warm-up"
    if not (run / "model" / "config.json").is_file():
        command("sft", experiment, "--seed", seed, "--run-dir", run, "--logging.progress", "off", folder=folder)
    return run / "model"


def command(*argv: object, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-m", "rollover", *map(str, argv)], cwd=folder, env=environment)
    if done.returncode:
        raise SystemExit(f"rollover {' '.join(map(str, argv))} ended with {done.returncode}")


# -- one arm ------------------------------------------------------------------------------------------------------


class Task:
    """Prompts and reward of an experiment, for a trainer that wants a table and a function of lists."""

    def __init__(self, experiment: str, model: Path, seed: int, num_prompts: int) -> None:
        from rollover.hf.tokenizer import open_tokenizer
        from rollover.run.building import build_config
        from rollover.tasks.open import eval_sources, held_out_texts, train_source

        config = build_config(experiment, ["--seed", str(seed)])
        tokenizer = open_tokenizer(model)
        evaluation = eval_sources(config.tasks, tokenizer, num_prompts=config.eval.num_prompts)
        source = train_source(config.tasks, tokenizer, seed=seed, held_out=held_out_texts(config.tasks, evaluation))
        self.rewards = {spec.source: spec.config.build(spec) for spec in source.reward_specs}
        drawn = [source.prompt(index) for index in range(num_prompts)]
        self.rows = [{"prompt": p.text, "source": p.source, "columns": json.dumps(dict(p.columns))} for p in drawn]

    def reward(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        source: Sequence[str],
        columns: Sequence[str],
        **others: Any,
    ) -> list[float]:
        import asyncio

        from rollover.environments.rewards.base import RewardSample
        from rollover.environments.scoring import score_once

        async def score() -> list[float]:
            found = []
            for prompt, text, ids, name, table in zip(
                prompts, completions, completion_ids, source, columns, strict=True
            ):
                sample = RewardSample(
                    prompt=prompt, columns=json.loads(table), completion=text, completion_ids=tuple(ids)
                )
                found += (await score_once(self.rewards[name], [sample])).rewards()
            return found

        return asyncio.run(score())


def calculate(turn: str) -> str:
    """Complete an operation.

    Args:
        turn: the turn that ends with it
    """
    from rollover.environments.episodes.base import Action
    from rollover.tasks.calculator import Calculator

    return Calculator().step(Action(text=turn)) or ""


def with_tool(task: Task, model: Path) -> dict[str, Any]:
    """Return what TRL's trainer needs for a task with the calculator."""
    import transformers
    from trl.trainer import grpo_trainer

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}
    for row in task.rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]

    def read(tokenizer: Any, ids: Sequence[int], **others: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"turn": text}}}
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if text.rstrip().endswith("=") else {})

    def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        asked, said = ([m[place]["content"] for m in found] for found, place in ((prompts, 0), (completions, -1)))
        return task.reward(asked, said, completion_ids, **columns)

    grpo_trainer.parse_response = read
    return {"tools": [calculate], "processing_class": tokenizer, "reward_funcs": reward}


def trl_settings(experiment: str, folder: Path, *, steps: int, seed: int) -> Any:
    """What TRL is told, so that it trains as the experiment does."""
    import trl

    num_prompts, max_new_tokens, learning_rate = SHAPES[experiment]
    return trl.GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=num_prompts * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=max_new_tokens,
        learning_rate=learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP_STEPS,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_steps=steps,
        shuffle_dataset=False,
        seed=seed,
        loss_type="grpo",
        vllm_importance_sampling_mode="token_truncate",
        max_tool_calling_iterations=7 if experiment == "tool" else None,  # the turn before them is the first of eight
    )


def run_trl(
    arm: str, experiment: str, model: Path, folder: Path, *, steps: int, every: int, seed: int
) -> dict[str, Any]:
    """Train by TRL, with its own rollouts or ours, and return what was measured."""
    import datasets
    import trl
    from transformers import TrainerCallback

    task = Task(experiment, model, seed, SHAPES[experiment][0] * (steps + 8))
    arguments = trl_settings(experiment, folder, steps=steps, seed=seed)
    options: dict[str, Any] = {"reward_funcs": task.reward}
    if experiment == "tool":
        options = with_tool(task, model)
    trainer_class: Any = trl.GRPOTrainer
    if arm == "hosted":
        from rollover.integrations.trl import GRPOTrainer as Hosted

        trainer_class = Hosted
        engine = {"max_running": MAX_RUNNING, "kv_cache_bytes": 134_217_728}
        options["rollover"] = {"rollout": {"strategy": "april"}, "engine": engine}

    class Clock(TrainerCallback):
        """Counts the seconds of the loop, those of saving left out."""

        def __init__(self) -> None:
            self.elapsed_s, self.since_s, self.marks = 0.0, 0.0, [0.0]

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.since_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.elapsed_s += time.perf_counter() - self.since_s
            self.marks.append(self.elapsed_s)
            if state.global_step % every == 0:
                place = folder / "checkpoints" / str(state.global_step)
                kwargs["model"].save_pretrained(place)
                for file in model.glob("*token*"):
                    shutil.copy(file, place)
            self.since_s = time.perf_counter()

    clock = Clock()
    trainer = trainer_class(
        model=str(model),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(task.rows),
        callbacks=[clock],
        **options,
    )
    generate, rollout_s = trainer._generate, 0.0

    def timed(prompts: Any) -> Any:
        nonlocal rollout_s
        since_s = time.perf_counter()
        found = generate(prompts)
        rollout_s += time.perf_counter() - since_s
        return found

    trainer._generate = timed
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    waits_s = [row["perf/rollout_wait_s"] for row in trainer.state.log_history if "perf/rollout_wait_s" in row]
    return {"marks_s": clock.marks, "rewards": rewards, "rollout_s": sum(waits_s) or rollout_s}


def run_ours(experiment: str, model: Path, folder: Path, *, steps: int, every: int, seed: int) -> dict[str, Any]:
    """Train by ``rollover train`` and return what was measured."""
    from swarm_arms import without_sections

    from rollover.report.metrics import read_metrics
    from rollover.run.building import find

    text = without_sections(find(experiment).read_text(), "model.scratch", "sft", "eval")
    text = re.sub(r"^steps = \d+", "", text, count=1, flags=re.MULTILINE)
    file, run = folder / "run.toml", folder / "run"
    file.write_text(
        f'seed = {seed}\nsteps = {steps}\n{text}\n[model]\npath = "{model}"\n[eval]\nnum_prompts = 280\n'
        f'max_new_tokens = 1\n[checkpoint]\nevery_steps = {every}\nkeep_last = 1000\n[logging]\nprogress = "off"\n'
    )
    command("train", file, "--run-dir", run, folder=folder)
    rows = [row for row in read_metrics(run) if row.kind == "step"]
    seconds = [row.values["time/step_s"] for row in rows]
    (folder / "checkpoints").mkdir()
    for step in range(every, steps + 1, every):
        (folder / "checkpoints" / str(step)).symlink_to(run / "checkpoints" / f"step_{step}")
    return {
        "marks_s": [sum(seconds[:i]) for i in range(len(seconds) + 1)],
        "rewards": [row.values["reward/mean"] for row in rows],
        "rollout_s": sum(row.values["time/rollout_s"] for row in rows),
    }


def accuracies(folder: Path, seed: int) -> dict[int, tuple[float, float]]:
    """Held-out accuracy of each checkpoint and its standard error."""
    from rollover.report.metrics import read_metrics

    found = {}
    for place in sorted((folder / "checkpoints").iterdir(), key=lambda place: int(place.name)):
        run = folder / "evaluated" / place.name
        options = ("--run-dir", run, "--seed", seed, "--logging.progress", "off")
        text = (folder.parent / "evaluate.toml").resolve()
        command("eval", text, "--model.path", place.resolve(), *options, folder=folder)
        (row,) = [row for row in read_metrics(run) if row.kind == "eval"]
        found[int(place.name)] = (row.values["accuracy"], row.values["accuracy_se"])
    return found


def measured(arm: str, folder: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm in a process of its own and evaluate what it has saved."""
    (folder / arm).mkdir(parents=True)
    settings = {"experiment": options.experiment, "steps": options.steps, "every": options.every}
    settings |= {"arm": arm, "folder": folder, "seed": seed}
    argv = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(HERE / "trl.py"), *argv], check=True, env=environment)
    result: dict[str, Any] = json.loads((folder / arm / "result.json").read_text())
    return {**result, "accuracy": accuracies(folder / arm, seed)}


def all_arms(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Warm a model up with a seed, evaluate it, and return what was measured of each arm that starts from it."""
    from swarm_arms import without_sections

    from rollover.run.building import find

    folder.mkdir(parents=True, exist_ok=True)
    warm_up(folder, options.experiment, seed)
    text = without_sections(find(options.experiment).read_text(), "model.scratch", "sft")
    (folder / "evaluate.toml").write_text(text)
    start = folder / "start" / "checkpoints" / "0"
    start.parent.mkdir(parents=True)
    start.symlink_to(folder / "warm-up" / "model")
    before = accuracies(folder / "start", seed)
    arms = ARMS if options.experiment == "quickstart" else ("stock", "ours")  # TRL's tools need its own rollouts
    results = {arm: measured(arm, folder, seed, options) for arm in arms}
    return {arm: {**found, "accuracy": before | found["accuracy"]} for arm, found in results.items()}


def reached(found: dict[str, Any], accuracy: float) -> float:
    """Seconds of the training loop up to the first checkpoint with this accuracy."""
    steps = (int(step) for step, (value, _) in found["accuracy"].items() if value >= accuracy)
    return found["marks_s"][next(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of runs; it must not exist, but for the warm-up")
    parser.add_argument("--experiment", choices=SHAPES, default="quickstart")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=15, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="the JSON file; none is written when left out")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    sizes = {"steps": options.steps, "every": min(options.every, options.steps)}
    sys.path.append(str(HERE))
    if options.arm is not None:
        model, folder = options.folder / "warm-up" / "model", options.folder / options.arm
        if options.arm == "ours":
            result = run_ours(options.experiment, model, folder, seed=options.seed, **sizes)
        else:
            result = run_trl(options.arm, options.experiment, model, folder, seed=options.seed, **sizes)
        (folder / "result.json").write_text(json.dumps(result))
        return
    record = {"command": sys.argv, "date": date.today().isoformat(), "machine": machine(), **sizes, "seeds": []}
    for seed in range(options.seeds):
        results = all_arms(options.folder / f"seed-{seed}", seed, options)
        least = min(max(value for value, _ in found["accuracy"].values()) for found in results.values())
        for arm, found in results.items():
            found["to_accuracy"] = [least, reached(found, least)]
            curve = ", ".join(
                f"{value:.3f} after {found['marks_s'][int(step)]:.0f} s"
                for step, (value, _) in found["accuracy"].items()
            )
            print(f"seed {seed}, {arm}: {found['marks_s'][-1]:.0f} s, of which rollouts {found['rollout_s']:.0f} s")
            print(f"    {curve}; {least:.3f} after {reached(found, least):.0f} s", flush=True)
        record["seeds"].append(results)
        if options.out is not None:
            options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
