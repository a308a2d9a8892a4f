"""What cannot be trained right with rollouts that carry over is refused, by name and with a way out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig

from rollover.engine.base import Capabilities
from rollover.errors import ConfigError, DataError
from rollover.integrations.trl import GRPOTrainer
from rollover.integrations.trl.checks import check_version, out_of_step, refuse, settings_in_the_way
from rollover.integrations.trl.prompts import DatasetPrompts, EncodedPrompt, fingerprint
from rollover.integrations.trl.weights import dropouts
from tests.integrations.trl.kit import arguments, letters, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_iterations": 2}, r"num_iterations is 2, but each batch is trained once: set it to 1"),
        ({"top_p": 0.9}, r"GRPOConfig\.top_p is 0\.9, but .* set it to 1\.0"),
        ({"top_k": 20}, r"GRPOConfig\.top_k is 20"),
        ({"min_p": 0.1}, r"GRPOConfig\.min_p is 0\.1"),
        ({"repetition_penalty": 1.1}, r"GRPOConfig\.repetition_penalty is 1\.1"),
        ({"top_entropy_quantile": 0.2}, r"top_entropy_quantile is 0\.2, which masks tokens .* set it to 1\.0"),
        ({"off_policy_mask_threshold": 0.5}, r"off_policy_mask_threshold is 0\.5, which masks .* set it to None"),
        ({"generation_kwargs": {"length_penalty": 2.0}}, r"generation_kwargs sets length_penalty"),
        ({"use_vllm": True}, "use_vllm is True, but Rollover opens the engine"),
        ({"use_transformers_continuous_batching": True}, r"use_transformers_continuous_batching is True"),
        ({"vllm_importance_sampling_correction": False}, r"vllm_importance_sampling_correction is False, so .*'sync'"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, r"mode is .* the loss 'vespo'"),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 6, "gradient_accumulation_steps": 4},
            r"steps_per_generation \(6\) must be a multiple of gradient_accumulation_steps \(4\)",
        ),
        ({"steps_per_generation": 2, "max_steps": 3}, r"trained in 2 optimizer steps .* make max_steps \(3\) a"),
        (
            {"steps_per_generation": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 3},
            r"make save_steps \(3\) a multiple of 2",
        ),
        ({"steps_per_generation": 2, "enable_jit_checkpoint": True}, "enable_jit_checkpoint may save in the middle"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha adds noise where TRL computes log-probs"),
    ],
)
def test_settings_of_trl_in_the_way(tiny_model: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_model, tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": -1, "num_train_epochs": 1.5}, r"make max_steps \(9, from num_train_epochs 1\.5\) a multiple"),
        ({"max_steps": 10, "save_strategy": "steps", "save_steps": 0.3}, r"save_steps \(3, from 0\.3\) a multiple"),
    ],
)
def test_steps_that_trl_counts_later_are_refused_before_any_decoding(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    made = trainer(
        tiny_model,
        tmp_path,
        dataset=letters().select(range(12)),
        per_device_train_batch_size=8,
        steps_per_generation=2,
        **changes,
    )
    with pytest.raises(ConfigError, match=message):
        made.train()
    assert made.seen == []
    assert not (tmp_path / "out" / "_rollover" / "journal.sqlite").exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rollout": {"temperature": 0.7}}, r"rollout\.temperature is 0\.7, but GRPOConfig\.temperature sets it to 1"),
        ({"rollout": {"top_p": 0.9}}, r"rollout\.top_p is 0\.9, but TRL sets it to 1\.0"),
        ({"rollout": {"group_size": 3}}, r"rollout\.group_size is 3, but GRPOConfig\.num_generations sets it to 4"),
        ({"rollout": {"stop_strings": ["."]}}, r"rollout\.stop_strings is .*mask_truncated_completions, .* to \[\]"),
        ({"rollout": {"unit": "sample"}}, r"rollout\.unit is 'sample', but TRL sets it to 'group'"),
    ],
)
def test_settings_of_rollover_not_of_trl(tiny_model: Path, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tiny_model, tmp_path, asked=asked, mask_truncated_completions=True)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"tools": [len]}, "tools is set, which calls tools over several turns"),
        ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func is set, which replaces the rollouts"),
        ({"train_dataset": letters().to_iterable_dataset()}, "must be a dataset with a length .*, got IterableDataset"),
        ({"train_dataset": datasets.Dataset.from_dict({"prompt": ["a"], "image": [1]})}, "train_dataset has images"),
    ],
)
def test_trainer_arguments_in_the_way(tiny_model: Path, tmp_path: Path, argument: dict[str, Any], message: str) -> None:
    given = {"model": str(tiny_model), "reward_funcs": len, "args": arguments(tmp_path), "train_dataset": letters()}
    with pytest.raises(ConfigError, match=message):
        GRPOTrainer(**given | argument)


def test_dropout_is_refused_until_it_is_off(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match=r"in 2 places .*q_proj\.lora_dropout.* set GRPOConfig\.disable_dropout"):
        trainer(tiny_model, tmp_path, peft_config=lora)
    trainer(tiny_model, tmp_path, peft_config=lora, disable_dropout=True)
    with pytest.raises(ConfigError, match=r"in 2 places .*self_attn.* attention_dropout in the model's config to 0"):
        trainer(tiny_model, tmp_path, model_init_kwargs={"attention_dropout": 0.1})
    layer = torch.nn.Linear(2, 2)
    layer.activation_dropout = 0.1  # OPT's
    assert dropouts(torch.nn.Sequential(layer, torch.nn.Dropout(0.0))) == ["0"]


def test_a_mode_that_drops_stale_responses_is_warned_about(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tiny_model, tmp_path, vllm_importance_sampling_mode="token_truncate")
    trainer(
        tiny_model, tmp_path, vllm_importance_sampling_mode="sequence_mask", asked={"rollout": {"strategy": "sync"}}
    )
    assert not caplog.records
    trainer(tiny_model, tmp_path, vllm_importance_sampling_mode="sequence_mask")
    assert [r.message for r in caplog.records if "drops every response" in r.message]


def test_several_processes_and_sharded_weights_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    with pytest.raises(ConfigError, match="the trainer has 2 processes, but batches are handed to one"):
        refuse(settings_in_the_way(args, num_processes=2, is_sharded=False))
    with pytest.raises(ConfigError, match="shards the weights, but they are published unsharded"):
        refuse(settings_in_the_way(args, num_processes=1, is_sharded=True))
    refuse(settings_in_the_way(args, num_processes=1, is_sharded=False))


def test_evaluations_that_save_the_best_are_at_the_end_of_a_batch(tmp_path: Path) -> None:
    best = {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "reward"}
    args = arguments(tmp_path, steps_per_generation=2, eval_steps=3, **best)
    with pytest.raises(ConfigError, match=r"make eval_steps \(3, with save_strategy 'best'\) a multiple of 2"):
        refuse(out_of_step(args, 4, args.save_steps))
    refuse(out_of_step(arguments(tmp_path, steps_per_generation=2, eval_steps=4, **best), 4, 3))


@pytest.mark.parametrize("version", ["0.29.1", "1.15.2", "1.17.0", "1.160.0", "2.0.0", "nightly"])
def test_a_version_of_trl_that_was_not_tested_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"TRL {version} is installed, .* for 1\.16: pip install"):
        check_version(version)


# -- prompts ------------------------------------------------------------------------------------------------------


def source(num_rows: int, *, shuffle: bool = True, most: int = 100) -> DatasetPrompts:
    table = [{"prompt": f"{i}?"} for i in range(num_rows)]
    return DatasetPrompts(
        table,  # type: ignore[arg-type]
        lambda text: EncodedPrompt([ord(c) for c in text], text),
        seed=3,
        shuffle=shuffle,
        max_prompt_tokens=most,
    )


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    epochs = [[source(7).prompt(7 * epoch + i).columns["row"] for i in range(7)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(7)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert source(7).prompt(16).prompt_id == f"train/{epochs[2][2]}@2"
    assert [source(3, shuffle=False).prompt(i).text for i in range(4)] == ["0?", "1?", "2?", "0?"]


def test_a_prompt_that_leaves_no_room_is_refused_by_its_row() -> None:
    with pytest.raises(DataError, match="the prompt of row 0 has 2 tokens, where 1 to 1 leave room"):
        source(1, most=1).prompt(0)
    with pytest.raises(DataError, match="train_dataset has no rows"):
        source(0)


def test_all_rows_are_measured_before_a_run(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(11, most=3).measure()
    with pytest.raises(DataError, match="the prompt of row 10 has 3 tokens, where 1 to 2 leave room"):
        source(11, most=2).measure()
    long = datasets.Dataset.from_list([*letters(), {"prompt": "1=" * 5000, "answer": "1"}])
    made = trainer(tiny_model, tmp_path, dataset=long, shuffle_dataset=False)
    measure, threads = DatasetPrompts.measure, []
    monkeypatch.setattr(
        DatasetPrompts, "measure", lambda prompts: threads.append(threading.current_thread()) or measure(prompts)
    )
    for _ in range(2):  # the first has not begun, so the second is no resume
        with pytest.raises(DataError, match=r"the prompt of row 16 has 10\d\d\d tokens"):
            made.train()
    assert made.seen == [] and threads == [threading.main_thread()] * 2, "the feed's thread looks after the engine"


def test_a_dataset_is_told_from_another() -> None:
    table = [{"prompt": f"{i}?"} for i in range(500)]
    changed = [*table[:-1], {"prompt": "x"}]
    assert fingerprint(table) == fingerprint([*table])  # type: ignore[arg-type]
    assert fingerprint(table).startswith("500 rows, ")  # type: ignore[arg-type]
    assert len({fingerprint(t) for t in (table, changed, table[:-1])}) == 3  # type: ignore[arg-type]
    answers = [[{**row, "answer": answer, "of": object()} for row in table] for answer in ("yes", "yes", "no")]
    assert fingerprint(answers[0]) == fingerprint(answers[1]) != fingerprint(answers[2])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="row 0 has no column 'prompt'"):
        fingerprint([{"question": "?"}])  # type: ignore[arg-type]


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_tokenised_as_trl_does(tiny_model: Path, tmp_path: Path, chat: bool) -> None:
    table = letters()
    if chat:
        table = datasets.Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in table]
        )
    made = trainer(tiny_model, tmp_path, dataset=table)
    if chat:
        with pytest.raises(DataError, match="messages as prompts, but the tokenizer has no chat_template"):
            made._make_source(Capabilities(max_running=1, max_context_tokens=4096)).prompt(0)
        template = "{% for m in messages %}#{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}={% endif %}"
        made.processing_class.chat_template = template
    prompts = made._make_source(Capabilities(max_running=1, max_context_tokens=4096))
    for index in range(len(table)):
        prompt = prompts.prompt(index)
        (expected,), *_ = made._tokenize_prompts([table[prompt.columns["row"]]["prompt"]])
        assert list(prompt.token_ids) == list(expected)
