"""Engines that lie, also in the few tokens of a check, are found by the checks that each member has to pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollover.engine import sampling_check
from rollover.engine.base import Engine
from rollover.engine.logprob_check import FLOAT32_TOLERANCE, Reference, check_logprobs, check_prompts
from rollover.engine.sampling_check import check_sampling
from rollover.errors import EngineMismatch
from rollover.run.worker import opener
from rollover.swarm.worker.config import WorkerConfig
from rollover.weights.sources import FolderWeights
from tests.engine.contract import update
from tests.engine.models import VOCAB, saved, tiny_model
from tests.swarm import liars
from tests.swarm.liars import Liar, lying
from tests.swarm.test_worker_real import ENGINE

pytestmark = pytest.mark.real_time
NOT_OURS = "does not sample from the trainer's policy"


async def check(engine: Engine, version: int) -> None:
    """Check a member under a version, of a model that is in doubt at each token."""
    model, prompts = tiny_model(seed=version, sharpness=2.0), check_prompts(VOCAB, 128)
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts]
    reference = Reference(version=version, prompts=prompts, logits_PV=np.array(logits))
    await check_logprobs(engine, reference, tolerance=FLOAT32_TOLERANCE, remedy="mend it")
    await check_sampling(engine, reference, temperature=1.0)


@pytest.mark.parametrize(
    ("kind", "versions", "says"),
    [
        (Liar, [0, 1], ""),
        (liars.InventedLogprobs, [], NOT_OURS),
        (liars.Int8, [], NOT_OURS),
        (liars.BFloat16, [], NOT_OURS),
        (liars.OldWeights, [0], NOT_OURS),
        (liars.Greedy, [], "looks like greedy decoding"),
    ],
)
async def test_a_liar_that_is_not_cunning_passes_only_where_it_is_right(
    kind: type[Liar], versions: list[int], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "MAX_DRAWS", 4)
    folders = [saved(tiny_model(seed=seed, sharpness=2.0), tmp_path / f"v{seed}") for seed in range(2)]
    open_on = opener(WorkerConfig(engine=ENGINE), name="liar", root=tmp_path)
    opened = await lying(kind, open_on, cunning=False)(folders[0])
    try:
        for version, folder in enumerate(folders):
            if version:
                await update(opened.weights, FolderWeights(version, folder))
            if version in versions:
                await check(opened.engine, version)
            else:
                with pytest.raises(EngineMismatch, match=says):
                    await check(opened.engine, version)
    finally:
        await opened.engine.close()
