"""The trainer of a run: in this process on one device, or in processes of its own on several and on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollover.cluster.config import ClusterConfig
from rollover.errors import ModelError, require
from rollover.hf.companions import Companions
from rollover.hf.config import MODEL_CLASSES, read_model_config
from rollover.hf.hub import resolve_model
from rollover.hf.weights import frozen_format, number_format
from rollover.report.progress import Progress
from rollover.run.config import RunConfig
from rollover.run.directory import RunDir
from rollover.run.layout import LOCK
from rollover.trainer.checkpoint import read_manifest
from rollover.trainer.checks import check_suits
from rollover.trainer.config import StepConfig, TrainerConfig

if TYPE_CHECKING:
    from rollover.trainer.base import Trainer
    from rollover.trainer.leading import RankLauncher


def open_trainer(
    config: RunConfig, run: RunDir, folder: Path, checkpoint: Path | None, progress: Progress, companions: Companions
) -> Trainer:
    """Open the trainer of a run that begins with the model in ``folder``, or resumes from ``checkpoint``. For
    ``companions`` see ``TrainingSetup``.

    Raises:
        ModelError: the model cannot be trained, or the checkpoint cannot be resumed under this config.
        RankLost: the processes of several devices do not start.
        ConfigError: they cannot be placed on the cluster.
    """
    from rollover.trainer.fleet import FleetTrainer
    from rollover.trainer.local import LocalTrainer
    from rollover.trainer.setup import TrainingSetup

    if checkpoint is not None and not read_manifest(checkpoint).files:
        progress.message(f"{checkpoint} has no checksums (an earlier version wrote it), so damage would go unnoticed")
    setup = TrainingSetup(
        config=config.trainer,
        algorithm=config.weighing_algorithm,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_new_tokens,
        num_steps=config.steps,
        seed=config.seed,
        deterministic=config.deterministic,
        companions=companions,
    )
    if not config.trainer.is_sharded and config.cluster is None:
        return LocalTrainer(setup, folder, resume_from=checkpoint)
    return FleetTrainer(
        setup,
        folder,
        resume_from=checkpoint,
        fallback=run.path / "staging",
        logs=run.path / "logs",
        launcher=cluster_launcher(config, config.trainer, run.path, progress),
        notify=progress.message,
    )


def cluster_launcher(config: RunConfig, section: StepConfig, run: Path, progress: Progress) -> RankLauncher | None:
    """Return what starts the ranks of the trainer or of the warm-up on the cluster; ``None`` without a cluster. Raises
    ``ConfigError`` when there is no such cluster, or it could never take the ranks."""
    if config.cluster is None:
        return None
    from rollover.cluster.ranks import RayLauncher

    timeout_s = config.trainer.rank_timeout_s
    return RayLauncher(config.cluster, section, timeout_s=timeout_s, run=run / LOCK, notify=progress.message)


def check_devices(config: RunConfig) -> list[str]:
    """Return what a user should know about the trainer's devices. This loads nothing, and so comes before the warm-up.
    Raises ``ConfigError`` for devices that are not there, and for settings that do not suit the model, ``ModelError``
    for a model that cannot be trained or whose routes cannot be replayed."""
    model = model_shape(config)
    sections = [section for section in (config.sft, config.trainer) if section is not None]
    for section in sections:
        check_suits(section, model)
        if section.optimizer == "adamw_8bit":
            require("bitsandbytes", purpose=f"{section.section}.optimizer = 'adamw_8bit'")
    lines = [] if model["model_type"] in MODEL_CLASSES else [*_proved(config, model)]
    if config.cluster is not None:
        lines += _check_cluster(config.cluster, sections)
    else:
        lines += [line for section in sections for line in _check_machine(section)]
    shared = [section for section in sections if section.context_parallel > 1]
    return lines + [
        f"{section.role}: each pass is shared by {section.context_parallel} devices, along the sequence"
        for section in shared
    ]


def logprob_format(config: TrainerConfig, folder: Path) -> str:
    """Return the number format in which the trainer computes log-probs. Adapters are computed beside the weights of
    ``folder``."""
    return config.dtype if config.lora is None or config.dtype == "bfloat16" else frozen_format(number_format(folder))


def model_shape(config: RunConfig) -> Mapping[str, Any]:
    """Return the contents that the ``config.json`` of the run's model has, or will have."""
    if config.model.scratch is not None:
        return config.model.scratch.model_config(config.model.scratch.vocab_size)
    assert config.model.path is not None
    return read_model_config(resolve_model(config.model.path, weights=False), weights=False)


def _proved(config: RunConfig, model: Mapping[str, Any]) -> Iterator[str]:
    from transformers import AutoConfig

    from rollover.trainer.proof import prove, prove_routes

    try:
        shape = AutoConfig.for_model(**model)
    except Exception as error:  # a type that transformers does not know, or a value that it refuses
        own = "; code that comes with a model is not run" if "auto_map" in model else ""
        reason = " ".join(str(error).partition(". ")[0].split())[:200]
        raise ModelError(f"model_type {model['model_type']!r} cannot be trained: {reason}{own}") from None
    if prove(shape) == "padded":
        yield f"trainer: a pass takes samples of model_type {model['model_type']!r} one by one, without shared prompts"
    if config.trainer.replay_routes:
        prove_routes(model)


def _check_machine(section: StepConfig) -> Iterator[str]:
    if not section.is_sharded:
        if section.device not in ("auto", "cpu"):
            from rollover.trainer.models import pick_device

            pick_device(section.device, section.section)
        return
    from rollover.trainer.devices import rank_devices

    devices = rank_devices(section)
    if len(devices) > 1:
        yield f"{section.role}: sharded over {len(devices)} devices ({', '.join(devices)}), one process each"
    if section.offload:
        yield f"{section.role}: weights, gradients and optimizer state are in the machine's memory"


def _check_cluster(cluster: ClusterConfig, sections: Sequence[StepConfig]) -> list[str]:
    from rollover.cluster.connect import connect
    from rollover.cluster.nodes import alive_nodes, check_placeable, check_versions, written
    from rollover.cluster.ranks import rank_demand

    ray = connect(cluster)
    nodes = alive_nodes(ray)
    check_versions(ray, nodes, timeout_s=cluster.placement_timeout_s)
    lines = [f"cluster: Ray at {ray.get_runtime_context().gcs_address}, {len(nodes)} nodes"]
    for section in sections:
        demand = rank_demand(cluster, section, nodes)
        check_placeable(demand, nodes)
        takes = written(demand.bundle)
        lines.append(
            f"{section.role}: one process on the cluster, with {takes}"
            if demand.count == 1
            else f"{section.role}: sharded over {demand.count} processes on the cluster, each with {takes}"
        )
    return lines
