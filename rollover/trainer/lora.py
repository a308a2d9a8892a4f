"""Low-rank adapters (LoRA, arXiv 2106.09685) with peft: they are trained while a model's own weights stay as they are.

The forward pass of a matrix ``W`` with an adapter is ``W x + (alpha / rank) B A x``; ``A`` begins with noise and ``B``
with zeros, so that training begins with the model itself. Engines get ``W + (alpha / rank) B A``, in the number format
of ``W``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rollover.errors import ConfigError, require
from rollover.hf.companions import Companions, read_companions, without_own_files, write_companions
from rollover.hf.folder import write_folder
from rollover.hf.hub import public_name, resolve_model
from rollover.hf.weights import frozen_format, number_format
from rollover.trainer.checkpoint import DamagedCheckpoint
from rollover.trainer.checks import check_targets
from rollover.trainer.config import LoraConfig, TrainerConfig
from rollover.trainer.hub_names import hub_weights, named_tensors
from rollover.trainer.logprobs import OneForward
from rollover.trainer.models import open_model, save_weights
from rollover.trainer.moments import trained_parameters
from rollover.trainer.shares import own_tensors, write_weights
from rollover.trainer.world import ALONE, World
from rollover.weights.adapters import ADAPTER_WEIGHTS, PREFIX, AdapterSource, LowRank, MergedWeights

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

_ADAPTER = "default"
"""peft's name for the only adapter of a model."""


class LoraPolicy:
    """Trains adapters in float32 beside a frozen base; both are sharded if there are other ranks. Implements
    ``Policy``.

    Args:
        base: the model that the run began with.
        checkpoint: a checkpoint with whose adapters training continues.
        device: of a process alone.
        seed: determines the first values of ``A``, which are the same for any number of ranks.
    """

    def __init__(
        self,
        config: TrainerConfig,
        base: Path,
        *,
        checkpoint: Path | None = None,
        device: torch.device,
        world: World = ALONE,
        seed: int = 0,
    ) -> None:
        require("peft", purpose="[trainer.lora]")
        assert config.lora is not None
        self.autocast = config.dtype == "bfloat16"
        self._publishes_adapters = config.publishes_adapters
        self._world = world
        self.model: Any
        if world.mesh is not None:
            self.model = self._sharded(config, base, checkpoint, seed=seed)
            self._hf = self.model.hf
            return
        self.model = self._hf = open_model(
            base, dtype=base_format(base), device=device, gradient_checkpointing=config.gradient_checkpointing
        )
        self._settings = adapter_settings(self._hf, config.lora, base)
        with_adapters(self._hf, self._settings, seed=seed)
        if checkpoint is not None:
            _load(self._hf, checkpoint)

    def _sharded(self, config: TrainerConfig, base: Path, checkpoint: Path | None, *, seed: int) -> OneForward:
        """Open base and adapters as this rank's share of them. The base is gathered in the number format in which it is
        held, usually 2 bytes per parameter; only adapters have gradients and moments."""
        from rollover.trainer.sharded import open_sharded

        lora = config.lora
        assert lora is not None

        def adapt(hf: Any) -> Mapping[str, Tensor]:
            self._settings = adapter_settings(hf, lora, base)
            values = _first_values(hf, lora, partial(with_adapters, settings=self._settings, seed=seed))
            if checkpoint is None:
                return values
            stored = read_adapters(checkpoint, {name_in_file(name): value for name, value in values.items()})
            return {name: stored[name_in_file(name)] for name in values}

        return open_sharded(base, config, self._world, dtype=base_format(base), adapt=adapt)

    def weights(self) -> MergedWeights:
        """Return the merged weights, sharded if the base is."""
        return merged_weights(self._hf)

    @contextmanager
    def reference(self) -> Iterator[Any]:
        with adapters_off(self.model):
            yield self.model

    def write_weights(self, folder: Path) -> None:
        merged = self.weights()
        if not self._publishes_adapters:
            write_weights(self._world, merged, folder)
            return
        source = AdapterSource(0, merged.adapters)
        whole = self._gathered(dict(source.tensors()))
        if self._world.rank == 0:
            source.write(folder, whole)

    def write(self, folder: Path, *, companions: Companions) -> None:
        """Write the adapters in peft's format, in one file, and the tokenizer's files beside them."""
        whole = self._gathered(named_adapters(self._hf))
        if self._world.rank == 0:
            write_companions(without_own_files(companions), folder)
            self._settings.save_pretrained(str(folder))
            save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _gathered(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapters on the first rank, which has room for them, and nothing on the others."""
        return own_tensors(self._world, adapters, dict.fromkeys(adapters, 0))


def merge(checkpoint: Path, target: Path, *, base: str | Path) -> None:
    """Write the model ``base`` with the adapters of ``checkpoint`` merged into it as a model folder, with the files of
    the checkpoint for its tokenizer.

    Raises:
        ModelError: one of them cannot be read, or the adapters are not of this model.
        ResourceError: the disk is full.
    """
    require("peft", purpose="merging adapters")
    from peft import LoraConfig as PeftConfig

    folder = resolve_model(base)
    model = open_model(folder, dtype=getattr(torch, number_format(folder)))
    try:
        with_adapters(model, PeftConfig.from_pretrained(str(checkpoint)), seed=0)
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpoint(checkpoint, f"its adapters do not fit {str(folder)!r}: {error}") from error
    _load(model, checkpoint)
    own = read_companions(checkpoint)
    write_folder(target, lambda partial: save_weights(model, merged_weights(model), partial, companions=own))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of ``model`` off within this context."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        for parameter in trained:  # peft freezes them, and FSDP, if it first saw them so, would keep them gathered
            parameter.requires_grad_(True)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_settings(model: Any, config: LoraConfig, base: Path) -> PeftConfig:
    """Return peft's settings of the adapters. Raises ``ConfigError`` when a target is not a matrix of the model."""
    from peft import LoraConfig as PeftConfig

    matrices = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    check_targets(config.targets, matrices)
    if "lm_head" in config.targets and model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        raise ConfigError(
            "trainer.lora.targets names 'lm_head', which is also the model's embedding and must not change"
        )
    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a number of either kind
        target_modules=list(config.targets),
        base_model_name_or_path=public_name(base),
        task_type="CAUSAL_LM",
    )


def with_adapters(model: Any, settings: PeftConfig, *, seed: int) -> Any:
    """Put adapters beside the matrices of ``model``, in place, and freeze the rest."""
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:  # they are small, and updates to them would be rounded away in half precision
            parameter.data = parameter.data.float()
    return model


def _first_values(hf: Any, lora: LoraConfig, put: Callable[[Any], Any]) -> dict[str, Tensor]:
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


def merged_weights(model: nn.Module) -> MergedWeights:
    """Return the weights of a model by their names on the hub, and the adapters beside them."""
    frozen = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in named_tensors(model).items()
        if "lora_" not in name
    }
    adapters = {}
    layers: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in layers:
        if hasattr(layer, "base_layer"):
            (active,) = layer.active_adapters
            a_RI, b_OR = layer.lora_A[active].weight.detach(), layer.lora_B[active].weight.detach()
            adapters[f"{name}.weight"] = LowRank(a_RI=a_RI, b_OR=b_OR, scale=float(layer.scaling[active]))
    return MergedWeights(hub_weights(model, frozen), adapters)


def named_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters by their names in peft's files."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters() if "lora_" in name}
    return {name_in_file(name): tensor.contiguous() for name, tensor in found.items()}


def name_in_file(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return f"{PREFIX}{name.replace(f'.{_ADAPTER}.', '.')}"


def _load(model: nn.Module, checkpoint: Path) -> None:
    """Load the adapters of a checkpoint. Raises ``DamagedCheckpoint`` when they do not fit the model."""
    own = named_adapters(model)
    for name, tensor in read_adapters(checkpoint, own).items():
        own[name].copy_(tensor)


def read_adapters(checkpoint: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the adapters of a checkpoint, by their names there. Raises ``DamagedCheckpoint`` when names or shapes are
    not the shapes of ``like``."""
    path = checkpoint / ADAPTER_WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(checkpoint, f"{path} cannot be read ({error})") from error
    for name in sorted(like.keys() | tensors.keys()):
        wanted, found = (tuple(t[name].shape) if name in t else "absent" for t in (like, tensors))
        if wanted != found:
            raise DamagedCheckpoint(checkpoint, f"{path} does not fit the model: {name} is {found}, not {wanted}")
    return tensors


def base_format(folder: Path) -> torch.dtype:
    """Return the number format in which the weights beside the adapters are held."""
    found = getattr(torch, frozen_format(number_format(folder)))
    assert isinstance(found, torch.dtype)
    return found
