from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import rollover.trainer.local as trainer_module
from rollover.algorithms import AlgorithmConfig, resolve
from rollover.algorithms.advantages import compute_advantages
from rollover.algorithms.batch import Denominators, TokenBatch
from rollover.batch import Batch
from rollover.errors import ConfigError, ModelError, ResourceError, RolloverError
from rollover.trainer.minibatch import shuffled
from rollover.trainer.packing import TrainingSample
from tests.trainer.builders import (
    assert_same,
    gradients,
    make_batch,
    make_folder,
    make_model,
    make_trainer,
    separate_logprobs,
    to_float64,
    trained,
    untrainable,
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TokenBatch, Denominators]]:
    """What reaches the loss, row by row."""
    calls: list[tuple[TokenBatch, Denominators]] = []

    def spy(algorithm: Any, tokens: TokenBatch, denominators: Denominators) -> Any:
        calls.append((tokens, denominators))
        return original(algorithm, tokens, denominators)

    original = trainer_module.policy_loss
    monkeypatch.setattr(trainer_module, "policy_loss", spy)
    return calls


def of_batch(batch: Batch) -> list[TrainingSample]:
    return [TrainingSample(prompt_ids=t.prompt.token_ids, response_ids=t.token_ids) for t in batch.trajectories]


def test_advantages_are_computed_on_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some need cumulative sums, of which CUDA has no deterministic ones."""
    moved, given = list[Tensor](), list[Any]()

    def cpu(tensor: Tensor) -> Tensor:
        moved.append(tensor.clone())
        return moved[-1]

    def spied(algorithm: Any, **arguments: Any) -> Tensor:
        given.extend(tree_leaves(arguments))
        return compute_advantages(algorithm, **arguments)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    monkeypatch.setattr(trainer_module, "compute_advantages", spied)
    make_trainer(folder, algorithm="turn-grpo", deterministic=True).step(make_batch())
    tensors = [one for one in given if isinstance(one, Tensor)]
    assert len(tensors) == 8
    assert {*map(id, tensors)} <= {*map(id, moved)}


@pytest.mark.parametrize("settings", [{"num_devices": 2}, {"offload": True}])
def test_a_trainer_alone_in_its_process_refuses_several_devices(folder: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="alone in its process"):
        make_trainer(folder, **settings)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "gspo", "dr-grpo", "rloo", "reinforce++"])
def test_any_split_of_the_batch_gives_the_same_gradient(folder: Path, algorithm: str) -> None:
    def run(budget: int, exact: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
        trainer = make_trainer(folder, algorithm=algorithm, micro_batch_tokens=budget, max_grad_norm=0)
        for model in (trainer._model, trainer._policy._ref_model):
            if exact and model is not None:
                to_float64(model)
        metrics = trainer.step(make_batch()).metrics
        return gradients(trainer), metrics

    for exact, tolerance in ((False, 1e-6), (True, 1e-12)):
        whole, whole_metrics = run(10**6, exact)
        scale = max(g.abs().max() for g in whole.values())
        for budget in (1, 90):
            split, metrics = run(budget, exact)
            for name, gradient in whole.items():
                assert (split[name] - gradient).abs().max() <= tolerance * max(scale, 1), name
            assert metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-6)
            assert metrics["ess/token"] == pytest.approx(whole_metrics["ess/token"])


def test_the_gradient_is_that_of_the_loss_written_out_by_hand(folder: Path) -> None:
    """GRPO on the first step: sum of -min(rho, 2) * A * ratio, mean over tokens, then over samples."""
    batch = make_batch()
    trainer = make_trainer(folder, micro_batch_tokens=80, max_grad_norm=0)
    metrics = trainer.step(batch).metrics

    model = make_model()
    samples = of_batch(batch)
    logprobs = separate_logprobs(model, samples, 0.8).split([len(s.response_ids) for s in samples])
    loss = torch.zeros(())
    index = 0
    for group in batch.groups:
        rewards = torch.tensor(group.rewards_G)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            lp, behaviour = logprobs[index], torch.tensor(trajectory.rollout_logprobs)
            rho = (lp.detach() - behaviour).exp().clamp(max=2)
            loss = loss - (rho * advantage * (lp - lp.detach()).exp()).mean() / len(samples)
            index += 1
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients(trainer), expected, atol=2e-6, rtol=1e-4)


def test_a_step_counts_a_version_and_measures_staleness_against_it(folder: Path, seen: list[Any]) -> None:
    trainer = make_trainer(folder)
    assert trainer.version == 0
    trainer.step(make_batch(step=0))
    trainer.step(make_batch(step=1, version=0))
    assert trainer.version == 2
    assert [int(tokens.staleness_T.max()) for tokens, _ in seen] == [0, 1]


def test_proximal_logprobs_are_those_at_the_start_of_the_batch(folder: Path, seen: list[Any]) -> None:
    batch = make_batch(num_groups=5)
    trainer = make_trainer(folder, mini_batches=2, learning_rate=0.02, seed=3)
    metrics = trainer.step(batch).metrics
    reordered = Batch(step=0, groups=shuffled(batch.groups, 2, seed=3, step=0))
    with torch.no_grad():
        start = separate_logprobs(make_model(), of_batch(reordered), 0.8)
    (first, _), (second, _) = seen
    assert torch.equal(first.proximal_logprobs_T, first.trainer_logprobs_T.detach())
    assert sorted(first.proximal_logprobs_T.tolist() + second.proximal_logprobs_T.tolist()) == pytest.approx(
        sorted(start.tolist()), abs=1e-4
    )
    moved = (second.trainer_logprobs_T - second.proximal_logprobs_T).abs().max()
    assert moved > 0.05 and metrics["ratio/max"] > 1.05


def test_mini_batches_deal_each_group_once_with_denominators_of_their_own(folder: Path, seen: list[Any]) -> None:
    batch = make_batch(num_groups=5)
    make_trainer(folder, mini_batches=2).step(batch)
    assert [d.num_groups for _, d in seen] == [3, 2]
    assert sum(d.num_tokens for _, d in seen) == batch.num_tokens
    assert sorted(n for _, d in seen for n in d.tokens_per_group) == sorted(g.num_tokens for g in batch.groups)
    for tokens, d in seen:
        counts = torch.zeros(d.num_groups).index_add(0, tokens.group_B[tokens.sample_T], torch.ones(d.num_tokens))
        assert counts.tolist() == list(d.tokens_per_group)


def test_the_deal_depends_on_seed_and_step_alone(folder: Path) -> None:
    groups = make_batch(num_groups=8).groups
    order = [g.group_id for g in shuffled(groups, 2, seed=0, step=1)]
    assert order == [g.group_id for g in shuffled(groups, 2, seed=0, step=1)]
    for other in ({"seed": 0, "step": 2}, {"seed": 1, "step": 1}):
        assert order != [g.group_id for g in shuffled(groups, 2, **other)]
    assert sorted(order) == list(range(8))
    assert shuffled(groups, 1, seed=0, step=1) == groups


def test_reference_logprobs_stay_those_of_the_initial_policy(folder: Path, seen: list[Any]) -> None:
    algorithm = resolve(AlgorithmConfig(name="grpo", kl_coef=0.1))
    trainer = make_trainer(folder, algorithm=algorithm, learning_rate=0.02, micro_batch_tokens=10**6)
    trainer.step(make_batch(step=0))
    assert torch.equal(seen[0][0].ref_logprobs_T, seen[0][0].trainer_logprobs_T.detach())
    batch = make_batch(step=1)
    trainer.step(batch)
    with torch.no_grad():
        initial = separate_logprobs(make_model(), of_batch(batch), 0.8)
    tokens = seen[1][0]
    assert sorted(tokens.ref_logprobs_T.tolist()) == pytest.approx(sorted(initial.tolist()), abs=1e-4)
    assert (tokens.ref_logprobs_T - tokens.trainer_logprobs_T).abs().max() > 0.05


def test_gradient_checkpointing_changes_no_gradient(folder: Path) -> None:
    plain, saving = make_trainer(folder), make_trainer(folder, gradient_checkpointing=True)
    recomputed = []
    saving._model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: recomputed.append(1))
    for trainer in (plain, saving):
        trainer.step(make_batch())
    assert len(recomputed) == 2  # forward, and again in the backward pass
    torch.testing.assert_close(gradients(saving), gradients(plain), atol=1e-7, rtol=1e-6)


def test_bfloat16_keeps_master_weights_and_gradients_in_float32(folder: Path) -> None:
    exact, rounded = make_trainer(folder), make_trainer(folder, dtype="bfloat16")
    norms = [t.step(make_batch()).metrics["grad_norm"] for t in (exact, rounded)]
    assert {w.dtype for w in rounded.weights().values()} == {torch.float32}
    assert norms[1] != norms[0] and norms[1] == pytest.approx(norms[0], rel=0.1)


def test_weights_are_views_in_hugging_face_names_with_tied_matrices_once(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder)
    names = set(trainer.weights())
    assert names == set(make_model().state_dict()) - {"lm_head.weight"}
    before = trainer.weights()["model.norm.weight"].clone()
    view = trainer.weights()["model.norm.weight"]
    trainer.step(make_batch())
    assert not torch.equal(view, before) and not view.requires_grad
    untied = make_trainer(make_folder(tmp_path, tie_word_embeddings=False))
    assert "lm_head.weight" in untied.weights()


def test_the_learning_rate_follows_the_schedule_of_the_run(folder: Path) -> None:
    trainer = make_trainer(folder, schedule="linear", learning_rate=1e-3, num_steps=3)
    rates = [trainer.step(make_batch(step=s)).metrics["learning_rate"] for s in range(3)]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


def test_a_deterministic_step_repeats_and_leaves_the_switch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, switches = trainer_module.policy_loss, set[bool]()

    def watched(*arguments: Any) -> Any:
        switches.add(torch.are_deterministic_algorithms_enabled())
        return loss(*arguments)

    monkeypatch.setattr(trainer_module, "policy_loss", watched)

    first, second = (trained(folder, 2, deterministic=True, mini_batches=2).weights() for _ in range(2))
    assert_same(first, second)
    assert switches == {True} and not torch.are_deterministic_algorithms_enabled()


def test_a_logprob_that_is_not_finite_names_the_sample(folder: Path) -> None:
    with pytest.raises(RolloverError, match=r"sample g2\.1 cannot be trained on: rollout_logprobs_T is nan"):
        make_trainer(folder, micro_batch_tokens=50).step(untrainable(make_batch()))


def test_running_out_of_memory_says_what_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(folder, micro_batch_tokens=777)
    monkeypatch.setattr(
        trainer._model.lm_head, "forward", lambda *_: torch.empty(1 << 60, dtype=torch.float32), raising=True
    )
    with pytest.raises(ResourceError, match=r"lower trainer\.micro_batch_tokens \(now 777\)"):
        trainer.step(make_batch())
    assert trainer.version == 0


def test_a_model_that_does_not_fit_gets_no_advice_on_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr("rollover.trainer.local.open_policy", full)
    with pytest.raises(ResourceError, match=r"does not fit .*set trainer\.num_devices or trainer\.offload") as raised:
        make_trainer(folder)
    assert "micro_batch_tokens" not in str(raised.value)


def test_impossible_settings_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="mini_batches is 5 but the batch has only 4 groups"):
        trained(folder, mini_batches=5)
    with pytest.raises(ValueError, match="temperature must be above 0 for training, got 0"):
        make_trainer(folder, temperature=0)
    with pytest.raises(ValueError, match=r"temperature must be between 1e-30 and 1e30, got 1e-300"):
        make_trainer(folder, temperature=1e-300)
    with pytest.raises(ConfigError, match=r"trainer\.device 'warp' cannot be used"):
        make_trainer(folder, device="warp")
    with pytest.raises(ModelError, match="does not exist"):
        make_trainer(folder / "nowhere")
