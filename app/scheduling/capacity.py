"""What is free while a plan is made, and what is held for whom.

EASY backfill (Lifka, "The ANL/IBM SP scheduling system", 1995): the first job that does not fit has
a reservation on a node. Its shadow time is when enough GPUs will be free there; the spare GPUs are
those it will not need then. Others may pass it if they end before the shadow time, or take no more
than the spare GPUs.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import inf

from app.scheduling.types import ClusterSnapshot, ResourceRequest, Waiting
from dressage.spec.status import WorkerState


@dataclass
class Reservation:
    """A node held for a job.

    Attributes:
        job: For whom.
        shadow_time: Seconds until it fits there.
        spare_gpus: GPUs that will be free then and that it does not need.
    """

    job: Waiting
    shadow_time: float
    spare_gpus: int


class FreeCapacity:
    """The nodes' free GPUs and CPU slots, each team's use, and the reservations."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self.nodes = {
            node.worker_id: node for node in snapshot.nodes if node.state is WorkerState.ACTIVE
        }
        self.team_gpus: dict[str, int] = defaultdict(int)
        self._gpus = {name: node.gpus for name, node in self.nodes.items()}
        self._cpu = dict.fromkeys(self.nodes, True)
        self._reservations: dict[str, Reservation] = {}
        self._ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._making_room: dict[str, str] = {}
        for running in snapshot.running:
            self._occupy(running.worker_id, running.team, running.request, running.seconds)
            if running.yielding_to and running.worker_id in self.nodes:
                self._making_room[running.yielding_to] = running.worker_id

    def place(self, job: Waiting) -> str | None:
        """The tightest node that has room, or None."""
        suitable = [node for node in self.nodes.values() if node.suits(job.request)]
        if not job.request.gpus:
            # A GPU's host computes for CPU jobs only where no worker without GPU could.
            without = [node for node in suitable if not node.gpus]
            room = [n.worker_id for n in without or suitable if self._cpu[n.worker_id]]
            return min(room, default=None)
        room = [node.worker_id for node in suitable if self._has_room(node.worker_id, job)]
        return min(room, key=lambda name: (self._gpus[name], name), default=None)

    def take(self, worker_id: str, job: Waiting) -> None:
        """Give a job its room on a node."""
        reservation = self._reservations.get(worker_id)
        if reservation and _outlasts(job, reservation):
            reservation.spare_gpus -= job.request.gpus
        self._occupy(worker_id, job.team, job.request, job.seconds)

    def reserve(self, job: Waiting) -> None:
        """Hold the node on which a job for several GPUs fits first, unless one is held."""
        suitable = [n.worker_id for n in self.nodes.values() if n.suits(job.request)]
        if job.job_id in self._making_room:
            # What others have yielded is for this job alone, until there is enough of it.
            self._reservations[self._making_room[job.job_id]] = Reservation(job, 0.0, 0)
            return
        if job.request.gpus < 2 or any(name in self._reservations for name in suitable):
            return
        name = min(suitable, key=lambda n: (self._shadow(n, job.request.gpus)[0], -self._gpus[n]))
        shadow_time, free_then = self._shadow(name, job.request.gpus)
        self._reservations[name] = Reservation(job, shadow_time, free_then - job.request.gpus)

    def reserved_for(self, job: Waiting) -> Waiting | None:
        """Whose reservation keeps a job from GPUs that are free."""
        for name, reservation in self._reservations.items():
            node = self.nodes[name]
            if node.suits(job.request) and self._gpus[name] >= job.request.gpus:
                return reservation.job
        return None

    def _occupy(
        self, worker_id: str, team: str, request: ResourceRequest, seconds: float | None
    ) -> None:
        self.team_gpus[team] += request.gpus
        if worker_id not in self.nodes:
            return  # a worker that is silent, drains or is sick still runs what it runs
        if request.gpus:
            self._gpus[worker_id] -= request.gpus
            end = inf if seconds is None else max(seconds, 0)
            self._ends[worker_id].append((end, request.gpus))
        else:
            self._cpu[worker_id] = False

    def _has_room(self, name: str, job: Waiting) -> bool:
        if self._gpus[name] < job.request.gpus:
            return False
        reservation = self._reservations.get(name)
        if reservation is None or not _outlasts(job, reservation):
            return True
        return reservation.spare_gpus >= job.request.gpus

    def _shadow(self, name: str, gpus: int) -> tuple[float, int]:
        """Seconds until so many GPUs of a node are free, and how many are free then."""
        free = self._gpus[name]
        for end, freed in sorted(self._ends[name]):
            if end is inf:
                break
            free += freed
            if free >= gpus:
                return end, free
        return inf, gpus


def _outlasts(job: Waiting, reservation: Reservation) -> bool:
    return job.seconds is None or job.seconds > reservation.shadow_time
