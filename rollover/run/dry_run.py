"""``--dry-run``: what a run would do, checked against its model, its data and its reward functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path

from rollover.errors import printable, require
from rollover.hf.pieces import pieces
from rollover.hf.tokenizer import FastTokenizer
from rollover.privacy import Redactor
from rollover.report.samples import blanked
from rollover.run.config import RunConfig, check_context
from rollover.run.reference_scores import reference_scores
from rollover.settings.plain import resolved
from rollover.trainer.config import StepConfig
from rollover.types import Prompt

_SHOWN_TOKENS = 120
_SHOWN_END = 16
"""Tokens of these that are the last of the prompt, where the response begins."""


def dry_run(config: RunConfig, job: str = "train") -> list[str]:
    """Describe in sentences, without secrets, what ``job`` (a function of ``rollover.run.jobs``) would do with
    ``config``, and check everything that needs no loading of weights.

    Raises:
        ModelError: the model's folder or its tokenizer is missing, or the trainer or the engine would refuse it.
        DataError: a dataset or a reward function cannot be used, or the first row of one.
        ConfigError: prompts and responses do not fit the model or the engine.
    """
    from rollover.run.engine import check_engine
    from rollover.run.memory import memory_lines
    from rollover.run.trainers import check_devices

    sampled = {"train": ("rollout", "eval"), "evaluate": ("eval",)}
    model = partial(_model, sampled=sampled.get(job, ()))
    parts: tuple[Callable[[RunConfig], Iterable[str]], ...] = (
        *(model, check_devices, check_engine, _warmup, _steps, _adapters, _biases, _variants, _sources, memory_lines),
    )
    if job != "train":
        sft = config.sft and replace(config.sft, sources=config.warmup_sources)
        config = replace(config, sft=sft, tasks=replace(config.tasks, train=()))
        parts = (model, check_devices, check_engine if job == "evaluate" else _warmup, _sources)
    redact = Redactor(resolved(config), prose=True).text
    return [printable(redact(line)) for part in parts for line in part(config)]


def _model(config: RunConfig, sampled: Sequence[str]) -> Iterator[str]:
    if config.model.scratch is not None:
        s = config.model.scratch
        yield f"model: from scratch, {s.num_layers} layers of width {s.hidden_size}"
        return
    from rollover.hf.config import max_context, read_model_config
    from rollover.hf.hub import resolve_model

    assert config.model.path is not None
    folder = resolve_model(config.model.path, weights=False)
    model = read_model_config(folder, weights=Path(config.model.path).is_dir())
    check_context(config, max_context(folder), sampled)
    yield f"model: {config.model.path} ({model['model_type']})"


def _warmup(config: RunConfig) -> Iterator[str]:
    if config.sft is not None:
        yield f"warm-up: {config.sft.num_steps} supervised steps of {config.sft.batch_size} examples"
        yield from _rates(config.sft, config.sft.num_steps)


def _steps(config: RunConfig) -> Iterator[str]:
    r = config.rollout
    yield (
        f"each step trains {r.rollout_batch_size} prompts x {r.group_size} samples"
        f" of at most {r.max_new_tokens} tokens, {config.steps} steps in all"
    )
    yield f"strategy {r.strategy.kind}: {r.strategy.describe(r)}, staleness at most {r.staleness_bound} versions"
    yield f"algorithm {config.algorithm.name}; log-probs at temperature {r.temperature}"
    yield from _rates(config.trainer, config.steps)


def _rates(section: StepConfig, num_steps: int) -> Iterator[str]:
    """Warn of a learning rate that is still rising when training ends, and of one that does not fall."""
    if section.final_lr_ratio and section.schedule == "constant":
        yield f"warning: {section.section}.final_lr_ratio has no effect with schedule 'constant'"
    if section.warmup_steps > num_steps:
        yield (
            f"warning: {section.section}.warmup_steps ({section.warmup_steps}) is above the {num_steps} steps, so the"
            f" learning rate never reaches {section.section}.learning_rate ({section.learning_rate:g})"
        )


def _adapters(config: RunConfig) -> Iterator[str]:
    if (lora := config.trainer.lora) is None:
        return
    require("peft", purpose="[trainer.lora]")
    given = "adapters alone" if lora.publish == "adapter" else "the merged weights"
    yield (
        f"adapters of rank {lora.rank} on {', '.join(lora.targets)}; the model's own weights stay fixed, and the engine"
        f" receives {given}"
    )


def _biases(config: RunConfig) -> Iterator[str]:
    r = config.rollout
    if r.replays_truncation:
        yield (
            f"each token is drawn from at most {r.max_kept} tokens (rollout.top_k), which are stored with it; log-probs"
            " are normalised over these"
        )
    elif r.is_cut:
        yield (
            "warning: rollout.accept_truncation_bias: top_p, top_k or min_p leaves tokens out, but log-probs are"
            " trained as if drawn from the whole vocabulary, so importance ratios and gradients are biased"
        )


def _variants(config: RunConfig) -> Iterator[str]:
    return (f"variant {name} changes {', '.join(changes)}" for name, changes in config.variants.items())


def _sources(config: RunConfig) -> Iterator[str]:
    from rollover.hf.config import max_context
    from rollover.hf.hub import resolve_model
    from rollover.hf.tokenizer import open_tokenizer
    from rollover.tasks.episodes import demonstrations
    from rollover.tasks.open import check_source, held_out_texts, response_ends
    from rollover.tasks.prompt_source import RowSource, examples
    from rollover.tasks.prompts import PromptEncoder
    from rollover.trainer.scratch import build_tokenizer

    tokenizer: FastTokenizer
    tasks = replace(config.tasks, shuffle=False)
    if config.model.path is None:  # nobody knows yet how many tokens a prompt has
        tokenizer, tasks, context = build_tokenizer([]), replace(tasks, max_prompt_tokens=10**6), inf
    else:
        folder = resolve_model(config.model.path, weights=False)
        tokenizer, context = open_tokenizer(folder), max_context(folder)
    measured = partial(check_source, seed=tasks.eval_seed, num_prompts=config.eval.num_prompts)
    evaluation = [(source, measured(source, tasks, tokenizer)) for source in tasks.eval]
    held_out = held_out_texts(tasks, [found[0] for _, found in evaluation if found and isinstance(found[0], RowSource)])
    trained = partial(check_source, seed=config.seed, held_out=held_out)
    taught = () if config.sft is None else config.warmup_sources
    lessons = demonstrations(taught, tasks, tokenizer, end=tokenizer.eos_token_id)
    roles = (("train", tasks.train), ("sft", tuple(source for source in taught if source not in tasks.train)))
    found = [
        (role, source, trained(source, tasks, tokenizer, teaches=role == "sft"))
        for role, sources in roles
        for source in sources
    ]
    for role, source, checked in [*found, *(("eval", *each) for each in evaluation)]:
        opened, first = checked or (None, None)
        worked = checked if role == "sft" else None
        if role == "train" and source in taught:
            worked = trained(source, tasks, tokenizer, teaches=True)
        if worked:
            next(examples(worked[0], tokenizer, end=tokenizer.eos_token_id, lessons=lessons, context=context))
        size = f", {opened.num_given} rows" if isinstance(opened, RowSource) else ""
        size += ", which a run downloads: its rows have not been checked" * (checked is None)
        reply = f"; {opened.reply}" if opened and opened.reply else ""
        rewards = () if role == "sft" else source.all_rewards
        scored_by = f", scored by {', '.join(reward.kind for reward in rewards)}" if rewards else ""
        yield f"{role} source {source.name}: {source.kind}{size}{scored_by}{reply}"
        for reward in rewards:
            yield from (f"  {finding}" for finding in reward.findings())
        for part, each in (("", None if role == "sft" else opened), ("warm-up: ", worked and worked[0])):
            if each and each.left_out:
                yield f"  warning: {part}{each.left_out}"
        if opened and first:
            yield from _first_prompt(config, first, opened.references(first), tokenizer)
        if opened and source.environment is not None:
            yield "  its reference answers were not scored: an environment answers the turns"
        elif opened and role != "sft":
            siblings, is_taught = config.rollout.group_size, config.sft is not None
            scores = reference_scores(opened, tokenizer, group_size=siblings, is_taught=is_taught)
            yield from (f"  {line}" for line in scores)
    if config.model.path is not None:
        yield from (f"warning: {found}" for found in PromptEncoder(tokenizer, tasks).findings())
        ends = response_ends(folder, tokenizer, tasks)
        yield f"a response ends with {' or '.join(tokenizer.decode([end]) for end in ends)}"


def _first_prompt(
    config: RunConfig, prompt: Prompt, references: Sequence[str], tokenizer: FastTokenizer
) -> Iterator[str]:
    """Show a prompt with the boundaries of its tokens, if they are known, and its reference answer."""
    redact = Redactor(resolved(config), prose=True).text
    is_known = config.model.path is not None
    texts = blanked(pieces(tokenizer, prompt.token_ids), redact) if is_known else list(redact(prompt.text))
    if (left_out := len(texts) - _SHOWN_TOKENS) > 0:
        texts[-_SHOWN_END - left_out : -_SHOWN_END] = [f"... {left_out} more ..."]
    shown = json.dumps(("|" if is_known else "").join(texts), ensure_ascii=False)[1:-1]
    yield f"  first prompt{f', {len(prompt.token_ids)} tokens' if is_known else ''}: {shown}"
    if references:
        yield f"  its reference answer: {json.dumps(redact(' or '.join(references)), ensure_ascii=False)[:200]}"
