"""Rollouts, checkpoints and a restart with slime's own data source, samples and tokenizer, over scripted servers.

``tests/real/slime_contracts.sh`` runs it where there is a checkout of slime.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from plugin_contracts._shared import install_stubs

install_stubs(with_sglang_router=True)

from rollover.integrations import slime as integration  # noqa: E402
from rollover.integrations.slime import plugin  # noqa: E402
from tests.integrations.slime.farm import Farm, farm  # noqa: E402
from tests.integrations.slime.kit import journaled, known, versions  # noqa: E402
from tests.real.slime_plugin import arguments  # noqa: E402

NUM_ROWS = 9


def filled(servers: Farm, folder: Path) -> Namespace:
    """Arguments of a run with few rows, so that it passes over them several times."""
    args = arguments(servers, folder)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(NUM_ROWS)))
    more = {
        "prompt_data": str(rows),
        "input_key": "text",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": None,
        "rollout_max_prompt_len": None,
        "rollout_shuffle": True,
        "rollout_max_response_len": 200,
        "dump_details": None,
        "buffer_filter_path": None,
        "save": str(folder / "ckpt"),
        "load": str(folder / "ckpt"),
    }
    return Namespace(**{**vars(args), **more})


def begun(args: Namespace, start: int) -> Any:
    source = integration.DataSource(args)
    source.load(start - 1)
    return source


def step(servers: Farm, args: Namespace, source: Any, rollout_id: int) -> list[Any]:
    output = integration.generate_rollout(args, rollout_id, source, evaluation=False)
    servers.update_weights()
    samples = [sample for group in output.samples for sample in group]
    assert len(samples) == args.rollout_batch_size * args.n_samples_per_prompt
    for sample in samples:
        sample._validate_response_metadata_lengths()
        assert sample.rollout_log_probs is not None and len(versions(sample)) == sample.response_length
    return samples


def test_a_killed_run_goes_on_with_slimes_own_data_source(tmp_path: Path) -> None:
    with farm() as servers:
        servers.update_weights()
        args = filled(servers, tmp_path)
        source = begun(args, 0)
        steps = [step(servers, args, source, 0), step(servers, args, source, 1)]
        source.save(1)
        steps += [step(servers, args, source, rollout_id) for rollout_id in (2, 3)]
        plugin._runs.pop(source).close()
        servers.restart_count()
        servers.update_weights()
        again = begun(args, 2)
        for rollout_id in (2, 3):
            repeated = step(servers, args, again, rollout_id)
            assert [known(s) for s in repeated] == [known(s) for s in steps[rollout_id]]
        steps += [step(servers, args, again, rollout_id) for rollout_id in range(4, 9)]
        plugin._runs.pop(again).close()
    seen = Counter(sample.index for samples in steps for sample in samples)
    assert len(seen) == 9 * 4 and set(seen.values()) == {1}
    groups = {s.group_index: s.prompt for samples in steps for s in samples}
    first_pass = [groups[i] for i in range(NUM_ROWS) if i in groups]
    assert len(set(first_pass)) == len(first_pass), "each row once in a pass"
    journaled(tmp_path).ledger.check()
