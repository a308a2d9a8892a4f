"""Refuses settings of TRL under which rollouts that carry over would be trained wrongly, or not at all.

Each message names the setting, why it does not work, and what to do. Torch-free; only TRL's version is read.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from rollover.errors import ConfigError, MissingExtra, require
from rollover.integrations.hosted import Given, refuse_other_versions

logger = logging.getLogger(__name__)

SUPPORTED = ("1.16",)
"""Versions of TRL with which the tests have run. The integration overrides private methods of TRL, so other versions
are refused."""


def trl_version() -> str:
    """Return the installed version of TRL. Raises ``MissingExtra`` when there is none."""
    require("trl", purpose="rollover.integrations.trl")
    try:
        return importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtra("trl is here, but its version is not: pip install 'rollover[trl]'") from None


def check_version(version: str | None = None) -> None:
    """Raise ``ConfigError`` unless TRL is of a version that was tested."""
    refuse_other_versions("TRL", version or trl_version(), SUPPORTED, "pip install 'rollover[trl]'")


def steps_per_batch(args: Any) -> int:
    """Return how many optimizer steps TRL makes from a generation batch, which is one version."""
    return int(args.steps_per_generation) // int(args.gradient_accumulation_steps)


def given_by(args: Any, group_size: int) -> Mapping[str, Given]:
    """Return the settings of a run that TRL's arguments determine."""
    masks = "GRPOConfig.mask_truncated_completions, which masks responses that do not end at an end token,"
    return {
        **({"rollout.stop_strings": Given([], masks)} if args.mask_truncated_completions else {}),
        "seed": Given(args.seed, "GRPOConfig.seed"),
        "rollout.rollout_batch_size": Given(
            args.generation_batch_size // group_size, "GRPOConfig.generation_batch_size / num_generations"
        ),
        "rollout.group_size": Given(group_size, "GRPOConfig.num_generations"),
        "rollout.unit": Given("group", "TRL"),
        "rollout.max_new_tokens": Given(args.max_completion_length, "GRPOConfig.max_completion_length"),
        "rollout.temperature": Given(float(args.temperature), "GRPOConfig.temperature"),
        "rollout.top_p": Given(1.0, "TRL"),
        "rollout.top_k": Given(0, "TRL"),
    }


def refuse(found: Iterable[str]) -> None:
    """Raise ``ConfigError`` with one line for each thing that is in the way, if there is one."""
    if lines := list(found):
        raise ConfigError("\n".join(lines))


def check_dropout(names: Collection[str]) -> None:
    """Raise ``ConfigError`` if parts of the model, by name, drop activations while it trains: TRL computes log-probs in
    training mode, so no engine could have the same."""
    if names:
        raise ConfigError(
            f"the model drops activations while it trains, in {len(names)} places (first {next(iter(names))!r}), so"
            " TRL's log-probs would never equal the log-probs of sampling: set GRPOConfig.disable_dropout to"
            " True, and dropouts such as attention_dropout in the model's config to 0"
        )


def check_correction(args: Any, *, is_on_policy: bool) -> None:
    """Raise ``ConfigError`` when tokens of older weights would be treated as tokens of the current ones; warn when most
    of their responses would be dropped."""
    if not args.vllm_importance_sampling_correction and not is_on_policy:
        raise ConfigError(
            "GRPOConfig.vllm_importance_sampling_correction is False, so tokens sampled from older weights would be"
            " trained as if the current weights had sampled them: set it to True, or use rollover='sync'"
        )
    if args.vllm_importance_sampling_mode == "sequence_mask" and not is_on_policy:
        logger.warning(
            "GRPOConfig.vllm_importance_sampling_mode is 'sequence_mask', TRL's default, which drops every response"
            " whose ratio is above vllm_importance_sampling_clip_max; with tokens of older weights, these are many:"
            " 'token_truncate' keeps them"
        )


def arguments_in_the_way(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a trainer's arguments before TRL acts upon them, by opening vLLM for example."""
    for name, what in (
        ("tools", "calls tools over several turns"),
        ("environment_factory", "rolls out several turns in an environment"),
        ("rollout_func", "replaces the rollouts"),
        ("quantization_config", "trains a model with quantised weights, which cannot be loaded into engines"),
    ):
        if arguments.get(name):
            yield f"{name} is set, which {what}: this is not possible with Rollover's rollouts; leave it out"
    args = arguments.get("args")
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name, False):
            yield (
                f"GRPOConfig.{name} is True, but Rollover opens the engine: leave it out, and for vLLM servers pass"
                " rollover={'engine': {'kind': 'vllm', 'urls': [...]}}"
            )
    dataset = arguments.get("train_dataset")
    if dataset is None or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        seen = "nothing" if dataset is None else type(dataset).__name__
        yield (
            f"train_dataset must be a dataset with a length and numbered rows, got {seen}: a run could not be resumed"
            " from a stream; turn it into a dataset with datasets.Dataset.from_list(list(stream.take(n)))"
        )
    elif {"image", "images"} & {*(getattr(dataset, "column_names", None) or ())}:
        yield "train_dataset has images, which no engine of Rollover supports: leave the column out"


_CUTS = "but TRL computes log-probs over the whole vocabulary, so truncated sampling would be weighted wrongly"
_MASKS = "which masks tokens in the middle of the loss, so that they would be counted as trained"
_LIMITED: Mapping[str, tuple[tuple[float | None, ...], str]] = {
    "top_p": ((1.0, None), _CUTS),
    "top_k": ((0, -1, None), _CUTS),
    "min_p": ((0.0, None), _CUTS),
    "repetition_penalty": ((1.0,), "which TRL's log-probs do not take into account"),
    "top_entropy_quantile": ((1.0,), _MASKS),
    "off_policy_mask_threshold": ((None,), _MASKS),
}
"""Settings of which not all values work: those that do, and what is wrong with the others."""


def settings_in_the_way(args: Any, *, num_processes: int, is_sharded: bool) -> Iterator[str]:
    """Yield what is wrong with the settings once TRL has completed them."""
    if num_processes > 1:
        yield (
            f"the trainer has {num_processes} processes, but batches are handed to one process only: start it with one"
            " (the engine may use any number of GPUs)"
        )
    if is_sharded:
        yield "DeepSpeed or FSDP shards the weights, but they are published unsharded: train without it"
    if args.num_iterations > 1:
        yield (
            f"GRPOConfig.num_iterations is {args.num_iterations}, but each batch is trained once: set it to 1, and use"
            " steps_per_generation for several optimizer steps per batch"
        )
    if args.steps_per_generation % args.gradient_accumulation_steps:
        yield (
            f"GRPOConfig.steps_per_generation ({args.steps_per_generation}) must be a multiple of"
            f" gradient_accumulation_steps ({args.gradient_accumulation_steps}): a batch ends with an optimizer step"
        )
    else:
        yield from out_of_step(args, args.max_steps, args.save_steps)
    if args.neftune_noise_alpha is not None:
        yield (
            "GRPOConfig.neftune_noise_alpha adds noise where TRL computes log-probs, so they would never equal the"
            " log-probs of sampling: leave it out"
        )
    if args.enable_jit_checkpoint and steps_per_batch(args) > 1:
        yield (
            "GRPOConfig.enable_jit_checkpoint may save in the middle of a batch, which could not be resumed: leave it"
            " out, or set steps_per_generation to gradient_accumulation_steps"
        )
    if args.loss_type == "vespo" and args.vllm_importance_sampling_mode.startswith("sequence"):
        yield (
            f"GRPOConfig.vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}, but the loss 'vespo'"
            " already weights whole sequences: set it to 'token_truncate' or 'token_mask'"
        )
    for name, (allowed, why) in _LIMITED.items():
        if (value := getattr(args, name)) not in allowed:
            yield f"GRPOConfig.{name} is {value}, {why}: set it to {allowed[0]}"
    if args.generation_kwargs:
        yield (
            f"GRPOConfig.generation_kwargs sets {', '.join(args.generation_kwargs)} for TRL's own generation, which"
            " Rollover replaces: leave it out; settings of the engine go to rollover={'engine': {...}}"
        )


def out_of_step(args: Any, max_steps: int, save_steps: float) -> Iterator[str]:
    """Yield settings that would save or stop in the middle of a batch. A share of the steps, or a number of epochs, is
    accepted until TRL has converted it to steps: ``num_train_epochs=1.5`` may be 9 steps."""
    each = steps_per_batch(args)
    wrong = []
    if args.save_strategy == "steps" and save_steps >= 1 and int(save_steps) % each:
        asked = f", from {args.save_steps:g}" if args.save_steps < 1 else ""
        wrong.append(f"save_steps ({save_steps:g}{asked})")
    if args.save_strategy == "best" and args.eval_steps and args.eval_steps >= 1 and int(args.eval_steps) % each:
        wrong.append(f"eval_steps ({args.eval_steps:g}, with save_strategy 'best')")
    if max_steps > 0 and max_steps % each:
        asked = f", from num_train_epochs {args.num_train_epochs:g}" if args.max_steps <= 0 else ""
        wrong.append(f"max_steps ({max_steps}{asked})")
    if wrong:
        yield (
            f"a batch is trained in {each} optimizer steps (steps_per_generation / gradient_accumulation_steps), and a"
            f" checkpoint in the middle of it could not be resumed: make {' and '.join(wrong)} a multiple of {each}"
        )
