"""The rollout worker that is made from the arguments of TRL's asynchronous trainer, over an engine of ours.

The trainer itself needs a GPU; its own reader, packer and names of weights are used here.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollover.errors import ConfigError, RunError
from rollover.integrations.trl import rollout_worker
from rollover.report.metrics import read_metrics
from rollover.rollout.journal import effective, read_events
from rollover.rollout.state import RolloutState
from tests.integrations.slime.kit import shows_its_run
from tests.integrations.trl.kit import letters, rollover, share

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL says that it may change
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset, _iter_vllm_named_params

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

GROUPS, GENERATIONS, BOUND, STEPS = 4, 4, 2, 5
SAMPLES = GROUPS * GENERATIONS


def arguments(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": SAMPLES // 2,
        "gradient_accumulation_steps": 2,
        "num_generations": GENERATIONS,
        "max_completion_length": 40,
        "max_staleness": BOUND,
        "token_budget": 0,
        "seed": 11,
    }
    return AsyncGRPOConfig(**(settings | changes))


async def short(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[Any]:
    """Gives nothing where the response is cut."""
    return [None if len(ids) == 40 else -0.01 * len(ids) for ids in completion_ids]


def worker(model: Path, folder: Path, asked: Any = None, rewards: Any = (share, short), **changes: Any) -> Any:
    return rollout_worker(
        arguments(folder, **changes),
        model=str(model),
        reward_funcs=rewards,
        train_dataset=letters(),
        rollover=rollover(asked or {"rollout": {"strategy": {"kind": "april", "over_sampling_batch_size": 6}}}),
    )


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]], list[Any]]:
    """The folder of five steps, what TRL's trainer would have taken at each, and the weights of each version."""
    folder = tmp_path_factory.mktemp("asynchronous")
    made = worker(tiny_model, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    version, steps, weights = 0, [], []

    def sync() -> None:
        nonlocal version
        weights.append({name: tensor.detach().clone() for name, tensor in model.named_parameters()})
        made.pause()
        made.send_weights(iter((name, tensor.detach()) for name, tensor in _iter_vllm_named_params(model)))
        made.resume()
        version += 1
        made.update_model_version(version)

    taken: list[Any] = []
    queue_get = made.rollout_buffer.get
    made.rollout_buffer.get = lambda **options: taken.append(queue_get(**options)) or taken[-1]
    metrics: Any = defaultdict(list)
    read = RolloutQueueDataset(made.rollout_buffer, lambda: version, made.check_health, 60, metrics, BOUND)
    items = iter(read)
    try:
        made.init_weight_transfer()
        sync()
        made.start()
        for _ in range(STEPS):
            for _ in range(SAMPLES):
                next(items)
            steps.append(taken[-SAMPLES:])
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter) * parameter.abs().mean())
            sync()
        assert "sample/dropped_stale_total" not in metrics
    finally:
        made.stop()
    return folder, steps, weights


def test_samples_have_the_log_probs_of_the_weights_that_were_sent(tiny_model: Path, trained: Any) -> None:
    """Each token's log-prob is that of one of the versions since the sample's oldest."""
    _, steps, weights = trained
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    num_old = 0
    for step, samples in enumerate(steps):
        assert len({sample.group_id for sample in samples}) == GROUPS
        for sample in samples[::5]:
            oldest = sample.model_version - 1
            assert step - BOUND <= oldest <= step
            num_old += oldest < step
            ids, mask = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask)
            nearest = torch.full((len(ids) - 1,), math.inf)
            for version in range(oldest, step + 1):
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(weights[version][name])
                    logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                sampled = logits.gather(1, ids[1:, None])[:, 0]
                nearest = torch.minimum(nearest, (sampled - torch.tensor(sample.old_log_probs[1:])).abs())
            assert float(nearest[mask[1:] == 1].max()) < 1e-4
    assert num_old > 0, "no sample was old, and the test shows less than it says"


def test_rewards_are_the_trainers_functions_over_its_columns(tiny_model: Path, trained: Any) -> None:
    tokenizer, table = AutoTokenizer.from_pretrained(tiny_model), letters()
    answers = {row["prompt"]: row["answer"] for row in table}
    cut = 0
    for sample in (sample for samples in trained[1] for sample in samples):
        ids = sample.input_ids[sample.completion_mask == 1].tolist()
        (asked,), (said,) = sample.prompt, sample.completion
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert said == {"role": "assistant", "content": text} and asked["role"] == "user"
        found = share([text], [answers[asked["content"]]])[0]
        assert sample.metrics["rewards/share"] == pytest.approx(found)
        if len(ids) == 40:
            cut += 1
            assert math.isnan(sample.metrics["rewards/short"]) and sample.metrics["reward"] == pytest.approx(found)
        else:
            assert sample.metrics["reward"] == pytest.approx(found - 0.01 * len(ids))
    assert cut > 0


def test_prompts_are_taken_in_the_order_of_the_dataset(trained: Any) -> None:
    asked = {sample.group_id: sample.prompt[0]["content"] for samples in trained[1] for sample in samples}
    table = letters()
    assert all(prompt == table[group % len(table)]["prompt"] for group, prompt in asked.items())


def test_the_run_is_one_to_report_on_and_to_simulate(trained: Any) -> None:
    folder, steps, _ = trained
    run = folder / "out/rollover"
    rows = read_metrics(run)
    assert [row.step for row in rows] == [*range(STEPS)]
    for row, samples in zip(rows, steps, strict=True):
        rewards = [sample.metrics["reward"] for sample in samples]
        assert row.values["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert 0.0 <= row.values["time/rollout_s"] <= row.values["time/step_s"]
        assert row.values["perf/trained_tokens_per_s"] > 0.0
    state = RolloutState(event for _, event in effective(read_events(run / "journal.sqlite")))
    state.ledger.check()
    assert not [step for step in state.ledger.batches if step < STEPS], "those are trained, and forgotten"
    shows_its_run(run)


def test_a_second_run_in_the_same_directory_is_refused(tiny_model: Path, trained: Any) -> None:
    with pytest.raises(RunError, match="runs of AsyncGRPOTrainer cannot be resumed, so move it away"):
        worker(tiny_model, trained[0]).init_weight_transfer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_budget": None}, "token_budget is None, so the trainer takes as many samples as fit"),
        ({"token_budget": 4096}, "token_budget is 4096"),
        ({"max_staleness": 0}, "max_staleness is 0, but samples are decoded while the trainer trains"),
        ({"num_generations": 5}, r"takes 16 samples per version .* multiple of AsyncGRPOConfig\.num_generations \(5\)"),
        ({"top_p": 0.9}, r"AsyncGRPOConfig\.top_p is 0\.9"),
        ({"repetition_penalty": 1.1}, r"AsyncGRPOConfig\.repetition_penalty is 1\.1"),
        ({"asked": {"rollout": {"max_staleness": 1}}}, r"AsyncGRPOConfig\.max_staleness sets it to 2"),
        ({"rewards": []}, "pass at least one reward function"),
    ],
)
def test_arguments_that_are_in_the_way(tiny_model: Path, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(tiny_model, tmp_path, **changes)
