"""The settings of training, as plain frozen records. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from rollover.errors import nearest
from rollover.settings.changes import Changeable, Inexact, said_by

DType = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]
Optimizer = Literal["adamw", "adamw_8bit"]


def _require(ok: bool, key: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{key} must be {allowed}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Settings of one optimizer step: AdamW, its schedule and clip, and how the passes run."""

    section: ClassVar[str] = "trainer"
    """The section of the config that messages refer to."""
    role: ClassVar[str] = "trainer"
    """The name of what has these settings, in messages."""
    learning_rate: float = 1e-6
    """Peak learning rate. The default suits full fine-tuning of a pretrained model with a billion parameters or more;
    small models need 1e-4 to 1e-3."""
    schedule: Schedule = "constant"
    """Shape of the schedule after the warm-up: constant, or decaying to ``final_lr_ratio`` right after the last step,
    so that this still learns."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly, starting at ``learning_rate / warmup_steps``."""
    final_lr_ratio: float = 0.0
    """Final learning rate of ``linear`` and ``cosine``, as a fraction of ``learning_rate``."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.999
    """Decay rate of the second moment."""
    adam_epsilon: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms and biases are never decayed. Off by default: policy updates are small,
    and decay would pull a pretrained model away for a reason other than reward."""
    optimizer: Optimizer = "adamw"
    """``adamw_8bit`` keeps the moments of matrices in 8 bits with a scale for every 256 values (bitsandbytes), which is
    2 bytes per parameter instead of 8; the embedding, norms and biases keep moments of 32 bits. It trains on one device
    and not with ``offload``; needs ``pip install 'rollover[bitsandbytes]'``."""
    max_grad_norm: float = 1.0
    """Upper bound to which the global gradient norm is clipped; 0 disables clipping."""
    micro_batch_tokens: Inexact[int] = 8192
    """Token budget of one forward and backward pass, prompts included. Memory grows with it; the gradient does not
    depend on it. A sequence longer than the budget gets a pass of its own."""
    dtype: DType = "float32"
    """``bfloat16`` runs the matrix products under autocast; master weights, gradients, optimizer state and the
    log-softmax stay float32, so that small updates are not rounded away (16 bytes per parameter)."""
    gradient_checkpointing: Inexact[bool] = False
    """Recompute activations in the backward pass: less memory for about a third more time."""
    offload: Inexact[bool] = False
    """Keep weights, gradients and optimizer state in the memory of the machine and bring the weights of one layer after
    another to the device (FSDP2's CPU offload); the optimizer steps on the CPU. A device then needs memory for
    activations and a few layers, and the machine 16 bytes per parameter. Not with adapters."""
    device: Inexact[str] = "auto"
    """``auto`` takes the first GPU if there is one, otherwise the CPU. Any PyTorch device with float64 works, such as
    ``cuda:1``; ``mps`` has none."""
    num_devices: Inexact[int] = 1
    """Devices over which weights, gradients and optimizer state are sharded (FSDP2), each with its own process: the
    first `num_devices` GPUs of this machine, or that many processes on the CPU; with `[cluster]`, devices of its nodes.
    1 trains inside the run's own process, or with `[cluster]` in one process on a node."""
    context_parallel: Inexact[int] = 1
    """Devices that share each pass along the sequence, for contexts that do not fit on one: activations of
    ``micro_batch_tokens`` are split over them, and all-to-all exchanges surround attention (Ulysses, arXiv 2309.14509).
    Must divide ``num_devices`` and the model's numbers of attention heads and key-value heads."""

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "at least 0")
        _require(0 <= self.final_lr_ratio <= 1, "final_lr_ratio", self.final_lr_ratio, "in [0, 1]")
        _require(0 <= self.adam_beta1 < 1, "adam_beta1", self.adam_beta1, "in [0, 1)")
        _require(0 <= self.adam_beta2 < 1, "adam_beta2", self.adam_beta2, "in [0, 1)")
        _require(self.adam_epsilon > 0, "adam_epsilon", self.adam_epsilon, "above 0")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        _require(self.max_grad_norm >= 0, "max_grad_norm", self.max_grad_norm, "at least 0 (0 is off)")
        _require(self.micro_batch_tokens >= 1, "micro_batch_tokens", self.micro_batch_tokens, "at least 1")
        for key, choices in (("schedule", Schedule), ("optimizer", Optimizer), ("dtype", DType)):
            if (value := getattr(self, key)) not in get_args(choices):
                raise ValueError(f"{key} {value!r} is unknown{nearest(value, get_args(choices))}")
        each, num = self.context_parallel, self.num_devices
        _require(num >= 1, "num_devices", num, "at least 1")
        _require(each >= 1, "context_parallel", each, "at least 1")
        _require(num % each == 0, "context_parallel", each, f"a divisor of num_devices ({num})")
        if self.optimizer == "adamw_8bit" and self.is_sharded:  # several devices would cut the blocks differently
            setting = "offload = true" if self.offload else f"num_devices = {num}"
            raise ValueError(
                f"optimizer = 'adamw_8bit' trains on one device, with the weights there, and {setting}: remove one of"
                " them"
            )

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 holds the weights: there are several devices, or their memory is not where they
        train."""
        return self.num_devices > 1 or self.offload


Publish = Literal["merged", "adapter"]

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All matrices of the layers of the supported models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685): the matrices of the model stay as they are, in the number format of
    its folder (float32 if that is float16), and products of two thin matrices are trained beside them. Needs
    `rollover[lora]`.

    Example: rank 16 beside a matrix of 4096 x 4096 trains 131,072 values instead of 16.8 million.
    """

    rank: int = 16
    """The inner dimension of each product."""
    alpha: float = 32.0
    """Products are scaled by ``alpha / rank``."""
    targets: tuple[str, ...] = LORA_TARGETS
    """The matrices that get an adapter, by the last part of their names. All matrices of the layers by default:
    adapters on attention alone learn less."""
    publish: Changeable[Publish] = "merged"
    """Form in which engines receive the adapters. ``merged``: as full weights, which every engine accepts and serves at
    full speed. ``adapter``: the adapters alone, a hundredth of the bytes, for an engine that already has the model: the
    embedded engine merges them itself; vLLM and SGLang apply them beside the model, and have to be started with LoRA
    enabled."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, "rank", self.rank, "at least 1")
        _require(self.alpha > 0, "alpha", self.alpha, "above 0")
        _require(len(self.targets) > 0, "targets", list(self.targets), "at least one matrix")
        is_once = len(set(self.targets)) == len(self.targets)
        _require(is_once, "targets", list(self.targets), "a list without repetitions")
        if self.publish not in get_args(Publish):
            raise ValueError(f"publish {self.publish!r} is unknown{nearest(self.publish, get_args(Publish))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(StepConfig):
    """The policy-gradient trainer.

    Example: ``TrainerConfig(learning_rate=1e-5, mini_batches=2)`` takes two optimizer steps per batch.
    """

    mini_batches: int = 1
    """Optimizer steps per batch. Each takes its share of the groups; proximal log-probs are those at the start of the
    batch, so the clip bounds the movement of the whole step."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the model's own weights."""
    replay_routes: bool = False
    """For mixtures of experts: train each token with the experts that the engine chose when it sampled the token
    (arXiv 2510.11370); their scores are computed as ever. Engines have to return them."""
    max_restarts: Changeable[int] = 3
    """With several devices: number of times in a row that their processes are restarted from the last checkpoint after
    one of them is lost, before the run gives up. Every new step resets the count. A warm-up begins again instead, the
    same number of times at most."""
    rank_timeout_s: Changeable[float] = 600.0
    """With several devices: time without progress in any of their processes after which they are ended and the one that
    the others wait for is named."""

    def __post_init__(self) -> None:
        StepConfig.__post_init__(self)
        _require(self.mini_batches >= 1, "mini_batches", self.mini_batches, "at least 1")
        if self.offload and self.lora is not None:
            raise ValueError("offload = true is for full training, and [trainer.lora] is set: remove one of them")
        _require(self.max_restarts >= 0, "max_restarts", self.max_restarts, "at least 0")
        _require(self.rank_timeout_s > 0, "rank_timeout_s", self.rank_timeout_s, "above 0")

    @property
    def publishes_adapters(self) -> bool:
        """Return whether engines get the adapters alone, in place of full weights."""
        return self.lora is not None and self.lora.publish == "adapter"

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide what is learned; a checkpoint can be resumed only under the same ones."""
        kept = _fixed(self)
        if self.lora is not None:
            kept["lora"] = _fixed(self.lora)
        return kept


def _fixed(settings: Any) -> dict[str, Any]:
    """Return the settings of a record that do not declare whether they may change on resume."""
    hints = get_type_hints(type(settings), include_extras=True)
    kept = {f.name for f in fields(settings) if said_by(hints[f.name]) is None}
    return {name: value for name, value in asdict(settings).items() if name in kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig(StepConfig):
    """Supervised warm-up: maximum likelihood of the response tokens."""

    section: ClassVar[str] = "sft"
    role: ClassVar[str] = "warm-up"
    learning_rate: float = 1e-5
    """Peak learning rate; the default suits pretrained models."""
    num_steps: int = 200
    """Optimizer steps. A count rather than a duration, so that a run can be repeated."""
    batch_size: int = 64
    """Examples per optimizer step."""

    def __post_init__(self) -> None:
        StepConfig.__post_init__(self)
        _require(self.num_steps >= 1, "num_steps", self.num_steps, "at least 1")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Settings that decide when the trainer's state is written to disk."""

    every_steps: int = 20
    """Batches between checkpoints; after a crash at most this many training steps are repeated, but no rollout is. 0
    saves only at the end of the run."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted. Two by default, so that one is complete whatever happens
    while the next is written."""

    def __post_init__(self) -> None:
        _require(self.every_steps >= 0, "every_steps", self.every_steps, "at least 0 (0 saves only at the end)")
        _require(self.keep_last >= 1, "keep_last", self.keep_last, "at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchConfig:
    """A small Qwen3 decoder built from scratch. The defaults make about 0.43 M parameters."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    """Must divide ``num_heads``."""
    intermediate_size: int = 384
    """Width of the gated MLP."""
    max_position: int = 512
    """Longest prompt plus response, in tokens."""
    tie_embeddings: bool = True
    """Use one matrix for input and output: at this size the embedding is a large share of the parameters."""
    initializer_range: float = 0.08
    """Standard deviation of the initial weights. The usual 0.02 is for wide models; narrow ones learn faster at first
    with a larger value."""
    vocab_size: int = 320
    """Maximum number of entries in the tokenizer: 256 bytes, the special tokens, and merges for the rest."""

    def __post_init__(self) -> None:
        for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size"):
            _require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        for key in ("hidden_size", "num_layers", "intermediate_size", "max_position", "vocab_size"):
            _require(
                getattr(self, key) <= 2**20,
                key,
                getattr(self, key),
                f"at most {2**20}: this section is for small models",
            )
        even_head = self.hidden_size % (2 * self.num_heads) == 0
        _require(even_head, "hidden_size", self.hidden_size, f"a multiple of 2 x num_heads ({self.num_heads})")
        divides = self.num_heads % self.num_kv_heads == 0
        _require(divides, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads ({self.num_heads})")
        _require(self.initializer_range > 0, "initializer_range", self.initializer_range, "above 0")
        _require(self.max_position >= 2, "max_position", self.max_position, "at least 2")
        _require(
            self.vocab_size >= 258,
            "vocab_size",
            self.vocab_size,
            "at least 258 (256 bytes, 2 special tokens)",
        )

    def model_config(self, vocab_size: int) -> dict[str, Any]:
        """Return the shape-related part of the model's ``config.json``, with a vocabulary of ``vocab_size`` entries."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tie_embeddings,
        }
