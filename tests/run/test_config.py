from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollover.engine.embedded.config import EmbeddedConfig
from rollover.engine.servers.vllm.config import VLLMConfig
from rollover.errors import ConfigError
from rollover.rollout.strategies import OversampleConfig, SyncConfig
from rollover.run import building
from rollover.run.building import EXPERIMENTS, build_config, find, variant
from rollover.run.config import RunConfig
from rollover.run.dry_run import dry_run
from rollover.run.sections import EvalConfig, ModelConfig
from rollover.settings import schema, toml
from rollover.settings.plain import resolved
from rollover.settings.shape import hints_of, members_of, own_kinds, types_at

TEXT = """\
steps = 12
[model]
path = "models/tiny"
[[tasks.train]]
kind = "reasoning_gym"
name = "chain_sum"
config = { min_terms = 2, operators = ["+"] }
[rollout]
rollout_batch_size = 4
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_the_rewards_of_turns_weigh_what_the_reward_of_their_source_says(tmp_path: Path) -> None:
    """Without a reward of kind ``environment`` they are no part of the reward, and an advantage must not see them."""
    both = "rewards = [{ kind = 'environment', weight = 0.1 }, { kind = 'exact' }]"
    source = "[[tasks.train]]\nkind = 'jsonl'\npath = 'rows.jsonl'\nenvironment = { kind = 'class', factory = 'a:B' }\n"
    rewards = {"both": both, "one": "reward = { kind = 'environment' }", "none": "reward = { kind = 'exact' }"}
    tables = "".join(f"{source}name = '{name}'\n{line}\n" for name, line in rewards.items())
    config = build_config(written(tmp_path, TEXT.replace("[rollout]", f"{tables}[rollout]")))
    assert config.weighing_algorithm.turn_weights == {"chain_sum": 0, "both": 0.1, "one": 1, "none": 0}


def test_the_toml_of_a_config_loads_as_that_config(tmp_path: Path) -> None:
    config = build_config(written(tmp_path, TEXT), ["--rollout.strategy", "sync", "--sft.num_steps", "3"])
    assert build_config(written(tmp_path, toml.dumps(resolved(config)))) == config


def test_the_short_form_of_a_strategy_is_extended_like_its_table(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(f"{TEXT}strategy = 'oversample'\n")
    options = written(tmp_path, "extends = 'base.toml'\n[rollout.strategy]\nover_sampling_batch_size = 6\n")
    assert build_config(options).rollout.strategy == OversampleConfig(over_sampling_batch_size=6)
    other = written(tmp_path, "extends = 'base.toml'\n[rollout]\nstrategy = 'sync'\n")
    assert build_config(other).rollout.strategy == SyncConfig()


def test_a_kind_that_is_the_default_of_the_extended_file_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(f"{TEXT}[engine]\nmax_running = 3\n")
    assert build_config(written(tmp_path, "extends = 'base.toml'\nengine = 'embedded'\n")).engine.max_running == 3
    other = written(tmp_path, "extends = 'base.toml'\n[engine]\nkind = 'vllm'\nlaunch = true\n")
    assert build_config(other).engine.max_running == VLLMConfig(launch=True).max_running


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda file: file.stem)
def test_every_packaged_experiment_loads_by_its_name(file: Path) -> None:
    assert build_config(file.stem) == build_config(file)


def test_an_unknown_experiment_gets_the_nearest_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.toml").write_text(TEXT)
    monkeypatch.setattr(building, "EXPERIMENTS", tmp_path)
    assert find("quickstart") == tmp_path / "quickstart.toml"
    with pytest.raises(ConfigError, match=r"quikstart: neither a .toml file nor .*; did you mean 'quickstart'"):
        find("quikstart")


def test_a_file_of_the_user_goes_before_a_packaged_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text(TEXT)
    assert build_config("quickstart").steps == 12


def test_a_directory_given_as_config_is_told_how_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rollover train --resume {tmp_path}"):
        build_config(tmp_path)


@pytest.mark.parametrize(("model", "seen"), [("", "neither"), ('path = "x"\n[model.scratch]', "both")])
def test_a_run_has_exactly_one_model(tmp_path: Path, model: str, seen: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.toml:\d: model: give either .*, got {seen}"):
        build_config(written(tmp_path, f"[model]\n{model}"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": ()},
        {"k": (0,)},
        {"k": (2,), "samples_per_prompt": 1},
        {"num_prompts": 0},
        {"samples_per_prompt": 0},
        {"every_steps": -1},
        {"temperature": -0.1},
        {"temperature": 0.0, "samples_per_prompt": 2},
        {"max_new_tokens": 0},
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"eval.{next(reversed(wrong))}"):
        EvalConfig(**wrong)  # type: ignore[arg-type]


VARIANTS = """
[variants.sync.rollout]
strategy = "sync"
[variants.april]
seed = 3
rollout.max_staleness = 2
"""


def test_a_variant_is_the_config_with_its_changes_from_a_given_policy(tmp_path: Path) -> None:
    config = build_config(written(tmp_path, TEXT + VARIANTS))
    alone = build_config(written(tmp_path, TEXT))
    model = ModelConfig(path="policy")
    assert variant(config, "sync", model=Path("policy")) == replace(
        alone, model=model, rollout=replace(alone.rollout, strategy=SyncConfig())
    )
    assert variant(config, "april", model=Path("policy")) == replace(
        alone, model=model, seed=3, rollout=replace(alone.rollout, max_staleness=2)
    )


def test_a_mistake_in_a_variant_is_found_with_its_line_before_any_run(tmp_path: Path) -> None:
    text = f"{TEXT}[variants.sync.rollout]\nstratgy = 'sync'\n[variants.april]\n"
    with pytest.raises(ConfigError, match=r"run\.toml:11: rollout\.stratgy: unknown key; did you mean 'strategy'"):
        build_config(written(tmp_path, text))


ENGINE = TEXT + "[engine]\n"


def test_an_engine_without_a_kind_is_the_embedded_one(tmp_path: Path) -> None:
    assert build_config(written(tmp_path, TEXT)).engine == EmbeddedConfig()
    assert build_config(written(tmp_path, f"{ENGINE}max_running = 3")).engine == EmbeddedConfig(max_running=3)
    chosen = build_config(written(tmp_path, TEXT), ["--engine.kind", "vllm", "--engine.launch", "true"])
    assert chosen.engine == VLLMConfig(launch=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("launch = true", r"run\.toml:11: engine\.launch: unknown key of kind 'embedded'; it belongs to kind 'vllm'"),
        ("kind = 'vllm'", r"run\.toml:1[012]: engine\.urls or launch = true: .*got neither$"),
        ("kind = 'vllm'\nurls = ['http://u:p@h']", r"run\.toml:12: engine\.urls must look like 'http://host:8000'"),
        ("kind = 'vllm'\nurls = ['http://h']\nnum_servers = 2", r"run\.toml:13: engine\.num_servers has no effect"),
        ("kind = 'vllm'\nlaunch = true\n[trainer]\nreplay_routes = true", r"run\.toml:14: trainer\.replay_routes ="),
    ],
)
def test_a_mistake_in_an_engine_is_judged_by_its_kind(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(written(tmp_path, ENGINE + lines))


def test_a_variant_of_another_engine_takes_nothing_over_from_the_first(tmp_path: Path) -> None:
    text = f"{ENGINE}max_running = 3\n[variants.v.engine]\nkind = 'vllm'\nlaunch = true\n[variants.w.engine]\nblock_size_tokens = 8\n"
    config = build_config(written(tmp_path, text))
    assert variant(config, "v", model=Path("policy")).engine == VLLMConfig(launch=True)
    assert variant(config, "w", model=Path("policy")).engine == EmbeddedConfig(max_running=3, block_size_tokens=8)


def test_none_takes_an_inherited_table_away(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'extends = "quickstart"\nsft = "none"\n[model]\npath = "m"\nscratch = "none"\n[trainer.lora]\nrank = 4\n'
        '[variants.adapters]\n[variants.full.trainer]\nlora = "none"\n'
    )
    config = build_config(tmp_path / "run.toml")
    assert (config.sft, config.model.scratch) == (None, None) and config.trainer.lora is not None
    assert variant(config, "full", model=tmp_path).trainer.lora is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends = 3\n", "run.toml:1: extends: must be the name of a file or experiment, got 3"),
        ('seed = 1\nextends = "run.toml"\n', "run.toml:2: extends: run.toml extends this file in turn"),
        ('extends = "base/b.toml"\n', "b.toml:1: extends: ../run.toml extends this file in turn"),
        ('extends = "quickstrat"\n', "did you mean 'quickstart'"),
    ],
)
def test_what_cannot_be_extended_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "b.toml").write_text('extends = "../run.toml"')
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "base.toml:1: steps: expected a whole number"),
        ("", "base.toml:4: rollout.batch: unknown key"),
        ("", "base.toml:6: tasks.train.0.path: this key is required"),
        ("steps = true\n", "run.toml:2: steps: expected a whole number"),
        ("[[tasks.eval]]\nkind = 'jsonl'\n", "run.toml:2: tasks.eval.0.path: this key is required"),
    ],
)
def test_a_mistake_is_told_with_the_line_of_the_extended_file(tmp_path: Path, text: str, message: str) -> None:
    base = "steps = 'x'\n[rollout]\ngroup_size = 4\nbatch = 3\n\n[[tasks.train]]\nkind = 'jsonl'\nreward = 'exact'\n"
    (tmp_path / "base.toml").write_text(f"{base}[[tasks.eval]]\nkind = 'jsonl'\npath = 'a'\n")
    (tmp_path / "middle.toml").write_text("extends = 'base.toml'\nseed = 4\n")
    (tmp_path / "run.toml").write_text(f"extends = 'middle.toml'\n{text}")
    with pytest.raises(ConfigError) as caught:
        build_config(tmp_path / "run.toml")
    assert f"{tmp_path}/{message}" in str(caught.value)


def test_a_contradiction_between_two_files_is_told_with_the_line_that_differs(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[eval]\npatience = 3\nevery_steps = 20\n")
    (tmp_path / "run.toml").write_text("extends = 'base.toml'\n[eval]\nevery_steps = 0\n")
    with pytest.raises(ConfigError) as caught:
        build_config(tmp_path / "run.toml")
    assert f"{tmp_path}/run.toml:3: eval.patience counts evaluations" in str(caught.value)


@pytest.mark.parametrize("cut", [["--rollout.top_p", "0.9"], ["--rollout.top_k", "20"], ["--rollout.min_p", "0.1"]])
def test_an_engine_without_kept_sets_refuses_to_leave_tokens_out(tmp_path: Path, cut: list[str]) -> None:
    file = written(tmp_path, f"{ENGINE}kind = 'vllm'\nlaunch = true")
    assert build_config(file).engine == VLLMConfig(launch=True)
    with pytest.raises(ConfigError, match=r"engine\.kind 'vllm' does not return the tokens among which it drew"):
        build_config(file, cut)
    assert build_config(file, [*cut, "--rollout.accept_truncation_bias", "true"]).rollout.is_cut


@pytest.mark.parametrize(
    ("engine", "strategy", "message"),
    [
        ("vllm", "april", None),
        ("sglang", "sync", None),
        ("embedded", "inflight", None),
        ("sglang", "inflight", "rollout.strategy 'inflight' loads weights under running samples, but with"),
        ("keep", "april", "trainer.lora.publish 'adapter' does not work with engine.kv_on_update 'keep'"),
        ("swarm", "april", "trainer.lora.publish 'adapter' is for engines on this machine: workers of a swarm"),
    ],
)
def test_adapters_alone_are_for_engines_that_can_change_them(engine: str, strategy: str, message: str | None) -> None:
    keys = [f"--engine.kind={'vllm' if engine == 'keep' else engine}"]
    keys += ["--engine.launch=true"] if engine in ("vllm", "sglang", "keep") else []
    keys += ["--engine.kv_on_update=keep"] if engine == "keep" else []
    keys += [f"--rollout.strategy={strategy}", "--trainer.lora.rank=4", "--trainer.lora.publish=adapter"]
    if message is None:
        shape = build_config("quickstart", keys).published_adapters
        assert shape is not None and shape.rank == 4
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_config("quickstart", keys)


def test_a_deterministic_run_is_refused_with_servers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml:1: deterministic = true needs engine\.kind 'embedded'.*'vllm'"):
        build_config(written(tmp_path, f"deterministic = true\n{ENGINE}kind = 'vllm'\nlaunch = true"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "strategy april: 48 groups in flight at the start of a round, staleness at most 4 versions"),
        (("--rollout.strategy", "rollover", "--rollout.strategy.lag_target", "0.5"), "rollover: a mean lag of 0.5"),
        (("--rollout.strategy", "inflight"), "strategy inflight: as many samples in flight as fit"),
    ],
)
def test_the_plan_says_how_much_is_started(options: tuple[str, ...], said: str) -> None:
    assert any(said in line for line in dry_run(build_config("quickstart", list(options))))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ('url = "ftp://x"', "url must be http(s)://host:port/v1; a key belongs in reward.api_key_env"),
        ('url = "http://h/v1", workers = 1', "workers must be 0 for 'judge'"),
        ('url = "http://h/v1", colour = 1', "colour: unknown key"),
    ],
)
def test_a_key_of_one_of_several_rewards_is_named_with_its_place(tmp_path: Path, entries: str, message: str) -> None:
    rewards = f"rewards = [{{ kind = 'exact' }}, {{ kind = 'judge', model = 'm', {entries} }}]"
    file = written(tmp_path, f"[[tasks.train]]\nkind = 'jsonl'\nname = 'a'\npath = 'a.jsonl'\n{rewards}\n")
    with pytest.raises(ConfigError, match=re.escape(f"run.toml:5: tasks.train.0.rewards.1.{message}")):
        build_config(file)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trainer.lr = 1e-6", "trainer.learning_rate"),
        ("rollout.n = 8", "rollout.group_size"),
        ("rollout.batch_size = 8", "rollout.rollout_batch_size"),
        ("trainer.kl_coef = 0.1", "algorithm.kl_coef"),
        ("trainer.beta = 0.1", "algorithm.kl_coef"),
        ("model.name = 'm'", "model.path"),
        ("data.train_files = 'a.parquet'", "tasks.train"),
    ],
)
def test_the_names_that_other_frameworks_have_for_a_key_lead_to_ours(tmp_path: Path, line: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key; did you mean '{meant}'\?"):
        build_config(written(tmp_path, f"{line}\nmodel.path = 'm'"))


def test_other_names_lead_to_keys() -> None:
    assert [key for key in RunConfig.other_names if not types_at(RunConfig, key.split("."))] == []


def keys_with_a_default_that_can_be_unset(options: list[Any], path: tuple[str, ...] = ()) -> Iterator[list[str]]:
    """The overrides that unset each of them."""
    tables = [option for option in options if is_dataclass(option)]
    for table in tables:
        for f in fields(table):
            inner = members_of(hints_of(table)[f.name])
            has_default = f.default not in (None, MISSING) or f.default_factory is not MISSING
            unset = [f"--{'.'.join((*path, f.name))}", "none"]
            kind = [f"--{'.'.join(path)}.kind", own_kinds(table)[0]] if len(tables) > 1 else []
            if types.NoneType in inner and has_default:
                yield [*kind, *unset]
            for more in keys_with_a_default_that_can_be_unset(inner, (*path, f.name)):
                yield [*kind, *more]


@pytest.mark.parametrize(("section", "above", "as_many"), [("trainer", 61, "sft 1000"), ("sft", 1001, "trainer 60")])
def test_a_learning_rate_that_never_reaches_its_peak_is_told(section: str, above: int, as_many: str) -> None:
    other, num_steps = as_many.split()
    keys = [f"--{section}.warmup_steps", str(above), f"--{other}.warmup_steps", num_steps]
    constant = [f"--{section}.schedule", "constant", f"--{section}.final_lr_ratio", "0.1"]
    told = "\n".join(dry_run(build_config("quickstart", [*keys, *constant])))
    assert f"warning: {section}.warmup_steps ({above}) is above the {above - 1} steps" in told
    assert f"warning: {section}.final_lr_ratio has no effect" in told and f"warning: {other}." not in told


@pytest.mark.parametrize("key", ["trainer.device", "sft.device"])
def test_a_device_that_is_not_there_is_told_under_its_own_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} 'cuda:99' cannot be used"):
        dry_run(build_config("quickstart", [f"--{key}", "cuda:99"]))


def test_a_dry_run_of_fine_tuning_describes_that_alone() -> None:
    told = "\n".join(dry_run(build_config("quickstart"), "sft"))
    assert "warm-up: 1000 supervised steps" in told and "sft source" in told
    assert "each step trains" not in told and "engine" not in told and "train source" not in told


def test_a_source_that_is_only_taught_needs_no_reward(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    keys = ["--sft.sources", f"[{{ kind = 'jsonl', name = 'm', path = '{tmp_path}/m.jsonl' }}]"]
    assert "sft source m: jsonl, 1 rows" in dry_run(build_config("quickstart", keys))


def test_what_a_dry_run_prints_is_the_config_also_where_a_default_is_unset() -> None:
    found = list(keys_with_a_default_that_can_be_unset([RunConfig]))
    assert ["--engine.kind", "swarm", "--engine.admin", "none"] in found
    for overrides in (*found, ["--algorithm.group_filter", "none"], ["--algorithm.correction", "none"]):
        config = build_config("quickstart", overrides)
        printed = toml.dumps(resolved(config, for_file=True))
        assert schema.build(RunConfig, toml.parse(printed, "printed.toml")) == config
        assert schema.build(RunConfig, toml.parse(printed, "printed.toml")) != build_config("quickstart")


LETTERS = {"kind": "jsonl", "name": "letters", "path": "letters.jsonl"}
RANK = {"kind": "function", "function": "m:f", "group": True}


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ({"reward": {"kind": "exact"}}, {"algorithm": {"advantage": "component_std"}}, "source 'letters' has none"),
        (
            {"reward": RANK},
            {"rollout": {"unit": "sample"}, "algorithm": {"advantage": "history"}},
            "a reward of source 'letters' compares siblings",
        ),
        (
            {"reward": RANK},
            {"rollout": {"group_size": 1}, "algorithm": {"name": "reinforce++"}},
            "rollout.group_size is 1, but a reward of source",
        ),
    ],
)
def test_rewards_that_a_run_cannot_use_are_refused(source: dict[str, Any], more: dict[str, Any], message: str) -> None:
    data = {"model": {"path": "m"}, "tasks": {"train": [LETTERS | source]}, **more}
    with pytest.raises(ConfigError) as caught:
        schema.build(RunConfig, toml.Document(name="run.toml", data=data))
    assert message in str(caught.value)
