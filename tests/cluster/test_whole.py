"""A whole run on a cluster: a plan for servers on two types of node and the trainer on one of them is made and launched;
that node goes and another comes, and a process of the run is killed and resumed. Its ledger adds up.

Several ranks are in ``test_ranks.py``. That such a run learns what one machine does is a law of ``test_runs.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from rollover.batch import WasteCause
from rollover.rollout.events import BatchConsumed, Event, SegmentEnded
from rollover.rollout.journal import read_events
from rollover.run.launching import launched_config, read_plan, who_goes_where
from rollover.trainer.checkpoint import read_manifest
from tests import runs
from tests.cluster.conftest import add_node, cluster_has, remove_nodes, until
from tests.cluster.test_engines import leftovers
from tests.swarm.chaos.forked import Forked

GROUPS, GROUP_SIZE = 4, 4
LOST_AT = 2
"""Steps that are done when a node goes."""
MORE = 2
"""Steps that the resumed run takes beyond the steps of the killed run."""
BOTH = {"engine-0", "engine-1"}
BOUND = 2
FLEET = """\
network = { gbit_s = 10 }
[[nodes]]
device = "spot"
num_devices = 2
[[nodes]]
device = "steady"
num_devices = 1
""" + "".join(
    f"""\
[devices.{name}]
name = "a processor"
bf16_tflops = {tflops}
hbm_gbps = 21.2
hbm_gib = 16
link_gbps = 22.0
source = "made up"
verified = true
[devices.{name}.efficiency]
train = 0.8
prefill = 0.7
decode = 0.5
bandwidth = 1.0
link = 1.0
memory = 0.9
step_ms = 1.0
link_latency_us = 2.0
source = "made up"
"""
    for name, tflops in (("spot", 0.4), ("steady", 0.05))
)
ENGINE = """\
[engine]
kind = "embedded_server"
launch_args = ["--device", "cpu", "--cpu_kernels", "torch"]
kv_cache_bytes = 4194304
stream_interval_tokens = 2
max_running = 12
health_interval_s = 0.3
health_timeout_s = 5.0
rejoin_max_interval_s = 1.0
stop_timeout_s = 5.0
weight_transfer = "gloo"
"""
SIZES = (
    *("--steps", "500", "--rollout.rollout_batch_size", str(GROUPS), "--rollout.group_size", str(GROUP_SIZE)),
    *("--rollout.max_new_tokens", "24", "--trainer.device", "cpu"),
    *("--trainer.mini_batches", "2", "--trainer.learning_rate", "5e-3", "--trainer.rank_timeout_s", "30"),
    *("--logging.progress", "plain"),
)


def steps_done() -> int:
    file = Path("out/metrics.jsonl")
    return file.read_text().count('"kind": "step"') if file.exists() else 0


def said() -> str:
    return " ".join(Path("driver.log").read_text().split())


def test_lost_nodes_and_a_kill_lose_nothing(cluster: Any, experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("out")
    Path("fleet.toml").write_text(FLEET)
    Path("run.toml").write_text(runs.CONFIG.partition("[engine]")[0] + ENGINE + trainer_and_below())
    workload = ("--workload", "light-8k", "--cap", "256", "--num-groups", "16", "--max-staleness", str(BOUND))
    planned = ("--quick", "--for-launch", "--json", "plan.json")
    assert cli.main(["plan", "fleet.toml", "--model", "model", *workload, *planned]) == 0
    plan = read_plan(Path("plan.json"))
    placed = [(role.count, role.resources) for role in who_goes_where(plan, launched_config(plan, "run.toml", ())[0])]
    assert placed == [(1, {"spot": 1.0}), (1, {"spot": 1.0}), (1, {"steady": 1.0})]
    kinds = {"steady": {"steady": 1.0}, "spot": {"spot": 2.0}}
    nodes = {name: add_node(cluster, kind) for name, kind in kinds.items()}
    try:
        argv = ("launch", "plan.json", "run.toml", "--run-dir", "out", "--cluster.address", cluster.address, *SIZES)
        process = Forked(experiment, "driver", argv)
        try:

            def wait(is_so: Callable[[], bool], what: str) -> None:
                until(lambda: is_so() or process.exit_code is not None, what)
                assert process.exit_code is None, said()

            wait(lambda: steps_done() >= LOST_AT, f"{LOST_AT} steps")
            cluster.remove_node(nodes.pop("spot"), allow_graceful=False)
            nodes["spot"] = add_node(cluster, kinds["spot"])
            wait(lambda: "engine-0 is back with weights version" in said(), "the server that was on the node that went")
            back, steps = len(written(run)), steps_done()
            wait(lambda: steps_done() >= steps + 2, "two steps with both servers")
            wait(lambda: samplers(written(run)[back:]) == BOTH, "samples of both servers")
        finally:
            process.kill()
        assert re.search(r"was lost with its host on node \S+ \((it cannot be|that node is).*; restarting its", said())
        killed, steps = len(written(run)), steps_done() + MORE
        assert cli.main(["train", "--resume", "out", "--steps", str(steps)]) == 0, capsys.readouterr().err
        check_laws(run, steps)
        for first, last in ((0, consumed(run)[LOST_AT - 1]), (back, killed), (killed, None)):
            names = samplers(written(run)[first:last])
            assert names == BOTH, f"of events {first} to {last} all are from {names}"
        until(lambda: cluster_has(cluster, steady=1, spot=2), "what the run had is given back")
        assert leftovers("") == []
    finally:
        remove_nodes(cluster, nodes.values())


def trainer_and_below() -> str:
    return "[trainer]" + runs.CONFIG.partition("[trainer]")[2]


def written(run: Path) -> list[Event]:
    """All that is in the journal."""
    return [event for _, event in read_events(run / "journal.sqlite")]


def consumed(run: Path) -> list[int]:
    """Where in the journal batches are handed out, replayed batches too."""
    return [number for number, event in enumerate(written(run)) if isinstance(event, BatchConsumed)]


def decoded(events: Sequence[Event]) -> list[SegmentEnded]:
    return [event for event in events if isinstance(event, SegmentEnded) and event.segment.token_ids]


def samplers(events: Sequence[Event]) -> set[str]:
    """Names of the engines that decoded tokens."""
    return {event.segment.engine for event in decoded(events)}


def check_laws(run: Path, steps: int) -> None:
    """The laws at the end of a run."""
    batches, ledger = runs.batches(run), runs.ledger(run)
    assert [batch.step for batch in batches] == list(range(steps)), "a step is missing"
    groups = [group.group_id for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == steps * GROUPS, "a group is missing or was trained twice"
    tokens, num_decoded = ledger.tokens, sum(len(event.segment.token_ids) for event in decoded(written(run)))
    assert tokens.decoded == num_decoded, "a decoded token is in no account"
    assert (+tokens.wasted).keys() <= {WasteCause.ZERO_ADVANTAGE}, "tokens were thrown away"
    assert all(batch.step - min(t.policy_versions) <= BOUND for batch in batches for t in batch.trajectories)
    assert read_manifest(run / "checkpoints" / f"step_{steps}").version == steps
