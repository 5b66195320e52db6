"""Who runs next, and where: a pure function from a picture of the queue to a verdict on each job.

Workers claim by it, the service explains by it, the scheduler preempts by it, and the benchmark
measures it.

Standing: priority class (aged) → the team's recent GPU time per weight → first come first served.
A job for several GPUs that does not fit reserves a worker; others may pass it only where they do
not delay it (EASY backfill; Lifka, "The ANL/IBM SP scheduling system", 1995).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from math import inf

URGENT, HIGH, NORMAL, LOW = range(4)
AGING = timedelta(days=1)  # of waiting lift a job by one class, up to HIGH
ADVANCE_SECONDS = 3600.0  # GPU time a team is charged ahead for what it runs: teams alternate
CPU_SHARE = 0.1  # of a GPU that a job without one is charged


class WorkerState(StrEnum):
    """Whether a worker takes new jobs."""

    ACTIVE = "active"
    DRAINING = "draining"
    SICK = "sick"


class Obstacle(StrEnum):
    """Why a job does not run now."""

    NONE = "none"
    BACK_OFF = "back_off"
    QUOTA = "quota"
    NO_WORKER = "no_worker"
    RESERVED = "reserved"
    BUSY = "busy"


@dataclass(frozen=True)
class Needs:
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
    """A queued job. `seconds`: how long it will run, None while nobody knows.

    `explained`: somebody has been told already why it waits.
    """

    job_id: str
    team: str
    priority: int
    arrival: int
    since: datetime
    needs: Needs
    not_before: datetime | None = None
    seconds: float | None = None
    explained: bool = False


@dataclass(frozen=True)
class Running:
    """A job with an open attempt. `seconds`: how much longer it will run, if known."""

    job_id: str
    team: str
    priority: int
    needs: Needs
    worker_id: str
    since: datetime
    gpu_indexes: tuple[int, ...] = ()
    seconds: float | None = None
    preemptible: bool = False
    yielding_to: str | None = None


@dataclass(frozen=True)
class Machine:
    """A live worker: `gpus` jobs of one GPU, or fewer bigger ones, and one job on its CPU."""

    worker_id: str
    gpus: int
    gpu_type: str | None = None
    memory_gb: float | None = None
    labels: frozenset[str] = frozenset()
    state: WorkerState = WorkerState.ACTIVE

    def suits(self, needs: Needs) -> bool:
        """Whether it could run such a job when idle."""
        if not needs.gpus:
            return needs.labels <= self.labels
        return (
            needs.gpus <= self.gpus
            and needs.labels <= self.labels
            and (not needs.gpu_type or needs.gpu_type.lower() in (self.gpu_type or "").lower())
            and (not needs.min_memory_gb or needs.min_memory_gb <= (self.memory_gb or 0))
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
class Picture:
    """Everything a decision depends on."""

    now: datetime
    waiting: Sequence[Waiting]
    running: Sequence[Running]
    machines: Sequence[Machine]
    shares: Mapping[str, Share] = field(default_factory=dict)

    def share(self, team: str) -> Share:
        """A team's share; one that nobody has set up has the default one."""
        return self.shares.get(team, Share())


@dataclass(frozen=True)
class Verdict:
    """What happens to one waiting job now. `position` counts from 1, in order of standing."""

    job: Waiting
    position: int
    worker_id: str | None
    obstacle: Obstacle
    reason: str


def plan(picture: Picture) -> list[Verdict]:
    """A verdict on every waiting job, in order of standing."""
    floor = _Floor(picture)
    return [
        _verdict(picture, floor, job, position)
        for position, job in enumerate(by_standing(picture), start=1)
    ]


def by_standing(picture: Picture) -> Iterator[Waiting]:
    """The waiting jobs, next first: each one charges its team, so that teams alternate."""
    queues: dict[str, list[Waiting]] = defaultdict(list)
    for job in picture.waiting:
        queues[job.team].append(job)
    for queue in queues.values():
        queue.sort(key=lambda job: (-_class(job, picture.now), -job.arrival))
    charged: dict[str, float] = defaultdict(float)
    for running in picture.running:
        charged[running.team] += _charge(running.needs)

    def standing(team: str) -> tuple[int, float, int]:
        share, head = picture.share(team), queues[team][-1]
        used = (share.recent + charged[team]) / share.weight
        return (_class(head, picture.now), used, head.arrival)

    while queues:
        team = min(queues, key=standing)
        job = queues[team].pop()
        if not queues[team]:
            del queues[team]
        charged[team] += _charge(job.needs)
        yield job


def preemptions(picture: Picture, verdicts: Sequence[Verdict]) -> dict[str, str]:
    """Running jobs that should yield, each with the waiting job of a higher class it yields to."""
    yielding = {job.yielding_to for job in picture.running if job.yielding_to}
    asked: dict[str, str] = {}
    for verdict in verdicts:
        job = verdict.job
        if verdict.obstacle is not Obstacle.BUSY or job.job_id in yielding:
            continue
        choices = [
            victims
            for machine in picture.machines
            if machine.state is WorkerState.ACTIVE and machine.suits(job.needs)
            if (victims := _victims(picture, machine, job, asked))
        ]
        for victim in min(choices, key=len, default=[]):
            asked[victim.job_id] = job.job_id
    return asked


def forecast(picture: Picture, *, stretch: float = 1.0, steps: int = 300) -> dict[str, float]:
    """Seconds until each waiting job starts, if nobody else comes; unknown ones are left out.

    Args:
        picture: As it is now.
        stretch: Multiplies every duration; below 1 for the early end of a range.
        steps: How many times something may end before the view is lost.
    """
    starts: dict[str, float] = {}
    passed = 0.0
    running = [_stretched(job, stretch) for job in picture.running]
    picture = replace(picture, running=running)
    for _ in range(steps):
        placed = [verdict for verdict in plan(picture) if verdict.worker_id]
        starts |= {verdict.job.job_id: passed for verdict in placed}
        running = [*picture.running, *(_started(verdict, stretch) for verdict in placed)]
        waiting = [job for job in picture.waiting if job.job_id not in starts]
        ends = [job.seconds for job in running if job.seconds is not None]
        if not waiting or not ends:
            break
        step = min(ends)
        passed += step
        picture = replace(
            picture,
            now=picture.now + timedelta(seconds=step),
            waiting=waiting,
            running=[_later(job, step) for job in running if job.seconds != step],
            shares=_used(picture, running, step),
        )
    return starts


class _Floor:
    """What is free on each machine while a plan is made, and what is held for whom."""

    def __init__(self, picture: Picture) -> None:
        self.machines = {
            machine.worker_id: machine
            for machine in picture.machines
            if machine.state is WorkerState.ACTIVE
        }
        self.free = {name: machine.gpus for name, machine in self.machines.items()}
        self.cpu_free = dict.fromkeys(self.machines, True)
        self.team_gpus: dict[str, int] = defaultdict(int)
        self.holder: dict[str, Waiting] = {}
        self.held_from: dict[str, float] = {}
        self.spare: dict[str, int] = {}
        self._ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._making_room: dict[str, str] = {}
        for running in picture.running:
            self.occupy(running.worker_id, running.team, running.needs, running.seconds)
            if running.yielding_to and running.worker_id in self.machines:
                self._making_room[running.yielding_to] = running.worker_id

    def occupy(self, worker_id: str, team: str, needs: Needs, seconds: float | None) -> None:
        self.team_gpus[team] += needs.gpus
        if worker_id not in self.machines:
            return  # a worker that is silent, drains or is sick still runs what it runs
        if needs.gpus:
            self.free[worker_id] -= needs.gpus
            self._ends[worker_id].append((inf if seconds is None else max(seconds, 0), needs.gpus))
        else:
            self.cpu_free[worker_id] = False

    def place(self, job: Waiting) -> str | None:
        """The tightest machine that has room, or None."""
        suitable = [m for m in self.machines.values() if m.suits(job.needs)]
        if not job.needs.gpus:
            # A GPU's host computes for CPU jobs only where no worker without GPU could.
            without = [m for m in suitable if not m.gpus]
            room = [m.worker_id for m in without or suitable if self.cpu_free[m.worker_id]]
            return min(room, default=None)
        room = [m.worker_id for m in suitable if self._has_room(m.worker_id, job)]
        return min(room, key=lambda name: (self.free[name], name), default=None)

    def take(self, worker_id: str, job: Waiting) -> None:
        if worker_id in self.holder and self._lasts_too_long(worker_id, job):
            self.spare[worker_id] -= job.needs.gpus
        self.occupy(worker_id, job.team, job.needs, job.seconds)

    def reserve(self, job: Waiting) -> None:
        """Hold the machine on which a job for several GPUs fits first, unless one is held."""
        suitable = [m.worker_id for m in self.machines.values() if m.suits(job.needs)]
        if job.job_id in self._making_room:
            # What others have yielded is for this job alone, until there is enough of it.
            name = self._making_room[job.job_id]
            self.holder[name], self.held_from[name], self.spare[name] = job, 0.0, 0
            return
        if job.needs.gpus < 2 or any(name in self.holder for name in suitable):
            return
        name = min(suitable, key=lambda n: (self._fits_after(n, job.needs.gpus)[0], -self.free[n]))
        self.held_from[name], free_then = self._fits_after(name, job.needs.gpus)
        self.holder[name] = job
        self.spare[name] = free_then - job.needs.gpus

    def held_for(self, job: Waiting) -> Waiting | None:
        """Whose reservation keeps a job from GPUs that are free."""
        for name, holder in self.holder.items():
            if self.machines[name].suits(job.needs) and self.free[name] >= job.needs.gpus:
                return holder
        return None

    def _has_room(self, name: str, job: Waiting) -> bool:
        if self.free[name] < job.needs.gpus:
            return False
        if name not in self.holder or not self._lasts_too_long(name, job):
            return True
        return self.spare[name] >= job.needs.gpus

    def _lasts_too_long(self, name: str, job: Waiting) -> bool:
        return job.seconds is None or job.seconds > self.held_from[name]

    def _fits_after(self, name: str, gpus: int) -> tuple[float, int]:
        """Seconds until so many GPUs are free, and how many are free then."""
        free = self.free[name]
        for end, freed in sorted(self._ends[name]):
            if end is inf:
                break
            free += freed
            if free >= gpus:
                return end, free
        return inf, gpus


def _verdict(picture: Picture, floor: _Floor, job: Waiting, position: int) -> Verdict:
    def not_now(obstacle: Obstacle, reason: str) -> Verdict:
        return Verdict(job, position, None, obstacle, reason)

    share, needs = picture.share(job.team), job.needs
    if job.not_before and job.not_before > picture.now:
        seconds = (job.not_before - picture.now).total_seconds()
        return not_now(Obstacle.BACK_OFF, f"tried again in {seconds:.0f} s")
    if needs.gpus and share.over_budget:
        return not_now(Obstacle.QUOTA, share.over_budget)
    limit, used = share.max_running_gpus, floor.team_gpus[job.team]
    if needs.gpus and limit is not None and used + needs.gpus > limit:
        return not_now(Obstacle.QUOTA, f"team quota used: {used} of {limit} GPUs run")
    if not any(machine.suits(needs) for machine in floor.machines.values()):
        return not_now(Obstacle.NO_WORKER, _nobody_suits(picture, needs))
    worker_id = floor.place(job)
    if worker_id:
        floor.take(worker_id, job)
        return Verdict(job, position, worker_id, Obstacle.NONE, "next, as soon as it is claimed")
    holder = floor.held_for(job) if needs.gpus else None
    floor.reserve(job)
    if holder:
        reason = f"free GPUs are reserved for a job of {holder.team} that needs {holder.needs}"
        return not_now(Obstacle.RESERVED, reason)
    kind = f"{needs}".removeprefix("1 ").removeprefix("a ")
    behind = f"; behind {position - 1} queued jobs" if position > 1 else ""
    return not_now(Obstacle.BUSY, f"no free {kind}{behind}")


def _nobody_suits(picture: Picture, needs: Needs) -> str:
    if not picture.machines:
        return "no training worker is alive"
    resting = [machine for machine in picture.machines if machine.suits(needs)]
    if resting:
        return f"every worker with {needs} is {' or '.join(sorted({m.state for m in resting}))}"
    hint = "; CPU workers take jobs with resources.gpus = 0" if needs.gpus else ""
    return f"no live worker has {needs}{hint}"


def _victims(
    picture: Picture, machine: Machine, job: Waiting, asked: Mapping[str, str]
) -> list[Running] | None:
    """The fewest jobs of a machine that must yield for another one to fit, lowest class first."""
    here = [running for running in picture.running if running.worker_id == machine.worker_id]
    if not job.needs.gpus:
        blocking = [running for running in here if not running.needs.gpus]
        may = [r for r in blocking if _yields(picture, r, job, asked)]
        return may if blocking and len(may) == len(blocking) else None
    missing = job.needs.gpus - machine.gpus + sum(running.needs.gpus for running in here)
    victims: list[Running] = []
    for running in sorted(here, key=lambda r: (-r.priority, -r.needs.gpus)):
        if missing <= 0:
            break
        if running.needs.gpus and _yields(picture, running, job, asked):
            victims.append(running)
            missing -= running.needs.gpus
    return victims if victims and missing <= 0 else None


def _yields(picture: Picture, running: Running, job: Waiting, asked: Mapping[str, str]) -> bool:
    # Aging protects who runs, and arms nobody: else one that yielded would be first again.
    return (
        running.preemptible
        and _class(running, picture.now) > job.priority
        and not running.yielding_to
        and running.job_id not in asked
    )


def _class(job: Waiting | Running, now: datetime) -> int:
    if job.priority <= HIGH:
        return job.priority
    return max(HIGH, job.priority - max(0, (now - job.since) // AGING))


def _charge(needs: Needs) -> float:
    return max(needs.gpus, CPU_SHARE) * ADVANCE_SECONDS


def _started(verdict: Verdict, stretch: float) -> Running:
    job = verdict.job
    assert verdict.worker_id
    seconds = None if job.seconds is None else job.seconds * stretch
    return Running(
        job.job_id, job.team, job.priority, job.needs, verdict.worker_id, job.since, seconds=seconds
    )


def _stretched(job: Running, stretch: float) -> Running:
    return job if job.seconds is None else replace(job, seconds=max(job.seconds, 1) * stretch)


def _later(job: Running, seconds: float) -> Running:
    return job if job.seconds is None else replace(job, seconds=job.seconds - seconds)


def _used(picture: Picture, running: Sequence[Running], seconds: float) -> dict[str, Share]:
    used = {**picture.shares}
    for job in running:
        share = used.get(job.team, Share())
        charge = max(job.needs.gpus, CPU_SHARE) * seconds
        used[job.team] = replace(share, recent=share.recent + charge)
    return used
