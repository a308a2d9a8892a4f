"""GRPO with active partial rollouts in one file, on the public names of ``rollover`` alone.

The program trains a model to answer with digits. Replace ``Questions`` and ``Reward`` by your own task, and the rest
stays as it is:

    python examples/grpo_in_one_file.py ./qwen3-0.6b runs/digits --steps 50

It needs ``pip install 'rollover[train]'`` and no GPU. Each of its steps is a step of APRIL:

1. The driver starts more prompts than the batch needs, and the engine decodes all of them.
2. As soon as the batch is full, the driver stops the engine and parks the responses that are not finished.
3. The trainer takes one optimizer step on the batch. Part of its tokens may have been sampled by older weights; the
   loss corrects for that with the log-probs on record.
4. The engine gets the new weights, and the driver resumes the parked responses first.

Every decision of the driver is an event in ``journal.sqlite``, and every few steps the trainer writes a checkpoint.
If the program is killed at any moment, the same command continues from both: no response is decoded twice, and no batch
is trained twice.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from rollover import (
    EmbeddedConfig,
    EmbeddedEngine,
    Journal,
    LocalTrainer,
    Prompt,
    RolloutDriver,
    RolloutState,
    SamplingParams,
    TrainerConfig,
    TrainingSetup,
    algorithm,
    restart,
    strategy,
)

PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 4
MAX_PROMPT_TOKENS = 16
CHECKPOINT_EVERY = 5
SEED = 0


class Questions:
    """The data: prompts by number, the same ones in every process, so that a resume needs no more than a counter."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def prompt(self, index: int) -> Prompt:
        text = f"{index % 100}="
        return Prompt(
            prompt_id=f"digits/{index}",
            token_ids=tuple(self.tokenizer(text, add_special_tokens=False).input_ids),
            text=text,
            source="digits",
        )


class Reward:
    """The reward: the share of digits in the response. Raise ``RewardError`` for a response that cannot be judged."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def score(self, trajectory: Any) -> float:
        response = self.tokenizer.decode(trajectory.token_ids, skip_special_tokens=True)
        return sum(c.isdigit() for c in response) / max(1, len(response))


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest checkpoint of a run. The trainer gives a folder its name once everything is written."""
    return max(run.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")), default=None)


def open_trainer(model: Path, run: Path, args: argparse.Namespace) -> LocalTrainer:
    """Open the trainer with the model, or with the newest checkpoint of an earlier process."""
    setup = TrainingSetup(
        config=TrainerConfig(learning_rate=args.learning_rate),
        algorithm=algorithm("grpo"),  # or "gspo", "rloo", "cispo", ...
        temperature=1.0,
        max_response_tokens=args.max_new_tokens,
        num_steps=args.steps,
        seed=SEED,
    )
    return LocalTrainer(setup, model, resume_from=newest_checkpoint(run))


def open_driver(engine: EmbeddedEngine, tokenizer: Any, journal: Journal, step: int, max_tokens: int) -> RolloutDriver:
    """Open the driver at ``step``, with the parked samples that an earlier process left in the journal."""
    april = strategy(
        "april",
        engine.capabilities,
        rollout_batch_size=PROMPTS_PER_STEP,
        group_size=SAMPLES_PER_PROMPT,
        over_sampling_batch_size=2 * PROMPTS_PER_STEP,  # what is not finished in time is parked
        max_staleness=4,  # no token of a batch is more than four versions old
        max_new_tokens=max_tokens,
    )
    return RolloutDriver(
        engine=engine,
        strategy=april,
        source=Questions(tokenizer),
        scorer=Reward(tokenizer),
        sampling=SamplingParams(max_new_tokens=max_tokens, stop_token_ids=(tokenizer.eos_token_id,)),
        seed=SEED,
        state=restart(journal, step=step, redo_round=False) if journal.last_seq else RolloutState(),
        journal=journal,
    )


async def train(args: argparse.Namespace) -> None:
    run = Path(args.run)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = open_trainer(args.model, run, args)
    engine = EmbeddedEngine.from_folder(
        Path(args.model), EmbeddedConfig(max_context_tokens=MAX_PROMPT_TOKENS + args.max_new_tokens)
    )
    journal = Journal(run / "journal.sqlite")
    driver = open_driver(engine, tokenizer, journal, trainer.version, args.max_new_tokens)

    async def load() -> None:
        await engine.load(trainer.version, trainer.weight_source())

    def save() -> None:
        """Write a checkpoint. The journal goes to the disk first, so that it is never the older of the two."""
        driver.flush()
        journal.sync()
        trainer.save(run / f"step_{trainer.version}")
        driver.saved(trainer.version)  # batches before this step are never asked for again
        for old in run.glob("step_*"):
            if old.name != f"step_{trainer.version}":
                shutil.rmtree(old)

    try:
        await driver.update_weights(trainer.version, load)
        while trainer.version < args.steps:
            batch = await driver.next_batch()
            trained = await asyncio.to_thread(trainer.step, batch)
            await driver.update_weights(trainer.version, load)
            report(batch, trained.metrics)
            if trainer.version % CHECKPOINT_EVERY == 0 or trainer.version == args.steps:
                save()
    finally:
        await driver.stop()  # parks what runs, and writes it to the journal
        await engine.close()
        trainer.close()
        tokens = driver.ledger.tokens
        wasted = tokens.wasted.total()
        print(f"decoded {tokens.decoded} = trained {tokens.trained} + wasted {wasted} + live {tokens.live}")
        journal.close()


def report(batch: Any, metrics: Any) -> None:
    """Print one line about a step."""
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    segments = [segment for trajectory in batch.trajectories for segment in trajectory.segments]
    older = sum(len(segment.token_ids) for segment in segments if segment.policy_version < batch.step)
    print(
        f"step {batch.step + 1}: reward {sum(rewards) / len(rewards):.3f}, {batch.num_tokens} tokens,"
        f" {older} of them sampled by older weights, loss {metrics['loss']:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with active partial rollouts in one file")
    parser.add_argument("model", help="a Hugging Face folder of the Llama, Qwen2 or Qwen3 families")
    parser.add_argument("run", help="the folder for the journal and the checkpoints; one that exists is resumed")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    asyncio.run(train(parser.parse_args()))


if __name__ == "__main__":
    main()
