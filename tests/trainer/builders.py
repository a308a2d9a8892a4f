"""Tiny models, trajectories and batches, made from seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rollover.algorithms import Algorithm, AlgorithmConfig, resolve
from rollover.batch import Batch, Group
from rollover.trainer.config import TrainerConfig
from rollover.trainer.local import LocalTrainer
from rollover.trainer.logprobs import response_logprobs
from rollover.trainer.models import save_model
from rollover.trainer.packing import TrainingSample, pack
from rollover.trainer.setup import TrainingSetup
from rollover.trainer.world import ALONE, World
from rollover.types import Prompt, SampleId, Trajectory
from tests.segments import segment

VOCAB = 40
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def make_model(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """A plain transformers model with weights large enough for peaked distributions."""
    shape = {**SHAPE, "tie_word_embeddings": True, **changes}
    torch.manual_seed(seed)
    match family:
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8)).eval()
        case "qwen2":
            return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    raise AssertionError(family)


def to_float64(model: Any) -> Any:
    """In place, norms included: transformers computes those in float32 whatever the model's dtype."""

    def normed(norm: Any, x: torch.Tensor) -> torch.Tensor:
        return norm.weight * x * (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normed, module)
    return model


def make_folder(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(make_model(family, **changes), folder, companions={})
    return folder


def make_samples(num: int, *, seed: int = 0, max_response: int = 30) -> list[TrainingSample]:
    """About three samples to a prompt, scattered."""
    rng = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(n))

    prompts = [tokens(rng.randint(1, 8)) for _ in range(num // 3)]
    return [
        TrainingSample(prompt_ids=prompts[i % len(prompts)], response_ids=tokens(rng.randint(1, max_response)))
        for i in range(num)
    ]


def separate_logits(model: Any, sample: TrainingSample) -> torch.Tensor:
    """By an ordinary forward, those that predict the tokens of the response."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    return model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1]


def separate_logprobs(model: Any, samples: Sequence[TrainingSample], temperature: float) -> torch.Tensor:
    """The oracle: one ordinary forward per sample, log-probs of its response tokens, concatenated."""
    parts = []
    for s in samples:
        logits = separate_logits(model, s)
        table = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
        parts.append(table.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0])
    return torch.cat(parts)


def assert_gradients_of_separate_samples(policy: Any, model: Any, samples: Sequence[TrainingSample]) -> None:
    """Of packed rows, against transformers' own model."""
    expected_T = separate_logprobs(model, samples, 1.0)
    assert_gradients(policy, model, expected_T, samples, torch.ones(len(expected_T)), 1.0, atol=1e-4, rtol=1e-4)


def assert_gradients(
    policy: Any,
    model: Any,
    expected_T: torch.Tensor,
    samples: Sequence[TrainingSample],
    weights_T: torch.Tensor,
    temperature: float,
    *,
    atol: float,
    rtol: float,
) -> None:
    """The weighted sum of the log-probs of packed rows has the gradient of that of ``expected_T``, which ``model`` has
    computed."""
    (expected_T * weights_T).sum().backward()
    for row in pack(samples, 64):
        (response_logprobs(policy, row, temperature) * weights_T[row.token_T]).sum().backward()
    expected = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=atol, rtol=rtol, msg=name)


def make_trajectory(
    sample_id: SampleId, prompt: Prompt, response: Sequence[int], *, reward: float, version: int = 0
) -> Trajectory:
    return Trajectory(sample_id=sample_id, prompt=prompt, segments=(segment(response, version=version),), reward=reward)


def make_batch(
    *, step: int = 0, num_groups: int = 4, group_size: int = 3, seed: int = 0, version: int | None = None
) -> Batch:
    """Random responses of uneven length with random rewards and made-up behaviour log-probs."""
    rng = random.Random(f"{seed}/{step}")
    groups = []
    for g in range(num_groups):
        ids = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(2, 8)))
        prompt = Prompt(prompt_id=f"test/{g}@0", token_ids=ids, text="", source="test")
        members = []
        for i in range(group_size):
            response = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 25))]
            made = make_trajectory(
                SampleId(g, i), prompt, response, reward=rng.random(), version=step if version is None else version
            )
            members.append(in_segment(made, rollout_logprobs=tuple(-rng.uniform(1.0, 6.0) for _ in response)))
        groups.append(group_of(members, g))
    return Batch(step=step, groups=tuple(groups))


def group_of(trajectories: Sequence[Trajectory], group_id: int = 0) -> Group:
    return Group(group_id=group_id, prompt=trajectories[0].prompt, trajectories=tuple(trajectories))


def changed(batch: Batch, change: Callable[[Trajectory], Trajectory]) -> Batch:
    """The batch with each of its trajectories changed."""
    groups = (replace(group, trajectories=tuple(map(change, group.trajectories))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def in_segment(trajectory: Trajectory, **values: Any) -> Trajectory:
    """The trajectory with other values in its only segment."""
    [whole] = trajectory.segments
    return replace(trajectory, segments=(whole._replace(**values),))


def untrainable(batch: Batch) -> Batch:
    """The batch with a log-prob that is no number, in its sample g2.1."""

    def broken(t: Trajectory) -> Trajectory:
        logprobs = (math.nan, *t.rollout_logprobs[1:])
        return in_segment(t, rollout_logprobs=logprobs) if t.sample_id == SampleId(2, 1) else t

    return changed(batch, broken)


def make_setup(*, algorithm: Algorithm | str = "grpo", **settings: Any) -> TrainingSetup:
    """``temperature`` and other settings of the run may stand among the config's own."""
    own = {"temperature": 0.8, "max_response_tokens": 25, "num_steps": 10, "seed": 0, "deterministic": False}
    own |= {key: settings.pop(key) for key in own.keys() & settings.keys()}
    if isinstance(algorithm, str):
        algorithm = resolve(AlgorithmConfig(name=algorithm))
    config = TrainerConfig(**{"learning_rate": 1e-3, "device": "cpu", **settings})
    return TrainingSetup(config=config, algorithm=algorithm, **own)


def make_trainer(
    folder: Path, *, resume_from: Path | None = None, world: World | None = None, **settings: Any
) -> LocalTrainer:
    return LocalTrainer(make_setup(**settings), folder, resume_from=resume_from, world=world or ALONE)


def trained(folder: Path, steps: int = 1, **settings: Any) -> LocalTrainer:
    """A trainer that has trained the batch of each of so many steps."""
    trainer = make_trainer(folder, **settings)
    for step in range(steps):
        trainer.step(make_batch(step=step))
    return trainer


def clones(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the next step does not change."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def assert_same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Both have the same names, and each tensor has the same bits."""
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


def apart_from_time(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in ("time/step_s", "tokens/per_s")}


def gradients(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    """Left by the last optimizer step."""
    return {name: p.grad.clone() for name, p in trainer._model.named_parameters()}
