"""A machine is measured from end to end, small; how well it predicts is a matter for an idle machine."""

from __future__ import annotations

from rollover.devices.fit import fit
from rollover.devices.measure import MeasuredSizes, measure
from rollover.trainer.config import ScratchConfig


def test_every_quantity_is_measured_and_makes_a_device() -> None:
    sizes = MeasuredSizes(
        scratch=ScratchConfig(max_position=256),
        batches=(1, 2, 4),
        context_tokens=16,
        prompts=(16, 32),
        sequences=(2, 4),
        response_tokens=8,
        matrix=128,
        copy_bytes=2**20,
        repeats=3,
    )
    found = measure(device="cpu", sizes=sizes)
    works = [("decode", n, 18.5) for n in (1, 2, 4)] + [("prefill", 1, n) for n in (16, 32)]
    assert [(p.work, p.count, p.tokens) for p in found.points] == [*works, ("train", 2, 8), ("train", 4, 8)]
    assert all(point.seconds > 0 for point in found.points)
    assert min(found.flops, found.copy_bytes_per_s, found.link_bytes_per_s, found.memory_bytes) > 0
    assert fit(found, "here").device.hbm_bytes == found.memory_bytes
