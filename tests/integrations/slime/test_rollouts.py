"""Rollouts inside recorded slime over scripted servers: what the trainer is given, and what a restart makes of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollover.batch import WasteCause
from rollover.errors import ConfigError, DataError, EngineError, RunError
from rollover.frontier.replay import read_recorded
from rollover.integrations.slime import plugin
from rollover.report.metrics import read_metrics
from rollover.report.record import read_config
from rollover.rollout.events import GroupOpened
from rollover.rollout.journal import read_events
from tests.integrations.slime import recorded
from tests.integrations.slime.farm import Farm, OldSGLang
from tests.integrations.slime.kit import (
    BATCH,
    GROUP,
    KIT,
    LENGTH,
    Loop,
    arguments,
    journaled,
    known,
    shows_its_run,
    slime_over_servers,
    versions,
    write_model,
)
from tests.integrations.slime.recorded import Manager, Sample
from tests.speed import within


@pytest.fixture
def servers() -> Iterator[Farm]:
    with slime_over_servers() as made:
        yield made


def run_of(folder: Path, servers: Farm, **changes: Any) -> Loop:
    return Loop(servers, arguments(folder, servers.port, **changes))


def test_every_token_was_sampled_by_a_server_under_its_version(tmp_path: Path, servers: Farm) -> None:
    trained = run_of(tmp_path, servers).steps(range(6))
    sampled = servers.sampled
    for step in trained:
        assert len(step.groups) == BATCH and {len(group) for group in step.groups} == {GROUP}
        assert [g[0].index for g in step.groups] == sorted(g[0].index or 0 for g in step.groups)
        for sample in step.samples:
            response = sample.tokens[-sample.response_length :]
            assert sample.rollout_log_probs is not None and len(versions(sample)) == sample.response_length <= LENGTH
            for token, logprob, version in zip(response, sample.rollout_log_probs, versions(sample), strict=True):
                assert (f"weights {version + 1}", token, round(logprob, 9)) in sampled
                assert 0 <= step.rollout_id - version <= 4
            assert sample.weight_versions == [str(v + 1) for v, _ in sample.metadata["rollover"]["versions"]]
            if response[-1] == 0:
                assert sample.status is Sample.Status.COMPLETED
            else:
                assert sample.status is Sample.Status.TRUNCATED and sample.response_length == LENGTH


def test_unfinished_samples_go_on_in_the_next_rollout(tmp_path: Path, servers: Farm) -> None:
    trained = run_of(tmp_path, servers).steps(range(6))
    state, decoded = journaled(tmp_path), servers.decoded_tokens
    resumed = [s for step in trained for s in step.samples if s.metadata["rollover"]["resumes"]]
    assert resumed and all(
        s.metadata["start_rollout_id"] == versions(s)[0] for s in resumed if len(set(versions(s))) > 1
    )
    seen = Counter(s.index for step in trained for s in step.samples)
    assert len(seen) == 6 * BATCH * GROUP and set(seen.values()) == {1}
    state.ledger.check()
    tokens = state.ledger.tokens
    assert tokens.trained == sum(s.response_length for step in trained for s in step.samples)
    assert tokens.decoded == decoded and not tokens.wasted.total()


def test_groups_that_are_whole_beyond_the_batch_lead_the_next_one(tmp_path: Path, servers: Farm) -> None:
    """slime's own function drops groups that end in the same turn as the last group that it needs."""
    loop = run_of(tmp_path, servers, rollout_max_response_len=2)
    surplus: list[set[Any]] = []
    for rollout_id in range(4):
        trained = {group[0].group_index for group in loop.step(rollout_id).groups}
        assert not surplus or surplus[-1] <= trained
        surplus.append({entry.prompt.columns["group_index"] for entry in journaled(tmp_path).ledger.ready.values()})
    assert any(surplus)


def test_metrics_say_how_stale_the_batch_is(tmp_path: Path, servers: Farm) -> None:
    last = run_of(tmp_path, servers).steps(range(3))[-1]
    lags = [2 - version for sample in last.samples for version in versions(sample)]
    assert last.metrics["rollover/staleness/mean"] == pytest.approx(sum(lags) / len(lags))
    assert last.metrics["rollover/staleness/max"] == max(lags)
    assert last.metrics["rollover/staleness/weights"] == 0.0


@pytest.mark.parametrize("streams", [False, True])
def test_caches_and_drafts_of_the_servers_reach_the_hosts_metrics(
    tmp_path: Path, servers: Farm, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    emit = OldSGLang._emit

    def with_drafts(worker: OldSGLang, running: Any, ids: Any, meta: dict[str, Any]) -> None:
        if meta["finish_reason"] is not None:
            meta |= {"spec_accept_token_num": 3, "spec_draft_token_num": 7, "spec_verify_ct": 2}
            said.append(meta)
        emit(worker, running, ids, meta)

    monkeypatch.setattr(OldSGLang, "_emit", with_drafts)
    for worker in servers.workers:
        worker.incremental = streams
    loop = run_of(tmp_path, servers)
    for rollout_id in range(3):
        said.clear()
        samples = loop.step(rollout_id).samples
        caches, drafts = [s.prefix_cache_info for s in samples], [s.spec_info for s in samples]
        assert sum(info.cached_tokens for info in caches) == sum(meta["cached_tokens"] for meta in said) > 0
        assert sum(info.total_prompt_tokens for info in caches) == sum(meta["prompt_tokens"] for meta in said)
        assert sum(info.completion_token_num for info in drafts) == sum(meta["completion_tokens"] for meta in said)
        assert sum(info.spec_accept_token_num for info in drafts) == 3 * len(said)
        assert sum(info.spec_draft_token_num for info in drafts) == 7 * len(said)
        assert sum(info.spec_verify_ct for info in drafts) == 2 * len(said)


def test_its_run_is_reported_and_simulated(tmp_path: Path, servers: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path)
    loop = run_of(tmp_path, servers, hf_checkpoint=str(model.relative_to(tmp_path)))
    loop.steps(range(5))
    before = servers.decoded_tokens
    output = loop.manager.eval(4)
    assert output.data["held out"]["rewards"] == [0.5] and servers.decoded_tokens == before, "evaluation stays slime's"
    loop.step(5)
    rows = read_metrics(tmp_path / "ckpt/rollover")
    assert [row.step for row in rows] == [0, 1, 2, 3, 4], "a step ends when the next one begins"
    for row in rows:
        assert 0.0 < row.values["time/rollout_s"] <= row.values["time/step_s"]
    shows_its_run(tmp_path / "ckpt/rollover")  # also while it is at work
    assert read_config(tmp_path / "ckpt/rollover")["meta"]["model"] == str(model)
    found = read_recorded(tmp_path / "ckpt/rollover")
    assert found.takes_turns and found.scenario.max_running == 2 * loop.manager.args.sglang_server_concurrency


@pytest.mark.parametrize("reward", ["never_for_odd_places", "late_for_odd_places"])
def test_a_failed_sibling_does_not_move_the_baseline(tmp_path: Path, servers: Farm, reward: str) -> None:
    changes = {"custom_rm_path": f"{KIT}.{reward}", "rollover": {"reward_timeout_s": within(0.5)}}
    (step,) = run_of(tmp_path, servers, **changes).steps([0])
    for number, group in enumerate(step.groups):
        failed = [s for s in group if s.status is Sample.Status.FAILED]
        assert [s.index % GROUP for s in failed if s.index is not None] == [1]
        others = [float(s.reward) for s in group if s not in failed]
        assert failed[0].reward == pytest.approx(sum(others) / len(others))
        place = number * GROUP + group.index(failed[0])
        assert step.rewards[place] == pytest.approx(0.0) and step.loss_masks[place] == [0]
        assert all(sum(mask) for i, mask in enumerate(step.loss_masks[number * GROUP :][:GROUP]) if i != 1)


def test_stale_tokens_are_left_out_where_slime_is_told_so(tmp_path: Path, servers: Farm) -> None:
    trained = run_of(tmp_path, servers, mask_offpolicy_in_partial_rollout=True).steps(range(4))
    untrained = journaled(tmp_path).ledger.tokens.wasted[WasteCause.MASKED_STALE]
    stale = 0
    for step in trained:
        for sample, mask in zip(step.samples, step.loss_masks, strict=True):
            assert mask == [int(version == step.rollout_id) for version in versions(sample)]
            stale += mask.count(0)
    assert 0 < untrained <= stale
    assert untrained == sum(mask.count(0) for step in trained[:-1] for mask in step.loss_masks)


def test_groups_of_equal_rewards_are_left_out_if_slime_asks_for_it(tmp_path: Path, servers: Farm) -> None:
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    loop = run_of(tmp_path, servers, dynamic_sampling_filter_path=path, rollout_max_response_len=3)
    trained = loop.steps(range(3))
    dropped = sum(journaled(tmp_path).ledger.dropped.values())
    assert dropped > 0
    assert all(len({s.reward for s in group}) > 1 for step in trained for group in step.groups)


def test_a_worker_that_dies_in_a_rollout_costs_no_batch(tmp_path: Path, servers: Farm) -> None:
    loop = run_of(tmp_path, servers)
    loop.step(0)
    servers.kill(1)
    trained = [loop.manager.generate(1)]
    servers.workers.pop()
    servers.router.urls.pop()
    servers.update_weights()
    trained.append(loop.step(2))
    journaled(tmp_path).ledger.check()
    assert [len(step.samples) for step in trained] == [BATCH * GROUP] * 2
    assert not any(s.status is Sample.Status.FAILED for step in trained for s in step.samples)


# -- labels -----------------------------------------------------------------------------------------------------------


def test_weights_that_were_not_updated_are_refused_until_they_are(tmp_path: Path, servers: Farm) -> None:
    loop = run_of(tmp_path, servers)
    loop.manager.generate(0)
    with pytest.raises(EngineError, match="still say '1' at the rollout of batch 1, where '2' was due"):
        loop.manager.generate(1)
    servers.update_weights()
    loop.step(1)


def test_a_rollout_begun_before_a_training_step_is_one_version_behind(tmp_path: Path, servers: Farm) -> None:
    """The order of ``train_async.py``: generate 0, generate 1, train 0, update, generate 2, train 1, update."""
    changes = {"rollover": {"weights_lag": 1, "rollout": {"max_staleness": 4}}}
    loop = run_of(tmp_path, servers, **changes)
    trained = [loop.manager.generate(0), loop.manager.generate(1)]
    for rollout_id in (2, 3):
        servers.update_weights()
        trained.append(loop.manager.generate(rollout_id))
    newest = [max(version for s in step.samples for version in versions(s)) for step in trained]
    assert all(version <= bound for version, bound in zip(newest, [0, 0, 1, 2], strict=True))
    assert [step.metrics["rollover/staleness/weights"] for step in trained] == [0.0, 1.0, 1.0, 1.0]


# -- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_behind", [0, 1, 3])
def test_a_killed_run_goes_on_with_the_same_batches(tmp_path: Path, killed_behind: int, servers: Farm) -> None:
    args = arguments(tmp_path, servers.port)
    loop = Loop(servers, args)
    first = [loop.step(0), loop.step(1, saves=True), *loop.steps(range(2, 2 + killed_behind))]
    decoded = servers.decoded_tokens
    loop.kill()
    again = Loop(servers, args, start=2)
    for step in first[2:]:
        assert [known(s) for s in again.step(step.rollout_id).samples] == [known(s) for s in step.samples]
    assert servers.decoded_tokens == decoded, "what is in the journal is not decoded again"
    rest = again.steps(range(2 + killed_behind, 6))
    journaled(tmp_path).ledger.check()
    everything = [*first, *rest]
    seen = Counter(s.index for step in everything for s in step.samples)
    assert len(seen) == 6 * BATCH * GROUP and set(seen.values()) == {1}
    assert all(0 <= step.rollout_id - v <= 4 for step in everything for s in step.samples for v in versions(s))
    assert all(len(versions(s)) == s.response_length for step in rest for s in step.samples)
    fresh = [s for step in rest for s in step.samples if s.metadata["rollover"]["resumes"]]
    assert any(versions(s)[0] < 2 + killed_behind <= versions(s)[-1] for s in fresh), "prefixes went on"
    opened = [e for _, e in read_events(tmp_path / "ckpt/rollover/journal.sqlite") if isinstance(e, GroupOpened)]
    untouched = recorded.RolloutDataSource(args).get_samples(len(opened))
    assert [event.prompt.text for event in opened] == [group[0].prompt for group in untouched], "prompts went on"
    assert [event.prompt.columns["indices"] for event in opened] == [[s.index for s in group] for group in untouched]


class Process:
    """A process of slime that can be killed."""

    def __init__(self, folder: Path, servers: Farm, *, start: int = 0) -> None:
        command = [sys.executable, "-m", "tests.integrations.slime.killed", str(folder), str(servers.port), str(start)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.servers = servers
        servers.restart()
        servers.update_weights()

    def begin(self, rollout_id: int, *, saves: bool = False) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{json.dumps([rollout_id, saves])}\n")
        self.child.stdin.flush()

    def step(self, rollout_id: int, *, saves: bool = False) -> list[Any]:
        self.begin(rollout_id, saves=saves)
        assert self.child.stdout is not None
        samples: list[Any] = json.loads(self.child.stdout.readline())
        self.servers.update_weights()
        return samples

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate(timeout=within(30.0))


def test_a_process_that_is_killed_in_a_rollout_costs_what_was_on_its_way(tmp_path: Path, servers: Farm) -> None:
    process = Process(tmp_path, servers)
    try:
        first = [process.step(0), process.step(1, saves=True), process.step(2)]
        before, give_up_s = servers.decoded_tokens, time.monotonic() + within(60.0)
        process.begin(3)
        while servers.decoded_tokens < before + 40:
            assert process.child.poll() is None and time.monotonic() < give_up_s
    finally:
        process.kill()
    args = arguments(tmp_path, servers.port)
    servers.restart()
    again = Loop(servers, args, start=2)
    rest = [[list(known(s)) for s in again.step(rollout_id).samples] for rollout_id in range(2, 6)]
    state = journaled(tmp_path)
    assert json.loads(json.dumps(rest[0])) == first[2]
    seen = Counter(sample[0] for samples in [*first[:2], *rest] for sample in samples)
    assert len(seen) == 6 * BATCH * GROUP and set(seen.values()) == {1}
    state.ledger.check()


def test_a_table_of_rewards_reaches_slime_whole_and_again_after_a_restart(tmp_path: Path, servers: Farm) -> None:
    changes = {"custom_rm_path": f"{KIT}.vowels_and_length", "reward_key": "vowels"}
    args = arguments(tmp_path, servers.port, **changes)
    loop = Loop(servers, args)
    first = loop.step(0)
    assert all(sample.reward["length"] == sample.response_length for sample in first.samples)
    loop.kill()
    again = Loop(servers, args).step(0)
    assert [s.reward for s in again.samples] == [s.reward for s in first.samples]


def test_a_checkpoint_without_the_place_in_the_prompts_is_refused(tmp_path: Path, servers: Farm) -> None:
    """slime's own data source would begin at the first prompt again, without a word."""
    args = arguments(tmp_path, servers.port)
    loop = Loop(servers, args)
    loop.step(0, saves=True)
    loop.kill()
    (tmp_path / "ckpt/rollout/global_dataset_state_dict_0.pt").unlink()
    with pytest.raises(RunError, match="the place in the prompts after rollout 0 is not in"):
        Loop(servers, args, start=1)


def test_other_prompts_than_those_of_the_run_are_refused(tmp_path: Path, servers: Farm) -> None:
    args = arguments(tmp_path, servers.port)
    loop = Loop(servers, args)
    loop.step(0, saves=True)
    loop.kill()
    args.prompt_data = str(Path(args.prompt_data).rename(tmp_path / "others.jsonl"))
    with pytest.raises(RunError, match=r"began with prompt data .*prompts\.jsonl, but now it is .*others\.jsonl"):
        Loop(servers, args, start=1).step(1)


@pytest.mark.parametrize(
    "changes", [{"data_source_path": "slime.rollout.data_source.RolloutDataSource"}, {"save": None, "load": None}]
)
def test_a_run_that_cannot_resume_keeps_no_trained_batch(
    tmp_path: Path, servers: Farm, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    loop = run_of(tmp_path, servers, **changes)
    trained = loop.steps(range(3))
    ledger = plugin._runs[loop.manager.data_source]._feed._open.driver.ledger
    assert list(ledger.batches) == [2]
    assert len(trained[1].samples) == BATCH * GROUP
    is_ours = "data_source_path" not in changes
    assert is_ours is ("--data-source-path rollover.integrations.slime.DataSource" not in caplog.text)
    assert not (tmp_path / "ckpt/rollover").exists()


# -- what the user is told --------------------------------------------------------------------------------------------


def test_a_loss_blind_to_lag_is_warned_of(tmp_path: Path, servers: Farm, caplog: pytest.LogCaptureFixture) -> None:
    run_of(tmp_path, servers, use_tis=False).step(0)
    assert "--use-tis corrects for it" in caplog.text


def test_a_reward_model_that_slime_does_not_have_ends_the_run_at_once(tmp_path: Path, servers: Farm) -> None:
    loop = run_of(tmp_path, servers, custom_rm_path=None)
    with pytest.raises(DataError, match="responses cannot be scored: Rule-based RM type is not specified"):
        loop.step(0)


def test_prompts_that_no_server_takes_end_the_run_with_the_servers_words(tmp_path: Path, servers: Farm) -> None:
    for worker in servers.workers:
        worker.fails = lambda input_ids: True
    loop = run_of(tmp_path, servers)
    with pytest.raises((EngineError, DataError), match="not this one"):
        loop.step(0)


def test_samples_are_not_put_back(tmp_path: Path, servers: Farm) -> None:
    source = run_of(tmp_path, servers).manager.data_source
    source.add_samples([])
    with pytest.raises(ConfigError, match="takes no samples back"):
        source.add_samples([[Sample()]])


def test_two_runs_in_a_process_share_nothing(tmp_path: Path, servers: Farm) -> None:
    loops = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        loops.append(Manager(arguments(tmp_path / name, servers.port)))
    servers.update_weights()
    first, second = (manager.generate(0) for manager in loops)
    servers.update_weights()
    third, fourth = (manager.generate(1) for manager in loops)
    for name in ("one", "two"):
        journaled(tmp_path / name).ledger.check()
    for steps in ((first, third), (second, fourth)):
        seen = Counter(s.index for step in steps for s in step.samples)
        assert len(seen) == 2 * BATCH * GROUP and set(seen.values()) == {1}


# -- slime's hooks ----------------------------------------------------------------------------------------------------


def test_hooks_and_filters_of_slime_are_called(tmp_path: Path, servers: Farm) -> None:
    changes = {"rollout_sample_hook_path": [f"{KIT}.marked"], "rollout_sample_filter_path": f"{KIT}.last_removed"}
    args = arguments(tmp_path, servers.port, **changes)
    loop = Loop(servers, args)
    first = loop.step(0)
    loop.kill()
    again = Loop(servers, args).step(0)
    for step in (first, again):
        assert all(sample.metadata["marked"] == sample.response_length for sample in step.samples)
        assert [s.remove_sample for s in step.groups[0]] == [False, False, False, True]
    assert [s.reward for s in again.samples] == [s.reward for s in first.samples]
