from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollover.trainer.config import ScratchConfig
from rollover.trainer.models import open_model
from rollover.trainer.scratch import build_scratch_model, build_tokenizer

TOKENIZER = build_tokenizer(["What is 12 + 34 = 46", "What is the sum of 7 and 58?"] * 4, vocab_size=300)
SMALL = ScratchConfig(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=48, max_position=64)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_every_digit_is_a_token_and_words_include_their_spaces() -> None:
    def pieces(text: str) -> list[str]:
        return [TOKENIZER.decode([i]) for i in TOKENIZER(text)["input_ids"]]

    assert pieces("What is 2026") == ["What ", "is ", "2", "0", "2", "6"]
    assert pieces("12 + 34 = 46") == ["1", "2", " + ", "3", "4", " = ", "4", "6"]


def test_the_vocabulary_keeps_its_cap_and_starts_with_pad_and_end() -> None:
    assert len(TOKENIZER) <= 300
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert TOKENIZER("5<|end|>")["input_ids"][-1] == 1


def test_a_scratch_folder_loads_as_any_other(tmp_path: Path) -> None:
    build_scratch_model(tmp_path / "m", TOKENIZER, SMALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(TOKENIZER)
    assert (model.config.head_dim, model.config.eos_token_id, model.config.pad_token_id) == (16, 1, 0)
    assert AutoTokenizer.from_pretrained(tmp_path / "m")("1 + 2")["input_ids"] == TOKENIZER("1 + 2")["input_ids"]
    open_model(tmp_path / "m")


@pytest.mark.parametrize(("seed", "same"), [(0, True), (1, False)])
def test_weights_follow_from_the_seed_alone(tmp_path: Path, seed: int, same: bool) -> None:
    generator_state = torch.get_rng_state()
    build_scratch_model(tmp_path / "a", TOKENIZER, SMALL)
    assert torch.equal(torch.get_rng_state(), generator_state)
    torch.rand(7)
    build_scratch_model(tmp_path / "b", TOKENIZER, SMALL, seed=seed)
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in "ab"]
    assert (weights[0] == weights[1]) is same
