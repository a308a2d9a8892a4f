"""The trainer in processes of its own from the run's point of view: it is not a rank itself, but leads them.

Ranks are processes of their own (``rank``), on this machine (``ranks``) or wherever a ``RankLauncher`` starts them
(``leading``), which shard the model with FSDP2; a rank alone has all of it. When one is lost, all are ended and
restarted from the last checkpoint, and are given the same batches since then once more. So nothing is decoded twice,
and engines meanwhile continue with the weights of their version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollover.batch import Batch, TrainedStep
from rollover.errors import ResourceError, RolloverError
from rollover.hf.folder import write_folder
from rollover.hf.hub import resolve_model
from rollover.hf.weights import read_weight_infos
from rollover.trainer.checkpoint import write_manifest
from rollover.trainer.leading import ForRanks, LedRanks, RankLauncher, RankLost, collective_timeout_s
from rollover.trainer.messages import LOGITS, RankTask
from rollover.trainer.ranks import LocalLauncher
from rollover.trainer.sending import SendFailed
from rollover.trainer.setup import TrainingSetup
from rollover.trainer.shares import write_index
from rollover.trainer.staging import Staging
from rollover.weights.adapters import AdapterSource
from rollover.weights.base import Manifest, TensorSpec, WeightSource
from rollover.weights.buckets import Bucket
from rollover.weights.groups import GroupPlan
from rollover.weights.sending import HeldWeights, Lease, SenderLost, SendReport
from rollover.weights.sources import FolderWeights

T = TypeVar("T")
Way = Literal["step", "skip"]

_LOST_OR_FULL = (RankLost, ResourceError)
"""Failures that new ranks may not repeat; memory counts only when a device, not a disk, ran out."""


Ask = Callable[[LedRanks | None, str, Any], tuple[LedRanks, Any]]
"""Asks ranks to perform a step of sending; see ``FleetTrainer._send``."""


class FleetSender:
    """Leads the ranks, which send the weights to engines, through the buckets. Implements ``Sender``."""

    def __init__(self, ask: Ask, plan: GroupPlan, buckets: Sequence[Bucket], on_close: Callable[[], None]) -> None:
        self._ask = ask
        self._buckets = buckets
        self._ranks: LedRanks | None = None
        self._on_close = on_close
        self.address: Mapping[str, Any] = self._answer("open", plan)

    def send(self, number: int) -> None:
        self._answer("send", self._buckets[number])

    def finish(self) -> SendReport:
        report = self._answer("finish")
        assert isinstance(report, SendReport)
        return report

    def close(self) -> None:
        try:
            with suppress(SenderLost):  # the ranks have ended, and the group with them
                self._answer("close")
        finally:
            self._on_close()

    def _answer(self, do: str, what: Any = None) -> Any:
        self._ranks, answer = self._ask(self._ranks, do, what)
        if isinstance(answer, SendFailed):
            raise answer.error()
        return answer


class FleetTrainer:
    """Implements ``Trainer`` on ``config.num_devices`` devices, with a process for each.

    Args:
        model: folder or hub id of the initial policy, which is also the frozen reference if the algorithm needs one.
        resume_from: a checkpoint to continue from, written by any number of devices.
        fallback: a folder for exchanging values when shared memory is too small for them, or ranks are elsewhere.
        logs: the folder for the output of each rank.
        launcher: starts the ranks; without it, they are processes of this machine.
        notify: tells the user that ranks were lost and restarted.

    Raises ``ModelError`` for a model that cannot be trained and for a checkpoint that does not match, ``ConfigError``
    for devices that are not there, ``RankLost`` for ranks that do not start.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        model: str | Path,
        *,
        fallback: Path,
        resume_from: Path | None = None,
        logs: Path | None = None,
        launcher: RankLauncher | None = None,
        notify: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._setup = setup
        self._config = config = setup.config
        self._launcher = launcher or LocalLauncher(config, timeout_s=config.rank_timeout_s, logs=logs)
        self._devices = self._launcher.devices
        self._num_threads = self._launcher.num_threads
        self._model = resolve_model(model)
        self._checkpoint = resume_from
        self._notify = notify
        self._since: list[tuple[Way, Batch]] = []
        """Batches trained or skipped since the checkpoint, packed, to be repeated when ranks are lost."""
        self._num_lost = 0
        """Number of times that ranks were lost since the last new step."""
        self._ran_out = False
        """True if memory or disk ran out at one of these times. New processes are tried once: a fragmented allocator
        may have been the reason."""
        self._is_closed = False
        self._turn = threading.Lock()
        self._lease = Lease()
        self._version = 0
        if resume_from is not None:
            self._version = self._setup.check_resumable(
                resume_from, self._model, num_threads=self._num_threads, num_ranks=len(self._devices)
            )
        # Two versions of the weights in float32, of which one may be being written, and a batch.
        num_values = sum(int(np.prod(info.shape)) for info in read_weight_infos(self._model).values())
        self._staging = Staging(2 * 4 * num_values + 2**28, fallback=fallback, on_disk=self._launcher.is_remote)
        self._ranks: LedRanks | None = None
        try:
            facts = self._surely(lambda ranks: ranks.facts)
        except BaseException:
            self.close()
            raise
        self._vocab_size = int(facts["vocab_size"])
        self._specs: Sequence[TensorSpec] = facts["weights"]

    @property
    def version(self) -> int:
        """Return the number of batches trained so far."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the output matrix."""
        return self._vocab_size

    @property
    def pids(self) -> Sequence[int]:
        """Return the process ids of the ranks that are alive."""
        return self._ranks.pids if self._ranks is not None else []

    def step(self, batch: Batch) -> TrainedStep:
        """Implement ``Trainer.step``. Raises ``RankLost`` when ranks were lost more than ``max_restarts`` times in a
        row."""
        trained: TrainedStep = self._train("step", batch)[0]
        return trained

    def skip(self, batch: Batch) -> TrainedStep:
        """Implement ``Trainer.skip``."""
        trained: TrainedStep = self._train("skip", batch)[0]
        return trained

    def weight_source(self) -> WeightSource:
        """Implement ``Trainer.weight_source``. Each rank writes the tensors that it owns, since none has all of them.
        Blocks until they have, and until the files are in shared memory here."""

        def write(ranks: LedRanks) -> Path:
            doing = f"writing version {self._version}"
            return self._staging.filled(self._version, lambda folder: ranks.ask(doing, "write", folder=folder))

        with self._turn:
            folder = self._surely(write)
        if self._config.publishes_adapters:
            return AdapterSource.read(self._version, folder)
        source = FolderWeights(self._version, folder)
        source.folder = None  # gone with later versions: engines that need a folder get another
        return source

    def weights_to_send(self) -> HeldWeights | None:
        """Implement ``Trainer.weights_to_send``: the ranks send, and none has all weights."""
        if self._config.publishes_adapters:
            return None
        with self._turn:
            self._surely(lambda ranks: None)
        manifest, send = Manifest(version=self._version, tensors=tuple(self._specs)), partial(FleetSender, self._send)
        return HeldWeights(manifest, self.weight_source, self._lease, send, current=lambda: self._version)

    def _send(self, ranks: LedRanks | None, do: str, what: Any) -> tuple[LedRanks, Any]:
        """Ask ``ranks``, or the current ones, to perform a step of sending weights. Returns them and the answer of the
        first. Raises ``SenderLost`` when one of them is lost; the next call then starts new ones."""
        with self._turn:
            try:
                if ranks is not None and ranks is not self._ranks:
                    raise SenderLost("the ranks that were sending weights have been started again")
                asked = self._open_ranks()
                return asked, asked.ask(f"sending weights of version {self._version}", "send", do=do, what=what)[0]
            except SenderLost:
                raise
            except _LOST_OR_FULL as error:
                self._give_up(error)
                raise SenderLost(str(error)) from error
            except BaseException:
                self._end_ranks()
                raise

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Implement ``Trainer.next_logits``."""

        def compute(ranks: LedRanks) -> NDArray[np.float32]:
            folder = self._staging.path
            asked = ForRanks([tuple(ids) for ids in prompts])
            ranks.ask("the log-prob check", "logits", prompts=asked, folder=folder)
            logits_PV: NDArray[np.float32] = np.load(folder / LOGITS)
            return logits_PV

        with self._turn:
            return self._surely(compute, retried=_LOST_OR_FULL)

    def save(self, folder: Path, extra: Mapping[str, Any] | None = None) -> None:
        """Implement ``Trainer.save``. Each rank writes the tensors that it owns."""
        manifest = self._setup.manifest(
            self._version, num_threads=self._num_threads, num_ranks=len(self._devices), extra=extra
        )

        def save(ranks: LedRanks) -> None:
            def write(partial: Path) -> None:
                sums = ranks.ask(f"the checkpoint of version {self._version}", "save", folder=partial)
                if self._config.lora is None:
                    write_index(partial)
                write_manifest(partial, manifest, {name: value for own in sums for name, value in own.items()})

            write_folder(folder, write)

        with self._turn:
            self._surely(save)
            self._checkpoint, self._since = folder, []

    def rest(self) -> None:
        """Implement ``Trainer.rest``."""
        with self._turn:
            self._surely(lambda ranks: ranks.ask(f"the rest after step {self._version - 1}", "rest"))

    def close(self) -> None:
        """End the ranks, even while they are at work."""
        self._is_closed = True
        self._end_ranks()
        self._staging.close()

    def _train(self, way: Way, batch: Batch) -> Any:
        assert batch.step == self._version, f"batch of step {batch.step} given to version {self._version}"
        with self._lease.changing(), self._turn:
            done = self._surely(lambda ranks: self._once(ranks, way, batch), retried=_LOST_OR_FULL)
            self._since.append((way, batch.packed()))
            self._version += 1
            self._num_lost, self._ran_out = 0, False
        return done

    def _once(self, ranks: LedRanks, way: Way, batch: Batch) -> Any:
        return ranks.ask(f"step {batch.step}", way, batch=ForRanks(batch))

    def _surely(self, work: Callable[[LedRanks], T], *, retried: tuple[type[RolloverError], ...] = (RankLost,)) -> T:
        """Run ``work`` with ranks that are at ``version``; after an error that is ``retried``, run it with new ones, as
        often as is allowed."""
        while True:
            try:
                return work(self._open_ranks())
            except retried as error:
                self._give_up(error)
            except BaseException:
                self._end_ranks()
                raise

    def _give_up(self, error: RolloverError) -> None:
        """End the ranks after an error that new ones may not repeat. Raises it if there were too many."""
        self._end_ranks()
        self._num_lost += 1
        if self._is_closed:
            raise error
        if self._num_lost > self._config.max_restarts:
            times = "once" if self._num_lost == 1 else f"{self._num_lost} times"
            error.add_note(
                f"the trainer's ranks were lost {times} without a new step in between (trainer.max_restarts ="
                f" {self._config.max_restarts})"
            )
            raise error
        if isinstance(error, ResourceError):
            if self._ran_out:
                error.add_note("it ran out again after the trainer's ranks were restarted")
                raise error
            self._ran_out = True
        since = "the model that the run started from" if self._checkpoint is None else self._checkpoint.name
        ranks = "its rank" if len(self._devices) == 1 else f"all {len(self._devices)} ranks"
        steps = f"{(repeated := len(self._since))} step{'s' * (repeated != 1)}"
        self._notify(
            f"trainer: {error}; restarting {ranks} from {since}, {steps} to repeat"
            f" (restart {self._num_lost} of {self._config.max_restarts})"
        )

    def _open_ranks(self) -> LedRanks:
        """Return ranks at ``version``: the present ones, or new ones that have repeated the same steps."""
        assert not self._is_closed, "the trainer is closed"
        if self._ranks is None:
            task = RankTask(
                rank=0,
                size=len(self._devices),
                device=self._devices[0],
                num_threads=self._num_threads,
                folder=self._staging.meeting(),
                timeout_s=collective_timeout_s(self._config.rank_timeout_s),
                setup=self._setup,
                model=self._model,
                resume_from=self._checkpoint,
            )
            self._ranks = self._launcher.launch(task)
            for way, batch in self._since:
                self._once(self._ranks, way, batch.unpacked())
        return self._ranks

    def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.end()
