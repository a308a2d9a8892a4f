"""``--dry-run``: what a run would do, checked against its model, its data and its reward functions.

Importing this module needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollover.algorithms.config import resolve
from rollover.algorithms.registry import ADVANTAGES
from rollover.errors import require
from rollover.run.checks import check_context
from rollover.run.config import RunConfig
from rollover.types import Prompt

_SHOWN_TOKENS = 120


def dry_run(config: RunConfig) -> list[str]:
    """Describe in sentences what a run of ``config`` would do, and check everything that needs no loading of weights.

    Raises:
        ModelError: the model's folder or its tokenizer is missing, or the trainer or the engine would refuse it.
        DataError: a dataset or a reward function cannot be used, or the first row of one.
        ConfigError: prompts and responses do not fit the model or the engine.
    """
    from rollover.run.engine import check_engine
    from rollover.run.memory import memory_lines
    from rollover.run.trainers import check_devices
    from rollover.tasks.open import check_source
    from rollover.tasks.prompts import PromptEncoder

    r = config.rollout
    lines = [f"model: {_model_line(config)}"]
    lines += check_devices(config)
    lines += check_engine(config)
    if config.sft is not None:
        lines.append(f"warm-up: {config.sft.num_steps} supervised steps of {config.sft.batch_size} examples")
    lines += [
        f"each step trains {r.rollout_batch_size} prompts x {r.group_size} samples"
        f" of at most {r.max_new_tokens} tokens, {config.steps} steps in all",
        f"strategy {r.strategy.kind}: {r.strategy.describe(r)}, staleness at most {r.staleness_bound} versions",
        f"algorithm {config.algorithm.name}; log-probs at temperature {r.temperature}",
    ]
    if (lora := config.trainer.lora) is not None:
        require("peft", purpose="[trainer.lora]")
        given = "adapters alone" if lora.publish == "adapter" else "the merged weights"
        targets = ", ".join(lora.targets)
        lines.append(
            f"adapters of rank {lora.rank} on {targets}; the model's own weights stay fixed, and the engine receives"
            f" {given}"
        )
    if r.top_p < 1 or r.top_k > 0:
        lines.append("warning: top_p or top_k truncates the sampling distribution; importance ratios are not exact")
    advantage = resolve(config.algorithm).advantage
    if r.strategy.sorts_by_length and ADVANTAGES[advantage].compares == "batch":
        lines.append(
            f"warning: strategy {r.strategy.kind} trains responses of similar length together, and the advantage"
            f" {advantage!r} compares those of a batch; strategy april mixes them"
        )
    lines += [f"variant {name} changes {', '.join(config.variants[name])}" for name in config.variants]
    tokenizer = _tokenizer(config)
    for role in ("train", "eval"):
        for source in getattr(config.tasks, role):
            encoder = tokenizer and PromptEncoder(tokenizer, config.tasks, source.chat_template_kwargs)
            facts = check_source(source, encoder)
            size = "" if facts.num_rows is None else f", {facts.num_rows} rows"
            reply = f"; {facts.reply}" if facts.reply else ""
            lines.append(f"{role} source {source.name}: {source.kind}{size}, scored by {source.reward.kind}{reply}")
            if facts.first is not None:
                lines += _first_prompt(facts.first, facts.reference, tokenizer)
    for source in () if config.sft is None else config.warmup_sources:
        encoder = tokenizer and PromptEncoder(tokenizer, config.tasks, source.chat_template_kwargs)
        check_source(source, encoder, teaches=True)
    if tokenizer is not None:
        lines.append(_ends(config, tokenizer))
    return [*lines, *memory_lines(config)]


def _first_prompt(prompt: Prompt, reference: str | None, tokenizer: Any) -> list[str]:
    """Show a prompt with the boundaries of its tokens, and its reference answer."""
    shown = "|".join(tokenizer.decode([token]) for token in prompt.token_ids[:_SHOWN_TOKENS])
    rest = f"|... {len(prompt.token_ids) - _SHOWN_TOKENS} more" if len(prompt.token_ids) > _SHOWN_TOKENS else ""
    lines = [f"  first prompt, {len(prompt.token_ids)} tokens: {json.dumps(shown, ensure_ascii=False)[1:-1]}{rest}"]
    if reference is not None:
        lines.append(f"  its reference answer: {json.dumps(reference, ensure_ascii=False)[:200]}")
    return lines


def _ends(config: RunConfig, tokenizer: Any) -> str:
    from rollover.hf.hub import resolve_model
    from rollover.tasks.open import response_ends

    assert config.model.path is not None
    ends = response_ends(resolve_model(config.model.path, weights=False), tokenizer, config.tasks)
    return f"a response ends with {' or '.join(tokenizer.decode([end]) for end in ends)}"


def _model_line(config: RunConfig) -> str:
    if config.model.scratch is not None:
        s = config.model.scratch
        return f"from scratch, {s.num_layers} layers of width {s.hidden_size}"
    from rollover.hf.config import read_model_config
    from rollover.hf.hub import resolve_model

    assert config.model.path is not None
    folder = resolve_model(config.model.path, weights=False)
    model = read_model_config(folder, weights=Path(config.model.path).is_dir())
    if isinstance(context := model.get("max_position_embeddings"), int):
        check_context(config, context)
    return f"{config.model.path} ({model['model_type']})"


def _tokenizer(config: RunConfig) -> Any:
    """Load the model's tokenizer and check it; ``None`` for a model that has yet to be built."""
    from rollover.hf.hub import resolve_model
    from rollover.hf.tokenizer import load_tokenizer

    if config.model.path is None:
        return None
    return load_tokenizer(resolve_model(config.model.path, weights=False))
