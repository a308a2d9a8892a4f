from __future__ import annotations

import itertools
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from rollover.errors import ConfigError, DataError
from rollover.trainer import ranks
from rollover.trainer.config import SFTConfig
from rollover.trainer.models import open_model
from rollover.trainer.setup import SFTSetup
from rollover.trainer.sft import SFTProgress, SFTTrainer, run_sft
from rollover.trainer.world import ALONE, World
from tests.trainer import forked_ranks
from tests.trainer.builders import make_model, make_samples, separate_logprobs
from tests.trainer.rank_pool import RankPool
from tests.trainer.test_fleet import assert_close

EXAMPLES = [(s.prompt_ids, s.response_ids) for s in make_samples(8, max_response=12)]


def config(**settings: object) -> SFTConfig:
    defaults = {"num_steps": 1, "batch_size": 8, "device": "cpu", "max_grad_norm": 0}
    return SFTConfig(**{**defaults, **settings})  # type: ignore[arg-type]


def test_first_loss_and_gradient_equal_transformers_with_masked_prompts(folder: Path, tmp_path: Path) -> None:
    model = make_model()
    ids = [torch.tensor([[*p, *r]]) for p, r in EXAMPLES]
    total = sum(len(r) for _, r in EXAMPLES)
    loss = torch.zeros(())
    for x, (p, r) in zip(ids, EXAMPLES, strict=True):
        labels = x.clone()
        labels[0, : len(p)] = -100
        loss = loss + model(input_ids=x, labels=labels).loss * len(r) / total
    loss.backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for budget in (1, 10**6):
        steps: list[SFTProgress] = []
        run_sft(folder, EXAMPLES, config(micro_batch_tokens=budget), output=tmp_path / "o", on_progress=steps.append)
        assert steps[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert steps[0].grad_norm == pytest.approx(norm, rel=1e-4)


def test_it_learns_what_it_is_shown_and_saves_that(folder: Path, tmp_path: Path) -> None:
    metrics = run_sft(
        folder,
        itertools.cycle(EXAMPLES),
        config(num_steps=60, learning_rate=1e-2, schedule="cosine", warmup_steps=5),
        output=tmp_path / "warm",
    )
    assert metrics["loss/first"] > 3 and metrics["loss/last_20_steps"] < 0.3
    model = make_model()
    model.load_state_dict(open_model(tmp_path / "warm").state_dict())
    with torch.no_grad():
        assert separate_logprobs(model, make_samples(8, max_response=12), 1.0).mean() > -0.3


def test_the_same_config_gives_the_same_model(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        settings = config(num_steps=3, learning_rate=1e-3)
        run_sft(folder, itertools.cycle(EXAMPLES), settings, output=tmp_path / name, deterministic=True)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_warm_up_leaves_nothing_of_the_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that start on the same device afterwards find its memory free."""
    left: list[weakref.ref[torch.Tensor]] = []
    save = SFTTrainer.save

    def saved(self: SFTTrainer, folder: Path) -> None:
        left.extend(map(weakref.ref, self._policy.model.parameters()))
        save(self, folder)

    monkeypatch.setattr(SFTTrainer, "save", saved)
    run_sft(folder, EXAMPLES, config(num_steps=1, gradient_checkpointing=True), output=tmp_path / "o")
    assert left and not any(parameter() is not None for parameter in left)


def test_progress_tells_each_step_once_with_its_tokens(folder: Path, tmp_path: Path) -> None:
    steps: list[SFTProgress] = []
    settings = config(num_steps=4, batch_size=2, schedule="linear", learning_rate=1e-3)
    run_sft(folder, EXAMPLES, settings, output=tmp_path / "o", on_progress=steps.append)
    assert [s.step for s in steps] == [0, 1, 2, 3]
    pairs = [EXAMPLES[i : i + 2] for i in range(0, 8, 2)]
    assert [s.num_tokens for s in steps] == [sum(len(r) for _, r in pair) for pair in pairs]
    assert [s.learning_rate for s in steps] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize(
    ("size", "budget", "devices"),
    [(2, 24, {}), (3, 24, {}), (3, 10**6, {}), (2, 24, {"num_devices": 2, "context_parallel": 2})],
    ids=["two", "three", "one of three has all rows", "two that share rows"],
)
def test_ranks_warm_up_as_one_process_does(
    folder: Path, two: RankPool, three: RankPool, size: int, budget: int, devices: dict[str, int]
) -> None:
    settings = {"num_steps": 4, "learning_rate": 1e-3, "micro_batch_tokens": budget, "max_grad_norm": 0.5}
    expected, trained = warmed(None, folder=folder, **settings)
    for figures, weights in {2: two, 3: three}[size].call(warmed, folder=folder, **settings, **devices):
        assert figures == pytest.approx(expected, rel=1e-5)
        assert_close(weights, trained)


def warmed(world: World | None, *, folder: Path, **settings: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms of gradients, and the weights after them."""
    own = config(**settings)
    trainer = SFTTrainer(SFTSetup(config=own), folder, world=world or ALONE)
    samples = make_samples(own.num_steps * own.batch_size, max_response=12)
    figures = []
    for step in range(own.num_steps):
        figures += trainer.step(step, samples[step * own.batch_size :][: own.batch_size])
    found = trainer._policy.weights().items()
    return figures, {n: (w.full_tensor() if isinstance(w, DTensor) else w).detach().clone() for n, w in found}


def test_several_devices_write_the_model_that_one_does(folder: Path, tmp_path: Path, forked: None) -> None:
    steps: list[SFTProgress] = []
    for num, offload in ((1, False), (2, False), (1, True)):
        settings = config(num_steps=3, batch_size=4, learning_rate=1e-3, num_devices=num, offload=offload)
        output = tmp_path / ("offloaded" if offload else f"on-{num}")
        run_sft(
            folder, itertools.cycle(EXAMPLES), settings, output=output, logs=tmp_path / "logs", on_progress=steps.append
        )
    assert [s.loss for s in steps[3:]] == pytest.approx(2 * [s.loss for s in steps[:3]], rel=1e-5)
    one, *others = (dict(open_model(tmp_path / name).named_parameters()) for name in ("on-1", "on-2", "offloaded"))
    for other in others:
        assert_close(other, one)
    assert len(list((tmp_path / "on-2").glob("model-*-of-00002.safetensors"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "offloaded", "on-1", "on-2"]


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of the ranks, in the order in which they are forked."""
    started: list[int] = []

    def start(rank: int, logs: Path | None) -> ranks._Process:
        process = forked_ranks.start(rank, logs)
        started.append(process.popen.pid)
        return process

    monkeypatch.setattr(ranks, "_start", start)
    return started


def test_a_rank_of_the_warm_up_that_is_lost_is_named(folder: Path, tmp_path: Path, pids: list[int]) -> None:
    settings = config(num_steps=3, batch_size=4, num_devices=2)
    with pytest.raises(ranks.RankLost, match=r"^rank 1 of 2 was killed \(SIGKILL, .*\) in step 1 of the warm-up"):
        run_sft(
            folder,
            itertools.cycle(EXAMPLES),
            settings,
            output=tmp_path / "o",
            logs=tmp_path / "logs",
            on_progress=lambda done: os.kill(pids[1], signal.SIGKILL),
        )
    assert not (tmp_path / "o").exists()


def test_a_warm_up_that_loses_a_rank_leads_to_the_same_model(folder: Path, tmp_path: Path, pids: list[int]) -> None:
    def kill(done: SFTProgress) -> None:
        steps.append(done.step)
        if steps == [0, 1]:
            os.kill(pids[1], signal.SIGKILL)

    settings = config(num_steps=3, batch_size=2, learning_rate=1e-3, num_devices=2)
    told: list[str] = []
    for name, on_progress in (("killed", kill), ("undisturbed", lambda done: None)):
        steps: list[int] = []
        run_sft(
            folder,
            EXAMPLES,
            settings,
            output=tmp_path / name,
            deterministic=True,
            logs=tmp_path / "logs",
            max_restarts=1,
            on_progress=on_progress,
            notify=told.append,
        )
        if name == "killed":
            assert steps == [0, 1, 0, 1, 2]
    (line,) = told
    assert line.startswith("warm-up: rank 1 of 2 was killed") and line.endswith("it begins again (restart 1 of 1)")
    ours, theirs = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("killed", "undisturbed"))
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs] and len(ours) == 2


def test_too_few_examples_are_an_error_and_no_model_is_left(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ran out at step 1 of 2: lower sft\.num_steps"):
        run_sft(folder, EXAMPLES, config(num_steps=2, batch_size=5), output=tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_a_device_that_is_not_there_is_told_under_its_own_key(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sft\.device 'warp' cannot be used"):
        run_sft(folder, EXAMPLES, config(device="warp"), output=tmp_path / "o")
