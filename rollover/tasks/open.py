"""Opens the sources of a run for training and evaluation, and checks them before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

from rollover.environments.episodes import ClassConfig
from rollover.environments.episodes.base import awaited
from rollover.environments.reasoning_gym import gym_seed
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError
from rollover.hf.companions import Companions
from rollover.hf.tokenizer import FastTokenizer, generation_config, stop_token_ids
from rollover.tasks.config import NO_SOURCE, TasksConfig
from rollover.tasks.episodes import AnswerWriter, begin_episode, check_environment, encoder_of
from rollover.tasks.fingerprint import DataFile, Fingerprint
from rollover.tasks.prompt_source import EndlessSource, PromptSource, RowSource
from rollover.tasks.prompts import PromptEncoder
from rollover.tasks.sources.base import SourceSettings
from rollover.types import Prompt

_MAX_CYCLE = 10_000


class MixtureSource:
    """Interleaves several sources: over every ``cycle`` draws each source has exactly its share.

    With shares p_k = n_k / L in lowest terms the cycle has L draws. Draws are spread evenly (the j-th of
    source k stands at (j + 1/2) / n_k), so that every batch has these shares too. Shares that would need a cycle above
    10,000 are rounded to that, and each source keeps at least one draw.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float]) -> None:
        self._sources = tuple(sources)
        self._by_name = {spec.source: source for source in sources for spec in source.reward_specs}
        self._counts = _shares(weights)
        places = [(Fraction(2 * j + 1, 2 * count), k, j) for k, count in enumerate(self._counts) for j in range(count)]
        self._cycle = tuple((k, j) for _, k, j in sorted(places))

    @property
    def cycle(self) -> int:
        return len(self._cycle)

    @property
    def reward_specs(self) -> tuple[RewardSpec, ...]:
        return tuple(spec for source in self._sources for spec in source.reward_specs)

    @property
    def left_out(self) -> str:
        return "; ".join(each.left_out for each in self._sources if each.left_out)

    def prompt(self, index: int) -> Prompt:
        cycle, place = divmod(index, len(self._cycle))
        source, nth = self._cycle[place]
        return self._sources[source].prompt(cycle * self._counts[source] + nth)

    def solution(self, prompt: Prompt) -> str:
        return self._by_name[prompt.source].solution(prompt)


def _shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Count the draws of each source in one cycle."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    divisor = gcd(*counts)
    if sum(counts) // divisor <= _MAX_CYCLE:
        return tuple(count // divisor for count in counts)
    total = sum(exact)
    return tuple(max(1, round(weight / total * _MAX_CYCLE)) for weight in exact)


def train_source(
    config: TasksConfig,
    tokenizer: FastTokenizer,
    *,
    seed: int,
    held_out: Collection[str] = frozenset(),
    taught: Sequence[SourceSettings] = (),
) -> PromptSource:
    """Open the training mixture, or that of the sources whose solutions are ``taught``, without the prompts that ask
    what ``held_out`` contains and the rows without a response to learn. Raises ``DataError`` for anything wrong with a
    source."""
    if not (mixed := taught or config.train):
        raise DataError(NO_SOURCE)
    given: dict[str, Any] = {"seed": seed, "held_out": held_out, "teaches": bool(taught)}
    sources = [open_source(source, config, tokenizer, **given) for source in mixed]
    if len(sources) == 1:
        return sources[0]
    return MixtureSource(sources, [source.weight for source in mixed])


def eval_sources(config: TasksConfig, tokenizer: FastTokenizer, *, num_prompts: int) -> tuple[RowSource, ...]:
    """Open the evaluation sets: the first ``num_prompts`` rows (or ``limit``, or all, if fewer) of each source in file
    order, without the skipped ones. Call ``prompt(i)`` for i below ``num_rows``."""
    opened = (open_source(s, config, tokenizer, seed=config.eval_seed, num_prompts=num_prompts) for s in config.eval)
    return tuple(source for source in opened if isinstance(source, RowSource))


def open_source(
    source: SourceSettings,
    config: TasksConfig,
    tokenizer: FastTokenizer,
    *,
    seed: int,
    held_out: Collection[str] = (),
    teaches: bool = False,
    num_prompts: int | None = None,
) -> RowSource | EndlessSource:
    """Open a source for training or, with the number of prompts, for evaluation. Raises ``DataError`` for anything
    wrong with it."""
    role, name = ("train", source.name) if num_prompts is None else ("eval", f"eval/{source.name}")
    encoder = encoder_of(source, config, tokenizer)
    rows = source.open(gym_seed(role, source.name, seed))
    limits = [limit for limit in (rows.num_rows, source.limit, num_prompts) if limit is not None]
    common: dict[str, Any] = {"name": name, "held_out": held_out, "teaches": teaches}
    if limits:
        shuffle = config.shuffle and num_prompts is None
        return RowSource(source, rows, encoder, num_rows=min(limits), seed=seed, shuffle=shuffle, **common)
    if config.curriculum is not None:
        raise DataError(
            f"tasks.curriculum needs rows that come again, and source {source.name!r} has none: set its limit"
        )
    return EndlessSource(source, rows, encoder, **common)


def held_out_texts(config: TasksConfig, evaluation: Sequence[RowSource]) -> frozenset[str]:
    """List what the evaluation prompts ask, which training must not see; nothing when ``keep_eval_out`` is off."""
    if not config.keep_eval_out:
        return frozenset()
    return frozenset(text for source in evaluation for text in source.asked())


def reply_end(tokenizer: FastTokenizer, config: TasksConfig) -> int:
    """Return the token that ends a response: the marker with which the chat template ends an assistant's turn, or else
    the tokenizer's end token."""
    end = PromptEncoder(tokenizer, config).turn_end
    return int(tokenizer.eos_token_id) if end is None else end


def response_ends(folder: Path, tokenizer: FastTokenizer, config: TasksConfig) -> tuple[int, ...]:
    """Return the tokens that end a response: tokens that the model's folder names, and the chat template's."""
    return tuple(dict.fromkeys([*stop_token_ids(folder, tokenizer), reply_end(tokenizer, config)]))


def companions_of(folder: Path, tokenizer: FastTokenizer, config: TasksConfig) -> Companions:
    """Return the files of the run's models in place of those in ``folder``, with which it began: where a response ends,
    and the chat template that the run has chosen."""
    ends = generation_config(folder, response_ends(folder, tokenizer, config))
    file = config.chat_template_file
    return {"generation_config.json": ends, **({"chat_template.jinja": Path(file).read_bytes()} if file else {})}


def check_source(
    source: SourceSettings,
    config: TasksConfig,
    tokenizer: FastTokenizer,
    *,
    seed: int = 0,
    **chosen: Any,
) -> tuple[RowSource | EndlessSource, Prompt] | None:
    """Open a source as ``open_source`` does, its environment and, unless it ``teaches``, its rewards. Return it with
    the first prompt that a run takes, or nothing if that needs a download. Raises ``DataError`` as a run would."""
    if source.look_up():
        return None
    opened = open_source(source, config, tokenizer, seed=seed, **chosen)
    for spec in () if chosen.get("teaches") else opened.reward_specs:
        spec.config.check(spec)
        spec.config.build(spec)
    encoder = encoder_of(source, config, tokenizer)
    check_environment(source, encoder)
    first = opened.prompt(0)
    if isinstance(source.environment, ClassConfig) and source.environment.writes_prompts:
        live, token_ids = begin_episode(source.environment, AnswerWriter(encoder, source), first)
        awaited(live.close())
        first = replace(first, token_ids=token_ids)
    return opened, first


def same_datasets(config: TasksConfig, recorded: Mapping[str, Fingerprint] | None) -> dict[str, Fingerprint]:
    """Return the fingerprints of all datasets of a run, which must be those ``recorded`` when it began (``None`` if it
    begins now, or began before they were recorded). Evaluation sources are compared only if ``keep_eval_out``.

    A cursor is a number of prompts drawn, so with other rows it would mean something else, and nothing would show it.
    The time at which a file was written decides nothing, and generated items are not compared.

    Raises:
        DataError: a dataset is missing, or is not the recorded one.
    """
    fingerprints: dict[str, Callable[[], Fingerprint | None]]
    roles = (("train", config.train), ("eval", config.eval))
    datasets = {f"{role}/{source.name}": source for role, sources in roles for source in sources}
    fingerprints = {name: source.fingerprint for name, source in datasets.items()}
    if config.chat_template_file is not None:
        fingerprints["chat_template"] = DataFile(Path(config.chat_template_file)).fingerprint
    if not config.keep_eval_out:
        recorded = {name: found for name, found in (recorded or {}).items() if not name.startswith("eval/")}
    now = {name: _same(take, (recorded or {}).get(name), name) for name, take in fingerprints.items()}
    return {name: found for name, found in now.items() if found is not None}


def _same(take: Callable[[], Fingerprint | None], before: Fingerprint | None, name: str) -> Fingerprint | None:
    mend = f"restore the original dataset, give its new path on --resume, or start a new run ({name})"
    try:
        now = take()
    except DataError as error:
        if before is None:
            raise
        raise DataError(f"a dataset of this run is missing: {str(error).partition(';')[0]}; {mend}") from None
    if before is None or now is None or (before["size"], before["sha256"]) == (now["size"], now["sha256"]):
        return before or now
    change = f"{before['size']} {before['unit']} then, {now['size']} now"
    if before["size"] == now["size"]:
        change = f"{now['size']} {now['unit']} as before, with other content"
    written = f", written {now['written']}" if "written" in now else ""
    use = "keeps out of training" if name.startswith("eval/") else "has counted"
    raise DataError(
        f"{now['path']} has changed since the run began ({change}{written}), so its rows are no longer those that the"
        f" run {use}; {mend}"
    )
