"""The model that a server must agree with: a model folder's sizes and the shapes of its weights. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollover.errors import EngineError, ModelError
from rollover.hf.config import read_config, size_of
from rollover.hf.weights import TensorInfo, is_unused, read_weight_infos
from rollover.weights.adapters import AdapterSource

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A Hugging Face folder, as far as a client needs to know it."""

    path: Path
    vocab_size: int
    max_context_tokens: int
    num_layers: float = math.inf
    tied_embeddings: bool
    cache_numbers_per_token: int
    """Keys and values of one token, in all layers."""
    weights: Mapping[str, TensorInfo]

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Read a model folder. Raises ``ModelError`` when config or weights cannot be read."""
        config = read_config(path)
        keys = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads", "hidden_size")
        sizes = {key: size_of(config, key) for key in keys}
        if wrong := [key for key, found in sizes.items() if not isinstance(found, int)]:
            raise ModelError(
                f"{path / 'config.json'} must state {wrong[0]} as a whole number, got {sizes[wrong[0]]!r}: add it, as"
                " the servers of the model have it"
            )
        vocab_size, context, num_layers, heads, hidden = sizes.values()
        head_dim, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
        return cls(
            path=path,
            vocab_size=vocab_size,
            max_context_tokens=context,
            num_layers=num_layers,
            tied_embeddings=bool(config.get("tie_word_embeddings")),
            cache_numbers_per_token=2 * num_layers * kv_heads * head_dim,
            weights=read_weight_infos(path),
        )

    @property
    def dtype(self) -> str | None:
        """Return the number format of most of its weights by torch's name; ``None`` if it is none of the common
        ones."""
        sizes: Counter[str] = Counter()
        for info in self.weights.values():
            sizes[info.dtype] += math.prod(info.shape)
        ((most, _),) = sizes.most_common(1)
        return most if most in _DTYPES else None

    def check_served(self, served: str, server: object) -> None:
        """Check that a server's own folder, where we can see it, is of this model: weights that do not fit could kill
        it. Raises ``EngineError``."""
        folder = Path(served)
        try:
            to_see = bool(served) and any(folder.glob("*.safetensors")) and folder.resolve() != self.path.resolve()
        except (OSError, ValueError):  # no folder of this machine has such a name
            return
        if to_see:
            try:
                self.check_fits(folder)
            except EngineError as e:
                raise EngineError(f"{server} serves another model than {self.path}: {e}") from None

    def check_fits(self, folder: Path) -> None:
        """Check that the weights in ``folder`` are of this model. Raises ``EngineError`` naming the first that
        is not."""
        try:
            given = {name: info.shape for name, info in read_weight_infos(folder).items()}
        except ModelError as e:
            raise EngineError(str(e)) from None
        self.check_shapes(given, f"weights in {folder}")

    def check_shapes(self, given: Mapping[str, tuple[int, ...]], what: str) -> None:
        """Check that tensors with these names and shapes are of this model. Raises ``EngineError`` naming the first
        that is not, and ``what`` they are."""
        twin = {"lm_head.weight"} if self.tied_embeddings else set()
        weights = {_without_prefix(name): info.shape for name, info in self.weights.items()}
        given = {_without_prefix(name): shape for name, shape in given.items()}
        for problem, absent, depth in (
            ("are missing", weights.keys() - given.keys() - twin, self.num_layers),
            ("are unknown", given.keys() - weights.keys() - twin, math.inf),  # a deeper model is another one
        ):
            if names := {name for name in absent if not is_unused(name, depth)}:
                raise EngineError(f"{what} do not fit: {len(names)} {problem}, first {min(names)!r}")
        for name, shape in given.items():
            expected = weights.get(name, shape)
            if shape != expected:
                raise EngineError(f"{what} do not fit: {name!r} has shape {list(shape)}, expected {list(expected)}")

    def check_adapters(self, source: AdapterSource) -> None:
        """Check that adapters are of this model. Raises ``EngineError`` naming the first that is not."""
        try:
            source.check_fits({name: info.shape for name, info in self.weights.items()})
        except ModelError as e:
            raise EngineError(str(e)) from None


def _without_prefix(name: str) -> str:
    """Return the name of a weight as GPT-2 and BLOOM have it on the hub, and servers take it with the prefix too."""
    return name.removeprefix("transformer.")
