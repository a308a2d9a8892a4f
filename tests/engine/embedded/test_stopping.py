"""Stop strings are matched on the joined text of the response, wherever it was cut."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollover.engine.stop_strings import StopStrings
from rollover.types import FinishReason
from tests.engine.contract import request
from tests.engine.embedded.harness import Calls, core_of, run
from tests.engine.models import VOCAB, saved, tiny_model

LETTERS = (string.ascii_letters + string.digits + "+-")[:VOCAB]


def with_tokenizer(folder: Path) -> Path:
    """One letter per token; the last four are bytes of an emoji, which only together make a character."""
    vocab = {letter: i for i, letter in enumerate(LETTERS[: VOCAB - 4])}
    vocab |= {f"<0x{byte:02X}>": VOCAB - 4 + i for i, byte in enumerate("🎲".encode())}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(saved(tiny_model(sharpness=3.0), tmp_path_factory.mktemp("model")))


def test_a_stop_string_ends_the_response_at_its_token_at_every_cut(folder: Path) -> None:
    core = core_of(folder)
    free = run(core, request("free", max_new_tokens=30)).tokens("free#0")
    text = "".join(LETTERS[t] for t in free)
    stop = text[9:12]
    end = text.index(stop) + 3
    assert 3 < end <= 12
    for cut in range(end):
        name = f"cut{cut}"
        calls = Calls(core, [request(name, max_new_tokens=30, stop_strings=("never!", stop))])
        calls.step(cut)
        calls.abort(f"{name}#0")
        head = calls.tokens(f"{name}#0")
        calls.add(request(name, max_new_tokens=30, stop_strings=("never!", stop), response_ids=head, call=1))
        calls.finish()
        assert head + calls.tokens(f"{name}#1") == free[:end]
        assert calls.chunks[f"{name}#1"][-1].finish_reason is FinishReason.STOP


def test_a_character_of_several_tokens_stops_only_when_it_is_whole(folder: Path) -> None:
    stop_strings = StopStrings(folder)
    dice = list(range(VOCAB - 4, VOCAB))
    for end in range(4):
        assert not stop_strings.complete([1] * 300 + dice[:end], ("🎲",))
    assert stop_strings.complete([1] * 300 + dice, ("🎲",))
    assert stop_strings.complete(dice, ("x", "🎲"))
    assert stop_strings.complete([1] * 8 + dice, ("🎲",), start=8)
    assert not stop_strings.complete(dice, ("🎲",), start=1), "the prompt has its beginning"
