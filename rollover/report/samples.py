"""The samples that a step trained, as the journal recorded them, and their texts without secrets.

What a model writes is never trusted: control characters and marks that change the direction of a text are written out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rollover.algorithms import Algorithm, AlgorithmConfig, resolve
from rollover.batch import Batch, WasteCause
from rollover.errors import RunError, printable, require
from rollover.hf.hub import resolve_model
from rollover.hf.pieces import pieces
from rollover.hf.tokenizer import FastTokenizer, open_tokenizer
from rollover.privacy import HIDDEN
from rollover.report.measures import mean_reward
from rollover.report.record import JOURNAL, read_config, refuse_comparison
from rollover.rollout.events import BatchConsumed, BatchTrained, GroupOpened, Observed, SampleScored, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment, Trajectory, append_segment

Order = Literal["reward", "length", "lag", "advantage"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSample(Trajectory):
    """A sample of a batch with what was learned from it."""

    step: int
    reward: float
    """Not a number if the trainer has computed it from the batch: then it is not on record."""
    shaping: float
    """The amount that the algorithm added to the reward."""
    relative: float | None = None
    """The shaped reward minus the mean of the group; ``None`` for a sample without siblings."""

    @property
    def lag(self) -> float:
        """Return the mean lag of its tokens, in versions."""
        return sum(self.step - version for version in self.policy_versions) / max(1, self.num_tokens)

    @property
    def has_reward(self) -> bool:
        """Return whether its reward is on record."""
        return not math.isnan(self.reward)

    @property
    def is_cut(self) -> bool:
        """Return whether the response reached the limit of its length, or of its turns."""
        return self.finish_reason is FinishReason.LENGTH

    def prompt_read(self, tokenizer: FastTokenizer) -> str:
        """Return the prompt that the model read; an environment may have written it."""
        return tokenizer.decode(list(self.observations[0].token_ids)) if self.has_opening else self.prompt.text

    def untrained(self, algorithm: Algorithm | None) -> list[str]:
        """Return for each segment why its tokens had no gradient, as far as the journal tells; empty if they had one.
        Tokens that a correction rejected are not known."""
        if algorithm is None:
            return [""] * len(self.segments)
        if not algorithm.trains_sample(self.finish_reason or FinishReason.STOP):
            return ["masked: cut at the limit"] * len(self.segments)
        has_kl = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        if not self.relative and algorithm.advantage in ("group_std", "group_mean", "leave_one_out") and not has_kl:
            return ["advantage 0"] * len(self.segments)
        masks_stale = algorithm.correction == "mask_stale"
        return ["masked: stale" if masks_stale and s.policy_version < self.step else "" for s in self.segments]

    def breaks(self, redact: Callable[[str], str]) -> list[tuple[int, str]]:
        """Return (number of tokens before it, description) of the places where the response was interrupted, or the
        environment of an episode answered. If its turns form a tree, they are numbered."""
        found, num_tokens, answers = [], 0, iter(self.observations)
        is_tree, turn = any(answer.parent is not None for answer in self.observations), 0
        for before, after in pairwise((*self.segments, None)):
            assert before is not None
            num_tokens += len(before.token_ids)
            if before.finish_reason is FinishReason.TURN:
                answer, turn, by = next(answers, None), turn + 1, "environment"
                if is_tree and answer is not None and answer.end is None:
                    parent = turn - 1 if answer.parent is None else answer.parent
                    by = f"turn {turn}, " + (f"after turn {parent}" if parent else "from the beginning")
                found.append((num_tokens, f"{by}: {printable(redact(answer.text)) if answer else ''}"))
            elif after is not None:
                parked = "parked" if before.finish_reason is FinishReason.ABORT else "new weights"
                found.append((num_tokens, f"{parked}, version {before.policy_version} → {after.policy_version}"))
        return found[int(self.has_opening) :]


class TrainedBatch(NamedTuple):
    """The batch of a step."""

    step: int
    samples: tuple[TrainedSample, ...]
    is_trained: bool
    """False if the step has not ended."""
    is_skipped: bool = False
    """True if it ended without training its batch, as a user decided."""


def read_batch(run_dir: Path, step: int | None = None) -> TrainedBatch:
    """Read the batch that a step trained; the newest one if ``step`` is None. Raises ``RunError`` if there is no
    journal, or no such batch."""
    journal = run_dir / JOURNAL
    if not journal.is_file():
        refuse_comparison(run_dir, read_config(run_dir))
    batches: dict[int, tuple[int, ...]] = {}
    untrained: dict[int, Mapping[WasteCause, int]] = {}
    for _, event in read_events(journal, effective=True, tokens=False):
        if isinstance(event, BatchConsumed):
            batches[event.step] = event.group_ids
        elif isinstance(event, BatchTrained):
            untrained[event.step] = event.untrained
    if not batches:
        raise RunError(f"{run_dir} has not trained a batch yet")
    wanted = max(batches) if step is None else step
    if wanted not in batches:
        raise RunError(f"{run_dir} has no batch of step {wanted}: it has the batches of steps 0 to {max(batches)}")
    samples = _samples(journal, wanted, batches[wanted])
    meta = read_config(run_dir)["meta"]
    if not meta.get("knows_rewards", meta.get("job") != "trl"):  # an earlier version noted no such fact
        samples = tuple(replace(sample, reward=math.nan, relative=None) for sample in samples)
    return TrainedBatch(wanted, samples, wanted in untrained, WasteCause.SKIPPED in untrained.get(wanted, ()))


def _samples(journal: Path, step: int, group_ids: Sequence[int]) -> tuple[TrainedSample, ...]:
    groups = set(group_ids)
    prompts: dict[int, Prompt] = {}
    segments: dict[SampleId, list[Segment]] = {}
    observations: dict[SampleId, list[Observation]] = {}
    scored: dict[SampleId, SampleScored] = {}
    for _, event in read_events(journal, effective=True, tokens=groups.__contains__):
        if isinstance(event, GroupOpened):
            if event.group_id in groups:
                prompts[event.group_id] = event.prompt
        elif isinstance(event, SegmentEnded):
            is_seen = event.segment.token_ids or event.segment.finish_reason is FinishReason.TURN
            if event.sample_id.group in groups and is_seen:
                append_segment(segments.setdefault(event.sample_id, []), event.segment)
        elif isinstance(event, Observed):
            if event.sample_id.group in groups:
                observations.setdefault(event.sample_id, []).append(event.observation)
        elif isinstance(event, SampleScored) and event.sample_id.group in groups:
            scored[event.sample_id] = event
    found = [
        TrainedSample(
            sample_id=one,
            prompt=prompts[one.group],
            segments=tuple(segments[one]),
            observations=tuple(observations.get(one, ())),
            step=step,
            reward=score.reward,
            shaping=score.shaping,
            components=score.components,
        )
        for one, score in sorted(scored.items(), key=lambda each: (group_ids.index(each[0].group), each[0]))
        if segments.get(one)
    ]
    return compared(found)


def of_batch(batch: Batch, shaping: Callable[[int], float]) -> tuple[TrainedSample, ...]:
    """Return the samples of a batch. ``shaping``: what the algorithm adds to the reward of so many tokens."""
    found = []
    for t in batch.trajectories:
        own = {each.name: getattr(t, each.name) for each in fields(Trajectory)} | {"reward": t.reward or 0.0}
        found.append(TrainedSample(**own, step=batch.step, shaping=shaping(t.limited_tokens)))
    return compared(found)


def compared(samples: Iterable[TrainedSample]) -> tuple[TrainedSample, ...]:
    """Return the samples with their rewards relative to their groups."""
    found = []
    for _, siblings in groupby(samples, key=lambda sample: sample.sample_id.group):
        group = list(siblings)
        rewards = [s.reward + s.shaping for s in group]
        # The mean of equal rewards, of 0.1 say, may be rounded to another number.
        mean = rewards[0] if len({*rewards}) == 1 else mean_reward(rewards)
        relative = [None] if len(group) == 1 else [reward - mean for reward in rewards]
        found += [replace(s, relative=r) for s, r in zip(group, relative, strict=True)]
    return tuple(found)


def algorithm_of(config: Mapping[str, Any]) -> Algorithm | None:
    """Return what a run's config says about the gradient of its tokens; None if it was not written by ``train``."""
    settings = config.get("algorithm", {})
    known = {field.name for field in fields(AlgorithmConfig)} & {*settings}
    given: dict[str, Any] = {key: tuple(v) if isinstance(v := settings[key], list) else v for key in known}
    try:
        return resolve(AlgorithmConfig(**given)) if "name" in given else None
    except ValueError:
        return None


def tokenizer_of(run_dir: Path, config: Mapping[str, Any]) -> Any:
    """Open the tokenizer of a run. Raises ``RolloverError`` if transformers is not installed, or a run that has written
    no model has its model elsewhere by now."""
    require("transformers", purpose="reading responses")
    saved = sorted(run_dir.glob("checkpoints/step_*"), key=lambda path: (len(path.name), path.name), reverse=True)
    made = [run_dir / "model", run_dir / "model-untrained", *saved]
    own = [folder for folder in made if (folder / "tokenizer_config.json").is_file()]
    meta = config.get("meta", {})
    named = config.get("model", {}).get("path") or meta.get("model") or meta.get("hf_checkpoint")
    if not own and not named:
        raise RunError(f"{run_dir} has no model of its own and its config names none, whose tokenizer reads responses")
    return open_tokenizer(own[0] if own else resolve_model(named, weights=False))


def response_pieces(sample: TrainedSample, tokenizer: FastTokenizer, redact: Callable[[str], str]) -> list[str]:
    """Return the text that each token of the response adds, ready to be shown."""
    return [printable(piece) for piece in blanked(pieces(tokenizer, sample.token_ids), redact)]


def blanked(parts: Sequence[str], redact: Callable[[str], str]) -> list[str]:
    """Return the parts of a text without the secrets that ``redact`` finds in the whole of it."""
    whole = "".join(parts)
    first, *rest = redact(whole).split(HIDDEN)
    if not rest:
        return list(parts)
    shown, end = [*first, *[""] * (len(whole) - len(first))], len(first)
    for number, kept in enumerate(rest, start=1):
        # A secret has at least one character, and the last part ends the text.
        start = len(whole) - len(kept) if number == len(rest) else whole.find(kept, end + 1)
        shown[end] = HIDDEN
        shown[start : start + len(kept)] = kept
        end = start + len(kept)
    ends = [*accumulate(len(part) for part in parts)]
    return ["".join(shown[end - len(part) : end]) for part, end in zip(parts, ends, strict=True)]


def chosen(samples: Sequence[TrainedSample], each: int = 3) -> list[tuple[str, TrainedSample]]:
    """Choose samples to read, with the reason: the longest, the worst, the samples whose weights had changed most
    between sampling and training (the highest lag), and some at random, which depend on the step alone."""
    shuffled = random.Random(samples[0].step).sample(samples, len(samples)) if samples else []
    orders = {
        "longest": in_order(samples, "length"),
        "worst": [s for s in in_order(samples, "reward")[::-1] if s.has_reward],
        "most changed": [s for s in in_order(samples, "lag") if s.lag > 0],
        "random": shuffled,
    }
    found: dict[SampleId, tuple[str, TrainedSample]] = {}
    for reason, ordered in orders.items():
        new = [sample for sample in ordered if sample.sample_id not in found]
        found |= {sample.sample_id: (reason, sample) for sample in new[:each]}
    return list(found.values())


COLUMNS = (
    *("step", "chosen as", "sample", "source", "prompt", "response", "reward", "components"),
    *("against its group", "tokens", "lag", "interruptions"),
)
"""Columns of the table that trackers get."""


def table_rows(
    samples: Sequence[TrainedSample], tokenizer: FastTokenizer, redact: Callable[[str], str]
) -> list[list[Any]]:
    """Return the chosen samples as rows of ``COLUMNS``: texts and numbers."""
    return [
        [
            sample.step,
            reason,
            str(sample.sample_id),
            sample.prompt.source,
            printable(redact(sample.prompt_read(tokenizer))),
            printable(redact(tokenizer.decode(list(sample.token_ids), skip_special_tokens=False))),
            sample.reward,
            ", ".join(f"{name} {value:.4g}" for name, value in sample.components.items()),
            sample.relative,
            sample.num_tokens,
            sample.lag,
            "; ".join(f"after {place} tokens: {text}" for place, text in sample.breaks(redact)),
        ]
        for reason, sample in chosen(samples)
    ]


def in_order(samples: Sequence[TrainedSample], order: Order) -> list[TrainedSample]:
    """Sort samples, the largest first; by ``advantage``, the samples furthest from the mean of their group."""
    keys = {
        "reward": lambda sample: sample.reward,
        "length": lambda sample: sample.num_tokens,
        "lag": lambda sample: sample.lag,
        "advantage": lambda sample: abs(sample.relative or 0.0),
    }
    return sorted(samples, key=keys[order], reverse=True)
