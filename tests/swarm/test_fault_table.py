"""Faults of whole processes, one at a time, and the law that must hold of each. Kills and pauses are in
``test_chaos.py``."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollover import cli
from tests import runs
from tests.speed import within
from tests.swarm.chaos.clocks import set_clocks
from tests.swarm.chaos.disks import can_mount, small_disk
from tests.swarm.chaos.forked import Forked
from tests.swarm.chaos.laws import check_laws, check_members
from tests.swarm.chaos.stage import DEADLINE_S, Stage

needs_mounts = pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")
BOUND = 2
TWO = {"laptop": 1000.0, "phone": 300.0}


def stage_in(folder: Path, *argv: str, speeds: Mapping[str, float] = TWO, **more: Any) -> Stage:
    """A run that goes on until it is stopped."""
    settings = ("--rollout.strategy", "bounded_async", "--rollout.max_staleness", str(BOUND), "--steps", "100000")
    return Stage(folder, (*settings, *argv), seed="0", speeds=speeds, **more)


async def finish(stage: Stage) -> None:
    check_laws(stage.run, await stage.stop(), BOUND, stage.proxy.record)
    check_members(stage.proxy.record)


def states(stage: Stage) -> dict[str, str]:
    """The state of each member that has joined, by name, as it was written last."""
    return {worker.name: worker.state for worker in stage.status().workers}


async def until_step(stage: Stage, step: int) -> None:
    await stage.until(f"step {step}", lambda: stage.steps_done() > step)


async def test_a_straggler_without_a_token_keeps_no_step_waiting_for_ever(experiment_folder: Path) -> None:
    """It passes its checks and sends its heartbeats. Each group is due at some step, so without anybody who takes over
    what the straggler has, the batch would wait for its sample for ever."""
    stage = stage_in(experiment_folder)
    stage.halt("laptop")
    async with stage.open():
        await until_step(stage, 1)
        await stage.until("a moved call", lambda: stage.status().counters["moved_calls"] > 0)
        await until_step(stage, stage.steps_done() + BOUND)
        await finish(stage)
        trained = [t for batch in runs.batches(stage.run) for t in batch.trajectories]
        assert {segment.engine for t in trained for segment in t.segments if segment.token_ids} == {"phone"}


async def test_a_clock_that_is_set_ends_no_lease_and_spoils_no_measurement(experiment_folder: Path) -> None:
    # The lease is long enough for the slowest machine, and far shorter than what the clocks are set by.
    async with stage_in(experiment_folder, "--engine.lease_s", "60", has_own_clock=True).open() as stage:
        log = stage.run / "swarm" / "weights.jsonl"

        def read() -> list[dict[str, Any]]:
            return list(map(json.loads, log.read_text().split("\n")[:-1])) if log.exists() else []

        await until_step(stage, 0)
        for ahead_s in (3600.0, -7200.0, 86400.0):
            set_clocks(experiment_folder, ahead_s)
            true_s = time.time()
            said = f"a publication {ahead_s:g} s off"
            await stage.until(said, lambda at_s=true_s + ahead_s: any(abs(p["time_s"] - at_s) < 900 for p in read()))
        await finish(stage)
        assert stage.status().counters["expired_leases"] == 0
        assert Counter(who for _, who in stage.proxy.record.welcomes) == {name: 1 for name in TWO}
        changes = [record for record in read() if record["record"] == "change"]
        assert changes and all(0 <= c["after_s"] < DEADLINE_S and 0 <= c["prepare_s"] < DEADLINE_S for c in changes)


async def test_a_second_coordinator_is_refused_and_a_revoked_worker_leaves(
    experiment_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage_in(experiment_folder).open() as stage:
        await until_step(stage, 0)
        second = Forked(experiment_folder, "second", ("train", "--resume", str(stage.run)))
        try:
            await stage.until("the end of the second", lambda: second.exit_code is not None)
        finally:
            second.kill()
        assert second.exit_code == 2 and "is in use by pid" in second.last_words()
        await stage.until("the phone", lambda: "phone" in states(stage))
        phone = stage.cast.pop("phone")
        assert cli.main(["workers", str(stage.run), "--revoke", "phone"]) == 0
        await stage.until("the end of the phone", lambda: phone.exit_code is not None)
        assert phone.exit_code == 2 and "revoked" in phone.last_words()
        away = "sent away"
        await stage.until(away, lambda: states(stage).get("phone") == away)
        capsys.readouterr()
        assert cli.main(["workers", str(stage.run)]) == 0 and "sent away" in capsys.readouterr().out
        await finish(stage)


async def test_a_worker_that_cannot_fetch_new_weights_keeps_nobody_waiting(experiment_folder: Path) -> None:
    async with stage_in(experiment_folder).open() as stage:
        await stage.until("the phone", lambda: any(who == "phone" for _, who, _ in stage.proxy.record.servings))
        stage.proxy.starved.add("phone")
        log = experiment_folder / "phone.log"
        await stage.until("what the phone says of it", lambda: "no source has blob" in log.read_text())
        too_old = "weights of the phone that are too old for any step"
        await stage.until(
            too_old, lambda: any(w.name == "phone" and (w.lag or 0) > BOUND for w in stage.status().workers)
        )
        await finish(stage)
        ages = [row["rollout/starvation_age"] for row in runs.rows(stage.run)]
        assert 1 <= max(ages) <= BOUND, "what the phone has begun is waited for, and is reported while it is"
        assert stage.status().metrics["rollout/starvation_age"] == ages[-1]


@pytest.mark.real_time
@needs_mounts
async def test_a_full_disk_costs_a_worker_new_weights_and_the_coordinator_a_stop(experiment_folder: Path) -> None:
    """Nothing is lost: the worker keeps the weights it has, and the run goes on once there is space."""
    run_megabytes = 512  # a run asks for some beforehand
    with (
        small_disk(experiment_folder / "disk", run_megabytes) as runs_disk,
        small_disk(experiment_folder / "cache", 24) as worker_disk,
    ):
        async with stage_in(experiment_folder, run=runs_disk.folder / "out", caches=worker_disk.folder).open() as stage:
            await until_step(stage, 0)
            worker_disk.fill()
            log = experiment_folder / "laptop.log"
            await stage.until("the message", lambda: "no space left on the disk" in log.read_text())
            worker_disk.clear()
            servings, full_s = stage.proxy.record.servings, time.monotonic()
            await stage.until("new weights", lambda: any(at_s > full_s for at_s, who, _ in servings if who == "laptop"))
            runs_disk.fill()
            coordinator = stage.cast["coordinator"]
            give_up_s = time.monotonic() + within(60)
            while (code := coordinator.exit_code) is None:
                assert time.monotonic() < give_up_s, stage.last_words()
                await asyncio.sleep(0.05)
            assert code == 2 and "space" in coordinator.last_words()
            runs_disk.clear()
            stage.start("coordinator")
            await finish(stage)
