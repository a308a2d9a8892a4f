"""Efficiencies that made the times are found again, and predict times that the fit has not seen."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollover import cli
from rollover.devices.costs.passes import forward_flops
from rollover.devices.fit import Measurements, Point, Work, entry, fit
from rollover.devices.model_shape import parse
from rollover.planner import fleet as fleets
from rollover.settings import toml

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}
MODEL = parse(CONFIG, name="m")
FLOPS, BANDWIDTH = 100e9, 20e9
TRAIN, PREFILL, DECODE, READ, STEP_S = 0.4, 0.6, 0.5, 0.7, 2e-3


def decode_s(batch: int, context: float) -> float:
    """A second time, in plain arithmetic: weights and caches once, two FLOPs a parameter."""
    weights = 4 * (MODEL.parameters - MODEL.embedding_parameters)
    caches = batch * context * 8 * 512 * 4
    flops = batch * (2 * MODEL.multiplied_parameters + 4 * 8 * 512 * context)
    return STEP_S + max((weights + caches) / (BANDWIDTH * READ), flops / (FLOPS * DECODE))


def measured(noise: float = 1.0) -> Measurements:
    batches = (1, 2, 4, 8, 16, 32, 64)
    steps = (4, 8, 16)
    forward = [2 * 256 * MODEL.multiplied_parameters + 256 * 4 * 8 * 512 * 128 for _ in steps]
    optimizer = 2 * 16 * MODEL.parameters / (BANDWIDTH * READ)
    return Measurements(
        title="Some CPU",
        model=CONFIG,
        weight_bytes=4,
        kv_bytes=4,
        memory_bytes=16 * 2**30,
        flops=FLOPS,
        copy_bytes_per_s=BANDWIDTH,
        link_bytes_per_s=5e9,
        link_latency_s=2e-6,
        points=(
            *(point("decode", i, b, 260, decode_s(b, 260) * (noise if i % 2 else 1)) for i, b in enumerate(batches)),
            *(
                point("prefill", i, 1, n, forward_flops(MODEL, n, n / 2) / (FLOPS * PREFILL))
                for i, n in enumerate((128, 256, 512, 1024))
            ),
            *(
                point("train", i, n, 128, 3 * n * f / (FLOPS * TRAIN) + optimizer)
                for i, (n, f) in enumerate(zip(steps, forward, strict=True))
            ),
        ),
    )


def point(work: Work, place: int, count: int, tokens: float, seconds: float) -> Point:
    return Point(work=work, count=count, tokens=tokens, seconds=seconds, held_out=place % 2 == 1)


def test_what_made_the_times_is_found_again() -> None:
    found = fit(measured(), "cpu").device.efficiency
    assert found.prefill == pytest.approx(PREFILL, rel=1e-3)
    assert found.train == pytest.approx(TRAIN, rel=1e-2)
    assert found.bandwidth == pytest.approx(READ, rel=0.05)
    assert found.decode == pytest.approx(DECODE, rel=0.05)
    assert fit(measured(), "cpu").worst < 0.02


def test_held_out_times_do_not_move_the_fit_and_show_its_error() -> None:
    honest, odd = fit(measured(), "cpu"), fit(measured(noise=1.5), "cpu")
    assert odd.device == honest.device
    assert odd.worst == pytest.approx(1 - 1 / 1.5, abs=0.02)


def test_no_efficiency_exceeds_one_however_slow_the_plain_measurements() -> None:
    slow = replace(measured(), flops=1e9, copy_bytes_per_s=1e9)
    found = fit(slow, "cpu").device
    e = found.efficiency
    assert max(e.train, e.prefill, e.decode, e.bandwidth) <= 1
    assert fit(slow, "cpu").worst < 0.10


def test_the_entry_is_a_catalogue_that_a_fleet_can_name(tmp_path: Path) -> None:
    calibration = fit(measured(), "my-cpu")
    (tmp_path / "mine.toml").write_text(entry(calibration.device))
    document = toml.parse('catalogues = ["mine.toml"]\n[[nodes]]\ndevice = "my-cpu"\nnum_devices = 1\n', "fleet.toml")
    device = fleets.parse(document, tmp_path).devices[0]
    assert device.flops == pytest.approx(calibration.device.flops, rel=1e-3)
    assert device.link.bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert device.efficiency.step_s == pytest.approx(calibration.device.efficiency.step_s, rel=1e-3)
    assert device.unverified == ()


def test_the_command_writes_a_device_and_says_how_well_it_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(measure=lambda model, device: measured())
    monkeypatch.setitem(sys.modules, "rollover.devices.measure", machine)
    out = tmp_path / "out.toml"
    assert cli.main(["calibrate", "--out", str(out), "--key", "mine"]) == 0
    assert "within 15%" in " ".join(capsys.readouterr().out.split())
    assert "[devices.mine]" in out.read_text()
    assert cli.main(["calibrate", "--model", str(tmp_path / "no"), "--out", str(out)]) == 2
    assert "is not a model folder" in capsys.readouterr().err
