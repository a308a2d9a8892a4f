"""A run inside slime: the feed over slime's servers, prompts and rewards, one batch for each of its rollouts.

::

    generate_rollout(args, rollout_id, data_source)
        servers.begin ──▶ label ──▶ version ──▶ feed.publish ──▶ feed.batch ──▶ servers.end ──▶ slime's samples
    DataSource.save(rollout_id)
        feed.saved, slime.json

Invariants: slime's rollout ``first_rollout + s`` is batch ``s``, which is on disk before slime has it; slime
gets its servers back idle, even when the rollout fails.
"""

from __future__ import annotations

import logging
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rollover.batch import Batch, Group, WasteCause
from rollover.clock import SystemClock
from rollover.errors import ConfigError, RunError
from rollover.hf.hub import located, resolve_model
from rollover.hf.tokenizer import stop_token_ids
from rollover.integrations.feed import FeedParts
from rollover.integrations.hosted import check_capabilities
from rollover.integrations.record import HostedRun
from rollover.integrations.slime.host import Host, Sample
from rollover.integrations.slime.labels import LabelLine
from rollover.integrations.slime.resume import Beginning
from rollover.integrations.slime.rewards import SlimeScorer
from rollover.integrations.slime.samples import (
    account_for_usage,
    account_for_versions,
    failed_sample,
    new_sample,
    respond,
)
from rollover.integrations.slime.servers import LentServers, served_model, workers
from rollover.integrations.slime.settings import SlimeSettings, learns_from_stale_tokens_unknowingly, zero_signal_filter
from rollover.integrations.slime.source import GivesGroups, SlimeSource
from rollover.integrations.steps import opened
from rollover.rollout.events import Event, GroupDropped
from rollover.rollout.scheduler import GroupRules
from rollover.types import SampleId, Trajectory

logger = logging.getLogger(__name__)


class SlimeRun:
    """One run. Its methods are for the thread of slime's rollout manager. Raises ``RolloverError`` for settings,
    servers or a journal that cannot be used.

    Args:
        groups: slime's data source.
        start: the point from which it resumes.
    """

    def __init__(
        self, args: Namespace, settings: SlimeSettings, groups: GivesGroups, start: Beginning, host: Host
    ) -> None:
        self._args = args
        self._host = host
        self._settings = settings
        self._code = code = host.code(args)
        self._progress = start.progress
        self._can_resume = start.folder is not None
        self._masks_stale = bool(getattr(args, "mask_offpolicy_in_partial_rollout", False))
        self._line: LabelLine | None = None
        self._stops = _stops(args, code.tokenizer)
        if settings.hosted.rollout.stop_strings and not Path(args.hf_checkpoint).is_dir():
            raise ConfigError(
                "--rollout-stop needs the tokenizer's files, and --hf-checkpoint is not a folder on this machine:"
                f" {args.hf_checkpoint!r}"
            )
        self._source = SlimeSource(
            groups, self._encode, position=start.position, group_size=settings.hosted.rollout.group_size
        )
        self._scorer = SlimeScorer(
            args, respond=self._respond, judge=code.judge, loop=code.loop, timeout_s=settings.options.reward_timeout_s
        )
        self._clock = SystemClock()
        with ExitStack() as stack:
            folder = start.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollover-")))
            self._record = HostedRun(
                folder,
                settings.hosted,
                host=f"{host.name} {host.versions[-1]}",
                resume=True,
                facts=_facts(args),
                remedy="resume it with --load",
            )
            stack.enter_context(self._record)
            self._progress.write(folder)
            self._feed, self._steps = opened(
                stack, self._record, settings.hosted, self._open_parts, step=start.step, observer=self._happened
            )
            self._record.note(model=located(args.hf_checkpoint))
            self._closing = stack.pop_all()
        if learns_from_stale_tokens_unknowingly(args) and settings.hosted.rollout.staleness_bound > 0:
            logger.warning(
                "tokens of older weights are trained as if the current ones had sampled them, since neither --use-tis"
                " nor --use-rollout-logprobs nor --mask-offpolicy-in-partial-rollout is set: their log-probs are in"
                " rollout_log_probs, so --use-tis corrects for it"
            )

    def close(self) -> None:
        """Close the feed and release the run's directory. Does nothing when called again."""
        self._closing.close()

    # -- what slime calls ------------------------------------------------------------------------------------

    def rollout(self, rollout_id: int) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the groups of a rollout in order of their samples' indices, and its metrics.

        Raises:
            EngineError: the servers disagree about their weights, have not received new ones, or fail.
            RunError: another rollout is next.
        """
        step = self._progress.step(rollout_id)
        if step != (due := self._feed.next_version):
            raise RunError(
                f"rollout {rollout_id} is asked for, but rollout {self._progress.first_rollout + due} is next: each"
                " batch is handed out once and in order"
            )
        self._steps.begin(step)
        try:
            version = self._begin(step)
            batch = self._feed.batch(step)
        except BaseException:
            with suppress(Exception):  # the first failure determines the message
                self._end()
            raise
        self._end()
        samples = self._feed.run(self._scorer.take(batch.trajectories), None, "judge samples from before a restart")
        groups = sorted((self._group(group, samples, version) for group in batch.groups), key=lambda g: g[0].index)
        account_for_usage(groups[0][0], self._servers.usage)
        metrics = self._steps.handed_out(batch, self._masked(batch, version))
        metrics["staleness/weights"] = float(step - version)
        return groups, {f"rollover/{name}": value for name, value in metrics.items()}

    def _begin(self, step: int) -> int:
        """Borrow the servers for a rollout. Returns the version of their weights."""
        config = self._settings.servers
        label = self._feed.run(self._servers.begin(), 8 * config.control_timeout_s, "reach the servers")
        self._line = self._line or LabelLine.first(step=step, label=label, max_lag=self._settings.options.weights_lag)
        version = self._line.version(label, step=step)
        self._steps.trained_before(version)
        if not self._can_resume:
            self._feed.saved(version)
        self._feed.publish(version, lambda: self._servers.serves(version))
        self._steps.published()
        return version

    def _masked(self, batch: Batch, version: int) -> dict[WasteCause, int]:
        """Return the number of tokens in a batch that slime receives masked, by cause."""
        if not self._masks_stale:
            return {}
        segments = (s for group in batch.groups for trajectory in group.trajectories for s in trajectory.segments)
        return {WasteCause.MASKED_STALE: sum(len(s.token_ids) for s in segments if s.policy_version != version)}

    def _end(self) -> None:
        config = self._settings.servers
        timeout_s = 4 * (config.abort_timeout_s + config.control_timeout_s)
        self._feed.run(self._servers.end(), timeout_s, "give the servers back")

    def save(self, rollout_id: int, save_groups: Callable[[], None]) -> None:
        """Record that slime has trained a rollout and saved a checkpoint, along with the state of its data source that
        ``save_groups`` saves. This may happen while the next rollout runs."""
        self._steps.trained_before(self._progress.step(rollout_id) + 1)
        self._progress = self._progress.saved(rollout_id, self._source.save(save_groups))
        self._feed.saved(self._progress.oldest_step(self._settings.options.kept_checkpoints))
        self._progress.write(self._record.path)  # the journal now has all groups that were drawn

    def set_aside(self) -> AbstractContextManager[None]:
        """Exclude slime's evaluation within this context from a step's time."""
        return self._steps.set_aside()

    # -- the parts -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _open_parts(self) -> AsyncIterator[FeedParts]:
        config, args = self._settings.servers, self._args
        model = served_model(args.hf_checkpoint, getattr(args, "sglang_context_length", None))
        num_workers = len(await workers(config))
        self._servers = LentServers(config, model, self._clock, num_workers=num_workers)
        check_capabilities(self._settings.hosted, self._servers.capabilities)
        try:
            yield FeedParts(
                engine=self._servers,
                source=self._source,
                scorer=self._scorer,
                stop_token_ids=self._stops,
                rules=GroupRules(keep_group=_has_signal) if zero_signal_filter(args, self._host) else None,
            )
        finally:
            await self._servers.close()

    def _happened(self, event: Event) -> None:
        if isinstance(event, GroupDropped):
            self._scorer.forget(event.group_id)

    # -- samples ---------------------------------------------------------------------------------------------

    def _group(self, group: Group, samples: Mapping[SampleId, Sample], version: int) -> list[Sample]:
        scored: dict[int, Sample] = {}
        for trajectory in group.trajectories:
            sample = samples[trajectory.sample_id]
            account_for_versions(
                sample,
                trajectory,
                version=version,
                first_rollout=self._progress.first_rollout,
                masks_stale=self._masks_stale,
            )
            scored[trajectory.sample_id.index] = sample
        whole = []
        for place in range(self._settings.hosted.rollout.group_size):
            if (sample := scored.get(place)) is None:
                sample = new_sample(self._code.sample, group.prompt, place)
                failed_sample(sample, [*scored.values()], self._args, filler=self._stops[0])
            whole.append(sample)
        return whole

    def _respond(self, trajectory: Trajectory) -> Sample:
        sample = new_sample(self._code.sample, trajectory.prompt, trajectory.sample_id.index)
        respond(sample, trajectory, self._args, decode=self._decode, label=self._label)
        return sample

    def _label(self, version: int) -> str:
        assert self._line is not None, "samples are scored within rollouts"
        return self._line.label(version)

    def _encode(self, text: str) -> Sequence[int]:
        return list(self._code.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, token_ids: Sequence[int]) -> str:
        skips = bool(getattr(self._args, "rollout_skip_special_tokens", False))
        return str(self._code.tokenizer.decode([*token_ids], skip_special_tokens=skips))


def _stops(args: Namespace, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: the model's, which SGLang knows too, and the user's."""
    asked = getattr(args, "rollout_stop_token_ids", None) or ()
    own = [asked] if isinstance(asked, int) else [*asked]
    folder = resolve_model(args.hf_checkpoint, weights=False)
    return tuple(dict.fromkeys([*stop_token_ids(folder, tokenizer), *own]))


def _facts(args: Namespace) -> dict[str, Any]:
    """Return the facts besides the settings that must be the same in a resumed run."""
    names = ("hf_checkpoint", "prompt_data", "input_key", "label_key", "rollout_shuffle", "apply_chat_template")
    return {name: getattr(args, name, None) for name in names}


def _has_signal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) > 0
