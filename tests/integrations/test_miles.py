"""miles: slime's rollouts behind a class. Its records as of 0.1.0 (2026-08-21), in our own words."""

from __future__ import annotations

import ast
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollover.errors import ConfigError
from rollover.integrations.miles import RolloutFn
from rollover.integrations.slime import plugin
from rollover.integrations.slime.host import MILES, SLIME
from rollover.integrations.slime.settings import slime_settings, zero_signal_filter
from tests.integrations.slime import recorded
from tests.integrations.slime.farm import Farm
from tests.integrations.slime.kit import BATCH, GROUP, arguments, journaled, known, slime_over_servers
from tests.speed import within

FUNCTION = "rollover.integrations.miles.RolloutFn"
SOURCE = "rollover.integrations.miles.DataSource"


class Sample(recorded.AnySample):
    """miles's sample has no method that appends a response."""

    def validate(self) -> None:
        assert len(self.tokens) >= self.response_length
        assert self.loss_mask is not None and len(self.loss_mask) == self.response_length
        assert self.rollout_log_probs is not None and len(self.rollout_log_probs) == self.response_length

    @property
    def oldest_weight_version(self) -> int:
        return min(int(v) for v in self.weight_versions)


class DataSource(recorded.RolloutDataSource):
    def get_samples(self, num_samples: int) -> list[list[Any]]:
        return [
            [Sample(s.group_index, s.index, s.prompt, label=s.label, metadata=dict(s.metadata)) for s in group]
            for group in super().get_samples(num_samples)
        ]


def training(rollout_id: int) -> Namespace:
    """The input of a rollout."""
    return Namespace(rollout_id=rollout_id, evaluation=False)


def evaluating(rollout_id: int, hf_dir: str | None = None) -> Namespace:
    return Namespace(rollout_id=rollout_id, hf_dir=hf_dir, evaluation=True)


class InferenceRolloutFn:
    """miles's own, of which evaluations remain."""

    def __init__(self, input: Namespace) -> None:
        self.input = input

    async def __call__(self, input: Namespace) -> str:
        assert input.evaluation
        return f"evaluation behind rollout {input.rollout_id}"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    """The servers of a miles, whose modules are recorded slime's but for three."""
    with slime_over_servers() as made:
        modules = {name: vars(module) for name, module in sys.modules.items() if name.partition(".")[0] == "slime"}
        modules["slime.utils.types"] = {"Sample": Sample}
        modules["slime.rollout.data_source"] = {"RolloutDataSource": DataSource}
        modules["slime.rollout.inference_rollout"] = {}
        modules["slime.rollout.inference_rollout.inference_rollout_common"] = {"InferenceRolloutFn": InferenceRolloutFn}
        for name, contents in modules.items():
            monkeypatch.setitem(sys.modules, f"miles{name.removeprefix('slime')}", module := ModuleType(name))
            vars(module).update(contents)
        yield made


def flags(folder: Path, servers: Farm, **changes: Any) -> Namespace:
    """The arguments of a run with Rollover's rollout function and data source."""
    return arguments(folder, servers.port, rollout_function_path=FUNCTION, data_source_path=SOURCE, **changes)


class Process:
    """A process of miles: its constructor input once, then an input for each rollout."""

    def __init__(self, args: Namespace, *, start: int = 0) -> None:
        source = recorded.load_function(args.data_source_path)(args)
        source.load(start - 1)
        self.source = source
        self.function = recorded.load_function(args.rollout_function_path)(Namespace(args=args, data_source=source))

    def generate(self, rollout_id: int) -> list[Sample]:
        output = self.function(training(rollout_id))
        samples = [sample for group in output.samples for sample in group]
        for sample in samples:
            sample.validate()
        assert len(samples) == BATCH * GROUP
        return samples


def test_its_own_staleness_flag_is_the_bound(tmp_path: Path, servers: Farm) -> None:
    process = Process(flags(tmp_path, servers, max_weight_staleness=1))
    for rollout_id in range(4):
        servers.update_weights()
        oldest = min(s.oldest_weight_version for s in process.generate(rollout_id))
        assert oldest >= rollout_id
    changes = {"max_weight_staleness": 1, "rollover": {"rollout": {"max_staleness": 3}}}
    with pytest.raises(ConfigError, match="--max-weight-staleness sets it to 1"):
        Process(flags(tmp_path, servers, **changes)).generate(0)


def test_evaluation_stays_mileses(tmp_path: Path, servers: Farm) -> None:
    process = Process(flags(tmp_path, servers))
    output = sys.modules["miles.utils.async_utils"].run(process.function(evaluating(3)))  # type: ignore[attr-defined]
    assert output == "evaluation behind rollout 3"


def test_an_evaluation_beside_training_is_no_pause_of_it(tmp_path: Path, servers: Farm) -> None:
    """One of a snapshot, on servers of its own."""
    process = Process(flags(tmp_path, servers))
    servers.update_weights()
    process.generate(0)
    steps = plugin._runs[process.source]._steps
    for asked, pauses in ((evaluating(0, hf_dir="snapshot"), False), (evaluating(0), True)):
        before = steps._underway.aside_s  # type: ignore[union-attr]
        sys.modules["miles.utils.async_utils"].run(process.function(asked))  # type: ignore[attr-defined]
        assert (steps._underway.aside_s > before) is pauses  # type: ignore[union-attr]


def test_a_checkpoint_is_saved_in_the_middle_of_the_next_rollout(tmp_path: Path, servers: Farm) -> None:
    """Its ``train_async.py`` does so: its rollout manager answers other calls while a rollout runs."""
    changes = {"rollover": {"weights_lag": 1, "rollout": {"max_staleness": 4}}}
    args = flags(tmp_path, servers, **changes)
    process = Process(args)
    servers.update_weights()
    steps = [process.generate(0), process.generate(1)]
    assert any(sample.metadata["rollover"]["resumes"] for sample in steps[1])
    servers.update_weights()
    draws, drawn = process.source.get_samples, threading.Event()

    def announced(num_samples: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = draws(num_samples)
        drawn.set()
        return groups

    process.source.get_samples = announced
    with ThreadPoolExecutor(1) as others:
        rollout = others.submit(process.generate, 2)
        assert drawn.wait(within(30.0))
        process.source.save(1)
        steps.append(rollout.result(60.0))
    process.source.close()
    process.source.close()
    again = Process(args, start=2)
    servers.restart_count()
    servers.update_weights()
    assert [known(s) for s in again.generate(2)] == [known(s) for s in steps[2]]  # type: ignore[arg-type]
    steps.append(again.generate(3))
    journaled(tmp_path).ledger.check()
    seen = Counter(sample.index for step in steps for sample in step)
    assert len(seen) == 4 * BATCH * GROUP and set(seen.values()) == {1}


def test_a_context_that_would_cut_responses_is_refused(tmp_path: Path) -> None:
    changes = {"rollout_max_context_len": 4000, "rollout_max_response_len": 3000}
    with pytest.raises(ConfigError, match="--rollout-max-context-len 4000 would have no effect"):
        slime_settings(arguments(tmp_path, 1, rollout_max_prompt_len=3999, **changes), MILES)
    slime_settings(arguments(tmp_path, 1, rollout_max_prompt_len=1000, **changes), MILES)
    slime_settings(arguments(tmp_path, 1, rollout_max_prompt_len=3999, **changes))  # slime's own cuts nothing either


def test_the_base_model_does_not_answer_for_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-rank 8 cannot be used"):
        slime_settings(arguments(tmp_path, 1, lora_rank=8), MILES)
    slime_settings(arguments(tmp_path, 1, lora_rank=8, lora_train_only=True), MILES)


@pytest.mark.parametrize("path", MILES.filters)
def test_its_own_filter_of_groups_without_signal_is_known(tmp_path: Path, path: str) -> None:
    args = arguments(tmp_path, 1, dynamic_sampling_filter_path=path)
    slime_settings(args, MILES)
    assert zero_signal_filter(args, MILES)
    with pytest.raises(ConfigError, match=r"except for slime\.rollout.*\(it is 'miles\."):
        slime_settings(args)


def test_no_message_names_slime_where_the_trainer_may_be_miles() -> None:
    package = Path(plugin.__file__).parent
    expected = {"slime", "slime.json", "slime/", *SLIME.filters}
    for file in package.glob("*.py"):
        tree = ast.parse(file.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert "slime" not in node.value or node.value in expected, (file, node.value)


def test_the_class_where_miles_wants_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="MILES_USE_LEGACY_ROLLOUT_V1"):
        RolloutFn(Namespace(), 0, object(), evaluation=False)


def test_the_strategy_is_an_argument() -> None:
    parser = ArgumentParser()
    RolloutFn.add_arguments(parser)
    assert parser.parse_args([]).rollover is None
    assert parser.parse_args(["--rollover", "rollover"]).rollover == "rollover"


def test_a_tree_without_a_module_that_is_needed_is_named(tmp_path: Path, servers: Farm) -> None:
    process = Process(flags(tmp_path, servers))
    del sys.modules["miles.rollout.rm_hub"]
    with pytest.raises(ConfigError, match=r"miles\.rollout\.rm_hub does not exist in the miles that is installed: "):
        process.generate(0)
