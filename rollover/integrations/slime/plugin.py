"""The two names that slime is given: a rollout function and a data source.

``--rollout-function-path rollover.integrations.slime.generate_rollout`` generates rollouts with Rollover's scheduler.
``--data-source-path rollover.integrations.slime.DataSource`` adds unfinished rollouts to slime's checkpoints. slime is
imported when they are first used. ``rollover.integrations.miles`` has the same for miles.
"""

from __future__ import annotations

import atexit
import logging
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from rollover.errors import ConfigError, RunError
from rollover.integrations.slime.host import SLIME, Host, Sample
from rollover.integrations.slime.resume import Beginning, SlimeProgress, beginning
from rollover.integrations.slime.run import SlimeRun
from rollover.integrations.slime.settings import slime_settings

logger = logging.getLogger(__name__)

_runs: WeakKeyDictionary[Any, SlimeRun] = WeakKeyDictionary()
"""The run of each data source; a process may have several."""


class DataSource:
    """Provides slime's prompts, and saves the unfinished rollouts of Rollover's rollout function with slime's
    checkpoints.

    The prompts come from slime's own ``RolloutDataSource``, in its order.

    Example: with ``--data-source-path rollover.integrations.slime.DataSource``, a run that is killed resumes from its
    checkpoint with the same batches, and no prefix is decoded twice.
    """

    host: ClassVar[Host] = SLIME

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.start: Beginning | None = None
        """The point from which the run resumes, once slime has reported it."""
        self._prompts: Any = self.host.module("rollout.data_source").RolloutDataSource(args)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next groups of samples without a response."""
        groups: list[list[Sample]] = self._prompts.get_samples(num_samples)
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Raise ``ConfigError`` for groups that are put back, which Rollover's rollout function never does."""
        if samples:
            raise ConfigError(
                "Rollover's data source takes no samples back: use it with the rollout function of the same module,"
                " which keeps what is unfinished in its journal"
            )

    def save(self, rollout_id: int) -> None:
        """Save the position in the prompts after a rollout, and record that the journal is needed from here on."""
        if (run := _runs.get(self)) is None:
            self._prompts.save(rollout_id)
        else:
            run.save(rollout_id, lambda: self._prompts.save(rollout_id))

    def load(self, rollout_id: int | None = None) -> None:
        """Resume after a rollout, -1 for the start. Raises ``RunError`` if the saved state is of another run."""
        start = beginning(self.args.load, self.args.save, -1 if rollout_id is None else rollout_id)
        if start.restore is not None:
            self._prompts.load(start.restore)
            if self._prompts.sample_group_index < start.position:
                raise RunError(
                    f"the place in the prompts after rollout {start.restore} is not in {self.args.load}/rollout, where"
                    f" {self.host.name} has saved it: bring it back, or resume from another checkpoint"
                )
        self.start = start

    def close(self) -> None:
        """Close the run over these prompts. Does nothing if there is none."""
        if (run := _runs.pop(self, None)) is not None:
            run.close()

    def __len__(self) -> int:
        return len(self._prompts)


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return slime's output of a rollout.

    Args:
        args: slime's, with Rollover's settings under ``rollover`` (``--custom-config-path``).
        data_source: the source of the prompts.
        evaluation: whether to evaluate, which slime's own rollout function does.
    """
    if evaluation:
        stock = SLIME.module("rollout.sglang_rollout")
        with set_aside(data_source):
            return stock.generate_rollout(args, rollout_id, data_source, evaluation=True)
    return roll_out(SLIME, args, rollout_id, data_source)


def set_aside(data_source: Any) -> AbstractContextManager[None]:
    """Exclude the host's other work within this context from the time of the current step."""
    run = _runs.get(data_source)
    return nullcontext() if run is None else run.set_aside()


def roll_out(host: Host, args: Namespace, rollout_id: int, data_source: Any) -> Any:
    """Return a host's output of a rollout for training from the run over ``data_source``, which is opened once."""
    run = _runs.get(data_source)
    if run is None:
        run = _runs[data_source] = _opened(host, args, rollout_id, data_source)
        atexit.register(run.close)
    groups, metrics = run.rollout(rollout_id)
    if (path := getattr(args, "rollout_sample_filter_path", None)) is not None:
        host.module("utils.misc").load_function(path)(args, groups)
    return host.module("rollout.base_types").RolloutFnTrainOutput(samples=groups, metrics=metrics)


def _opened(host: Host, args: Namespace, rollout_id: int, data_source: Any) -> SlimeRun:
    """Open the run over a data source whose first rollout in this process is ``rollout_id``."""
    settings = slime_settings(args, host)
    if isinstance(data_source, DataSource):
        start = data_source.start or beginning(args.load, args.save, rollout_id - 1)
    else:
        logger.warning(
            "what is unfinished is lost when %s ends: --data-source-path rollover.integrations.%s.DataSource puts it"
            " into the checkpoints",
            host.name,
            host.name,
        )
        progress = SlimeProgress(first_rollout=rollout_id)
        start = Beginning(folder=None, progress=progress, step=0, restore=None, position=0)
    return SlimeRun(args, settings, data_source, start, host)
