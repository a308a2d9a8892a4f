"""``rollover samples``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click

from rollover.errors import printable
from rollover.hf.tokenizer import FastTokenizer
from rollover.report.samples import ORDERS, Order, TrainedSample, in_order, read_batch, response_pieces, tokenizer_of

_COLOURS = ((-0.1, 245), (-0.7, 250), (-2.3, 220), (-4.6, 208))
"""Log-probs down to which a token has a colour of the terminal, from likely (grey) to unlikely (orange)."""
_RAREST = 196
_MOST_COLUMNS = 300
"""Characters of the columns that travelled with a prompt."""


@click.command("samples")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="The step that trained them, from 0; the newest by default.")
@click.option("--source", help="Only samples of this source.")
@click.option("--sort", type=click.Choice(ORDERS), default="reward", show_default=True, help="The largest first.")
@click.option("--reverse", is_flag=True, help="The smallest first.")
@click.option("--show", type=click.IntRange(min=1), default=5, show_default=True, help="Number of samples.")
def command(run: Path, step: int | None, source: str | None, sort: Order, reverse: bool, show: int) -> None:
    """Read what the model wrote: prompts and responses of a trained batch.

    In a terminal, tokens are coloured by their log-prob: grey ones were likely, orange and red ones were not.

    \b
    rollover samples runs/quickstart-20260101-120000 --sort length
    rollover samples runs/quickstart-20260101-120000 --step 3 --sort reward --reverse
    """
    from rollover.errors import RunError
    from rollover.privacy import Redactor
    from rollover.report.record import read_config

    config = read_config(run)
    redactor = Redactor(config, prose=True)
    redact = redactor.text
    batch = read_batch(run, step)
    samples = [s for s in batch.samples if source is None or s.prompt.source == source]
    if not samples:
        known = ", ".join(sorted({s.prompt.source for s in batch.samples}))
        raise RunError(f"step {batch.step} trained no sample of source {source!r}; it trained samples of {known}")
    if sort == "advantage" and all(s.relative is None for s in samples):
        raise RunError(f"no sample of step {batch.step} is compared with its group: choose another --sort")
    ordered = in_order(samples, sort)
    tokenizer = tokenizer_of(run, config)
    state = "skipped" if batch.is_skipped else "trained" if batch.is_trained else "is training"
    click.echo(f"step {batch.step} {state} {len(batch.samples)} samples")
    for sample in (ordered[::-1] if reverse else ordered)[:show]:
        click.echo("\n" + redact(_described(sample)))
        if sample.prompt.columns:
            columns = printable(redact(json.dumps(redactor.value(sample.prompt.columns), ensure_ascii=False)))
            click.echo(columns if len(columns) <= _MOST_COLUMNS else f"{columns[:_MOST_COLUMNS]}...")
        click.echo(printable(redact(sample.prompt_read(tokenizer))))
        click.echo(click.style("── response ──", bold=True))
        click.echo(_coloured(sample, tokenizer, redact))


def _described(sample: TrainedSample) -> str:
    components = ", ".join(f"{name} {value:.4g}" for name, value in sample.components.items())
    shaping = (f" {sample.shaping:+.3g}" if sample.shaping else "") + (f" ({components})" if components else "")
    cut = ", cut at the limit" if sample.is_cut else ""
    reward = f"{sample.reward:.4g}{shaping}" if sample.has_reward else "not on record"
    relative = "" if sample.relative is None else f"  against its group {sample.relative:+.3f}"
    return click.style(
        f"{sample.sample_id}  {sample.prompt.prompt_id}  reward {reward}{relative}"
        f"  {sample.num_tokens} tokens{cut}  lag {sample.lag:.2f}",
        bold=True,
    )


def _coloured(sample: TrainedSample, tokenizer: FastTokenizer, redact: Callable[[str], str]) -> str:
    """Return the response with the places where it was interrupted."""
    logprobs = [p for segment in sample.segments for p in segment.rollout_logprobs]
    breaks = dict(sample.breaks(redact))
    text = []
    for number, (piece, logprob) in enumerate(zip(response_pieces(sample, tokenizer, redact), logprobs, strict=True)):
        if number in breaks:
            text.append(click.style(f"⟦{breaks[number]}⟧", reverse=True))
        colour = next((colour for least, colour in _COLOURS if logprob >= least), _RAREST)
        text.append(click.style(piece, fg=colour))
    if len(logprobs) in breaks:
        text.append(click.style(f"⟦{breaks[len(logprobs)]}⟧", reverse=True))
    return "".join(text)
