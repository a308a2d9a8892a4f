"""The settings of a run inside verl: its configuration, and the user's settings under the sampler's ``sampler_kwargs``.

Invariants: a setting of verl's that would have no effect is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from rollover.errors import ConfigError
from rollover.integrations.hosted import Given, HostedConfig, hosted_config, refuse_other_versions, split_options

SUPPORTED = ("0.9",)
"""Supported versions of verl, based on the wheels of 0.9.0 (2026-08) and 0.9.1 (2026-09) with their vLLM and SGLang
replicas. For Rollover they differ in two ways: at closed vLLM replicas of 0.9.1, calls wait at a gate of verl's rather
than vLLM's; and when an abort fails, 0.9.1 raises an error, which 0.9.0 only logs."""
SOURCE = "trainer.v1.sampler.sampler_kwargs.rollover"
"""The place where users write settings, for messages."""
SINGLE_TURN = "single_turn_agent"
"""The agent loop that Rollover replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlOptions:
    """Settings that only a run inside verl has.

    Example: ``VerlOptions(max_running=2048)`` is for four replicas of ``max_num_seqs`` 512.
    """

    max_running: int | None = None
    """Number of samples that all replicas together decode at the same time; ``max_num_seqs`` for each replica when left
    out."""
    response_timeout_s: float = 3600.0
    """Longest wait for a response, which arrives whole."""
    abort_timeout_s: float = 60.0
    """Longest wait for stopped responses to be handed over."""
    reward_timeout_s: float = 600.0
    """Longest wait for the reward of a response; its sample then fails."""

    def __post_init__(self) -> None:
        if self.max_running is not None and self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        for name in ("response_timeout_s", "abort_timeout_s", "reward_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0 seconds, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSettings:
    """All settings of a run inside verl, checked."""

    hosted: HostedConfig
    options: VerlOptions


def verl_settings(config: Any) -> VerlSettings:
    """Return the settings of a run with this configuration of verl. Raises ``ConfigError`` for a setting that would
    have no effect, and for settings that cannot work."""
    rollout, data, v1 = config.actor_rollout_ref.rollout, config.data, config.trainer.v1
    _refuse(config)
    options, asked = split_options(
        _plain((v1.sampler.get("sampler_kwargs") or {}).get("rollover")), VerlOptions, SOURCE
    )
    if "engine" in asked:
        raise ConfigError(f"{SOURCE}: engine has no effect, since verl's replicas decode: leave it out")
    if isinstance(table := asked.setdefault("rollout", {}), dict):
        table.setdefault("stall_timeout_s", options.response_timeout_s)
    given = {
        "seed": Given(int(data.get("seed") or 0), "data.seed"),
        "rollout.unit": Given("group", "verl"),
        "rollout.rollout_batch_size": Given(data.train_batch_size, "data.train_batch_size"),
        "rollout.group_size": Given(rollout.n, "actor_rollout_ref.rollout.n"),
        "rollout.max_new_tokens": Given(rollout.response_length, "actor_rollout_ref.rollout.response_length"),
        "rollout.temperature": Given(rollout.temperature, "actor_rollout_ref.rollout.temperature"),
        "rollout.stop_strings": Given([], "verl, whose replicas end responses only at tokens,"),
    }
    hosted = hosted_config(asked, given, source=SOURCE)
    if hosted.rollout.strategy.overlaps_training:
        raise ConfigError(
            f"{SOURCE}: strategy {hosted.rollout.strategy.title} decodes while the trainer trains, and verl's replicas"
            " sleep then: use 'april', 'rollover', 'concurrency', 'oversample' or 'sync'"
        )
    return VerlSettings(hosted=hosted, options=options)


def _plain(value: Any) -> Any:
    """Return a value of the configuration without the classes of the library that read it."""
    if hasattr(value, "items"):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(inner) for inner in value]


def verl_version() -> str:
    """Return the version of verl that is installed or on the path. Raises ``ConfigError`` if there is none."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        pass
    try:
        return str(import_module("verl").__version__)
    except (ImportError, AttributeError):
        raise ConfigError(
            "verl is neither installed nor on the path, or does not say its version: run this inside verl"
            f" {' or '.join(SUPPORTED)}"
        ) from None


def _refuse(config: Any) -> None:
    refuse_other_versions("verl", verl_version(), SUPPORTED)
    rollout, v1 = config.actor_rollout_ref.rollout, config.trainer.v1
    mode, name = v1.trainer_mode, rollout.get("name")
    loop = (rollout.get("agent") or {}).get("default_agent_loop") or SINGLE_TURN
    # SGLang replicas keep a token of the context free.
    longest = rollout.prompt_length + rollout.response_length + (name == "sglang")
    context = rollout.get("max_model_len") or longest
    of_rollout, of_v1 = "actor_rollout_ref.rollout", "trainer.v1"
    refused = (
        (mode != "sync", f"{of_v1}.trainer_mode={mode}", "its replicas decode beside the trainer: use sync"),
        (
            *(name == "trtllm", f"{of_rollout}.name={name}"),
            "its replicas ignore how many tokens a resumed response may still have: use vllm or sglang",
        ),
        (
            *(loop != SINGLE_TURN, f"{of_rollout}.agent.default_agent_loop={loop}"),
            "a prompt gets one response, without tools or turns",
        ),
        (
            *(context < longest, f"{of_rollout}.max_model_len={context}"),
            f"a prompt and a response of full length need {longest} tokens: raise it",
        ),
        (rollout.get("ignore_eos"), f"{of_rollout}.ignore_eos", "responses end at the end token: leave it out"),
        (
            *(not rollout.calculate_log_probs, f"{of_rollout}.calculate_log_probs=false"),
            "stale tokens need the log-probs that they were sampled with: set it to true",
        ),
        (rollout.top_p != 1, f"{of_rollout}.top_p={rollout.top_p}", "log-probs are those before top_p: use 1"),
        (rollout.top_k > 0, f"{of_rollout}.top_k={rollout.top_k}", "log-probs are those before top_k: use -1"),
        (
            *((config.algorithm.get("filter_groups") or {}).get("enable"), "algorithm.filter_groups.enable"),
            "groups are not filtered here: set it to false",
        ),
        (
            *(v1.sampler.get("sync_refill_failed_groups"), f"{of_v1}.sampler.sync_refill_failed_groups"),
            "Rollover replaces failed groups itself: leave it out",
        ),
        (
            *(rollout.get("enable_rollout_routing_replay"), f"{of_rollout}.enable_rollout_routing_replay"),
            "routed experts are not recorded: set it to false",
        ),
    )
    for is_set, setting, why in refused:
        if is_set:
            raise ConfigError(f"{setting} cannot be used with Rollover's replay buffer: {why}")
