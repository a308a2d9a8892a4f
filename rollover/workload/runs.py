"""The trace in a run's journal: every sample it ever decoded, including those cut off or discarded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollover.errors import DataError, RunError
from rollover.report.record import JOURNAL, read_config, read_timeline
from rollover.report.timeline import SampleTrace
from rollover.workload.law import MAX_TOKENS
from rollover.workload.trace import Trace, TracePrompt


def is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def read_run(path: Path) -> Trace:
    """Return the trace of the run in ``path``, capped at its ``max_new_tokens``.

    Raises:
        RunError: it is not a run directory, or its journal cannot be read.
        DataError: nothing has been decoded in it yet.
    """
    config = read_config(path)
    if not (path / JOURNAL).is_file():
        variants = [str(path / name) for name in config.get("variants") or () if (path / name / JOURNAL).is_file()]
        if variants:
            raise RunError(f"{path} is a comparison; give one of its runs: {', '.join(variants)}")
        raise DataError(f"{path}: the trace is empty; the run has not decoded anything yet")
    try:
        cap_tokens = min(MAX_TOKENS, int(config["rollout"]["max_new_tokens"]))
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path / 'config.json'} lacks rollout.max_new_tokens: is it the config of a run?") from None
    return Trace(name=str(path), cap_tokens=cap_tokens, prompts=_by_prompt(read_timeline(path).samples))


def _by_prompt(samples: Iterable[SampleTrace]) -> tuple[TracePrompt, ...]:
    """Return the prompts in the order of their first group; samples that decoded nothing say nothing and are left
    out."""
    prompts: dict[str, list[SampleTrace]] = {}
    for sample in samples:
        if sample.num_tokens:
            prompts.setdefault(sample.prompt.prompt_id, []).append(sample)
    return tuple(
        TracePrompt(
            prompt_id=prompt_id,
            prompt_tokens=len(decoded[0].prompt.token_ids),
            lengths=tuple(sample.num_tokens for sample in decoded),
            unfinished=frozenset(i for i, sample in enumerate(decoded) if not sample.finished),
        )
        for prompt_id, decoded in prompts.items()
    )
