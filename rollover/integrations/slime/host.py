"""slime, or its fork miles: which of the two it is, and the parts of its code that a rollout uses.

Both have the same arguments, records and data sources under their own package names. Their code is imported only here,
when a rollout begins.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, NamedTuple, Protocol

from rollover.errors import ConfigError
from rollover.integrations.hosted import refuse_other_versions

Sample = Any
"""The host's ``Sample``."""


class JudgesSamples(Protocol):
    """The host's part of a reward: its sample hooks, then its reward model."""

    def __call__(self, sample: Sample) -> Awaitable[Sample]: ...


class HostCode(NamedTuple):
    """The parts of the host that a rollout uses."""

    sample: type[Any]
    tokenizer: Any
    judge: JudgesSamples
    loop: asyncio.AbstractEventLoop
    """The host's own loop, on which ``judge`` runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A trainer of slime's kind."""

    name: str
    """Name of its package."""
    distributions: tuple[str, ...]
    """The names under which it may be installed."""
    versions: tuple[str, ...]
    """Supported versions, without their last number."""
    filters: tuple[str, ...]
    """Its dynamic sampling filters that only drop groups whose rewards are all equal."""

    def check_version(self) -> None:
        """Raise ``ConfigError`` for an installed version that is not supported. A checkout on the path does not reveal
        its version, and is accepted."""
        for distribution in self.distributions:
            with suppress(metadata.PackageNotFoundError):
                refuse_other_versions(distribution, metadata.version(distribution), self.versions)

    def module(self, name: str) -> Any:
        """Import a module of the host. Raises ``ConfigError`` when there is none of that name."""
        path = f"{self.name}.{name}"
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):
                raise
            known = " and ".join(self.versions)
            raise ConfigError(
                f"{error.name} does not exist in the {self.name} that is installed: install {self.name} {known}, for"
                " which this was written"
            ) from None

    def code(self, args: Namespace) -> HostCode:
        """Import the parts that a rollout with these arguments uses."""
        async_rm = self.module("rollout.rm_hub").async_rm
        hooks = None
        if getattr(args, "rollout_sample_hook_path", None):
            hooks = self.module("rollout.sample_hooks").apply_rollout_sample_hooks

        async def judge(sample: Sample) -> Sample:
            if hooks is not None:
                sample = await hooks(args, sample, evaluation=False)
            if sample.reward is None:
                sample.reward = await async_rm(args, sample)
            return sample

        return HostCode(
            sample=self.module("utils.types").Sample,
            tokenizer=self.module("utils.processing_utils").load_tokenizer(args.hf_checkpoint, trust_remote_code=True),
            judge=judge,
            loop=self.module("utils.async_utils").get_async_loop().loop,
        )


SLIME = Host(
    name="slime",
    distributions=("slime",),
    versions=("0.3",),
    filters=("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",),
)
"""Based on the source of 0.3.1, of 2026-08-21."""
MILES = Host(
    name="miles",
    distributions=("miles", "miles-rl"),
    versions=("0.1",),
    filters=(
        "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "miles.rollout.filter_hub.common_filters.apply_reward_nonzero_std_filter",
    ),
)
"""Based on the source of 0.1.0, of 2026-08-21; later versions have the second filter."""
