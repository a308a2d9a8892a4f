"""A trainer sharded over ranks computes what one alone computes: every algorithm, any assignment, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rollover.algorithms import AlgorithmConfig, resolve
from rollover.batch import Batch
from rollover.errors import ModelError, RolloverError
from rollover.trainer import balancing
from rollover.trainer.balancing import by_longest_first
from rollover.trainer.base import TrainedStep
from rollover.trainer.checkpoint import write_manifest
from rollover.trainer.local import LocalTrainer
from rollover.trainer.minibatch import BatchTensors, shuffled, split
from rollover.trainer.models import open_model
from rollover.trainer.shares import write_index
from rollover.trainer.world import World
from tests.trainer.builders import assert_same, make_batch, make_folder, make_trainer
from tests.trainer.rank_pool import RankPool

STEPS = 3
BUDGET = 40
"""Input positions of a row: few enough that ranks have several, and not equally many."""
UNLIKE = {"time/step_s", "tokens/per_s", "tokens/forward"}
"""What the clock says, and the work: of a family that is assigned in pieces the prompt is computed more than once."""


EPSILON = 1e-4
"""By Adam's usual epsilon of 1e-8 a gradient that is little but rounding makes a step as large as any other, which
differs by more than 1e-6 between processors and ways of packing. A large one also shows wrong scales of gradients, which
Adam otherwise divides out."""


Assign = Callable[[Sequence[float], int], tuple[tuple[int, ...], ...]]


class Trained(NamedTuple):
    metrics: list[dict[str, float]]
    drift: list[Any]
    untrained: list[Any]
    weights: dict[str, torch.Tensor]

    def after(self, num_steps: int) -> Trained:
        """What was trained behind these steps."""
        return Trained(*(part[num_steps:] for part in self[:-1]), self.weights)


def batches(**shape: Any) -> list[Batch]:
    return [make_batch(step=step, version=max(0, step - 1), **{"num_groups": 5, **shape}) for step in range(STEPS)]


MAXIMA = 4e-5
"""Relative difference of a metric of one token, which no mean averages out. Weights may differ by 1e-6, and a log-prob
sums hidden_size = 32 products of them with normed activations of about 1: 3.2e-5, and as much again as float32 rounds
sums of 32 terms, 32 * 6e-8 = 2e-6. The ratio of a token differs by as much as its log-prob."""


def train(world: World | None, *, folder: Path, given: list[Batch], **settings: Any) -> Trained:
    """Alone, or on one of several ranks."""
    trainer = make_trainer(folder, world=world, **{"adam_epsilon": EPSILON, **settings})
    return told([trainer.step(batch) for batch in given], trainer)


def told(done: Sequence[TrainedStep], trainer: LocalTrainer) -> Trained:
    return Trained(
        [dict(d.metrics) for d in done], [d.drift for d in done], [d.untrained for d in done], whole(trainer)
    )


def whole(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    found = trainer.weights().items()
    return {name: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone() for name, w in found}


def assert_alike(
    ours: Trained, theirs: Trained, *, weights: float = 1e-6, metrics: float = 1e-5, maxima: float = MAXIMA
) -> None:
    """Compare two trainings that may differ in rounding; ``maxima`` is for metrics of one token."""
    for one, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - UNLIKE:
            within = maxima if name.endswith("/max") else metrics
            assert one[name] == pytest.approx(other[name], rel=within, abs=within), name
    assert ours.untrained == theirs.untrained
    assert [d.keys() for d in ours.drift] == [d.keys() for d in theirs.drift]
    for one_drift, other_drift in zip(ours.drift, theirs.drift, strict=True):
        for name in one_drift:
            assert one_drift[name].num_tokens == other_drift[name].num_tokens
            assert one_drift[name].mean_abs == pytest.approx(other_drift[name].mean_abs, abs=metrics)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, tensor in ours.weights.items():
        assert (tensor - theirs.weights[name]).abs().max() < weights, name


def assert_alike_on(
    *pools: RankPool, weights: float = 1e-6, devices: Mapping[str, int] | None = None, **arguments: Any
) -> Trained:
    """Every rank trains what one process trains, which is returned."""
    alone = train(None, **arguments)
    for pool in pools:
        for found in pool.call(train, **arguments, **(devices or {})):
            assert_alike(found, alone, weights=weights)
    return alone


def written(
    pool: RankPool,
    saved: Path,
    *,
    folder: Path,
    given: list[Batch],
    devices: Mapping[str, int] | None = None,
    **setup: Any,
) -> Path:
    """A checkpoint that ranks have written after these batches."""
    saved.mkdir()
    pool.call(write_share, folder=folder, given=given, saved=saved, **setup, **(devices or {}))
    if "lora" not in setup:
        write_index(saved)
    manifest = make_trainer(folder, **setup)._setup.manifest
    write_manifest(saved, manifest(len(given), num_threads=1, num_ranks=pool.size))
    return saved


def write_share(world: World, *, folder: Path, given: list[Batch], saved: Path, **setup: Any) -> None:
    trainer = make_trainer(folder, world=world, **setup)
    for batch in given:
        trainer.step(batch)
    trainer.write_share(saved)


def num_padding(batch: Batch, algorithm: str, minis: int, ranks: int) -> int:
    """Passes that ranks make for nothing."""
    groups = shuffled(batch.groups, minis, seed=0, step=batch.step)
    row = resolve(AlgorithmConfig(name=algorithm))
    data = BatchTensors.of(groups, row, step=batch.step, device=torch.device("cpu"))
    return sum(
        len(mini.padding)
        for rank in range(ranks)
        for mini in split(data, minis, budget=BUDGET, max_response_tokens=25, world=World(rank, ranks))
    )


# A ratio per token, one per sample, and advantages whitened over the whole batch: what needs other sums over ranks.
@pytest.mark.parametrize(
    ("algorithm", "minis", "tied", "shape", "settings"),
    [
        ("dapo", 1, True, {}, {}),
        ("gspo", 2, False, {}, {}),
        ("reinforce++", 2, True, {}, {}),
        pytest.param("grpo", 1, False, {}, {"max_grad_norm": 0, "weight_decay": 0.1}, id="no clip"),
        pytest.param("reinforce++", 1, True, {"num_groups": 1, "group_size": 1}, {}, id="ranks without any row"),
    ],
)
def test_two_and_three_ranks_compute_what_one_process_does(
    two: RankPool,
    three: RankPool,
    folders: dict[bool, Path],
    algorithm: str,
    minis: int,
    tied: bool,
    shape: dict[str, int],
    settings: dict[str, Any],
) -> None:
    given = batches(seed=2, **shape)
    settings = {"algorithm": algorithm, "mini_batches": minis, "micro_batch_tokens": BUDGET, **settings}
    alone = train(None, folder=folders[tied], given=given, **settings)
    for pool in (two, three):
        padding = [num_padding(batch, algorithm, minis, pool.size) for batch in given]
        assert any(padding), "no rank has fewer rows than the others"
        first, *others = pool.call(train, folder=folders[tied], given=given, **settings)
        assert_alike(first, alone)
        for other in others:
            assert_alike(other, first, weights=1e-12, metrics=1e-12, maxima=1e-12)


# -- who gets what ----------------------------------------------------------------------------------------------------


def to_the_last(costs: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """One rank trains everything."""
    return *[()] * (num_ranks - 1), tuple(range(len(costs)))


def to_the_opposite(costs: Sequence[float], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks in reversed order."""
    return by_longest_first(costs, num_ranks)[::-1]


def assigned(given: list[Batch], way: Assign, size: int) -> list[list[tuple[int, ...]]]:
    """The samples that each rank trains of each batch, in its order."""
    found = []
    for batch in given:
        row = resolve(AlgorithmConfig(name="dapo"))
        data = BatchTensors.of(batch.groups, row, step=batch.step, device=torch.device("cpu"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(balancing, "by_longest_first", way)
            ranks = [split(data, 1, budget=BUDGET, max_response_tokens=25, world=World(r, size)) for r in range(size)]
        found.append([tuple(i for mini in own for row in mini.rows for i in row.samples_B) for own in ranks])
    return found


def train_assigned(world: World, *, way: Assign, **arguments: Any) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balancing, "by_longest_first", way)
        return train(world, **arguments)


@pytest.mark.parametrize("way", [to_the_last, to_the_opposite])
def test_the_deal_changes_nothing(two: RankPool, three: RankPool, folders: dict[bool, Path], way: Assign) -> None:
    given = batches()
    settings = {"folder": folders[False], "given": given, "algorithm": "dapo", "mini_batches": 2}
    settings["micro_batch_tokens"] = BUDGET
    alone = train(None, **settings)
    for size, pool in ((2, two), (3, three)):
        pairs = zip(assigned(given, way, size), assigned(given, by_longest_first, size), strict=True)
        assert all(ours != theirs for ours, theirs in pairs), "the ranks have the samples that they always have"
        for found in pool.call(train_assigned, way=way, **settings):
            assert_alike(found, alone)


# -- what went wrong once ---------------------------------------------------------------------------------------------


def after_every_use(world: World, *, folder: Path, given: list[Batch], saved: Path) -> Trained:
    """Score before the first step and between steps, publish and save, and look at what is held, after each pass too."""
    settings = {"mini_batches": 2, "micro_batch_tokens": BUDGET, "adam_epsilon": EPSILON}
    trainer = make_trainer(folder, world=world, algorithm="reinforce++", **settings)
    with pytest.MonkeyPatch.context() as patch:
        num_passes = look_after_each_pass(trainer, world, patch)
        trained = use(trainer, world, given, saved)
        assert len(num_passes) > 2 * 2 * len(given), "no mini-batch has two passes"
    return trained


def look_after_each_pass(trainer: LocalTrainer, world: World, patch: pytest.MonkeyPatch) -> list[int]:
    """Look at what is held after each pass forward and back. A gradient that is summed only at the last of them is whole
    on every rank until then, and no parameter has its part. Returns a list that grows with the passes."""
    accumulate, tick, passes = trainer._accumulate, world.tick, list[int]()

    def looking(*args: Any) -> Any:
        patch.setattr(world, "tick", look)
        try:
            return accumulate(*args)
        finally:
            patch.setattr(world, "tick", tick)

    def look() -> None:
        assert_sharded(trainer, world)
        assert all(p.grad is not None for p in trainer._model.parameters()), "a gradient is kept back"
        passes.append(1)
        tick()

    patch.setattr(trainer, "_accumulate", looking)
    return passes


def use(trainer: LocalTrainer, world: World, given: list[Batch], saved: Path) -> Trained:
    done = []
    for batch in given:
        trainer.next_logits([[3, 4, 5], [6]])
        assert_sharded(trainer, world)
        done.append(trainer.step(batch))
        assert_sharded(trainer, world)
        whole(trainer)
        assert_sharded(trainer, world)
    trainer.write_share(saved)
    assert_sharded(trainer, world)
    return told(done, trainer)


def assert_sharded(trainer: LocalTrainer, world: World) -> None:
    """Every parameter is a part of its tensor, and so is its gradient, and the optimizer has those very parameters."""
    parameters = dict(trainer._model.named_parameters())
    held = {id(p) for group in trainer._optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in parameters.values()}
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().shape[0] <= math.ceil(parameter.shape[0] / world.size), name
        assert parameter.grad is None or isinstance(parameter.grad, DTensor), name


def test_weights_stay_sharded_and_those_used_train(two: RankPool, folders: dict[bool, Path], tmp_path: Path) -> None:
    given = batches()
    settings = {"algorithm": "reinforce++", "mini_batches": 2, "micro_batch_tokens": BUDGET}
    alone = train(None, folder=folders[True], given=given, **settings)
    for found in two.call(after_every_use, folder=folders[True], given=given, saved=tmp_path):
        assert_alike(found, alone)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json"}, "something else than tensors and JSON was written"


def loaded(world: World, *, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bool]:
    trainer = make_trainer(folder, world=world)
    hf = trainer._model.hf
    buffers = {name: buffer.clone() for name, buffer in hf.named_buffers()}
    return whole(trainer), buffers, hf.lm_head.weight is hf.model.embed_tokens.weight


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True)])
def test_ranks_read_their_rows_and_make_rotary_modules(
    three: RankPool, tmp_path: Path, family: str, tied: bool
) -> None:
    folder = make_folder(tmp_path / "model", family, tie_word_embeddings=tied, vocab_size=41)  # 41 rows on three ranks
    expected = open_model(folder)
    for weights, buffers, is_tied in three.call(loaded, folder=folder):
        assert is_tied == tied
        assert_same(weights, dict(expected.named_parameters()))
        assert buffers
        assert_same(buffers, dict(expected.named_buffers()))


def test_the_weights_say_whether_input_and_output_are_one(three: RankPool, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, tied in ((embedding.clone(), True), (embedding + 1, False)):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        assert three.call(loaded, folder=folder)[0][2] is tied
    del tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, folder / "model.safetensors", metadata={"format": "pt"})
    weights, _, is_tied = three.call(loaded, folder=folder)[0]
    assert is_tied and torch.equal(weights["model.embed_tokens.weight"], embedding)


def refused(world: World, **arguments: Any) -> tuple[str, str]:
    try:
        train(world, **arguments)
    except RolloverError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


def test_weights_that_do_not_fit_are_named(two: RankPool, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, problem in (
        ({n: t for n, t in tensors.items() if n != name}, f"missing keys: {name}"),
        ({**tensors, name: tensors[name][:5].clone()}, f"mismatched keys: {name}"),
        ({**tensors, "model.layers.9.norm": torch.ones(3)}, "unexpected keys: model.layers.9.norm"),
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        for kind, message in two.call(refused, folder=folder, given=[]):
            assert (kind, message.endswith(problem)) == (ModelError.__name__, True), message
