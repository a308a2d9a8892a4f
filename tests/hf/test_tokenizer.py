from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from rollover.hf.tokenizer import open_tokenizer


def test_text_is_cut_as_tokenizer_json_says(tmp_path: Path) -> None:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(["12 345"] * 9, BpeTrainer(initial_alphabet=alphabet, special_tokens=["<end>"]))
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    backend.no_truncation()
    expected = backend.encode("12 345 12 345").ids
    assert open_tokenizer(tmp_path)(["12 345 12 345"])["input_ids"] == [expected]
    assert AutoTokenizer.from_pretrained(tmp_path)(["12 345 12 345"])["input_ids"] != [expected], "no longer needed"
