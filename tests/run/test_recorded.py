"""Runs that an earlier version recorded, resumed by this one.

``recorded/`` holds one run per strategy, each killed with SIGKILL in its sixth rollout: the newest checkpoint is that of
step 4, the batch of step 4 is journaled and must be trained again, and the rollout of step 5 was under way. Beside each
stand the batches and the final weights of the same run when nobody killed it. ``rollover`` has chosen other batches
since then: what is on record is trained as it was, and the rest by the new rule.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import runs
from tests.runs import Processes

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize("name", ["april", "oversample", "rollover"])
def test_a_run_of_an_earlier_version_goes_on_to_the_same_weights(name: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "letter_reward.py").write_text(runs.REWARD)
    run = tmp_path / name
    outcome = Processes(tmp_path).run("train", "--resume", name)
    assert outcome.code == 0, outcome.err
    runs.ledger(run)
    recorded = 5 if name == "rollover" else None
    batches = [
        [[group.group_id for group in batch.groups], [list(t.token_ids) for t in batch.trajectories]]
        for batch in runs.batches(run)
    ]
    assert len(batches) == 7
    assert batches[:recorded] == json.loads((run / "batches.json").read_text())[:recorded]
    final = load_file(run / "checkpoints" / "step_7" / "model.safetensors")
    expected = load_file(run / "final.safetensors")
    assert final.keys() == expected.keys()
    if recorded is not None:
        return
    for tensor in expected:  # another processor may round differently
        np.testing.assert_allclose(final[tensor], expected[tensor], rtol=0, atol=1e-6)
