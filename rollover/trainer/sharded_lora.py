"""Low-rank adapters beside a frozen base, both sharded over ranks by FSDP2.

The base is on the ranks in the number format of its folder, usually 2 bytes per parameter, and is gathered in it; only
adapters have gradients and moments. The passes equal the passes of one process, with autocast where it uses autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollover.errors import require
from rollover.hf.companions import Companions, without_own_files, write_companions
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.lora import (
    adapter_settings,
    adapters_off,
    base_format,
    merged_weights,
    name_in_file,
    named_adapters,
    read_adapters,
    with_adapters,
)
from rollover.trainer.moments import trained_parameters
from rollover.trainer.sharded import open_sharded
from rollover.trainer.shares import own_tensors, write_weights
from rollover.trainer.world import World
from rollover.weights.adapters import ADAPTER_WEIGHTS, AdapterSource, LowRank


class ShardedLoraPolicy:
    """Trains adapters in float32; both base and adapters are sharded. Implements ``Policy``.

    Args:
        base: the model that the run began with.
        checkpoint: a checkpoint with whose adapters training continues.
        seed: determines the first values of ``A``, which are the values that one process would draw.
    """

    def __init__(
        self, config: TrainerConfig, base: Path, *, checkpoint: Path | None = None, world: World, seed: int = 0
    ) -> None:
        require("peft", purpose="[trainer.lora]")
        lora = config.lora
        assert lora is not None
        self.autocast = config.dtype == "bfloat16"
        self._publishes_adapters = config.publishes_adapters
        self._world = world

        def adapt(hf: Any) -> Mapping[str, Tensor]:
            self._settings = adapter_settings(hf, lora, base)
            values = _adapt(hf, lora, partial(with_adapters, settings=self._settings, seed=seed))
            if checkpoint is None:
                return values
            stored = read_adapters(checkpoint, {name_in_file(name): value for name, value in values.items()})
            return {name: stored[name_in_file(name)] for name in values}

        self.model = open_sharded(base, config, world, dtype=base_format(base), adapt=adapt)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the merged weights, sharded as the base is."""
        return merged_weights(self.model.hf)

    @contextmanager
    def reference(self) -> Iterator[Any]:
        with adapters_off(self.model):
            yield self.model

    def write(self, folder: Path, *, companions: Companions) -> None:
        """Write the adapters in peft's format, in one file: the first rank has room for them."""
        adapters = named_adapters(self.model.hf)
        whole = own_tensors(self._world, adapters, dict.fromkeys(adapters, 0))
        if self._world.rank == 0:
            write_companions(without_own_files(companions), folder)
            self._settings.save_pretrained(str(folder))
            save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def write_weights(self, folder: Path) -> None:
        merged = merged_weights(self.model.hf)
        if self._publishes_adapters:
            self._write_adapters(merged.adapters, folder)
            return
        write_weights(self._world, merged, folder)

    def _write_adapters(self, adapters: Mapping[str, LowRank], folder: Path) -> None:
        """Gather the adapters on the first rank, which writes them."""
        source = AdapterSource(0, adapters)
        tensors = dict(source.tensors())
        whole = own_tensors(self._world, tensors, dict.fromkeys(tensors, 0))
        if self._world.rank == 0:
            source.write(folder, whole)


def _adapt(hf: Any, lora: LoraConfig, put: Any) -> dict[str, Tensor]:
    """Put adapters beside the matrices of a model without memory, and return their first values. peft moves adapters to
    the device of their matrix. So while it draws them, each matrix is on the CPU, with all its values in one place in
    memory; afterwards it and the adapters have no memory again."""
    targets = [m for n, m in hf.named_modules() if isinstance(m, nn.Linear) and n.rpartition(".")[2] in lora.targets]
    for module in targets:
        module.weight = nn.Parameter(torch.zeros((), dtype=module.weight.dtype).expand(module.weight.shape))
    put(hf)
    values = {name: parameter.detach() for name, parameter in trained_parameters(hf).items()}
    for module in hf.modules():
        if hasattr(module, "base_layer"):
            module.to("meta")
    return values
