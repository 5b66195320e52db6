"""What a plan is made from, and what it says. Plain data: no database, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from dressage.spec.status import WaitReason, WorkerState

URGENT, HIGH, NORMAL, LOW = range(4)


@dataclass(frozen=True)
class ResourceRequest:
    """What a worker must have.

    Attributes:
        gpus: 0 for a job on the CPU.
        gpu_type: Part of the GPU's name, in any case: `h100`.
        min_memory_gb: Of each GPU, in GiB.
        labels: All of them must be among the worker's.
    """

    gpus: int = 1
    gpu_type: str | None = None
    min_memory_gb: float | None = None
    labels: frozenset[str] = frozenset()

    def __str__(self) -> str:
        words = [f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}" if self.gpus else "a CPU slot"]
        if self.gpu_type:
            words.append(f"of type {self.gpu_type}")
        if self.min_memory_gb:
            words.append(f"with {self.min_memory_gb:g} GiB each")
        if self.labels:
            words.append(f"labelled {', '.join(sorted(self.labels))}")
        return " ".join(words)


@dataclass(frozen=True)
class Waiting:
    """A queued job.

    Attributes:
        seconds: How long it will run; None while nobody knows.
        explained: Whether somebody has been told already why it waits.
    """

    job_id: str
    team: str
    priority: int
    arrival: int
    since: datetime
    request: ResourceRequest
    not_before: datetime | None = None
    seconds: float | None = None
    explained: bool = False


@dataclass(frozen=True)
class Running:
    """A job with an open attempt.

    Attributes:
        seconds: How much longer it will run, if that is known.
        yielding_to: The waiting job that it makes room for.
    """

    job_id: str
    team: str
    priority: int
    request: ResourceRequest
    worker_id: str
    since: datetime
    gpu_indexes: tuple[int, ...] = ()
    seconds: float | None = None
    preemptible: bool = False
    yielding_to: str | None = None


@dataclass(frozen=True)
class Node:
    """A live worker: `gpus` jobs of one GPU, or fewer bigger ones, and one job on its CPU."""

    worker_id: str
    gpus: int
    gpu_type: str | None = None
    memory_gb: float | None = None
    labels: frozenset[str] = frozenset()
    state: WorkerState = WorkerState.ACTIVE

    def suits(self, request: ResourceRequest) -> bool:
        """Whether it could run such a job when idle."""
        if not request.gpus:
            return request.labels <= self.labels
        return (
            request.gpus <= self.gpus
            and request.labels <= self.labels
            and (not request.gpu_type or request.gpu_type.lower() in (self.gpu_type or "").lower())
            and (not request.min_memory_gb or request.min_memory_gb <= (self.memory_gb or 0))
        )


@dataclass(frozen=True)
class Share:
    """What a team may use, and has used.

    Attributes:
        recent: GPU-seconds, an old one counting less (half for each day).
        over_budget: Says which budget of GPU-seconds is spent, if one is.
    """

    weight: float = 1.0
    recent: float = 0.0
    max_running_gpus: int | None = None
    over_budget: str | None = None


@dataclass(frozen=True)
class ClusterSnapshot:
    """Everything a decision depends on."""

    now: datetime
    waiting: Sequence[Waiting]
    running: Sequence[Running]
    nodes: Sequence[Node]
    shares: Mapping[str, Share] = field(default_factory=dict)

    def share(self, team: str) -> Share:
        """A team's share; one that nobody has set up has the default one."""
        return self.shares.get(team, Share())

    def free_gpus(self, worker_id: str) -> tuple[int, ...]:
        """Indexes of a node's GPUs that no attempt holds, lowest first."""
        node = next(node for node in self.nodes if node.worker_id == worker_id)
        held = {
            index for job in self.running if job.worker_id == worker_id for index in job.gpu_indexes
        }
        return tuple(index for index in range(node.gpus) if index not in held)


@dataclass(frozen=True)
class Placement:
    """What happens to one waiting job now.

    Attributes:
        position: Counts from 1, in order of rank.
        worker_id: Where it runs; None: it waits.
        wait_reason: Why it waits, for programs.
        reason: The same as a sentence for people.
    """

    job: Waiting
    position: int
    worker_id: str | None
    wait_reason: WaitReason
    reason: str
