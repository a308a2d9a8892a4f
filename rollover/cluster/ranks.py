"""The ranks of a sharded trainer on the nodes of a Ray cluster, which the process of the run leads from its own node.

Each rank has a host, an actor in one placement group (``host``). Actors end with the process that has made them, and
the placement group is given back with them, whatever happens to that process. That a rank is there is what its host
answers, never a table of the cluster.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rollover.cluster.calls import answers, lost
from rollover.cluster.config import ClusterConfig
from rollover.cluster.connect import connect
from rollover.cluster.files import SharedFiles
from rollover.cluster.host import HostFacts, HostReport, RankHost
from rollover.cluster.nodes import (
    ClusterNode,
    NodeDemand,
    actor_options,
    alive_nodes,
    check_placeable,
    place,
    remove,
    room_for,
)
from rollover.errors import ConfigError
from rollover.trainer.config import StepConfig
from rollover.trainer.leading import LedRanks, RankProcess
from rollover.trainer.messages import Done, Failed, NetworkMeeting, RankTask

_REPORT_S = 1.0
"""Seconds for which a host holds back a report if there is no answer yet."""
_ACTOR_S = 60.0
"""Maximum wait for an actor to start, which takes a few seconds."""
_END_S = 15.0
"""Maximum wait for hosts to end their ranks; Ray ends the ranks of the others."""


def rank_demand(cluster: ClusterConfig, config: StepConfig, nodes: Sequence[ClusterNode]) -> NodeDemand:
    """Return what the ranks need: each a GPU if the cluster has them, or else one CPU, and ``trainer_resources``.

    Raises ``ConfigError`` for a device that ranks cannot have, and for GPUs that this build of PyTorch cannot use; all
    nodes have the same build."""
    kind, key = config.device, f"{config.section}.device"
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"{key} {kind!r} cannot be used on a cluster: set 'auto', 'cuda' or 'cpu' (Ray says which GPU a rank has)"
        )
    needs = {
        device: NodeDemand(
            what=f"the {config.role}",
            keys=f"{config.section}.num_devices, cluster.trainer_resources",
            bundle={resource: 1.0, **cluster.trainer_resources},
            count=config.num_devices,
        )
        for device, resource in (("cuda", "GPU"), ("cpu", "CPU"))
    }
    has_gpus = room_for(needs["cuda"], nodes) > 0
    if kind == "auto":
        kind = "cuda" if has_gpus else "cpu"
    if kind == "cuda" and has_gpus and not _can_use_gpus(config.num_devices):
        raise ConfigError(
            f"{key} {config.device!r} takes GPUs of the Ray cluster, but PyTorch {torch.__version__} was built without"
            f" CUDA or without NCCL: install one with both on every node, or set {key} = 'cpu'"
        )
    return needs[kind]


def _can_use_gpus(num_ranks: int) -> bool:
    """Say whether this build of PyTorch can; several ranks exchange gradients over NCCL."""
    has_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return has_gpus and (num_ranks == 1 or (dist.is_available() and dist.is_nccl_available()))


class RayLauncher:
    """Starts ranks on a Ray cluster. Implements ``RankLauncher``.

    Args:
        timeout_s: ranks that do nothing for so long are given up.
        run: a file of the run's directory, which nodes must see, as they read checkpoints there.
        notify: tells the user where the ranks are, once.

    Raises ``ConfigError`` when there is no cluster, or the cluster could never take the ranks.
    """

    is_remote = True

    def __init__(
        self,
        cluster: ClusterConfig,
        config: StepConfig,
        *,
        timeout_s: float,
        run: Path,
        notify: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._ray = connect(cluster)
        self._run = run
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._notify = notify
        nodes = alive_nodes(self._ray)
        self._demand = rank_demand(cluster, config, nodes)
        check_placeable(self._demand, nodes)
        on_gpu = "GPU" in self._demand.bundle
        self.devices = ("cuda:0" if on_gpu else "cpu",) * config.num_devices
        self.num_threads = max(1, int(self._demand.bundle.get("CPU", 1)))
        self._has_told = False

    def launch(self, task: RankTask) -> LedRanks:
        """See ``RankLauncher.launch``. Raises ``NotPlaced`` when the cluster has no room in time."""
        group = place(self._ray, self._demand, timeout_s=self._cluster.placement_timeout_s)
        ranks = ClusterRanks(self._ray, group, self._demand, task, run=self._run, timeout_s=self._timeout_s)
        if not self._has_told:
            self._notify(ranks.whereabouts)
            self._has_told = True
        return ranks


@dataclass(slots=True, eq=False)
class _Hosted:
    """One rank behind its host."""

    rank: int
    pid: int = 0
    answer: Done | Failed | None = None
    is_gone: bool = False
    ending: str = ""
    has_stopped: bool = False
    report: Any = None
    """The pending report of its host."""

    def fate(self) -> str:
        return self.ending

    def is_stopped(self) -> bool:
        return self.has_stopped


class ClusterRanks(LedRanks):
    """All ranks on a cluster, from their start to their end.

    Args:
        group: the placement group with a bundle for each; it is given back at the end.
        task: of rank 0.
        run: see ``RayLauncher``.

    Raises ``ConfigError`` naming a node that does not see the files of the run, ``RankLost``, or the error of a rank
    that cannot load what it shall train.
    """

    whereabouts: str
    """A description for the user of where the ranks are."""

    def __init__(
        self, ray: Any, group: Any, demand: NodeDemand, task: RankTask, *, run: Path, timeout_s: float
    ) -> None:
        super().__init__(task.folder, timeout_s=timeout_s)
        self._ray = ray
        self._group = group
        self._members = [_Hosted(rank) for rank in range(task.size)]
        self._progress = np.zeros(task.size, dtype=np.uint64)
        self._actors: list[Any] = []
        try:
            self._actors = [self._actor(demand, rank) for rank in range(task.size)]
            self._start(task, run)
            self.facts = self._answers("loading")[0]
        except BaseException:
            self.end()
            raise

    @property
    def members(self) -> Sequence[RankProcess]:
        return self._members

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def progress(self) -> NDArray[np.uint64]:
        return self._progress

    def end(self) -> None:
        members, self._members = self._members, []
        if not members:
            return
        with suppress(self._ray.exceptions.RayError):
            ending = [actor.end.remote() for actor in self._actors]
            if ending:
                self._ray.wait(ending, num_returns=len(ending), timeout=_END_S)
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor, no_restart=True)
        with suppress(self._ray.exceptions.RayError):
            remove(self._group)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _actor(self, demand: NodeDemand, rank: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(RankHost).options(
            **actor_options(demand.bundle),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,  # a report is awaited while other calls are made
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
        )
        return actor.remote()

    def _start(self, task: RankTask, run: Path) -> None:
        """Start the ranks, once their nodes are known to see what they read."""
        read = [folder.resolve() for folder in (task.model, task.resume_from) if folder is not None]
        limit_s = max(_ACTOR_S, self._timeout_s)
        nodes = answers(self._ray, [actor.node.remote() for actor in self._actors], timeout_s=limit_s)
        order = beside_each_other(nodes, task.setup.config.context_parallel)
        actors = self._actors = [self._actors[i] for i in order]
        preparing = [actor.prepare.remote(size=task.size, listens=rank == 0) for rank, actor in enumerate(actors)]
        self._hosts: list[HostFacts] = answers(self._ray, preparing, timeout_s=self._timeout_s)
        for files in (SharedFiles.of(run), *map(SharedFiles.of_model, read)):
            seen = answers(self._ray, [actor.sees.remote(files) for actor in actors], timeout_s=self._timeout_s)
            for host, sees in zip(self._hosts, seen, strict=True):
                if not sees:
                    raise files.refusal(
                        host.address, "ranks read the model and the run directory at the same path, as on a shared disk"
                    )
        self.whereabouts = described_ranks(self._hosts, role=task.setup.config.role)
        starting = []
        for rank, (actor, host) in enumerate(zip(actors, self._hosts, strict=True)):
            first = self._hosts[0]
            own = replace(
                task,
                rank=rank,
                folder=host.folder,
                model=task.model.resolve(),
                resume_from=None if task.resume_from is None else task.resume_from.resolve(),
                meeting=NetworkMeeting(
                    host=first.address, port=first.port, own=host.address, descriptor=host.descriptor
                ),
            )
            starting.append(actor.start.remote(rank, pickle.dumps(own)))
        for member, pid in zip(self._members, answers(self._ray, starting, timeout_s=self._timeout_s), strict=True):
            member.pid = pid

    def _tell(self, message: bytes) -> None:
        for actor in self._actors:
            actor.tell.remote(message)  # if it is lost, its report says so

    def _collect(self, waiting: Sequence[RankProcess], timeout_s: float) -> bool:
        asked = {}
        counts = self._progress.tolist()
        for member in self._members:
            if member in waiting:
                if member.report is None:
                    member.report = self._actors[member.rank].report.remote(_REPORT_S, counts)
                asked[member.report] = member
        ready, _ = self._ray.wait([*asked], num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = self._ray.wait([*asked], num_returns=len(asked), timeout=0)
        for report in ready:
            asked[report].report = None
            self._take(asked[report], report)
        return any(asked[report].answer is not None for report in ready)

    def _take(self, member: _Hosted, report: Any) -> None:
        try:
            found: HostReport = self._ray.get(report, timeout=self._timeout_s)
        except self._ray.exceptions.RayError as error:
            address = self._hosts[member.rank].address
            member.is_gone, member.ending = True, f"was lost with its host on node {address} ({lost(error)})"
            return
        self._progress[member.rank] = found.progress
        member.has_stopped = found.is_stopped
        if found.message is not None:
            member.answer = pickle.loads(found.message)
        elif found.fate is not None:
            member.is_gone, member.ending = True, found.fate


def beside_each_other(nodes: Sequence[str], size: int) -> list[int]:
    """Return the order in which hosts become ranks 0, 1 and so on, so that as many groups of ``size`` successive ranks
    as possible are on one node each.

    Args:
        nodes: the id of the node of each host.
    """
    by_node: dict[str, list[int]] = {}
    for host, node in enumerate(nodes):
        by_node.setdefault(node, []).append(host)
    whole, rest = [], []
    for hosts in by_node.values():
        end = len(hosts) - len(hosts) % size
        whole += hosts[:end]
        rest += hosts[end:]
    return whole + rest


def described_ranks(hosts: Sequence[HostFacts], *, role: str) -> str:
    """Say where the ranks of this role are, given the host of each."""
    by_node: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_node.setdefault(host.node_id, []).append(rank)
    addresses = [hosts[ranks[0]].address for ranks in by_node.values()]
    places = []
    for (node, ranks), address in zip(by_node.items(), addresses, strict=True):
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        is_alone = addresses.count(address) == 1  # several nodes can be on one machine
        places.append(f"{name} on node {address if is_alone else f'{address} ({node[:8]})'}")
    return f"{role}: {'; '.join(places)}"
