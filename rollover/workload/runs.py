"""The trace that a run leaves in its journal: every sample it ever decoded, also those cut off or thrown away."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.errors import DataError, RunError
from rollover.rollout.events import Event, GroupOpened, SegmentEnded
from rollover.rollout.journal import effective, read_events
from rollover.types import FinishReason
from rollover.workload.law import MAX_TOKENS
from rollover.workload.trace import Trace, TracePrompt

_JOURNAL = "journal.sqlite"


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def read_run(path: Path) -> Trace:
    """The trace of the run in ``path``, capped at its ``max_new_tokens``.

    Raises:
        RunError: it is no run directory, or its journal cannot be read.
        DataError: nothing has been decoded in it yet.
    """
    config = read_config(path)
    journal = path / _JOURNAL
    if not journal.is_file():
        variants = [str(path / name) for name in config.get("variants") or () if (path / name / _JOURNAL).is_file()]
        if variants:
            raise RunError(f"{path} compares variants; name one of them: {', '.join(variants)}")
        raise DataError(f"{path}: an empty trace; the run has not decoded anything yet")
    try:
        cap_tokens = min(MAX_TOKENS, int(config["rollout"]["max_new_tokens"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(
            f"{path / 'config.json'} does not say rollout.max_new_tokens: is it the config of a run?"
        ) from None
    return Trace(name=str(path), cap_tokens=cap_tokens, prompts=_fold(e for _, e in effective(read_events(journal))))


def read_config(path: Path) -> dict[str, Any]:
    """The run's resolved config.

    Raises:
        RunError: there is none.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is not a run directory: it holds no config.json") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise RunError(f"{file} is not the config of a run")
    return config


@dataclass(slots=True)
class _Opened:
    """A prompt as the journal tells it: the samples of its first group, then those of later ones."""

    prompt_tokens: int
    lengths: list[int] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)


def _fold(events: Iterable[Event]) -> tuple[TracePrompt, ...]:
    """Prompts in the order of their first group; samples that decoded nothing say nothing and are left out."""
    prompts: dict[str, _Opened] = {}
    groups: dict[int, tuple[_Opened, int]] = {}
    for event in events:
        match event:
            case GroupOpened(group_id=group_id, prompt=prompt, group_size=group_size):
                opened = prompts.setdefault(prompt.prompt_id, _Opened(prompt_tokens=len(prompt.token_ids)))
                groups[group_id] = opened, len(opened.lengths)
                opened.lengths += [0] * group_size
                opened.finished += [False] * group_size
            case SegmentEnded(sample_id=sample_id, segment=segment):
                opened, first = groups[sample_id.group]
                opened.lengths[first + sample_id.index] += len(segment.token_ids)
                if segment.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    opened.finished[first + sample_id.index] = True
    found = ((prompt_id, p, [i for i, n in enumerate(p.lengths) if n]) for prompt_id, p in prompts.items())
    return tuple(
        TracePrompt(
            prompt_id=prompt_id,
            prompt_tokens=p.prompt_tokens,
            lengths=tuple(p.lengths[i] for i in decoded),
            unfinished=frozenset(k for k, i in enumerate(decoded) if not p.finished[i]),
        )
        for prompt_id, p, decoded in found
        if decoded
    )
