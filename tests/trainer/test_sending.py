"""A trainer sends its weights straight into several receivers: one process, and ranks that have a part each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.servers.weights.transfer import TransferFailed, send_weights
from rollover.hf.weights import EMBEDDING, HEAD
from rollover.trainer.config import LoraConfig
from rollover.weights import buckets as pieces_of
from rollover.weights.sending import SenderLost, SendReport, WeightsGone
from tests.engine.servers.receivers import ReceiverProcess, digest
from tests.speed import within
from tests.trainer.builders import make_batch, make_folder, make_trainer
from tests.trainer.test_fleet import fleet

LIMIT = 6000
"""Bytes of a bucket: a model of tests is several."""


@contextmanager
def receivers(*names: str, **settings: Any) -> Iterator[list[ReceiverProcess]]:
    with ExitStack() as stack:
        opened = [ReceiverProcess(name, **{"timeout_s": within(10.0), **settings}) for name in names]
        for each in opened:
            stack.callback(each.close)
        yield opened


def send(source: Any, to: Sequence[ReceiverProcess], formats: dict[str, str], **limits: float) -> SendReport:
    pieces = pieces_of.buckets(pieces_of.as_served(source.manifest.tensors, formats), limit_bytes=LIMIT)
    assert len(pieces) > 3
    limits = {"limit_s": within(10.0), "part_s": within(2.0), **limits}
    opened = partial(source.open_sender, buckets=pieces)
    return asyncio.run(send_weights(opened, pieces, [each.receiver() for each in to], **limits))


def digests(weights: Any) -> dict[str, str]:
    return {name: digest(tensor.detach()) for name, tensor in weights.items()}


@pytest.mark.parametrize("is_flat", [False, True], ids=["tensors", "flat"])
def test_a_trainer_alone_sends_what_it_has_in_the_formats_that_are_served(tmp_path: Path, is_flat: bool) -> None:
    trainer = make_trainer(make_folder(tmp_path / "model"))
    trainer.step(make_batch(step=0))
    weights = dict(trainer.weights())
    formats = dict.fromkeys([*weights, HEAD], "bfloat16")
    with receivers("a", "b", is_flat=is_flat) as both:
        report = send(trainer.weights_to_send(), both, formats)
        expected = digests({name: tensor.bfloat16() for name, tensor in weights.items()})
        expected.setdefault(HEAD, expected[EMBEDDING])
        assert both[0].held == both[1].held == expected
    sent = {**weights, HEAD: weights.get(HEAD, weights[EMBEDDING])}
    assert report.num_bytes == sum(2 * tensor.numel() for tensor in sent.values())


def test_weights_are_sent_until_the_next_step_begins(tmp_path: Path) -> None:
    trainer = make_trainer(make_folder(tmp_path / "model"))
    old = trainer.weights_to_send()
    trainer.step(make_batch(step=0))
    with receivers("a") as one, pytest.raises(WeightsGone, match="weights of version 0 can no longer be sent"):
        send(old, one, {})
    with receivers("a") as one:
        send(trainer.weights_to_send(), one, {})
        assert one[0].held == digests(trainer.weights())


@pytest.mark.parametrize(
    ("changes", "settings"),
    [({"tie_word_embeddings": False}, {}), ({"tie_word_embeddings": True}, {"lora": LoraConfig(rank=4)})],
    ids=["untied", "lora"],
)
def test_ranks_send_what_they_would_have_written_and_none_has_all_of_it(
    tmp_path: Path, forked: None, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder = make_folder(tmp_path / "model", **changes)
    with fleet(folder, tmp_path, **settings) as trainer, receivers("a", "b") as both:
        trainer.step(make_batch(step=0))
        report = send(trainer.weights_to_send(), both, {})
        written = dict(trainer.weight_source().tensors())
        assert both[0].held == both[1].held == digests(written)
        assert report.num_bytes == sum(tensor.nbytes for tensor in written.values())
        largest = max(tensor.nbytes for tensor in written.values())
        assert report.peak_bytes <= 2 * max(LIMIT, largest) < report.num_bytes
        trainer.step(make_batch(step=1))
        send(trainer.weights_to_send(), both, {})
        assert both[0].held == digests(dict(trainer.weight_source().tensors()))


@pytest.mark.parametrize(("number", "num_ranks"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_receiver_lost_midway_is_named(tmp_path: Path, forked: None, number: signal.Signals, num_ranks: int) -> None:
    folder = make_folder(tmp_path / "model")
    told: list[str] = []
    limit_s = within(1.0) if number == signal.SIGSTOP else within(20.0)
    with ExitStack() as stack:
        well, lost = stack.enter_context(receivers("well", "lost", timeout_s=limit_s))
        trainer: Any = make_trainer(folder)
        if num_ranks > 1:
            trainer = stack.enter_context(fleet(folder, tmp_path, told))
        trainer.step(make_batch(step=0))
        lost._on_bucket = lambda bucket: lost.kill(number) if bucket == 2 else None
        with pytest.raises(TransferFailed, match="sending weights to well, lost failed") as caught:
            send(trainer.weights_to_send(), [well, lost], {}, limit_s=limit_s, part_s=within(0.5))
        assert [receiver.name for receiver in caught.value.gone] == ["lost"]
        send(trainer.weights_to_send(), [well], {})
        assert well.held == digests(dict(trainer.weights_to_send().tensors()))
        trainer.step(make_batch(step=1))
        send(trainer.weights_to_send(), [well], {})
        assert not told


def test_a_rank_lost_while_it_sends_is_replaced_with_the_same_weights(tmp_path: Path, forked: None) -> None:
    told: list[str] = []
    with fleet(make_folder(tmp_path / "model"), tmp_path, told) as trainer, receivers("a") as one:
        trainer.step(make_batch(step=0))
        expected = digests(dict(trainer.weight_source().tensors()))
        one[0]._on_bucket = lambda bucket: os.kill(trainer.pids[1], signal.SIGKILL) if bucket == 2 else None
        with pytest.raises(SenderLost, match="rank 1 of 2 was killed"):
            send(trainer.weights_to_send(), one, {})
        one[0]._on_bucket = lambda bucket: None
        send(trainer.weights_to_send(), one, {})
        assert one[0].held == expected
        assert len(told) == 1 and "1 step to repeat (restart 1 of 3)" in told[0]
        trainer.step(make_batch(step=1))
