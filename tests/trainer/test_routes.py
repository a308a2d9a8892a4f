"""Routing replay: a model that is given the experts it chose computes the same, whatever the layout of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollover.batch import Batch, Drift
from rollover.errors import ConfigError, ModelError, RolloverError
from rollover.trainer.checks import check_suits
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.experts import RowRoutes
from rollover.trainer.gathering import measured_drift
from rollover.trainer.logprobs import all_logprobs, response_logprobs
from rollover.trainer.models import open_model, save_model
from rollover.trainer.packing import TrainingSample, num_positions, pack
from rollover.trainer.proof import prove_routes
from rollover.types import FinishReason, Observation, Prompt, SampleId, Segment, Trajectory
from rollover.weights.sources import FolderWeights
from tests.engine.contract import request
from tests.engine.embedded.harness import core_of, run
from tests.trainer.builders import changed, in_segment, make_batch, make_samples
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_experts import FAMILIES, make_experts
from tests.trainer.test_families import config_of
from tests.trainer.test_sharded import BUDGET, assert_alike_on, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    make_experts(made)
    return made


@torch.no_grad()
def opposite(folder: Path) -> Any:
    """A model that takes other experts."""
    model = open_model(folder)
    for layer in model.model.layers:
        layer.mlp.gate.weight.neg_()
    return model


def by_turns(model: Any, other: Any, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with routes of two models."""
    return [replace(s, routes=routes_of(model if i % 2 else other, s)) for i, s in enumerate(samples)]


@torch.no_grad()
def routes_of(model: Any, sample: TrainingSample) -> tuple[bytes, ...]:
    """The experts that ``model`` chooses where it predicts the tokens of a response, alone."""
    (row,) = pack([replace(sample, routes=())], 1000)
    model.routes.taken = taken = {}
    response_logprobs(model, row, 1.0)
    model.routes.taken = None
    ids_NS = torch.cat([taken[number] for number in sorted(taken)], dim=1)[len(sample.prompt_ids) - 1 :]
    return of_sample(sample, [bytes(ids) for ids in ids_NS.tolist()])


def of_sample(sample: TrainingSample, routes: Sequence[bytes]) -> tuple[bytes, ...]:
    return (*[b""] * len(sample.prompt_ids), *routes)


def logprobs(model: Any, samples: list[TrainingSample], budget: int = 64) -> torch.Tensor:
    num = sum(len(sample.response_ids) for sample in samples)
    out = torch.zeros(num)
    for row in pack(samples, budget):
        out = out.index_copy(0, row.token_T, response_logprobs(model, row, 1.0))
    return out


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phimoe"])
def test_own_routes_change_nothing(family: str) -> None:
    prove_routes(config_of(family, **FAMILIES[family]).to_dict())


@torch.no_grad()
def test_samples_on_lines_of_their_own_follow_their_own_routes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes of another model, which also give the log-probs that they give in shared rows."""
    packed = open_model(folder)
    samples = by_turns(packed, opposite(folder), make_samples(5))
    monkeypatch.setattr("rollover.trainer.models.prove", lambda config: "padded")
    padded = open_model(folder)
    assert padded.is_padded and not packed.is_padded
    found = logprobs(padded, samples, budget=100)
    torch.testing.assert_close(found, logprobs(packed, samples, budget=100), atol=1e-5, rtol=1e-5)
    assert (found - logprobs(padded, [replace(s, routes=()) for s in samples])).abs().max() > 0.1


def test_a_model_that_chooses_in_another_way_is_refused() -> None:
    with pytest.raises(ModelError, match="routes cannot be replayed in PhimoeSparseMoeBlock"):
        prove_routes(config_of("phimoe", **FAMILIES["phimoe"]).to_dict())


def test_siblings_each_follow_their_own_route_from_the_first_token_on(folder: Path) -> None:
    """Routes of another model: the siblings share their prompt, whose last position predicts a first token of each."""
    model, samples = open_model(folder), make_samples(9)
    replayed = by_turns(model, opposite(folder), samples)
    together = logprobs(model, replayed, budget=100)
    alone = torch.cat([logprobs(model, [sample]) for sample in replayed])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert (together - logprobs(model, samples)).abs().max() > 0.1
    for row in pack(replayed, 100):
        assert len(row.input_ids_N) <= 100
    assert num_positions(replayed, (0,)) == num_positions(samples, (0,))


def test_gradients_follow_given_routes_and_recomputed_layers_do_too(folder: Path) -> None:
    model, again = open_model(folder), open_model(folder, gradient_checkpointing=True)
    samples = [replace(s, routes=of_sample(s, [bytes([1, 5, 0, 7])] * len(s.response_ids))) for s in make_samples(6)]
    for policy in (model, again):
        logprobs(policy, samples).sum().backward()
    own = open_model(folder)
    logprobs(own, [replace(sample, routes=()) for sample in samples]).sum().backward()
    for (name, one), other, without in zip(model.named_parameters(), again.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
        assert not torch.equal(one.grad, without.grad), name


@torch.no_grad()
def test_a_turn_has_the_routes_that_it_was_sampled_with_in_every_row(folder: Path, tmp_path: Path) -> None:
    """A plan of old weights, and what the embedded engine makes of it under new ones: two alternatives, the second of
    which goes on, and a summary. A twin has the same plan of new weights, which take other experts."""
    model, old = open_model(folder), opposite(folder)
    save_model(old, tmp_path, companions={})
    core = core_of(tmp_path, kv_on_update="recompute", cpu_kernels="torch")
    start = Segment(0, (), (), FinishReason.TURN, 0, 0.0, 0.0)
    prompt = Prompt(prompt_id="p/0@0", token_ids=(), text="", source="p")
    tree = Trajectory(sample_id=SampleId(0, 0), prompt=prompt, segments=(start,))
    for turn, (ids, parent) in enumerate([((5, 6, 7), 0), ((4, 9), 1), ((4, 9), 1), ((8,), 3), ((2, 3), 0)], start=1):
        tree = replace(tree, observations=(*tree.observations, Observation(ids, parent=parent)))
        asked = request("a", call=turn, prompt_ids=tree.before(turn), max_new_tokens=4 + turn, returns_routes=True)
        chunks = run(core, asked).chunks[asked.request_id]
        tokens, logprobs, routes = (
            tuple(value for chunk in chunks for value in getattr(chunk, name))
            for name in ("token_ids", "logprobs", "routes")
        )
        version = chunks[0].policy_version
        sampled = Segment(version, tokens, logprobs, FinishReason.TURN, version, 0.0, 1.0, routes=routes)
        tree = replace(tree, segments=(*tree.segments, sampled))
        if turn == 1:
            core.load(1, FolderWeights(1, folder))
    plan = TrainingSample(prompt_ids=(5, 6, 7), response_ids=tree.turns[1])
    as_now = tree.segments[1]._replace(routes=routes_of(model, plan)[3:])
    twin = replace(tree, segments=(start, as_now, *tree.segments[2:]))
    assert as_now.routes != tree.segments[1].routes and tree.paths == ((0, 1, 2), (0, 1, 3, 4), (0, 5))

    expected = []
    for trajectory in (tree, twin):
        for turn in range(1, 6):
            sample = TrainingSample(prompt_ids=trajectory.before(turn), response_ids=trajectory.turns[turn])
            (row,) = pack([sample], 1000)
            bytes_NB = torch.zeros(len(row.input_ids_N), 4, dtype=torch.uint8)
            for earlier in trajectory.path(turn)[1:]:
                first = len(trajectory.before(earlier)) - 1
                for place, route in enumerate(trajectory.segments[earlier].routes, start=first):
                    bytes_NB[place] = torch.tensor([*route])
            known_N = (bytes_NB > 0).any(1)  # no layer takes expert 0 twice
            given = replace(row, routes=RowRoutes(bytes_NB=bytes_NB, is_known_N=known_N))
            expected.append(response_logprobs(model, given, 1.0))
    paths = [path for trajectory in (tree, twin) for path in TrainingSample.all_of(trajectory, replays_routes=True)]
    num_tokens = 2 * tree.num_tokens
    for budget in (1, 40, 1000):
        found = all_logprobs(model, pack(paths, budget), 1.0, num_tokens=num_tokens)
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
    told, again = torch.tensor(twin.rollout_logprobs), found[tree.num_tokens :]
    torch.testing.assert_close(again[len(plan.response_ids) :], told[len(plan.response_ids) :], atol=1e-4, rtol=0)
    assert (found[: tree.num_tokens] - again).abs().max() > 0.1, "the routes of the plan make a difference"


def with_routes(batch: Batch, step: int) -> Batch:
    """A batch whose tokens were routed in some way, all but one sample's."""

    def routed(t: Trajectory) -> Trajectory:
        ids = tuple(bytes([(7 * i + step) % 8, (7 * i + step + 3) % 8] * 2) for i in range(t.num_tokens))
        return in_segment(t, routes=() if t.sample_id == SampleId(0, 0) else ids)

    return changed(batch, routed)


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": LoraConfig(rank=4, targets=("q_proj", "v_proj")), "learning_rate": 1e-2}],
    ids=["full", "adapters"],
)
def test_ranks_replay_what_one_process_does(two: RankPool, folder: Path, settings: dict[str, Any]) -> None:
    given = [with_routes(make_batch(step=step, num_groups=5), step) for step in range(2)]
    settings = {**settings, "folder": folder, "given": given, "algorithm": "dapo", "micro_batch_tokens": BUDGET}
    alone = assert_alike_on(two, weights=5e-6, replay_routes=True, **settings)
    total = given[0].num_tokens
    known = total - given[0].groups[0].trajectories[0].num_tokens
    assert alone.metrics[0]["routes/replayed"] == known / total
    off = train(None, **settings)
    assert off.metrics[0]["grad_norm"] != pytest.approx(alone.metrics[0]["grad_norm"], rel=1e-3)


def test_ranks_that_share_rows_replay_their_own_positions(two: RankPool, folder: Path) -> None:
    settings = {"given": [with_routes(make_batch(num_groups=5), 0)], "micro_batch_tokens": BUDGET}
    devices = {"num_devices": 2, "context_parallel": 2}
    assert_alike_on(two, devices=devices, folder=folder, replay_routes=True, **settings)


def test_routes_of_another_model_are_refused(folder: Path) -> None:
    model = open_model(folder)
    (sample,) = make_samples(3)[:1]
    for route, message in ((bytes(6), "routes of 6 bytes are not of this model"), (bytes([8] * 4), "expert 8 of 8")):
        given = replace(sample, routes=of_sample(sample, [route] * len(sample.response_ids)))
        with pytest.raises(RolloverError, match=message):
            logprobs(model, [given])


def test_a_model_without_experts_has_no_routes() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.replay_routes = true, but a model of type 'qwen3' has no experts"):
        check_suits(TrainerConfig(replay_routes=True), config_of("qwen3").to_dict())


def test_drift_is_of_responses_whose_tokens_all_replay_the_newest_routes() -> None:
    prompt = Prompt(prompt_id="p/0@0", token_ids=(1,), text="1", source="p")
    old = Segment(6, (7, 8), (-1.0, -1.0), FinishReason.ABORT, 6, 0.0, 1.0, engine="one")
    new = Segment(7, (9,), (-1.0,), FinishReason.STOP, 7, 1.0, 2.0, engine="one")
    distance_T = np.array([9.0, 9.0, 0.5, 0.1])
    for routes, expected in (((), Drift(2, 0.3)), ((b"\x01",), Drift(1, 0.1))):
        pair = (old._replace(routes=routes * 2), new._replace(routes=routes))
        segments = (pair, (new._replace(routes=routes),))
        made = [Trajectory(sample_id=SampleId(0, i), prompt=prompt, segments=s) for i, s in enumerate(segments)]
        (found,) = measured_drift(made, distance_T, step=7).values()
        assert found.num_tokens == expected.num_tokens and found.mean_abs == pytest.approx(expected.mean_abs)
