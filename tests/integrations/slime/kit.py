"""A run of recorded slime over scripted servers: its arguments, its training loop, and what its journal holds."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollover import cli
from rollover.integrations.slime import plugin
from rollover.rollout.journal import read_events
from rollover.rollout.state import RolloutState
from tests.integrations.slime import recorded
from tests.integrations.slime.farm import Farm, farm
from tests.integrations.slime.recorded import Manager, Sample, Trained

ROLLOUT = "rollover.integrations.slime.generate_rollout"
SOURCE = "rollover.integrations.slime.DataSource"
KIT = "tests.integrations.slime.kit"
BATCH, GROUP = 3, 4
LENGTH = 3000
"""Longest response; the mean is near 16 tokens, and what is to be stopped does not come to its end within seconds."""
PROMPT_TOKENS = 9
NUM_ROWS = 50


async def share_of_vowels(args: Namespace, sample: Sample, **known: Any) -> float:
    """A reward that differs between siblings."""
    assert sample.response_length and sample.label == sample.prompt.upper()
    return sum(letter in "aeiouAEIOU" for letter in sample.response) / sample.response_length


async def vowels_and_length(args: Namespace, sample: Sample, **known: Any) -> dict[str, float]:
    return {"vowels": await share_of_vowels(args, sample), "length": float(sample.response_length)}


async def never_for_odd_places(args: Namespace, sample: Sample, **known: Any) -> float:
    assert sample.index is not None
    if sample.index % GROUP == 1:
        raise RuntimeError("the judge has fallen over")
    return await share_of_vowels(args, sample)


async def late_for_odd_places(args: Namespace, sample: Sample, **known: Any) -> float:
    assert sample.index is not None
    if sample.index % GROUP == 1:
        await asyncio.Event().wait()
    return await share_of_vowels(args, sample)


def marked(args: Namespace, sample: Sample) -> Sample:
    sample.metadata["marked"] = sample.response_length
    return sample


def last_removed(args: Namespace, groups: list[list[Sample]]) -> None:
    for group in groups:
        group[-1].remove_sample = True


def write_prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    rows = ({"prompt": f"prompt {i:02}", "label": f"PROMPT {i:02}", "metadata": {"row": i}} for i in range(NUM_ROWS))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def write_model(folder: Path) -> Path:
    """As much of a model folder as a client of its servers reads."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "vocab_size": 64, "max_position_embeddings": 4096, "eos_token_id": 0}
    (model / "config.json").write_text(json.dumps(config))
    return model


def arguments(folder: Path, port: int, **changes: Any) -> Namespace:
    """slime's, after its own checks."""
    save = str(folder / "ckpt")
    settings: dict[str, Any] = {
        "rollout_function_path": ROLLOUT,
        "data_source_path": SOURCE,
        "hf_checkpoint": str(write_model(folder)),
        "prompt_data": str(write_prompts(folder)),
        "rollout_global_dataset": True,
        "rollout_batch_size": BATCH,
        "over_sampling_batch_size": 2 * BATCH,
        "n_samples_per_prompt": GROUP,
        "rollout_max_response_len": LENGTH,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_seed": 42,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 64,
        "custom_rm_path": f"{KIT}.share_of_vowels",
        "group_rm": False,
        "reward_key": None,
        "use_tis": True,
        "partial_rollout": True,
        "mask_offpolicy_in_partial_rollout": False,
        "save": save,
        "load": save,
        "rollover": {"engine": {"abort_timeout_s": 10.0}},
    }
    return Namespace(**(settings | changes))


def fresh_and_odd(group: int, num_input_tokens: int) -> bool:
    """Every second group is stopped once, whenever its batch is full."""
    return group % 2 == 1 and num_input_tokens == PROMPT_TOKENS


class Loop:
    """slime's ``train.py`` in one process, from behind rollout ``start - 1``. Leaving it unclosed is a kill: the journal
    is as the process left it."""

    def __init__(self, servers: Farm, args: Namespace, *, start: int = 0) -> None:
        self.servers = servers
        self.manager = Manager(args, start=start)
        servers.restart_count()
        servers.update_weights()

    def step(self, rollout_id: int, *, saves: bool = False) -> Trained:
        trained = self.manager.generate(rollout_id)
        if saves:
            self.manager.save(rollout_id)
        self.servers.update_weights()
        return trained

    def steps(self, rollout_ids: Sequence[int], *, saves: bool = False) -> list[Trained]:
        return [self.step(rollout_id, saves=saves) for rollout_id in rollout_ids]

    def kill(self) -> None:
        """End the process where it stands: what is not in the journal is gone."""
        if (run := plugin._runs.pop(self.manager.data_source, None)) is not None:
            run.close()


@contextmanager
def slime_over_servers() -> Iterator[Farm]:
    with recorded.installed(), farm() as servers:
        for worker in servers.workers:
            worker.runs_on = fresh_and_odd
        try:
            yield servers
        finally:
            for run in list(plugin._runs.values()):
                run.close()
            plugin._runs.clear()


def journaled(folder: Path) -> RolloutState:
    """Return the state that the journal of a run holds."""
    return RolloutState(event for _, event in read_events(folder / "ckpt/rollover/journal.sqlite", effective=True))


def shows_its_run(run: Path) -> None:
    """Have the commands that the pages name read a run."""
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    figures = run.parent / "figures.json"
    options = ["--strategies", "april", "--seeds", "1", "--json", str(figures)]
    assert cli.main(["simulate", "--from", str(run), *options]) == 0
    assert "april" in figures.read_text()


def versions(sample: Sample) -> list[int]:
    """The version of each of its tokens."""
    return [version for version, number in sample.metadata["rollover"]["versions"] for _ in range(number)]


def known(sample: Sample) -> tuple[Any, ...]:
    """What a sample is, for a comparison with another process's."""
    return (sample.index, tuple(sample.tokens), tuple(sample.rollout_log_probs or ()), sample.reward, versions(sample))
