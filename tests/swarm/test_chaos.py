"""A short form of the chaos campaign; ``benchmarks/chaos.py`` is the whole."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests import runs
from tests.swarm.chaos.campaign import Case, survive
from tests.swarm.chaos.faults import Blows
from tests.swarm.chaos.laws import sampled
from tests.swarm.nginx_kit import NGINX


def test_push_pull_survives_kills_pauses_and_a_bad_network(experiment_folder: Path) -> None:
    often = Blows(gap_s=0.5)  # the ten steps take five seconds where nothing is in their way
    settings = ("--rollout.max_staleness", "2")
    case = Case(strategy="bounded_async", argv=settings, steps=10, num_kills=6, blows=often, relay=NGINX is not None)
    survivor = asyncio.run(survive(case, experiment_folder))
    assert survivor.toll.num_kills >= 3
    assert survivor.held.acked_tokens > 0.5 * survivor.held.decoded_tokens  # else the law of them says little


def test_pull_mode_samples_token_for_token_what_an_undisturbed_run_does(experiment_folder: Path) -> None:
    case = Case(strategy="sync", mode="pull", steps=5, num_kills=4, blows=Blows(gap_s=0.8), relay=NGINX is not None)
    alone = runs.Processes(experiment_folder).run(
        *("train", "run.toml", "--run-dir", "alone", "--rollout.strategy", "sync", "--steps", "5", "--seed", "0")
    )
    assert alone.code == 0, alone.err
    survivor = asyncio.run(survive(case, experiment_folder))
    assert survivor.toll.num_kills >= 2
    assert survivor.held.max_lag == 0
    assert survivor.trained == sampled(experiment_folder / "alone")
