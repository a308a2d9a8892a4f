"""One file describes one run: ``RunConfig`` composes the configs of the components and adds nothing to them.

What is loaded here is complete and valid: every key is known, typed and in range, and no two sections
contradict each other. It is never changed afterwards. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rollover.algorithms.config import AlgorithmConfig, resolve
from rollover.algorithms.registry import ADVANTAGES
from rollover.cluster.config import ClusterConfig
from rollover.engine.base import Capabilities
from rollover.engine.config import EngineDemands
from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.kinds import AnyEngineConfig
from rollover.errors import ConfigError, nearest
from rollover.report.config import LoggingConfig
from rollover.rollout.config import RolloutConfig
from rollover.rollout.old_config import upgraded
from rollover.rollout.strategies import STRATEGIES
from rollover.rollout.strategies.config import NumRunning
from rollover.rollout.strategy import OnFull
from rollover.settings import toml
from rollover.settings.changes import Changeable, Fixed, OnResume
from rollover.settings.schema import ByKind, build, parse_overrides
from rollover.swarm.config import SwarmConfig
from rollover.tasks.config import TasksConfig
from rollover.tasks.old_config import without_keys_of_other_kinds
from rollover.tasks.sources import SourceConfig
from rollover.trainer.config import CheckpointConfig, ScratchConfig, SFTConfig, TrainerConfig
from rollover.weights.adapters import AdapterShape

_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
"""The packaged experiments, each ``NAME.toml``."""


RUN_FILES = (
    *("config.json", "config.partial", "journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "metrics.jsonl"),
    *(
        "tensorboard",
        "model",
        "model-untrained",
        "checkpoints",
        "weights",
        "logs",
        "staging",
        "report.html",
        "lock",
        "wandb",
    ),
)
"""The entries of a run directory. No variant may take one of these names for its own directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The policy: an existing model, or one built from scratch. Give exactly one of the two."""

    path: Changeable[str | None] = None
    """Hugging Face folder or hub id of a Llama, Qwen2 or Qwen3 model. A resumed run may load it from another place."""
    scratch: ScratchConfig | None = None
    """A small decoder with random weights, and a tokenizer trained for the tasks."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.scratch is None):
            seen = "neither" if self.path is None else "both"
            raise ValueError(f"give either model.path or a table model.scratch, got {seen}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig(SFTConfig):
    """Supervised fine-tuning on worked solutions: before the first step, or alone with ``rollover sft``."""

    sources: tuple[Annotated[SourceConfig, ByKind()], ...] = ()
    """Sources of the worked solutions; `tasks.train` when left out."""
    bare_answers: float = 0.0
    """Share of the examples that show only the last line of the solution. The model then learns to guess as well as to
    work things out, which leaves reinforcement learning something to choose between."""

    def __post_init__(self) -> None:
        SFTConfig.__post_init__(self)
        if not 0 <= self.bare_answers < 1:
            raise ValueError(f"sft.bare_answers must lie in [0, 1), got {self.bare_answers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out prompts, before the first step, during training and after the last."""

    every_steps: int = 0
    """Training steps between evaluations; 0 evaluates only before the first step and after the last."""
    num_prompts: Fixed[int] = 200
    """Prompts from each evaluation source. With 200 prompts, an accuracy of 50 % has a standard error of 3.5 points."""
    samples_per_prompt: int = 1
    """Responses to each prompt; at least the largest value of ``k``."""
    k: tuple[int, ...] = (1,)
    """Values of k for which to report pass@k, the probability that at least one of k responses is right."""
    temperature: float = 1.0
    """1 measures the policy that is being trained; 0 is greedy decoding, which needs one sample per prompt."""
    max_new_tokens: int | None = None
    """Token budget of a response; `rollout.max_new_tokens` when left out."""

    def __post_init__(self) -> None:
        for key, least in (
            ("every_steps", 0),
            ("num_prompts", 1),
            ("samples_per_prompt", 1),
            ("temperature", 0),
        ):
            if getattr(self, key) < least:
                raise ValueError(f"eval.{key} must be at least {least}, got {getattr(self, key)}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"eval.max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not self.k or min(self.k) < 1 or max(self.k) > self.samples_per_prompt:
            raise ValueError(
                f"eval.k must list numbers from 1 to eval.samples_per_prompt ({self.samples_per_prompt}), "
                f"got {list(self.k)}"
            )
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"eval.samples_per_prompt is {self.samples_per_prompt}, but at eval.temperature 0 "
                "all samples of a prompt are the same: raise the temperature or take one sample"
            )


def _stays_when_scheduled(before: RunConfig, after: RunConfig) -> str | None:
    if before.trainer.schedule == "constant":
        return None
    return f"the learning rate of trainer.schedule {before.trainer.schedule!r} depends on it"


def _stays_undone(before: RunConfig, after: RunConfig) -> str | None:
    return "what has been done was not repeatable" if after.deterministic else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a whole run.

    Example:
        ``load("quickstart", ["--steps", "5"]).steps`` is 5.
    """

    model: ModelConfig
    seed: int = 0
    """Seeds everything random: prompts, sampling noise and weights built from scratch."""
    steps: Annotated[
        int, OnResume(_stays_when_scheduled, "may change on resume, unless the learning rate has a schedule")
    ] = 100
    """Number of training steps; each trains one batch and produces one policy version."""
    deterministic: Annotated[bool, OnResume(_stays_undone, "may change to `false` on resume")] = False
    """Makes the run repeatable bit for bit on one machine (CPU), even across a restart; slower."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    engine: Annotated[AnyEngineConfig | SwarmConfig, ByKind()] = field(default_factory=EmbeddedConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sft: WarmupConfig | None = None
    """Supervised warm-up before the first step; no warm-up when left out."""
    cluster: Changeable[ClusterConfig | None] = None
    """A Ray cluster on which the trainer's ranks and engine servers run; only this machine is used when left out."""
    checkpoint: Changeable[CheckpointConfig] = field(default_factory=CheckpointConfig)
    eval: Changeable[EvalConfig] = field(default_factory=EvalConfig)
    logging: Changeable[LoggingConfig] = field(default_factory=LoggingConfig)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Runs to compare, by name; each table lists the changes to this config, as in ``[variants.april.rollout]``
    followed by ``strategy = "april"``. All variants start from the same initial policy."""

    @property
    def warmup_sources(self) -> tuple[SourceConfig, ...]:
        """Return the sources whose solutions a warm-up teaches, and for which a tokenizer from scratch is made."""
        return (self.sft and self.sft.sources) or self.tasks.train

    @property
    def published_adapters(self) -> AdapterShape | None:
        """Return the shape of the adapters that engines are given alone; ``None`` where they get full weights."""
        lora = self.trainer.lora
        return None if lora is None or lora.publish == "merged" else AdapterShape(rank=lora.rank, targets=lora.targets)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        self._check_variants()
        if found := list(_contradictions(self)):
            raise ValueError("; ".join(found))

    def _check_variants(self) -> None:
        for name in self.variants:
            if not _VARIANT_NAME.fullmatch(name) or name in RUN_FILES:
                raise ValueError(
                    f"variants: {name!r} cannot name a variant, whose run gets a directory of that name: take up to 64"
                    f" letters, digits, '_', '-' and '.', and none of {', '.join(RUN_FILES)}"
                )
        if len(self.variants) == 1:
            raise ValueError(
                f"variants: {min(self.variants)!r} is alone, and a comparison needs two: add another variant"
                " (an empty table is this config unchanged), or write its changes into the config"
            )


def check_context(config: RunConfig, max_context_tokens: int, keys: Sequence[str] = ("rollout", "eval")) -> None:
    """Raise ``ConfigError`` when the longest admissible prompt and response of one of ``keys`` do not fit the model or
    engine."""
    for key in keys:
        needed = context_needed(config, key)
        budget = needed - config.tasks.max_prompt_tokens
        if needed > max_context_tokens:
            raise ConfigError(
                f"tasks.max_prompt_tokens ({config.tasks.max_prompt_tokens}) and {key}.max_new_tokens ({budget}) make"
                f" {needed} tokens, but the model's context holds {max_context_tokens}: lower one of the two, or use a"
                " model or server with a longer context"
            )


def context_needed(config: RunConfig, key: str) -> int:
    """Return the tokens of the longest admissible prompt and response of the section ``key``."""
    budget: int = getattr(config, key).max_new_tokens or config.rollout.max_new_tokens
    return config.tasks.max_prompt_tokens + budget


def check_capabilities(config: RunConfig, capabilities: Capabilities) -> None:
    """Raise ``ConfigError`` when the engine lacks a capability that the strategy needs."""
    if config.rollout.strategy.needs_in_flight_update and not capabilities.in_flight_update:
        raise ConfigError(_lacking(config))
    if config.rollout.strategy.overlaps_training and capabilities.is_colocated:
        raise ConfigError(_asleep_in_training(config))


def _lacking(config: RunConfig) -> str:
    others = ", ".join(kind for kind, strategy in STRATEGIES.items() if not strategy.needs_in_flight_update)
    return (
        f"rollout.strategy {config.rollout.strategy.kind!r} loads weights under running samples, which this engine"
        f" (engine.kind {config.engine.kind!r}) cannot: set engine.kv_on_update = 'keep', or choose a strategy that"
        f" does without: {others}"
    )


def _asleep_in_training(config: RunConfig) -> str:
    others = ", ".join(kind for kind, strategy in STRATEGIES.items() if strategy.builds.on_full is not OnFull.KEEP)
    return (
        f"rollout.strategy {config.rollout.strategy.kind!r} generates while the trainer trains, but with"
        " engine.colocated = true the engine sleeps meanwhile: choose a strategy that stops for the trainer"
        f" ({others}), or set engine.colocated = false"
    )


def _contradictions(config: RunConfig) -> Iterator[str]:
    rollout, engine = config.rollout, config.engine
    can = engine.declared
    algorithm = resolve(config.algorithm)
    advantage = ADVANTAGES[algorithm.advantage]
    single = "group_size is 1" if rollout.group_size == 1 else "unit is 'sample'" if rollout.unit == "sample" else ""
    if single and advantage.compares == "siblings":
        yield (
            f"rollout.{single}, but the advantage {algorithm.advantage!r} of algorithm {algorithm.name!r} compares"
            " siblings: change that, or use algorithm.advantage = 'history' or algorithm.name = 'reinforce++'"
        )
    if single and algorithm.group_filter == "zero_signal":
        yield f"algorithm.group_filter 'zero_signal' would drop every group: rollout.{single}; change one of them"
    if advantage.compares == "history" and not single:
        yield (
            f"algorithm.advantage {algorithm.advantage!r} is for samples that are trained one by one: set rollout.unit"
            " = 'sample', or use an advantage that compares siblings"
        )
    if config.trainer.mini_batches > rollout.rollout_batch_size * rollout.num_siblings:
        yield (
            f"trainer.mini_batches ({config.trainer.mini_batches}) is above rollout.rollout_batch_size"
            f" ({rollout.rollout_batch_size}): each mini-batch needs a group"
        )
    if rollout.strategy.needs_in_flight_update and not can.in_flight_update:
        yield _lacking(config)
    if rollout.strategy.overlaps_training and can.is_colocated:
        yield _asleep_in_training(config)
    if config.deterministic and rollout.strategy.overlaps_training:
        yield (
            f"deterministic = true cannot hold with rollout.strategy {rollout.strategy.kind!r}, which trains and"
            " generates at the same time: use one that stops for the trainer, such as 'april'"
        )
    if config.cluster is not None and config.trainer.num_devices == 1 and not config.cluster.num_engines:
        yield (
            "[cluster] has nothing to run: set trainer.num_devices above 1 or cluster.engines above 0, or leave the"
            " section out"
        )
    yield from engine.refusals(
        EngineDemands(
            strategy=rollout.strategy.kind,
            staleness_bound=rollout.staleness_bound,
            in_flight_update=rollout.strategy.needs_in_flight_update,
            deterministic=config.deterministic,
            adapters=config.published_adapters is not None,
            on_cluster=config.cluster is not None and bool(config.cluster.num_engines),
        )
    )
    if not can.cuts_logprobs and (rollout.top_p < 1 or rollout.top_k > 0):
        yield (
            f"rollout.top_p ({rollout.top_p:g}) and rollout.top_k ({rollout.top_k}) cut the distribution, but"
            f" engine.kind {engine.kind!r} reports log-probs from before the cut: set them to 1 and 0"
        )
    running = rollout.strategy.num_running if isinstance(rollout.strategy, NumRunning) else None
    if running is not None and can.max_running is not None and running > can.max_running:
        yield (
            f"rollout.strategy.num_running ({running}) is above engine.max_running"
            f" ({can.max_running}): raise the latter or lower the former"
        )
    if can.max_context_tokens is not None:
        yield from _too_long(config, can.max_context_tokens, "engine.max_context_tokens")
    if config.model.scratch is not None:
        yield from _too_long(config, config.model.scratch.max_position, "model.scratch.max_position")


def _too_long(config: RunConfig, context: int, key: str) -> Iterator[str]:
    needed = config.tasks.max_prompt_tokens + config.rollout.max_new_tokens
    if needed > context:
        yield (
            f"rollout.max_new_tokens ({config.rollout.max_new_tokens}) and tasks.max_prompt_tokens"
            f" ({config.tasks.max_prompt_tokens}) make {needed} tokens, above {key} ({context}):"
            " lower one of the first two or raise the last"
        )


def load(config: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a TOML file or a packaged experiment, with ``--section.key value`` overrides applied.

    A file may begin with ``extends = "..."``, another file (seen from its own folder) or a packaged experiment: it then
    says only what differs.

    Raises ``ConfigError`` listing every mistake with its line.
    """
    document = _read(find(config), str(config), ())
    loaded = build(RunConfig, document, parse_overrides(overrides))
    for name in loaded.variants:
        _build_variant(loaded, name, document)
    return loaded


def _read(file: Path, name: str, extending: tuple[Path, ...]) -> toml.Document:
    """Read a file together with the one it extends; line numbers are those of ``file`` itself."""
    document = toml.read(file, file.name if file.parent == EXPERIMENTS else name)
    if "extends" not in document.data:
        return document
    data = dict(document.data)
    base = data.pop("extends")
    where = f"{document.name}:{document.lines.get(('extends',), 1)}: extends"
    if not isinstance(base, str):
        raise ConfigError(f"{where}: must be the name of a file or experiment, got {base!r}")
    beside = file.parent / base
    below = find(beside if beside.is_file() else base)
    if below in (*extending, file):
        raise ConfigError(f"{where}: {base} extends this file in turn; break the circle")
    inherited = _read(below, str(below), (*extending, file))
    return toml.Document(name=document.name, data=_merged(inherited.data, data), lines=document.lines)


def variant(config: RunConfig, name: str, *, model: Path) -> RunConfig:
    """Return the config of the variant ``name``, which starts from the policy in ``model``."""
    made = _build_variant(config, name, toml.Document(name=f"variants.{name}", data={}))
    return dataclasses.replace(made, model=ModelConfig(path=str(model)), sft=None)


def _build_variant(config: RunConfig, name: str, written: toml.Document) -> RunConfig:
    """Build the variant ``name``; messages refer to ``written``."""
    data = _merged({**resolved(config), "variants": {}}, config.variants[name])
    head = ("variants", name)
    lines = {path[2:]: line for path, line in written.lines.items() if path[:2] == head and path != head}
    return build(RunConfig, toml.Document(name=written.name, data=data, lines=lines))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge table by table; a table whose ``kind`` changes inherits nothing. A string in place of a table is its
    kind."""
    merged = dict(base)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(change, str):
            change = {"kind": change}
        elif isinstance(old, str) and isinstance(change, Mapping):
            old = {"kind": old}
        if isinstance(old, Mapping) and isinstance(change, Mapping) and change.get("kind") in (None, old.get("kind")):
            merged[key] = _merged(old, change)
        else:
            merged[key] = change
    return merged


def restore(data: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Invert ``resolved`` and apply overrides; ``source`` names the data in messages. Configs stored by earlier
    versions are accepted."""
    stored = _upgraded(without_keys_of_other_kinds(data))
    stored["variants"] = {name: _upgraded(changes) for name, changes in (stored.get("variants") or {}).items()}
    return build(RunConfig, toml.Document(name=source, data=stored), parse_overrides(overrides))


def _upgraded(stored: Mapping[str, Any]) -> dict[str, Any]:
    rollout = stored.get("rollout")
    return {**stored, "rollout": upgraded(rollout)} if isinstance(rollout, Mapping) else dict(stored)


def find(config: str | Path) -> Path:
    """Return the file that ``config`` names: a path, or a packaged experiment without ``.toml``."""
    path = Path(config)
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except OSError as error:
        raise ConfigError(f"{config}: cannot be looked for: {error.strerror}") from None
    if path.suffix == ".toml" or is_file:
        return path
    if is_dir:
        raise ConfigError(f"{config} is a directory; to go on with a run: rollover train --resume {config}")
    packaged = {file.stem: file for file in EXPERIMENTS.glob("*.toml")}
    if str(config) not in packaged:
        hint = nearest(str(config), packaged)
        raise ConfigError(f"{config}: neither a .toml file nor a packaged experiment{hint}")
    return packaged[str(config)]


def resolved(config: Any) -> dict[str, Any]:
    """Return a config with all its defaults as plain dicts, lists and scalars; unset keys are ``None``."""
    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def plain(value: Any) -> Any:
    """Return a value of a config as ``resolved`` has it."""
    if dataclasses.is_dataclass(value):
        return resolved(value)
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
