"""The two names that slime is given: a rollout function and a data source.

``--rollout-function-path rollover.integrations.slime.generate_rollout`` rolls out by Rollover's scheduler.
``--data-source-path rollover.integrations.slime.DataSource`` puts what is unfinished into slime's checkpoints. slime is
imported when they are first used.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
from argparse import Namespace
from typing import Any
from weakref import WeakKeyDictionary

from rollover.errors import ConfigError
from rollover.integrations.slime.resume import Beginning, SlimeProgress, beginning
from rollover.integrations.slime.run import SlimeCode, SlimeRun
from rollover.integrations.slime.samples import Sample
from rollover.integrations.slime.settings import slime_settings

logger = logging.getLogger(__name__)

_runs: WeakKeyDictionary[Any, SlimeRun] = WeakKeyDictionary()
"""The run over each data source; a process may have several."""


class DataSource:
    """Gives slime's prompts, and saves with slime's checkpoints what a rollout function of Rollover's has unfinished.

    The prompts are those of slime's own ``RolloutDataSource``, in its order.

    Example: with ``--data-source-path rollover.integrations.slime.DataSource``, a run that is killed goes on from its
    checkpoint with the same batches, and no prefix is decoded twice.

    Args:
        args: slime's.
    """

    def __init__(self, args: Namespace) -> None:
        from slime.rollout.data_source import RolloutDataSource

        self.args = args
        self.start: Beginning | None = None
        """Where the run goes on, once slime has said it."""
        self._prompts = RolloutDataSource(args)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups of samples without a response."""
        groups: list[list[Sample]] = self._prompts.get_samples(num_samples)
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raise ``ConfigError`` for groups to be put back: those of Rollover's rollout function never come here."""
        if samples:
            raise ConfigError(
                "rollover.integrations.slime.DataSource takes no samples back: use it with --rollout-function-path"
                " rollover.integrations.slime.generate_rollout, which keeps what is unfinished in its journal"
            )

    def save(self, rollout_id: int) -> None:
        """Save behind a rollout: the place in the prompts, and that the journal is needed from here on."""
        self._prompts.save(rollout_id)
        if (run := _runs.get(self)) is not None:
            run.saved(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on behind a rollout, -1 for the start.

        Raises:
            RunError: what is there does not belong to this run.
        """
        start = beginning(self.args.load, self.args.save, -1 if rollout_id is None else rollout_id)
        if start.restore is not None:
            self._prompts.load(start.restore)
        self.start = start

    def __len__(self) -> int:
        return len(self._prompts)


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return slime's output of a rollout.

    Args:
        args: slime's, with settings of Rollover's under ``rollover`` (``--custom-config-path``).
        data_source: of the prompts.
        evaluation: slime's own rollout function evaluates.

    Raises:
        RolloverError: the message says what to do.
    """
    from slime.rollout import sglang_rollout
    from slime.rollout.base_types import RolloutFnTrainOutput

    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    run = _runs.get(data_source)
    if run is None:
        run = _runs[data_source] = open_run(args, rollout_id, data_source)
        atexit.register(run.close)
    groups, metrics = run.rollout(rollout_id)
    if (path := getattr(args, "rollout_sample_filter_path", None)) is not None:
        from slime.utils.misc import load_function

        load_function(path)(args, groups)
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def open_run(args: Namespace, rollout_id: int, data_source: Any) -> SlimeRun:
    """Return the run over a data source whose first rollout in this process is ``rollout_id``."""
    settings = slime_settings(args)
    start: Beginning | None = None
    if isinstance(data_source, DataSource):
        start = data_source.start or beginning(args.load, args.save, rollout_id - 1)
    else:
        logger.warning(
            "what is unfinished is lost when slime ends: --data-source-path rollover.integrations.slime.DataSource puts"
            " it into the checkpoints"
        )
    if start is None or start.folder is None:
        progress = start.progress if start is not None else SlimeProgress(first_rollout=rollout_id)
        start = Beginning(folder=None, progress=progress, step=0, restore=None, position=0)
    return SlimeRun(args, settings, data_source, start, slime_code(args))


def slime_code(args: Namespace) -> SlimeCode:
    """Import what a run uses of slime."""
    from slime.rollout.rm_hub import async_rm
    from slime.rollout.sample_hooks import apply_rollout_sample_hooks
    from slime.utils.async_utils import get_async_loop
    from slime.utils.processing_utils import load_tokenizer
    from slime.utils.types import Sample

    async def judge(sample: Any) -> Any:
        sample = await apply_rollout_sample_hooks(args, sample, evaluation=False)
        if sample.reward is None:
            sample.reward = await async_rm(args, sample)
        return sample

    loop: asyncio.AbstractEventLoop = get_async_loop().loop
    tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=True)
    return SlimeCode(sample=Sample, tokenizer=tokenizer, judge=judge, loop=loop)
