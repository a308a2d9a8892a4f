"""Opens the sources of a run for training and evaluation, and checks them before it begins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from math import gcd, lcm
from pathlib import Path
from typing import Any, NamedTuple

from rollover.environments.episodes import ClassConfig
from rollover.environments.reasoning_gym import gym_seed
from rollover.environments.rewards.base import RewardSpec
from rollover.errors import DataError
from rollover.hf.tokenizer import Tokenizer, stop_token_ids
from rollover.tasks.columns import ColumnMap
from rollover.tasks.config import NO_SOURCE, TasksConfig
from rollover.tasks.episodes import AnswerWriter, begin_episode, check_environment, encoder_of
from rollover.tasks.fingerprint import DataFile, Fingerprint
from rollover.tasks.prompt_source import EndlessSource, PromptSource, RowSource
from rollover.tasks.prompts import PromptEncoder
from rollover.tasks.rows import DatasetRows
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
    divisor = reduce(gcd, counts)
    if sum(counts) // divisor <= _MAX_CYCLE:
        return tuple(count // divisor for count in counts)
    total = sum(exact)
    return tuple(max(1, round(weight / total * _MAX_CYCLE)) for weight in exact)


def train_source(
    config: TasksConfig, tokenizer: Tokenizer, *, seed: int, held_out: Collection[str] = frozenset()
) -> PromptSource:
    """Open the training mixture, without the prompts that ask what ``held_out`` contains. Raises ``DataError`` for
    anything wrong with a source."""
    if not config.train:
        raise DataError(NO_SOURCE)
    sources: list[PromptSource] = []
    for source in config.train:
        encoder = encoder_of(source, config, tokenizer)
        rows = source.open(gym_seed("train", source.name, seed))
        if _fewest(rows.num_rows, source.limit) is None and config.curriculum is not None:
            raise DataError(
                f"tasks.curriculum needs rows that come again, and source {source.name!r} has none: set its limit"
            )
        sources.append(_opened(source, rows, encoder, held_out, seed=seed, shuffle=config.shuffle))
    if len(sources) == 1:
        return sources[0]
    return MixtureSource(sources, [source.weight for source in config.train])


def _opened(
    source: SourceSettings,
    rows: DatasetRows,
    encoder: PromptEncoder,
    held_out: Collection[str] = (),
    *,
    seed: int = 0,
    shuffle: bool = False,
) -> RowSource | EndlessSource:
    num_rows, name = _fewest(rows.num_rows, source.limit), source.name
    if num_rows is None:
        return EndlessSource(source, rows, encoder, name=name, held_out=held_out)
    return RowSource(source, rows, encoder, name=name, held_out=held_out, num_rows=num_rows, seed=seed, shuffle=shuffle)


def eval_sources(config: TasksConfig, tokenizer: Tokenizer, *, num_prompts: int) -> tuple[RowSource, ...]:
    """Open the evaluation sets: the first ``num_prompts`` rows (or ``limit``, or all, if fewer) of each source in file
    order, without the skipped ones. Call ``prompt(i)`` for i below ``num_rows``."""
    sources = []
    for source in config.eval:
        encoder = encoder_of(source, config, tokenizer)
        rows, name = source.open(gym_seed("eval", source.name, config.eval_seed)), f"eval/{source.name}"
        num_rows = _fewest(rows.num_rows, source.limit, num_prompts)
        assert num_rows is not None
        sources.append(
            RowSource(source, rows, encoder, name=name, num_rows=num_rows, seed=config.eval_seed, shuffle=False)
        )
    return tuple(sources)


def _fewest(*nums_rows: int | None) -> int | None:
    """Return the smallest number of rows, where ``None`` means a dataset without end or no limit."""
    return min((num_rows for num_rows in nums_rows if num_rows is not None), default=None)


def held_out_texts(config: TasksConfig, evaluation: Sequence[RowSource]) -> frozenset[str]:
    """List what the evaluation prompts ask, which training must not see; nothing when ``keep_eval_out`` is off."""
    if not config.keep_eval_out:
        return frozenset()
    return frozenset(text for source in evaluation for text in source.asked())


def reply_end(tokenizer: Any, config: TasksConfig) -> int:
    """Return the token that ends a response: the marker with which the chat template ends an assistant's turn, or else
    the tokenizer's end token."""
    end = PromptEncoder(tokenizer, config).turn_end
    return int(tokenizer.eos_token_id) if end is None else end


def response_ends(folder: Path, tokenizer: Any, config: TasksConfig) -> tuple[int, ...]:
    """Return the tokens that end a response: those that the model's folder names, and the chat template's."""
    return tuple(dict.fromkeys([*stop_token_ids(folder, tokenizer), reply_end(tokenizer, config)]))


class SourceFacts(NamedTuple):
    """Facts about a source that was opened and not yet read.

    Example: ``SourceFacts(num_rows=7473)`` for the training split of gsm8k, and ``SourceFacts(num_rows=None)`` for
    generated items without a limit.
    """

    num_rows: int | None
    """Number of rows; ``None`` if endless, or unknown without a download."""
    reply: str = ""
    """The use of the turn that ends the messages, if it is an assistant's."""
    first: Prompt | None = None
    """The first prompt that a run takes, if there is a tokenizer."""
    reference: str | None = None
    """Its reference answer, if the source has one."""
    needs_download: bool = False
    left_out: str = ""
    """The rows that a run leaves out, if the first one is among them."""


def check_source(config: SourceSettings, encoder: PromptEncoder | None = None, *, teaches: bool = False) -> SourceFacts:
    """Open the dataset and the reward of a source and write out its first prompt, and its solution if it ``teaches``,
    as far as that needs no download and there is a tokenizer. If the first prompt is too long, all are read.

    Raises:
        DataError: as a run would.
    """
    if config.look_up():
        return SourceFacts(None, needs_download=True)
    rows = config.open(seed=0)
    where = rows.where(0)
    columns = ColumnMap(config.column_settings(), rows[0], where)
    for spec in config.reward_specs(columns, config.name):
        spec.config.check(spec)
        spec.config.build(spec)
    check_environment(config, encoder)
    first, left_out = None, ""
    if encoder is not None:
        text, token_ids = encoder.encode(columns.question(rows[0], where), where=where)
        kept = columns.kept(rows[0], where)
        first = Prompt(prompt_id=f"{config.name}/0@0", token_ids=token_ids, text=text, source=config.name, columns=kept)
        if not encoder.fits(token_ids, where):
            source = _opened(config, rows, encoder)
            first, left_out = source.prompt(0), source.left_out
        if isinstance(config.environment, ClassConfig) and config.environment.writes_prompts:
            live, token_ids = begin_episode(config.environment, AnswerWriter(encoder, config), first)
            live.close()
            first = replace(first, token_ids=token_ids)
        if teaches:
            config.solution(first, columns.prompt)
    row = rows[0] if first is None else first.columns
    reference = " or ".join(dict.fromkeys(config.references(columns, row, where))) or columns.reference(row, where)
    num_rows = _fewest(rows.num_rows, config.limit)
    return SourceFacts(num_rows, _use_of_reply(columns), first, reference, left_out=left_out)


def _use_of_reply(columns: ColumnMap) -> str:
    if not columns.replies:
        return ""
    if columns.answer == columns.prompt:
        return "the assistant's last turn is the reference answer and what sft teaches, and not in the prompt"
    return "the assistant's last turn is what sft teaches, and not in the prompt"


def same_datasets(config: TasksConfig, recorded: Mapping[str, Fingerprint] | None) -> dict[str, Fingerprint]:
    """Return the fingerprints of all datasets of a run, which must be those ``recorded`` when it began (``None`` if it
    begins now, or began before they were recorded).

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
    raise DataError(
        f"{now['path']} has changed since the run began ({change}{written}), so its rows are no longer those that the"
        f" run has counted; {mend}"
    )
