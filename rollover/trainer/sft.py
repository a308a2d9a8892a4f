"""Supervised warm-up: maximum likelihood of response tokens, by the packing and log-probs that the trainer
uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollover.errors import DataError
from rollover.hf.companions import read_companions
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.trainer.config import SFTConfig
from rollover.trainer.guards import deterministic_kernels, reporting_out_of_memory
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.models import load_policy, pick_device, save_model
from rollover.trainer.optimizer import apply_gradients, build_optimizer, learning_rate
from rollover.trainer.packing import TrainingSample, pack

Example = tuple[Sequence[int], Sequence[int]]
"""Prompt ids and response ids; the response ends with the end token where the model should learn to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTProgress:
    """One optimizer step."""

    step: int
    """From 0."""
    loss: float
    """Mean negative log-likelihood of the step's response tokens, before the update; nats."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Response tokens trained."""
    elapsed_s: float
    """Since the first step began."""


def run_sft(
    model: str | Path,
    examples: Iterable[Example],
    config: SFTConfig,
    *,
    output: Path,
    deterministic: bool = False,
    on_progress: Callable[[SFTProgress], None] = lambda progress: None,
) -> dict[str, float]:
    """Train ``config.num_steps`` steps on examples taken in order, ``config.batch_size`` a step, and write
    the model to the folder ``output``. Prompt tokens are conditioned on and not trained. Returns the closing
    metrics.

    Raises ``DataError`` when the examples run out before the last step.
    """
    device = pick_device(config.device)
    folder = resolve_model(model)
    companions = read_companions(folder)
    source = iter(examples)
    started_s = time.perf_counter()
    with reporting_out_of_memory(config), deterministic_kernels(deterministic):
        policy = load_policy(folder, device=device, gradient_checkpointing=config.gradient_checkpointing)
        optimizer = build_optimizer(policy, config)
        total_tokens, losses = 0, []
        for step in range(config.num_steps):
            samples = _take(source, config, step)
            optimizer.zero_grad(set_to_none=True)
            num_tokens = sum(len(s.response_ids) for s in samples)
            loss = 0.0
            for row in pack(samples, config.micro_batch_tokens, device=device):
                logprobs_T = response_logprobs(policy, row, 1.0, autocast=config.dtype == "bfloat16")
                share = -logprobs_T.sum() / num_tokens
                share.backward()
                loss += float(share.detach())
            rate = learning_rate(config, step, config.num_steps)
            grad_norm = apply_gradients(optimizer, config, rate)
            losses.append(loss)
            total_tokens += num_tokens
            on_progress(
                SFTProgress(
                    step=step,
                    loss=loss,
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    num_tokens=num_tokens,
                    elapsed_s=time.perf_counter() - started_s,
                )
            )
    write_folder(output, lambda partial: save_model(policy, partial, companions=companions))
    last = losses[-min(20, len(losses)) :]
    return {
        "loss/first": losses[0],
        "loss/last_20_steps": sum(last) / len(last),
        "tokens/response": float(total_tokens),
        "time/total_s": time.perf_counter() - started_s,
    }


def _take(source: Iterator[Example], config: SFTConfig, step: int) -> list[TrainingSample]:
    examples = list(itertools.islice(source, config.batch_size))
    if len(examples) < config.batch_size:
        raise DataError(
            f"the examples ran out at step {step} of {config.num_steps}: "
            "lower sft.num_steps or sft.batch_size, or give more examples"
        )
    return [TrainingSample(prompt_ids=tuple(p), response_ids=tuple(r)) for p, r in examples]
