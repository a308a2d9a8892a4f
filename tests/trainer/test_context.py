"""Ranks that share rows along the sequence compute what one process computes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.errors import ConfigError, RolloverError
from rollover.trainer import logprobs
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.context import ContextGroup
from rollover.trainer.minibatch import BatchTensors, split
from rollover.trainer.packing import PackedRow, TrainingSample, pack, shared
from rollover.trainer.world import PeerLost, World
from tests.speed import within
from tests.trainer.builders import make_batch, make_folder, make_samples, make_trainer, untrainable
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_fleet import PATIENCE_S, assert_close, fleet, published
from tests.trainer.test_sharded import (
    BUDGET,
    EPSILON,
    Trained,
    assert_alike,
    assert_alike_on,
    batches,
    refused,
    train,
    written,
)
from tests.trainer.test_truncated_sampling import recorded

ON_TWO = {"num_devices": 2, "context_parallel": 2}
ON_FOUR = {"num_devices": 4, "context_parallel": 2}
SETTINGS: dict[str, Any] = {"micro_batch_tokens": BUDGET, "adam_epsilon": EPSILON}
WITH_REFERENCE = resolve(AlgorithmConfig(name="gspo", kl_coef=0.1))


@cache
def alone(folder: Path) -> Trained:
    return train(None, folder=folder, given=batches(), **SETTINGS)


@pytest.mark.parametrize(
    ("devices", "tied", "settings"),
    [
        (ON_TWO, True, {"algorithm": "dapo"}),
        (ON_FOUR, True, {"algorithm": "dapo"}),
        (ON_FOUR, False, {"algorithm": "gspo", "mini_batches": 2}),
        (ON_FOUR, False, {"algorithm": "reinforce++", "mini_batches": 2}),
        (ON_FOUR, False, {"algorithm": WITH_REFERENCE, "gradient_checkpointing": True, "mini_batches": 2}),
        (ON_FOUR, True, {"algorithm": "gspo", "micro_batch_tokens": 10**6}),
        (ON_FOUR, True, {"algorithm": "dapo", "mini_batches": 2, "micro_batch_tokens": 1}),
    ],
    ids=["two", "four", "gspo", "reinforce++", "checkpointed, with a reference", "one row", "a row for each sample"],
)
def test_ranks_that_share_rows_compute_what_one_process_does(
    two: RankPool,
    four: RankPool,
    folders: dict[bool, Path],
    devices: dict[str, int],
    tied: bool,
    settings: dict[str, Any],
) -> None:
    settings = {"folder": folders[tied], "given": batches(), **SETTINGS, **settings}
    first, *others = {2: two, 4: four}[devices["num_devices"]].call(train, **settings, **devices)
    assert_alike(first, train(None, **settings))
    for other in others:
        assert_alike(other, first, weights=1e-12, metrics=1e-12, maxima=1e-12)


def test_the_batches_of_these_tests_have_what_is_difficult() -> None:
    """Samples on both sides of a seam, rows of odd length, ranks without any target, and rows made for nothing."""
    found = {"a sample on two ranks": 0, "padding of positions": 0, "passes for nothing": 0}
    for batch in batches():
        data = BatchTensors.of(batch.groups, resolve(AlgorithmConfig()), step=batch.step, device=torch.device("cpu"))
        for rank in range(4):
            world = World(rank, 4)
            context = ContextGroup.__new__(ContextGroup)
            context.size, context.place, context.number = 2, rank % 2, rank // 2
            for mini in split(data, 1, budget=BUDGET, max_response_tokens=25, world=world, context=context):
                found["passes for nothing"] += len(mini.padding)
                for row in mini.rows:
                    share = row.share
                    assert share is not None
                    found["padding of positions"] += share.num_padding
                    own, whole = row.sample_T[share.own_T].unique(), row.sample_T
                    found["a sample on two ranks"] += sum(
                        int((whole[share.own_T] == s).sum() < (whole == s).sum()) for s in own
                    )
    assert all(found.values()), found


def test_adapters_are_trained_alike(two: RankPool, folders: dict[bool, Path]) -> None:
    settings = {"lora": LoraConfig(rank=4, alpha=8.0), "learning_rate": 1e-2, "algorithm": WITH_REFERENCE}
    settings |= {**SETTINGS, "folder": folders[True], "given": batches(), "gradient_checkpointing": True}
    # The learning rate is ten times that of full weights.
    assert_alike_on(two, devices=ON_TWO, weights=5e-6, **settings)


def in_chunks(world: World | None, **arguments: Any) -> Trained:
    """Trains with so little room for logits that the output matrix runs in many pieces."""
    before = logprobs.LOGITS_PER_CHUNK
    logprobs.LOGITS_PER_CHUNK = 4 * 40
    try:
        return train(world, **arguments)
    finally:
        logprobs.LOGITS_PER_CHUNK = before


@pytest.mark.parametrize("devices", [{"num_devices": 2}, ON_TWO], ids=["rows of their own", "shared rows"])
def test_ranks_normalise_tokens_over_kept_sets(
    two: RankPool, folders: dict[bool, Path], devices: dict[str, int]
) -> None:
    arguments = {"folder": folders[True], "given": [recorded(batch) for batch in batches()], **SETTINGS}
    expected = train(None, **arguments)
    assert all(0 < metrics["kept/mass"] < 1 for metrics in expected.metrics)
    for do in (train, in_chunks):
        assert_alike(two.call(do, **arguments, **devices)[0], expected)


def test_bfloat16_is_as_far_from_float32_as_it_is_without_sharing(two: RankPool, folders: dict[bool, Path]) -> None:
    settings = {"folder": folders[True], "given": batches()[:1], "micro_batch_tokens": BUDGET}
    exact = train(None, **settings).metrics[0]["grad_norm"]
    found = [
        two.call(train, **settings, **devices, dtype="bfloat16")[0].metrics[0]["grad_norm"]
        for devices in ({"num_devices": 2}, ON_TWO)
    ]
    assert all(value != exact and abs(value - exact) < 0.05 * exact for value in found)


def logits(world: World | None, *, folder: Path, prompts: Sequence[Sequence[int]], **settings: Any) -> Any:
    return make_trainer(folder, world=world, micro_batch_tokens=12, **settings).next_logits(prompts)


def test_logits_after_prompts_are_those_of_one_process(two: RankPool, folders: dict[bool, Path]) -> None:
    prompts = [[3], [5, 6, 7, 8, 9], list(range(2, 33)), [4, 4]]
    expected = logits(None, folder=folders[True], prompts=prompts)
    for found in two.call(logits, folder=folders[True], prompts=prompts, **ON_TWO):
        assert abs(found - expected).max() < 1e-5


def test_a_rank_without_any_target_takes_part(two: RankPool, folders: dict[bool, Path]) -> None:
    sample = TrainingSample(prompt_ids=tuple(range(2, 32)), response_ids=(4, 5))
    (row,) = pack([sample], 100)
    assert len(shared(row, _Alone(2, 0)).share.own_T) == 0
    expected = with_gradient(None, folder=folders[False], samples=[sample])
    for values, gradients in two.call(with_gradient, folder=folders[False], samples=[sample]):
        assert torch.allclose(values, expected[0], atol=1e-6)
        for name, gradient in expected[1].items():
            assert (gradients[name] - gradient).abs().max() < 1e-5, name


def with_gradient(
    world: World | None, *, folder: Path, samples: list[TrainingSample]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the row of all samples, and the gradient of their sum."""
    trainer = make_trainer(folder, world=world, **({} if world is None else ON_TWO))
    (row,) = pack(samples, 10**6)
    values = logprobs.response_logprobs(trainer._model, shared(row, trainer._context), 0.8)
    values.sum().backward()
    gradients = {
        name.removeprefix("hf."): p.grad.full_tensor() if world is not None else p.grad
        for name, p in trainer._model.named_parameters()
    }
    return values.detach(), {name: gradient.clone() for name, gradient in gradients.items()}


def test_an_untrainable_sample_is_named_and_no_rank_goes_on(four: RankPool, folders: dict[bool, Path]) -> None:
    batch = untrainable(make_batch(num_groups=4))
    found = four.call(refused, folder=folders[True], given=[batch], micro_batch_tokens=BUDGET, **ON_FOUR)
    assert sorted(kind for kind, _ in found) == ["PeerLost", "PeerLost", RolloverError.__name__, RolloverError.__name__]
    assert sum(message.startswith("sample g2.1 cannot be trained on: ") for _, message in found) == 2
    given = batches()  # and the ranks can train another
    trained = four.call(train, folder=folders[True], given=given, **SETTINGS, **ON_FOUR)[0]
    assert_alike(trained, alone(folders[True]))


def test_checkpoints_know_nothing_of_who_shares_rows(
    two: RankPool, four: RankPool, folders: dict[bool, Path], tmp_path: Path
) -> None:
    folder, given = folders[True], batches()
    saved = written(two, tmp_path / "step_2", folder=folder, given=given[:2], devices=ON_TWO, **SETTINGS)
    straight = alone(folder).after(2)
    arguments = {"folder": folder, "given": given[2:], "resume_from": saved, **SETTINGS}
    assert_alike(train(None, **arguments), straight)
    for pool, settings in ((two, {"num_devices": 2}), (two, ON_TWO), (four, ON_FOUR)):
        assert_alike(pool.call(train, **arguments, **settings)[0], straight)


def left_waiting(world: World) -> str:
    """The last rank does not come to an exchange."""
    own = World(world.rank, world.size, mesh=world.mesh, timeout_s=within(0.5))
    context = ContextGroup(own, 2)
    if world.rank == world.size - 1:
        return ""
    try:
        return str(context.exchange(torch.zeros(2, 1)).tolist())
    except PeerLost as error:
        return str(error)


def test_a_rank_that_does_not_come_is_named_within_the_deadline(four: RankPool) -> None:
    first, second, third, _ = four.call(left_waiting)
    assert first == second == str([[0.0], [0.0]])
    assert re.match(r"rank 2 of 4 waited \d+ s for rank 3 \(exchange of a row\): ", third), third


def test_a_fleet_equals_one_process_also_after_a_stop(folders: dict[bool, Path], tmp_path: Path, forked: None) -> None:
    folder, expected = folders[True], make_trainer(folders[True], **SETTINGS)
    told: list[str] = []
    with fleet(folder, tmp_path, told, rank_timeout_s=PATIENCE_S, **SETTINGS, **ON_FOUR) as trainer:
        for batch in batches():
            if batch.step == 1:
                os.kill(trainer.pids[3], signal.SIGSTOP)
            ours, theirs = trainer.step(batch).metrics, expected.step(batch).metrics
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert_close(published(trainer), dict(expected.weights()))
    assert len(told) == 1 and told[0].startswith(f"trainer: rank 3 of 4 did nothing for {PATIENCE_S:g} s (trainer.")


def test_heads_that_cannot_be_dealt_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel is 4, but the model has 4 attention heads and 2"):
        make_trainer(folder, num_devices=4, context_parallel=4)
    with pytest.raises(ValueError, match=r"^context_parallel must be a divisor of num_devices \(4\), got 3"):
        TrainerConfig(num_devices=4, context_parallel=3)


# -- shares, without any other process --------------------------------------------------------------------------------


@dataclass
class _Alone(ContextGroup):
    """A rank whose neighbours are played by the test."""

    size: int
    place: int
    given: list[Tensor] = field(default_factory=list)

    def exchange(self, parts_C: Tensor) -> Tensor:
        raise AssertionError("nothing is exchanged")

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack(self.given)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_shares_hold_each_position_and_each_target_once(size: int, budget: int) -> None:
    for row in pack(make_samples(12), budget):
        contexts = [_Alone(size, place) for place in range(size)]
        parts = [share_of(row, context) for context in contexts]
        for name in ("input_ids_N", "position_ids_N"):
            tensors = [getattr(part, name) for part in parts]
            assert len({len(tensor) for tensor in tensors}) == 1
            whole = getattr(row, name)
            assert torch.equal(torch.cat(tensors)[: len(whole)], whole)
            assert 0 <= len(torch.cat(tensors)) - len(whole) == parts[0].num_padding < size
        each = len(parts[0].input_ids_N)
        values_T = torch.randn(len(row.target_T))
        for place, part in enumerate(parts):
            assert torch.equal(part.predict_T + place * each, row.predict_T[part.own_T])
            assert torch.equal(part.target_T, row.target_T[part.own_T])
        assert torch.cat([part.own_T for part in parts]).sort().values.tolist() == list(range(len(values_T)))
        for context, part in zip(contexts, parts, strict=True):
            for other in parts:
                padded = torch.full((other.width,), torch.nan)
                padded[: len(other.own_T)] = values_T[other.own_T]
                context.given.append(padded)
            assert torch.equal(part.gathered(values_T[part.own_T]), values_T)


def share_of(row: PackedRow, context: _Alone) -> Any:
    share = shared(row, context).share
    assert share is not None
    return share
