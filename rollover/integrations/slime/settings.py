"""The settings of a run inside slime: its flags, and the user's table ``rollover`` in ``--custom-config-path``.

Invariants: a flag of slime that would have no effect is refused, and so is a setting that slime's flags determine.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollover.engine.servers.sglang.config import SGLangConfig
from rollover.errors import ConfigError
from rollover.integrations.hosted import Given, HostedConfig, hosted_config, split_options
from rollover.integrations.slime.host import MILES, SLIME, Host
from rollover.rollout.strategies import STRATEGIES
from rollover.rollout.strategies.config import OverSampling

SOURCE = "rollover, in the --custom-config-path file"
"""The place where users write settings, for messages."""
_RESPONSE_TIMEOUT_S = 3600.0
"""Answers arrive whole, so the wait for a response is the wait for its last token."""
_STALL_TIMEOUT_S = 3600.0
"""For the same reason no token is seen before the first response is complete."""
_ENGINE_KEYS = frozenset(
    {
        *("max_running", "connect_timeout_s", "first_token_timeout_s", "token_timeout_s", "busy_timeout_s"),
        *("control_timeout_s", "abort_timeout_s", "health_interval_s", "health_timeout_s"),
        *("rejoin_max_interval_s", "all_down_timeout_s"),
    }
)
"""The engine settings that have an effect on slime's servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeOptions:
    """Settings that only a run inside slime has.

    Example: ``SlimeOptions(weights_lag=1)`` is for ``train_async.py``.
    """

    weights_lag: int = 0
    """Number of batches that the servers' weights may be behind a rollout: 0 for ``train.py``, 1 for
    ``train_async.py``, which begins a rollout before the previous training step is done."""
    reward_timeout_s: float = 600.0
    """Longest wait for the reward of a response; its sample then fails."""
    kept_checkpoints: int = 2
    """Number of checkpoints, counted from the newest, from which the run can be resumed. The batches since the oldest
    of them stay in memory."""

    def __post_init__(self) -> None:
        if self.weights_lag < 0:
            raise ValueError(f"weights_lag must be at least 0, got {self.weights_lag}")
        if self.reward_timeout_s <= 0:
            raise ValueError(f"reward_timeout_s must be above 0 seconds, got {self.reward_timeout_s}")
        if self.kept_checkpoints < 1:
            raise ValueError(f"kept_checkpoints must be at least 1, got {self.kept_checkpoints}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlimeSettings:
    """All settings of a run inside slime, checked."""

    hosted: HostedConfig
    options: SlimeOptions

    @property
    def servers(self) -> SGLangConfig:
        """Return the settings for reaching slime's servers."""
        assert isinstance(self.hosted.engine, SGLangConfig), "the servers are given"
        return self.hosted.engine


def slime_settings(args: Namespace, host: Host = SLIME) -> SlimeSettings:
    """Return the settings of a run with these arguments of slime, or of another ``host`` of its kind. Raises
    ``ConfigError`` for an argument that would have no effect, and for settings that cannot work."""
    host.check_version()
    _refuse_what_has_no_effect(args, host)
    if host is MILES:
        _refuse_a_context_that_cuts(args)
    options, asked = split_options(getattr(args, "rollover", None), SlimeOptions, SOURCE)
    _add_strategy(asked, args)
    rollout = _table(asked, "rollout")
    rollout.setdefault("stall_timeout_s", _STALL_TIMEOUT_S)
    engine = _table(asked, "engine")
    if useless := sorted(engine.keys() - _ENGINE_KEYS):
        raise ConfigError(f"{SOURCE}: engine.{useless[0]} has no effect on the servers of {host.name}: leave it out")
    engine.setdefault("max_running", _argument(args, "sglang_server_concurrency"))
    engine.setdefault("first_token_timeout_s", _RESPONSE_TIMEOUT_S)
    hosted = hosted_config(asked, _given(args, host), source=SOURCE)
    strategy = hosted.rollout.strategy
    if strategy.overlaps_training:
        raise ConfigError(
            f"{SOURCE}: strategy {strategy.title} decodes while the trainer trains, and {host.name} changes weights"
            " only while its servers are idle: use 'april', 'rollover', 'concurrency', 'oversample' or 'sync'"
        )
    if not isinstance(hosted.engine, SGLangConfig) or not isinstance(hosted.engine.max_running, int):
        raise ConfigError(f"{SOURCE}: engine.max_running must be one number, the same for every server")
    bound, least = hosted.rollout.staleness_bound, strategy.staleness_needed(hosted.rollout) + options.weights_lag
    if options.weights_lag and bound < least:
        raise ConfigError(
            f"{SOURCE}: with weights_lag {options.weights_lag}, strategy {strategy.kind!r} needs a staleness bound of"
            f" {least}, and has {bound}: set rollout.max_staleness"
        )
    return SlimeSettings(hosted=hosted, options=options)


def learns_from_stale_tokens_unknowingly(args: Namespace) -> bool:
    """Return whether slime's loss treats tokens of older weights as tokens of the current ones."""
    corrections = ("use_tis", "use_rollout_logprobs", "mask_offpolicy_in_partial_rollout")
    return not any(getattr(args, name, False) for name in corrections)


def zero_signal_filter(args: Namespace, host: Host = SLIME) -> bool:
    """Return whether groups whose rewards are all equal are dropped, as the host's own filter does."""
    return getattr(args, "dynamic_sampling_filter_path", None) in host.filters


# -- what slime has decided --------------------------------------------------------------------------------------------


def _given(args: Namespace, host: Host) -> dict[str, Given]:
    stops = getattr(args, "rollout_stop", None) or ()
    top_k = getattr(args, "rollout_top_k", -1)
    bound = getattr(args, "max_weight_staleness", None)  # only miles has it
    return {
        **({} if bound is None else {"rollout.max_staleness": Given(bound, "--max-weight-staleness")}),
        "seed": Given(_argument(args, "rollout_seed"), "--rollout-seed"),
        "rollout.unit": Given("group", host.name),
        "rollout.rollout_batch_size": Given(_argument(args, "rollout_batch_size"), "--rollout-batch-size"),
        "rollout.group_size": Given(_argument(args, "n_samples_per_prompt"), "--n-samples-per-prompt"),
        "rollout.max_new_tokens": Given(_argument(args, "rollout_max_response_len"), "--rollout-max-response-len"),
        "rollout.temperature": Given(_argument(args, "rollout_temperature"), "--rollout-temperature"),
        "rollout.top_p": Given(getattr(args, "rollout_top_p", 1.0), "--rollout-top-p"),
        "rollout.top_k": Given(max(top_k, 0), "--rollout-top-k"),
        "rollout.stop_strings": Given([stops] if isinstance(stops, str) else [*stops], "--rollout-stop"),
        "engine.kind": Given("sglang", host.name),
        "engine.urls": Given(
            [f"http://{_argument(args, 'sglang_router_ip')}:{_argument(args, 'sglang_router_port')}"],
            f"{host.name}'s router",
        ),
    }


def _argument(args: Namespace, name: str) -> Any:
    if (value := getattr(args, name, None)) is None:
        known = " and ".join(f"{host.name} {version}" for host in (SLIME, MILES) for version in host.versions)
        raise ConfigError(
            f"the argument {name} is not set, and a rollout needs it: set it, or use a version for which this was"
            f" written ({known})"
        )
    return value


# -- what the user asks for --------------------------------------------------------------------------------------------


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    table = data.setdefault(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{SOURCE}: {name} must be a table of settings, got {table!r}")
    return table


def _add_strategy(asked: dict[str, Any], args: Namespace) -> None:
    """Start as many groups as ``--over-sampling-batch-size`` says, if the strategy starts more than a batch."""
    rollout = _table(asked, "rollout")
    strategy = rollout.get("strategy", {"kind": "april"})
    strategy = {"kind": strategy} if isinstance(strategy, str) else strategy
    launched = getattr(args, "over_sampling_batch_size", None) or 0
    if not isinstance(strategy, dict) or launched <= _argument(args, "rollout_batch_size"):
        return
    kind = strategy.get("kind", "april")
    if kind in STRATEGIES and not issubclass(STRATEGIES[kind], OverSampling):
        raise ConfigError(
            f"--over-sampling-batch-size {launched} has no effect with strategy {kind!r}, which decides itself how many"
            " groups it starts: leave it out"
        )
    if strategy.setdefault("over_sampling_batch_size", launched) != launched:
        raise ConfigError(
            f"{SOURCE}: rollout.strategy.over_sampling_batch_size is {strategy['over_sampling_batch_size']}, but"
            f" --over-sampling-batch-size is {launched}: leave one of them out"
        )
    rollout["strategy"] = strategy


# -- what is refused ---------------------------------------------------------------------------------------------------

_LORA = ("lora_rank", "lora_adapter_path")
_ADAPTERS = "requests name no adapter, so the base model would answer them: leave it out, or merge the adapter"
_UNSET = {
    "custom_generate_function_path": "samples are decoded here, one response to one prompt: leave it out",
    "group_rm": "responses are scored one by one, as each ends; give a reward for one sample",
    "buffer_filter_path": "unfinished groups are in Rollover's journal, not in the data source's buffer: leave it out",
    "rollout_all_samples_process_path": "groups that are not trained are not handed out: leave it out",
    "use_rollout_routing_replay": "routed experts are not recorded: leave it out",
    "use_rollout_indexer_replay": "indexer choices are not recorded: leave it out",
    "recompute_logprobs_via_prefill": "log-probs are the engine's own, from when it sampled: leave it out",
    "use_opd": "log-probs of a teacher are not asked for: leave it out",
    "debug_rollout_only": "its servers are given no weights, and so no label that tells their version: leave it out",
    "multi_lora": "requests name no adapter: leave it out",
    "multimodal_keys": "prompts can only be text: choose a dataset without images",
}
"""Arguments of slime that this rollout function would ignore, with the reason."""
_LIMITED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rollout_top_p", lambda p: p is not None and p != 1, "SGLang's log-probs are those before top-p: use 1"),
    ("rollout_top_k", lambda k: k is not None and k > 0, "SGLang's log-probs are those before top-k: use -1"),
    ("update_weights_interval", lambda n: n is not None and n != 1, "a version is one training step: use 1"),
)
"""The same for arguments of which some values have an effect, with the values that have none."""


def _refuse_a_context_that_cuts(args: Namespace) -> None:
    """Refuse a ``--rollout-max-context-len`` that could cut responses: miles shortens them to what it leaves of the
    context, and slime does not."""
    if (context := getattr(args, "rollout_max_context_len", None)) is None:
        return
    prompt, response = getattr(args, "rollout_max_prompt_len", None), _argument(args, "rollout_max_response_len")
    if prompt is None or prompt + response > context:
        raise ConfigError(
            f"--rollout-max-context-len {context} would have no effect: Rollover's rollout function does not shorten"
            f" responses to fit the context, so choose --rollout-max-prompt-len ({prompt}) and"
            f" --rollout-max-response-len ({response}) so that their sum is at most {context}"
        )


def _refuse_what_has_no_effect(args: Namespace, host: Host) -> None:
    chosen = getattr(args, "dynamic_sampling_filter_path", None)
    if chosen and chosen not in host.filters:
        raise ConfigError(
            "--dynamic-sampling-filter-path cannot be used with Rollover's rollout function, except for"
            f" {' and '.join(host.filters)} (it is {chosen!r}): choose one of these or leave it out"
        )
    unset = _UNSET if getattr(args, "lora_train_only", False) else _UNSET | dict.fromkeys(_LORA, _ADAPTERS)
    for name, is_set, why in (*((name, bool, why) for name, why in unset.items()), *_LIMITED):
        if is_set(value := getattr(args, name, None)):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value!r} cannot be used with Rollover's rollout function: {why}"
            )
    if not getattr(args, "rollout_global_dataset", True):
        raise ConfigError(
            "--disable-rollout-global-dataset cannot be used with Rollover's rollout function, which would have no"
            " prompts: leave it out"
        )
