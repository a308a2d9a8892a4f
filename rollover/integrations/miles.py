"""The scheduler inside miles: ``RolloutFn`` for ``--rollout-function-path``, ``DataSource`` for ``--data-source-path``.

miles is a fork of slime. Its rollout functions are classes; everything else is as in ``rollover.integrations.slime``.
"""

from __future__ import annotations

import inspect
from argparse import ArgumentParser
from collections.abc import Awaitable
from typing import Any, ClassVar

from rollover.errors import ConfigError
from rollover.integrations.slime import plugin
from rollover.integrations.slime.host import MILES, Host


class MilesDataSource(plugin.DataSource):
    """Provides miles's prompts, and saves unfinished rollouts with its checkpoints.

    Example: ``--data-source-path rollover.integrations.miles.DataSource``
    """

    host: ClassVar[Host] = MILES


DataSource = MilesDataSource
"""The name that users of miles specify."""


class RolloutFn:
    """A rollout function of miles. Raises ``ConfigError`` if ``more`` is given.

    Args:
        input: with ``args`` and ``data_source``.
        more: passed when miles calls rollout functions as in its first version, with ``MILES_USE_LEGACY_ROLLOUT_V1``.
    Example: ``--rollout-function-path rollover.integrations.miles.RolloutFn --rollover april``
    """

    def __init__(self, input: Any, *more: Any, **evaluation: bool) -> None:
        if more or evaluation:
            raise ConfigError(
                "with MILES_USE_LEGACY_ROLLOUT_V1 miles calls functions, and RolloutFn is a class: leave it unset"
            )
        self._input = input
        self._evaluation: Any = None

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """Add Rollover's arguments to miles's."""
        parser.add_argument(
            "--rollover",
            default=None,
            metavar="STRATEGY",
            help="Rollover's strategy: april (the default), rollover, concurrency, oversample or sync. A table of"
            " settings goes under the same name into the --custom-config-path file.",
        )

    def __call__(self, input: Any) -> Any:
        """Return the output of a rollout, or of an evaluation by miles's own function.

        Args:
            input: with ``rollout_id`` and ``evaluation``.
        """
        args, data_source = self._input.args, self._input.data_source
        if not input.evaluation:
            return plugin.roll_out(MILES, args, input.rollout_id, data_source)
        if self._evaluation is None:
            self._evaluation = _own_function(self._input)
        if getattr(input, "hf_dir", None) is not None:  # on servers of its own, in parallel with training
            return self._evaluation(input)
        with plugin.set_aside(data_source):
            output = self._evaluation(input)
        return self._awaited(output) if inspect.isawaitable(output) else output

    async def _awaited(self, output: Awaitable[Any]) -> Any:
        with plugin.set_aside(self._input.data_source):
            return await output


def _own_function(input: Any) -> Any:
    """Return miles's own rollout function: whichever of its two the installed version has."""
    try:
        return MILES.module("rollout.inference_rollout.inference_rollout_common").InferenceRolloutFn(input)
    except ConfigError:
        generate = MILES.module("rollout.sglang_rollout").generate_rollout
        return lambda asked: generate(input.args, asked.rollout_id, input.data_source, evaluation=True)
