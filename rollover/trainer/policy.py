"""The policy that is trained: its model, the weights that engines serve, and its part of a checkpoint.

``FullPolicy`` trains all weights of a model; ``lora.LoraPolicy`` trains adapters beside weights that stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollover.errors import ModelError
from rollover.hf.companions import Companions
from rollover.hf.config import read_model_config
from rollover.trainer.checkpoint import DamagedCheckpoint
from rollover.trainer.config import StepConfig, TrainerConfig
from rollover.trainer.models import named_weights, open_model, save_model, transformers_config
from rollover.trainer.shares import write_weights
from rollover.trainer.world import ALONE, World
from rollover.weights.adapters import holds_adapters

_SHAPE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


class Policy(Protocol):
    """A model in training, whatever part of it is trained."""

    @property
    def model(self) -> Any:
        """Return the transformers model that computes log-probs; parameters without ``requires_grad`` stay as they
        are."""
        ...

    @property
    def autocast(self) -> bool:
        """Return whether passes of ``model`` need autocast to run their matrix products in bfloat16, as configured."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that engines serve, by Hugging Face name, without gradient; a tied matrix appears once."""
        ...

    def reference(self) -> AbstractContextManager[Any]:
        """Return a context with the frozen policy that training began with, as a model."""
        ...

    def write(self, folder: Path, *, companions: Companions) -> None:
        """Write the trained parameters into a checkpoint's folder."""
        ...

    def write_weights(self, folder: Path) -> None:
        """Write this rank's part of the weights that engines serve: all of them if the model is not sharded."""
        ...


class FullPolicy:
    """Trains all weights, in float32. Implements ``Policy``.

    Args:
        folder: the model or checkpoint to begin from.
        initial: the model that the run began with; a frozen copy is kept when ``needs_ref``.
    """

    def __init__(
        self, config: StepConfig, folder: Path, *, initial: Path, needs_ref: bool, device: torch.device
    ) -> None:
        self.autocast = config.dtype == "bfloat16"
        self.model = open_model(folder, device=device, gradient_checkpointing=config.gradient_checkpointing)
        self._ref_model = open_model(initial, device=device).requires_grad_(False) if needs_ref else None

    def weights(self) -> Mapping[str, Tensor]:
        return named_weights(self.model)

    def reference(self) -> AbstractContextManager[Any]:
        assert self._ref_model is not None, "the algorithm said that it needs one"
        return nullcontext(self._ref_model)

    def write(self, folder: Path, *, companions: Companions) -> None:
        save_model(self.model, folder, companions=companions)

    def write_weights(self, folder: Path) -> None:
        write_weights(ALONE, self.weights(), folder)


def open_policy(
    config: TrainerConfig,
    initial: Path,
    *,
    checkpoint: Path | None = None,
    needs_ref: bool,
    device: torch.device,
    seed: int,
    world: World = ALONE,
) -> Policy:
    """Load the policy of a run that begins with the model ``initial`` or continues from ``checkpoint``.

    Args:
        needs_ref: ``reference`` will be used.
        seed: determines the first values of adapters.
        world: the ranks over which it is sharded.

    Raises:
        ModelError: the model cannot be trained, or the checkpoint is of another kind.
        DamagedCheckpoint: the checkpoint differs from what was written.
    """
    if config.lora is not None:
        from rollover.trainer.lora import LoraPolicy

        return LoraPolicy(config, initial, checkpoint=checkpoint, device=device, world=world, seed=seed)
    try:
        if world.mesh is not None:
            from rollover.trainer.sharded import ShardedPolicy

            return ShardedPolicy(config, checkpoint or initial, initial=initial, needs_ref=needs_ref, world=world)
        return FullPolicy(config, checkpoint or initial, initial=initial, needs_ref=needs_ref, device=device)
    except ModelError as error:
        if checkpoint is None:
            raise
        raise DamagedCheckpoint(checkpoint, str(error)) from error


def check_kind(config: TrainerConfig, checkpoint: Path, initial: Path) -> None:
    """Raise ``ModelError`` when a checkpoint holds something other than ``config`` trains, or is not of the model
    ``initial``."""
    has_adapters = holds_adapters(checkpoint)
    if has_adapters != (config.lora is not None):
        found, wanted = ("adapters", "not set") if has_adapters else ("full weights", "set")
        raise ModelError(
            f"checkpoint {str(checkpoint)!r} holds {found}, but [trainer.lora] is {wanted}: restore the setting, or"
            " start a new run"
        )
    if has_adapters:
        return
    try:
        read_model_config(checkpoint)
        old = transformers_config(checkpoint)
    except ModelError as error:
        raise DamagedCheckpoint(checkpoint, str(error)) from error
    new = transformers_config(initial)  # the files may name one value in different ways, or not at all
    for key in _SHAPE:
        if getattr(old, key, None) != getattr(new, key, None):
            raise ModelError(
                f"checkpoint {str(checkpoint)!r} has a model with {key} = {getattr(old, key, None)!r}, "
                f"but the run's model {str(initial)!r} has {getattr(new, key, None)!r}: "
                "resume with the model that the run started from"
            )
