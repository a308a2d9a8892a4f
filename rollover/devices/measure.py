"""Times of this machine: products and copies of tensors, decoding, prefill, training.

Every time is the median of several, the first of which is discarded. Run it on an idle machine.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.batch import Batch, Group
from rollover.devices.fit import Measurements, Point
from rollover.devices.model_shape import parse
from rollover.engine.base import GenerateRequest
from rollover.engine.embedded import sizing
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.embedded.core import EngineCore
from rollover.errors import ModelError
from rollover.hf.architecture import Architecture
from rollover.hf.config import read_config
from rollover.trainer.config import ScratchConfig, TrainerConfig
from rollover.trainer.local import LocalTrainer
from rollover.trainer.models import pick_device
from rollover.trainer.scratch import build_scratch_model, build_tokenizer
from rollover.trainer.setup import TrainingSetup
from rollover.types import FinishReason, Prompt, SampleId, SamplingParams, Segment, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSizes:
    """The points that are measured. Every other one is held out: not fitted, only predicted."""

    scratch: ScratchConfig
    """The model if none is given; its weights should not fit into a processor cache."""
    batches: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    context_tokens: int = 256
    prompts: tuple[int, ...] = (128, 256, 512, 1024)
    sequences: tuple[int, ...] = (4, 8, 16)
    response_tokens: int = 128
    matrix: int = 2048
    copy_bytes: int = 256 * 2**20
    repeats: int = 9


CPU = MeasuredSizes(
    scratch=ScratchConfig(
        hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=2048, max_position=2048
    )
)
GPU = MeasuredSizes(
    scratch=ScratchConfig(
        hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=8, intermediate_size=6144, max_position=4096
    ),
    batches=(1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256),
    context_tokens=1024,
    prompts=(256, 512, 1024, 2048),
    sequences=(8, 16, 32),
    response_tokens=512,
    matrix=8192,
    copy_bytes=2**30,
)


def measure(model: Path | None = None, *, device: str = "auto", sizes: MeasuredSizes | None = None) -> Measurements:
    """Measure everything; ``model`` is a Hugging Face folder, by default one made for the purpose."""
    place = pick_device(device)
    sizes = sizes or (CPU if place.type == "cpu" else GPU)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    if model is not None:
        _check(model, sizes)
    link_s, link_latency_s = _link(place, sizes)
    with tempfile.TemporaryDirectory() as temporary:
        folder = model
        if folder is None:
            folder = Path(temporary) / "model"
            build_scratch_model(folder, build_tokenizer(["measured, not read"]), sizes.scratch)
        config = json.loads((folder / "config.json").read_text())
        points = [work(folder, str(place), config, sizes) for work in (_decodes, _prefills, _steps)]
        return Measurements(
            title=torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
            model=config,
            weight_bytes=dtype.itemsize,
            kv_bytes=dtype.itemsize,
            memory_bytes=_memory_bytes(place),
            flops=_flops(place, dtype, sizes),
            copy_bytes_per_s=_copy(place, sizes),
            link_bytes_per_s=sizes.copy_bytes / link_s,
            link_latency_s=link_latency_s,
            points=tuple(chain.from_iterable(points)),
        )


def _check(folder: Path, sizes: MeasuredSizes) -> None:
    """Refuse a model that the planner cannot describe, or that is too short, before anything is measured."""
    file, positions = folder / "config.json", Architecture.from_folder(folder).max_position_embeddings
    parse(read_config(folder), name=folder.name, file=str(file))
    needed = max(sizes.context_tokens + max(sizes.batches) + sizes.repeats + 1, max(sizes.prompts) + 8)
    if positions < needed:
        raise ModelError(
            f"{file}: max_position_embeddings = {positions:,}, and contexts of {needed:,} tokens are measured: take a"
            " model with longer contexts, or leave --model out"
        )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return f"CPU, {torch.get_num_threads()} threads"


def _memory_bytes(place: torch.device) -> float:
    if place.type == "cuda":
        return float(torch.cuda.get_device_properties(place).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _median_s(work: Callable[[], Any], place: torch.device, repeats: int) -> float:
    def done() -> None:
        work()
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    done()
    return statistics.median(_seconds(done) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _flops(place: torch.device, dtype: torch.dtype, sizes: MeasuredSizes) -> float:
    a = torch.randn(sizes.matrix, sizes.matrix, device=place).to(dtype)
    return 2 * sizes.matrix**3 / _median_s(lambda: a @ a, place, sizes.repeats)


def _copy(place: torch.device, sizes: MeasuredSizes) -> float:
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / _median_s(lambda: target.copy_(source), place, sizes.repeats)


def _link(place: torch.device, sizes: MeasuredSizes) -> tuple[float, float]:
    """Return the seconds of a large copy to another device, and of the smallest one."""
    other = torch.device("cpu")
    if place.type == "cuda" and torch.cuda.device_count() > 1:
        other = torch.device("cuda", ((place.index or 0) + 1) % torch.cuda.device_count())
    large = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=other, pin_memory=other.type != place.type)
    target = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=place)
    small = torch.zeros(1, dtype=torch.uint8, device=other)
    spot = torch.empty(1, dtype=torch.uint8, device=place)
    return (
        _median_s(lambda: target.copy_(large), place, sizes.repeats),
        _median_s(lambda: spot.copy_(small), place, sizes.repeats),
    )


# --- Engine -----------------------------------------------------------------------------------------------------------


def _core(folder: Path, device: str, *, running: int, context: int) -> EngineCore:
    settings = EmbeddedConfig(
        device=device,
        max_running=running,
        max_context_tokens=context,
        prefill_chunk_tokens=max(2048, context),
        stream_interval_tokens=1,
    )
    block = sizing.block_bytes(settings, Architecture.from_folder(folder), sizing.dtype_of(settings))
    num_blocks = (running + 2) * (context // settings.block_size_tokens + 4)
    return EngineCore(folder, replace(settings, kv_cache_bytes=num_blocks * block))


def _request(name: str, tokens: int, vocab: int, max_new_tokens: int) -> GenerateRequest:
    drawn = random.Random(name)
    return GenerateRequest(
        request_id=name,
        sample_key=name,
        prompt_key=name,
        prompt_ids=tuple(drawn.randrange(vocab) for _ in range(tokens)),
        params=SamplingParams(max_new_tokens=max_new_tokens),
        seed=drawn.getrandbits(32),
    )


def _decodes(folder: Path, device: str, config: dict[str, Any], sizes: MeasuredSizes) -> Iterator[Point]:
    budget = max(sizes.batches) + sizes.repeats + 1
    core = _core(folder, device, running=max(sizes.batches), context=sizes.context_tokens + budget)
    for place, batch in enumerate(sizes.batches):
        for number in range(batch):
            core.add(_request(f"{place}/{number}", sizes.context_tokens, config["vocab_size"], budget))
        while len(core.step()) < batch:  # early ones decode meanwhile; an iteration prefills at least one
            pass
        context = statistics.mean(s.num_tokens for s in core.scheduler.running) + sizes.repeats / 2
        seconds = statistics.median(_seconds(core.step) for _ in range(sizes.repeats))
        core.abort_all()
        yield Point(work="decode", count=batch, tokens=context, seconds=seconds, held_out=place % 2 == 1)


def _prefills(folder: Path, device: str, config: dict[str, Any], sizes: MeasuredSizes) -> Iterator[Point]:
    core = _core(folder, device, running=1, context=max(sizes.prompts) + 8)

    def prefill() -> None:
        while core.has_work:
            core.step()

    for place, tokens in enumerate(sizes.prompts):
        times = []
        for number in range(sizes.repeats // 2 + 1):
            core.add(_request(f"{place}/{number}", tokens, config["vocab_size"], 1))
            times.append(_seconds(prefill))
        seconds = statistics.median(times[1:])
        yield Point(work="prefill", count=1, tokens=tokens, seconds=seconds, held_out=place % 2 == 1)


# --- Trainer ----------------------------------------------------------------------------------------------------------


def _steps(folder: Path, device: str, config: dict[str, Any], sizes: MeasuredSizes) -> Iterator[Point]:
    length = sizes.response_tokens
    settings = TrainerConfig(
        device=device, dtype="float32" if device == "cpu" else "bfloat16", micro_batch_tokens=8 * 2 * length
    )
    algorithm = resolve(AlgorithmConfig())
    setup = TrainingSetup(
        config=settings, algorithm=algorithm, temperature=1.0, max_response_tokens=length, num_steps=1000
    )
    trainer = LocalTrainer(setup, folder)
    for place, count in enumerate(sizes.sequences):
        batches = (_batch(step, count, length, config["vocab_size"]) for step in range(4 * place, 4 * place + 4))
        times = [trainer.step(batch).metrics["time/step_s"] for batch in batches]
        seconds = statistics.median(times[1:])
        yield Point(work="train", count=count, tokens=length, seconds=seconds, held_out=place % 2 == 1)


def _batch(step: int, sequences: int, length: int, vocab: int) -> Batch:
    """Make a batch of groups of two, with one sample right and one wrong."""
    ids = tuple((3 + 5 * i) % vocab for i in range(length))
    groups = []
    for number in range(sequences // 2):
        prompt = Prompt(prompt_id=f"p/{number}@0", token_ids=ids, text="", source="p")
        segment = Segment(
            policy_version=step,
            kv_version=step,
            token_ids=ids,
            rollout_logprobs=(-5.0,) * length,
            finish_reason=FinishReason.STOP,
            start_s=0.0,
            end_s=1.0,
        )
        trajectories = tuple(
            Trajectory(sample_id=SampleId(number, i), prompt=prompt, segments=(segment,), reward=float(i))
            for i in range(2)
        )
        groups.append(Group(group_id=number, prompt=prompt, trajectories=trajectories))
    return Batch(step=step, groups=tuple(groups))
