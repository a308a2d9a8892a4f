"""slime's flags and the user's settings, as settings of a run."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rollover.errors import ConfigError
from rollover.integrations.slime.host import MILES, SLIME, Host
from rollover.integrations.slime.settings import slime_settings
from tests.integrations.slime.kit import LENGTH, arguments


def strategy(folder: Path, **changes: Any) -> Any:
    return slime_settings(arguments(folder, 1, **changes)).hosted.rollout.strategy


def test_flags_of_slime_are_the_settings_of_the_run(tmp_path: Path) -> None:
    settings = slime_settings(arguments(tmp_path, 3000, rollout_stop=["\n\n"]))
    rollout, servers = settings.hosted.rollout, settings.servers
    assert (rollout.rollout_batch_size, rollout.group_size, rollout.max_new_tokens) == (3, 4, LENGTH)
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop_strings) == (1.0, 1.0, 0, ("\n\n",))
    assert (settings.hosted.seed, rollout.unit) == (42, "group")
    assert (servers.urls, servers.max_running) == (("http://127.0.0.1:3000",), 64)
    assert servers.first_token_timeout_s == rollout.stall_timeout_s == 3600.0


def test_the_default_is_april_with_slimes_over_sampling(tmp_path: Path) -> None:
    found = strategy(tmp_path, rollover=None)
    assert (found.kind, found.over_sampling_batch_size) == ("april", 6)
    assert strategy(tmp_path, rollover=None, over_sampling_batch_size=3).over_sampling_batch_size is None


def test_options_of_our_own_are_read(tmp_path: Path) -> None:
    asked = {"weights_lag": 1, "reward_timeout_s": 5.0, "kept_checkpoints": 3, "rollout": {}}
    options = slime_settings(arguments(tmp_path, 1, rollover=asked)).options
    assert (options.weights_lag, options.reward_timeout_s, options.kept_checkpoints) == (1, 5.0, 3)
    assert asked.keys() == {"weights_lag", "reward_timeout_s", "kept_checkpoints", "rollout"} and asked["rollout"] == {}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (7, "expected the name of a strategy or a table"),
        ({"weights_lag": -1}, "weights_lag must be at least 0"),
        ({"kept_checkpoints": 0}, "kept_checkpoints must be at least 1"),
        ({"reward_timeout_s": "long"}, "reward_timeout_s: expected a number"),
        ({"weight_lag": 1}, "weight_lag: unknown key"),
        ({"rollout": {"temperature": 0.5}}, "--rollout-temperature sets it to 1.0"),
        ({"rollout": {"group_size": 8}}, "--n-samples-per-prompt sets it"),
        ({"rollout": 3}, "rollout must be a table"),
        ({"rollout": {"strategy": "aprill"}}, "did you mean 'april'"),
        ({"rollout": {"strategy": "bounded_async"}}, "--over-sampling-batch-size 6 has no effect"),
        ({"rollout": {"strategy": {"kind": "april", "over_sampling_batch_size": 9}}}, "leave one of them out"),
        ({"engine": {"kv_on_update": "keep"}}, "engine.kv_on_update has no effect"),
        ({"engine": {"max_running": [1]}}, "max_running"),
        ({"weights_lag": 1, "rollout": {"max_staleness": 1}}, "needs a staleness bound of 2, and has 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, asked: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        slime_settings(arguments(tmp_path, 1, rollover=asked))
    assert message in str(refusal.value)


@pytest.mark.parametrize("kind", ["bounded_async", "inflight"])
def test_strategies_that_decode_beside_the_trainer_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"'{kind}' decodes while the trainer trains"):
        slime_settings(arguments(tmp_path, 1, rollover=kind, over_sampling_batch_size=3))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("custom_generate_function_path", "my.generate", "decoded here"),
        ("group_rm", True, "one by one"),
        ("buffer_filter_path", "my.filter", "journal"),
        ("rollout_all_samples_process_path", "my.process", "not handed out"),
        ("use_rollout_routing_replay", True, "experts"),
        ("dynamic_sampling_filter_path", "my.filter", "except for slime.rollout.filter_hub"),
        ("rollout_top_p", 0.9, "before top-p"),
        ("rollout_top_k", 20, "before top-k"),
        ("multimodal_keys", {"image": "images"}, "can only be text"),
        ("update_weights_interval", 2, "one training step"),
        ("debug_rollout_only", True, "no label"),
        ("recompute_logprobs_via_prefill", True, "when it sampled"),
        ("lora_rank", 8, "name no adapter"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(tmp_path: Path, name: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        slime_settings(arguments(tmp_path, 1, **{name: value}))
    assert re.match(rf"--{name.replace('_', '-')} .*cannot be used", str(refusal.value)) and why in str(refusal.value)


def test_an_argument_that_slime_no_longer_has_is_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, 1)
    del args.sglang_router_ip
    with pytest.raises(ConfigError, match=r"sglang_router_ip is not set.*slime 0\.3"):
        slime_settings(args)


@pytest.mark.parametrize(
    ("host", "name", "tested"), [(SLIME, "slime", "0.3.1"), (MILES, "miles", "0.1.0"), (MILES, "miles-rl", "0.1.0")]
)
def test_another_version_is_refused_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: Host, name: str, tested: str
) -> None:
    found = {name: "0.4.0"}

    def version(asked: str) -> str:
        if asked not in found:
            raise metadata.PackageNotFoundError(asked)
        return found[asked]

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ConfigError, match=rf"{name} 0\.4\.0 is installed, and this was written for {tested[:3]}: "):
        slime_settings(arguments(tmp_path, 1), host)
    found[name] = tested
    slime_settings(arguments(tmp_path, 1), host)
