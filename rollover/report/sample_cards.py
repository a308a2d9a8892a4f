"""The samples of a report, as HTML to read: what the model was given, what it wrote, and what was learned from it.

Every text is redacted as a whole, written out (``printable``), cut and escaped, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from rollover.algorithms import Algorithm
from rollover.errors import RolloverError, printable
from rollover.hf.tokenizer import FastTokenizer
from rollover.privacy import Redactor
from rollover.report.colours import version_colours
from rollover.report.record import read_config
from rollover.report.samples import (
    TrainedBatch,
    TrainedSample,
    algorithm_of,
    chosen,
    read_batch,
    response_pieces,
    tokenizer_of,
)

MOST_TOKENS = 800
"""Tokens of a response that are shown, half of them from its end."""
_BEGIN = 24
"""Tokens of a response that are seen before it is opened."""
_MOST_CHARACTERS = 4_000
"""Characters of a prompt that are shown, half of them from its end."""
_LEVELS = (-0.1, -0.7, -2.3, -4.6)
"""Log-probs from which a token counts as likely, fairly likely, and so on; the rest is the rarest."""
_COLOURINGS = (("logprob", "log-prob"), ("version", "version"), ("mask", "gradient"))
Redact = Callable[[str], str]


def read_cards(run_dir: Path) -> str:
    """Return the samples of a run's newest batch as HTML; if they cannot be read, a sentence that says why."""
    config = read_config(run_dir)
    redactor = Redactor(config, prose=True)
    try:
        batch, tokenizer = read_batch(run_dir), tokenizer_of(run_dir, config)
    except RolloverError as reason:
        return f'<div class="card"><p class="empty">{escape(redactor.text(str(reason)))}</p></div>'
    return sample_cards(batch, algorithm_of(config), tokenizer, redactor)


def sample_cards(batch: TrainedBatch, algorithm: Algorithm | None, tokenizer: FastTokenizer, redactor: Redactor) -> str:
    """Return cards that open, and buttons for the colours of their tokens."""
    redact = redactor.text
    buttons = "".join(
        f'<button type="button" data-colouring="{key}" aria-pressed="{"true" if key == "logprob" else "false"}">'
        f"{escape(name)}</button>"
        for key, name in _COLOURINGS
    )
    colours = version_colours(segment.policy_version for sample in batch.samples for segment in sample.segments)
    cards = []
    for reason, sample in chosen(batch.samples):
        texts = response_pieces(sample, tokenizer, redact)
        untrained = ["batch skipped"] * len(sample.segments) if batch.is_skipped else sample.untrained(algorithm)
        cards.append(
            f'<details class="card sample"><summary>{_summary(reason, sample, texts)}</summary>'
            f"<div>{_facts(sample, redactor)}<h3>Prompt</h3>"
            f'<div class="text">{_cut(printable(redact(sample.prompt_read(tokenizer))))}</div><h3>Response</h3>'
            f'<div class="text tokens">{_response(sample, texts, untrained, colours, redact)}</div>'
            "</div></details>"
        )
    return f'<p class="choices">Colour tokens by {buttons}</p>{"".join(cards)}'


def _summary(reason: str, sample: TrainedSample, texts: Sequence[str]) -> str:
    cut = ", cut at the limit" if sample.is_cut else ""
    begin = " ".join("".join(texts[:_BEGIN]).split())
    reward = f"reward {sample.reward:.4g}, " if sample.has_reward else ""
    return (
        f"<b>{reason}</b> {sample.sample_id}: {reward}{sample.num_tokens:,} tokens{cut},"
        f" lag {sample.lag:.2f} <small>{escape(begin)}</small>"
    )


def _facts(sample: TrainedSample, redactor: Redactor) -> str:
    reward = f"{sample.reward:.4g}" + (f" {sample.shaping:+.3g} for its length" if sample.shaping else "")
    facts = {
        "prompt": f"{sample.prompt.prompt_id}, {len(sample.prompt.token_ids)} tokens",
        **{f"reward: {name}": f"{value:.4g}" for name, value in sample.components.items()},
        "reward": reward if sample.has_reward else "not on record: the trainer has computed it from the batch",
        **({} if sample.relative is None else {"against its group": f"{sample.relative:+.4g}"}),
        "columns of its row": json.dumps(redactor.value(sample.prompt.columns), ensure_ascii=False, default=str),
    }
    rows = "".join(
        f"<tr><th>{escape(printable(redactor.text(name)))}</th><td>{_cut(printable(redactor.text(value)))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def _response(
    sample: TrainedSample, texts: Sequence[str], untrained: Sequence[str], colours: Mapping[int, str], redact: Redact
) -> str:
    """Draw the tokens of each segment, and between segments why the response was interrupted."""
    hidden = range(MOST_TOKENS // 2, len(texts) - MOST_TOKENS // 2)
    left_out = f"<mark>{len(hidden):,} tokens are left out</mark>"
    breaks, parts, start = dict(sample.breaks(redact)), [], 0
    for segment, cause in zip(sample.segments, untrained, strict=True):
        end = start + len(segment.token_ids)
        about = f"version {segment.policy_version}, lag {sample.step - segment.policy_version}"
        tokens = "".join(
            _token(text, logprob) if place not in hidden else left_out * (place == hidden[0])
            for place, text, logprob in zip(range(start, end), texts[start:end], segment.rollout_logprobs, strict=True)
        )
        if start in breaks:
            parts.append(f"<mark>{escape(breaks[start])}</mark>")
        parts.append(
            f'<span class="{"untrained" if cause else "trained"}" style="--version:{colours[segment.policy_version]}"'
            f' title="{about}{", " + cause if cause else ""}">{tokens}</span>'
        )
        start = end
    if start in breaks:
        parts.append(f"<mark>{escape(breaks[start])}</mark>")
    return "".join(parts)


def _token(text: str, logprob: float) -> str:
    level = next((number for number, least in enumerate(_LEVELS) if logprob >= least), len(_LEVELS))
    return f'<i class="p{level}" title="{logprob:.2f}">{escape(text)}</i>'


def _cut(text: str) -> str:
    """Escape a text, without the middle of a long one."""
    left_out = len(text) - _MOST_CHARACTERS
    if left_out <= 0:
        return escape(text)
    half = _MOST_CHARACTERS // 2
    return f"{escape(text[:half])}<mark>{left_out:,} characters are left out</mark>{escape(text[-half:])}"
