"""Scores the reference answers of a source with its own rewards, as a dry run does: a reward that is 0 for every right
answer teaches nothing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rollover.environments.columns import has_value, read_column
from rollover.environments.rewards.base import RewardSpec
from rollover.environments.rewards.extraction import MARKED, ExtractionSettings
from rollover.environments.scorer import RewardScorer
from rollover.errors import DataError, NoReward
from rollover.hf.tokenizer import FastTokenizer
from rollover.tasks.columns import ANSWER_COLUMNS
from rollover.tasks.prompt_source import EndlessSource, RowSource
from rollover.types import FinishReason, Prompt, SampleId, Score, Segment, Trajectory

_MOST_ROWS, _MOST_S = 20, 30.0
_FORMS = ("{}", *MARKED.values(), r"\boxed{{{}}}", "Answer: {}", "The answer is {}.")
"""Responses that give an answer, in the order in which they are tried; other texts of the row come last."""

_Trial = list[tuple[str, Score | None]]
"""The responses to one prompt up to the first that scored above 0, and their scores."""


def reference_scores(
    source: RowSource | EndlessSource, tokenizer: FastTokenizer, *, group_size: int, is_taught: bool
) -> Iterator[str]:
    """Say what each reward but a judge gives to the reference answers of the first rows: bare and, as long as that
    scores nothing, in other forms. ``is_taught``: the model learns the form of an answer first. Raises ``DataError``
    for a wrong function, as a run does at its first response."""
    for spec in source.reward_specs:
        if spec.config.kind != "judge":
            trials, failure, cause = asyncio.run(_tried(source, spec, tokenizer, group_size))
            if any(score is not None or not failure for trial in trials for _, score in trial):
                yield _told(trials, spec, source.prompt(0), cause, is_taught=is_taught)
            if failure or not trials:
                yield failure or "its reference answers were not scored: no column holds one"


async def _tried(
    source: RowSource | EndlessSource, spec: RewardSpec, tokenizer: FastTokenizer, group_size: int
) -> tuple[list[_Trial], str, str]:
    """Return a trial for each row that has an answer, what failed first, and why none scores, if it is known."""
    quick: dict[str, Any] = {"workers": 0} if isinstance(spec.config, ExtractionSettings) else {}
    alone = replace(spec, component="", config=replace(spec.config, retries=0, weight=1.0, **quick))
    scorer = RewardScorer([alone], tokenizer)
    trials, failure, cause = list[_Trial](), "", ""

    async def trial_of(prompt: Prompt) -> _Trial:
        nonlocal failure
        trial = _Trial()
        for text in _responses(source, prompt):
            ids = tuple(tokenizer([text], add_special_tokens=False)["input_ids"][0])
            whole = Segment(0, ids, (0.0,) * len(ids), FinishReason.STOP, 0, 0.0, 0.0)
            response = Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=(whole,))
            scores = await scorer.score_group([response] * (group_size if spec.config.compares_siblings else 1))
            score = max((one for one in scores if isinstance(one, Score)), default=None)
            if score is None and not isinstance(scores[0], NoReward):
                failure = failure or f"warning: the response {_shown(text)} cannot be scored: {scores[0]}"
            trial.append((text, score))
            if (score or 0) > 0:
                break
        return trial

    try:
        async with asyncio.timeout(_MOST_S):
            for index in range(min(_MOST_ROWS, getattr(source, "num_rows", _MOST_ROWS))):
                trials += [trial] if (trial := await trial_of(source.prompt(index))) else []
            first = source.prompt(0)
            texts = {name: str(value) for name, value in first.columns.items() if isinstance(value, (int, float))}
            if trials and texts and not failure and not any(map(_is_good, trials)):
                trial = await trial_of(replace(first, columns={**first.columns, **texts}))
                if _is_good(trial):
                    cause = (
                        f"With {', '.join(texts)} as text it would give {_given(trial[-1])}: the row has a number"
                        " there, so compare numbers, or its str(...)"
                    )
    except TimeoutError:
        failure = failure or f"warning: scoring {_MOST_ROWS} reference answers took more than {_MOST_S:g} s"
    finally:
        await scorer.close()
    return trials, failure, cause


def _is_good(trial: _Trial) -> bool:
    return (trial[-1][1] or 0) > 0


def _responses(source: RowSource | EndlessSource, prompt: Prompt) -> list[str]:
    """Return responses that are right: the answer in each form, and other texts of the row."""
    columns = [read_column(prompt.columns, name) for name in ANSWER_COLUMNS if has_value(prompt.columns, name)]
    texts = [*source.references(prompt)[:1], *(str(each[0] if isinstance(each, list) else each) for each in columns)]
    with suppress(DataError):
        texts.append(source.solution(prompt))
    begin = "</think>\n\n" if prompt.text.rstrip().endswith("<think>") else ""
    formed = [form.format(texts[0]) for form in _FORMS if texts]
    return [begin + text for text in (*formed, *(text for text in texts if text != texts[0]))]


def _told(trials: list[_Trial], spec: RewardSpec, first: Prompt, cause: str, *, is_taught: bool) -> str:
    good = list(filter(_is_good, trials))
    extract = f", extract = {spec.config.extract!r}," if isinstance(spec.config, ExtractionSettings) else ""
    told = f"reward {spec.component or spec.config.label}{extract} gives {_given(trials[0][0])}"
    share = f"{len(good)} of {len(trials)} reference answers score above 0"
    if not good and spec.config.compares_siblings:
        return f"{told}; its siblings were the same responses"
    if not good:
        tried = ", ".join(_shown(text) for text, _ in trials[0][1:])
        columns = ", ".join(f"{name} ({type(value).__name__})" for name, value in first.columns.items())
        unknown = (
            "If the reward compares answers, it expects another form of response, or it compares with the wrong column"
            f" or type: the row has {columns}"
        )
        return f"warning: {share}: {told}, and nothing above 0 to {tried}. {cause or unknown}"
    length = Counter(map(len, good)).most_common(1)[0][0]
    if length == 1:
        return f"{told}; {share}"
    told = f"{told}, and {_given(next(trial[-1] for trial in good if len(trial) == length))}; {share}"
    marker = _FORMS[length - 1].partition("{")[0].strip() if length <= len(_FORMS) else ""
    if is_taught or marker.lower() in first.text.lower():
        return told
    return (
        f"warning: {told}. The prompt does not ask for {marker!r}: unless the model writes it by itself, ask"
        f" for it in tasks.prompt_suffix{', or change reward.extract' if extract else ''}"
    )


def _given(response: tuple[str, Score | None]) -> str:
    text, score = response
    parts = ", ".join(f"{name} {value:g}" for name, value in score.components.items()) if score is not None else ""
    return f"{'nothing' if score is None else f'{score:g}'}{parts and f' ({parts})'} to the response {_shown(text)}"


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}", ensure_ascii=False)
