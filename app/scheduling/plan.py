"""Who runs next, and where: a pure function from a snapshot to a placement for each job.

Workers claim by it, the service explains by it, the scheduler preempts by it, and the benchmark
measures it.

Rank: priority class (aged) → the team's recent GPU time per weight → first come first served. A job
for several GPUs that does not fit has a reservation; others may backfill (`capacity`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from app.scheduling.capacity import FreeCapacity
from app.scheduling.types import (
    HIGH,
    ClusterSnapshot,
    Node,
    Placement,
    ResourceRequest,
    Running,
    Share,
    Waiting,
)
from dressage.spec.status import WaitReason, WorkerState

AGING = timedelta(days=1)  # of waiting lift a job by one class, up to HIGH
ADVANCE_SECONDS = 3600.0  # GPU time a team is charged ahead for what it runs: teams alternate
CPU_SHARE = 0.1  # of a GPU that a job without one is charged


def plan(snapshot: ClusterSnapshot) -> list[Placement]:
    """A placement on every waiting job, in order of rank."""
    capacity = FreeCapacity(snapshot)
    return [
        _placement(snapshot, capacity, job, position)
        for position, job in enumerate(by_rank(snapshot), start=1)
    ]


def by_rank(snapshot: ClusterSnapshot) -> Iterator[Waiting]:
    """The waiting jobs, next first: each one charges its team, so that teams alternate."""
    queues: dict[str, list[Waiting]] = defaultdict(list)
    for job in snapshot.waiting:
        queues[job.team].append(job)
    for queue in queues.values():
        queue.sort(key=lambda job: (-_class(job, snapshot.now), -job.arrival))
    charged: dict[str, float] = defaultdict(float)
    for running in snapshot.running:
        charged[running.team] += _charge(running.request)

    def rank(team: str) -> tuple[int, float, int]:
        share, head = snapshot.share(team), queues[team][-1]
        used = (share.recent + charged[team]) / share.weight
        return (_class(head, snapshot.now), used, head.arrival)

    while queues:
        team = min(queues, key=rank)
        job = queues[team].pop()
        if not queues[team]:
            del queues[team]
        charged[team] += _charge(job.request)
        yield job


def preemptions(snapshot: ClusterSnapshot, placements: Sequence[Placement]) -> dict[str, str]:
    """Running jobs that should yield, each with the waiting job of a higher class it yields to."""
    yielding = {job.yielding_to for job in snapshot.running if job.yielding_to}
    asked: dict[str, str] = {}
    for placement in placements:
        job = placement.job
        if placement.wait_reason is not WaitReason.BUSY or job.job_id in yielding:
            continue
        choices = [
            victims
            for node in snapshot.nodes
            if node.state is WorkerState.ACTIVE and node.suits(job.request)
            if (victims := _victims(snapshot, node, job, asked))
        ]
        for victim in min(choices, key=len, default=[]):
            asked[victim.job_id] = job.job_id
    return asked


def forecast(
    snapshot: ClusterSnapshot, *, stretch: float = 1.0, steps: int = 300
) -> dict[str, float]:
    """Seconds until each waiting job starts, if nobody else comes; unknown ones are left out.

    Args:
        snapshot: As it is now.
        stretch: Multiplies every duration; below 1 for the early end of a range.
        steps: How many times something may end before the view is lost.
    """
    starts: dict[str, float] = {}
    passed = 0.0
    running = [_stretched(job, stretch) for job in snapshot.running]
    snapshot = replace(snapshot, running=running)
    for _ in range(steps):
        placed = [placement for placement in plan(snapshot) if placement.worker_id]
        starts |= {placement.job.job_id: passed for placement in placed}
        running = [*snapshot.running, *(_started(placement, stretch) for placement in placed)]
        waiting = [job for job in snapshot.waiting if job.job_id not in starts]
        ends = [job.seconds for job in running if job.seconds is not None]
        if not waiting or not ends:
            break
        step = min(ends)
        passed += step
        snapshot = replace(
            snapshot,
            now=snapshot.now + timedelta(seconds=step),
            waiting=waiting,
            running=[_later(job, step) for job in running if job.seconds != step],
            shares=_used(snapshot, running, step),
        )
    return starts


def _placement(
    snapshot: ClusterSnapshot, capacity: FreeCapacity, job: Waiting, position: int
) -> Placement:
    def not_now(wait_reason: WaitReason, reason: str) -> Placement:
        return Placement(job, position, None, wait_reason, reason)

    share, request = snapshot.share(job.team), job.request
    if job.not_before and job.not_before > snapshot.now:
        seconds = (job.not_before - snapshot.now).total_seconds()
        return not_now(WaitReason.BACK_OFF, f"tried again in {seconds:.0f} s")
    if request.gpus and share.over_budget:
        return not_now(WaitReason.QUOTA, share.over_budget)
    limit, used = share.max_running_gpus, capacity.team_gpus[job.team]
    if request.gpus and limit is not None and used + request.gpus > limit:
        return not_now(WaitReason.QUOTA, f"team quota used: {used} of {limit} GPUs run")
    if not any(node.suits(request) for node in capacity.nodes.values()):
        return not_now(WaitReason.NO_WORKER, _nobody_suits(snapshot, request))
    worker_id = capacity.place(job)
    if worker_id:
        capacity.take(worker_id, job)
        return Placement(
            job, position, worker_id, WaitReason.NONE, "next, as soon as it is claimed"
        )
    holder = capacity.reserved_for(job) if request.gpus else None
    capacity.reserve(job)
    if holder:
        reason = f"free GPUs are reserved for a job of {holder.team} that needs {holder.request}"
        return not_now(WaitReason.RESERVED, reason)
    kind = f"{request}".removeprefix("1 ").removeprefix("a ")
    behind = f"; behind {position - 1} queued jobs" if position > 1 else ""
    return not_now(WaitReason.BUSY, f"no free {kind}{behind}")


def nobody_takes(snapshot: ClusterSnapshot, request: ResourceRequest) -> str | None:
    """Why no worker that is alive would ever take such a job, if none would."""
    if any(node.state is WorkerState.ACTIVE and node.suits(request) for node in snapshot.nodes):
        return None
    return _nobody_suits(snapshot, request)


def _nobody_suits(snapshot: ClusterSnapshot, request: ResourceRequest) -> str:
    if not snapshot.nodes:
        return "no training worker is alive"
    resting = [node for node in snapshot.nodes if node.suits(request)]
    if resting:
        return f"every worker with {request} is {' or '.join(sorted({m.state for m in resting}))}"
    hint = "; CPU workers take jobs with resources.gpus = 0" if request.gpus else ""
    return f"no live worker has {request}{hint}"


def _victims(
    snapshot: ClusterSnapshot, node: Node, job: Waiting, asked: Mapping[str, str]
) -> list[Running] | None:
    """The fewest jobs of a node that must yield for another one to fit, lowest class first."""
    here = [running for running in snapshot.running if running.worker_id == node.worker_id]
    if not job.request.gpus:
        blocking = [running for running in here if not running.request.gpus]
        may = [r for r in blocking if _yields(snapshot, r, job, asked)]
        return may if blocking and len(may) == len(blocking) else None
    missing = job.request.gpus - node.gpus + sum(running.request.gpus for running in here)
    victims: list[Running] = []
    for running in sorted(here, key=lambda r: (-r.priority, -r.request.gpus)):
        if missing <= 0:
            break
        if running.request.gpus and _yields(snapshot, running, job, asked):
            victims.append(running)
            missing -= running.request.gpus
    return victims if victims and missing <= 0 else None


def _yields(
    snapshot: ClusterSnapshot, running: Running, job: Waiting, asked: Mapping[str, str]
) -> bool:
    # Aging protects who runs, and arms nobody: else one that yielded would be first again.
    return (
        running.preemptible
        and _class(running, snapshot.now) > job.priority
        and not running.yielding_to
        and running.job_id not in asked
    )


def _class(job: Waiting | Running, now: datetime) -> int:
    if job.priority <= HIGH:
        return job.priority
    return max(HIGH, job.priority - max(0, (now - job.since) // AGING))


def _charge(request: ResourceRequest) -> float:
    return max(request.gpus, CPU_SHARE) * ADVANCE_SECONDS


def _started(placement: Placement, stretch: float) -> Running:
    job = placement.job
    assert placement.worker_id
    seconds = None if job.seconds is None else job.seconds * stretch
    return Running(
        job.job_id,
        job.team,
        job.priority,
        job.request,
        placement.worker_id,
        job.since,
        seconds=seconds,
    )


def _stretched(job: Running, stretch: float) -> Running:
    return job if job.seconds is None else replace(job, seconds=max(job.seconds, 1) * stretch)


def _later(job: Running, seconds: float) -> Running:
    return job if job.seconds is None else replace(job, seconds=job.seconds - seconds)


def _used(
    snapshot: ClusterSnapshot, running: Sequence[Running], seconds: float
) -> dict[str, Share]:
    used = {**snapshot.shares}
    for job in running:
        share = used.get(job.team, Share())
        charge = max(job.request.gpus, CPU_SHARE) * seconds
        used[job.team] = replace(share, recent=share.recent + charge)
    return used
