"""A tokenizer and a small decoder from scratch, saved as an ordinary Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollover.hf.folder import write_folder
from rollover.hf.tokenizer import FastTokenizer
from rollover.trainer.config import ScratchConfig
from rollover.trainer.models import save_model

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = ScratchConfig().vocab_size) -> FastTokenizer:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` entries. Any text survives encoding and decoding: all
    256 bytes are entries. Each digit is a token of its own, so that numbers look alike wherever they appear.
    ``<|pad|>`` is entry 0 and ``<|end|>`` (end of text) entry 1."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+ ?|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD_TOKEN, eos_token=END_TOKEN, clean_up_tokenization_spaces=False
    )
    return cast(FastTokenizer, tokenizer)


def build_scratch_model(folder: Path, tokenizer: FastTokenizer, config: ScratchConfig, *, seed: int = 0) -> None:
    """Write a randomly initialised Qwen3 model with the tokenizer's vocabulary to ``folder`` (float32). The same
    config, seed and vocabulary size give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                **config.model_config(len(tokenizer)),
                initializer_range=config.initializer_range,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                dtype=torch.float32,
            )
        )

    def write(partial: Path) -> None:
        tokenizer.save_pretrained(partial)
        save_model(model, partial, companions={})

    write_folder(folder, write)
