"""A tokenizer small enough to reckon by hand: one token per character, ``<s>`` put before plain text."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

ALPHABET = [chr(c) for c in range(32, 127)] + ["\n"]
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(ALPHABET)}
    core = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = Fuse()
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


def ids(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(c) + 3 for c in text)
