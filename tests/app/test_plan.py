"""Who runs next, and where: the pure decision."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from app.scheduling.plan import by_rank, forecast, plan, preemptions
from app.scheduling.types import ClusterSnapshot, Node, ResourceRequest, Running, Share, Waiting
from dressage.spec.status import WaitReason, WorkerState

NOW = datetime(2026, 11, 2, tzinfo=UTC)
HOUR = 3600.0


def waiting(name, arrival=0, team="a", priority=2, gpus=1, seconds=None, hours=0.0, **request):
    return Waiting(
        job_id=name,
        team=team,
        priority=priority,
        arrival=arrival,
        since=NOW - timedelta(hours=hours),
        request=ResourceRequest(gpus=gpus, **request),
        seconds=seconds,
    )


def running(name, worker, team="a", priority=2, gpus=1, seconds=None, hours=0.0, **more):
    return Running(
        job_id=name,
        team=team,
        priority=priority,
        request=ResourceRequest(gpus=gpus),
        worker_id=worker,
        since=NOW - timedelta(hours=hours),
        gpu_indexes=tuple(range(gpus)),
        seconds=seconds,
        **more,
    )


def snapshot(jobs, nodes, active=(), **shares):
    return ClusterSnapshot(NOW, jobs, list(active), nodes, shares)


def placed(found):
    return {placement.job.job_id: placement.worker_id for placement in found if placement.worker_id}


def reasons(found):
    return {v.job.job_id: (v.wait_reason, v.reason) for v in found if not v.worker_id}


def order(jobs, **shares):
    return [job.job_id for job in by_rank(snapshot(jobs, [], **shares))]


def test_class_comes_before_share_and_share_before_arrival():
    jobs = [
        waiting("first", 1, team="busy"),
        waiting("second", 2, team="idle"),
        waiting("high", 3, team="busy", priority=1),
    ]
    shares = {"busy": Share(recent=100 * HOUR), "idle": Share(recent=HOUR)}
    assert order(jobs, **shares) == ["high", "second", "first"]


def test_a_team_of_twice_the_weight_may_have_used_twice_as_much():
    jobs = [waiting("light", 1, team="light"), waiting("heavy", 2, team="heavy")]
    for used, first in ((19, "heavy"), (21, "light")):
        shares = {
            "light": Share(recent=10 * HOUR),
            "heavy": Share(weight=2, recent=used * HOUR),
        }
        assert order(jobs, **shares)[0] == first


def test_teams_of_equal_standing_alternate():
    jobs = [waiting(f"a{n}", n, team="a") for n in range(3)]
    jobs += [waiting(f"b{n}", 10 + n, team="b") for n in range(3)]
    assert order(jobs) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_waiting_lifts_a_job_at_last_but_never_to_urgent():
    fresh, old = waiting("fresh", 2), waiting("old", 1, priority=3, hours=25)
    assert order([fresh, old]) == ["old", "fresh"]
    assert order([fresh, replace(old, since=NOW - timedelta(hours=23))]) == ["fresh", "old"]
    very_old, urgent = waiting("old", 1, priority=3, hours=999), waiting("u", 9, priority=0)
    assert order([very_old, urgent]) == ["u", "old"]


def test_the_tightest_machine_that_fits_is_taken():
    nodes = [Node("big", 8), Node("small", 2)]
    assert placed(plan(snapshot([waiting("j", gpus=2)], nodes))) == {"j": "small"}


def test_kind_memory_and_labels_are_respected():
    nodes = [
        Node("a100", 1, "NVIDIA A100", 40.0),
        Node("h100", 1, "NVIDIA H100 80GB", 80.0, frozenset({"nvlink"})),
    ]
    for request in ({"gpu_type": "h100"}, {"min_memory_gb": 60}, {"labels": frozenset({"nvlink"})}):
        assert placed(plan(snapshot([waiting("j", **request)], nodes))) == {"j": "h100"}
    found = plan(snapshot([waiting("j", gpu_type="b200")], nodes))
    assert reasons(found)["j"][0] is WaitReason.NO_WORKER
    assert "no live worker has 1 GPU of type b200" in reasons(found)["j"][1]


def test_cpu_jobs_go_to_cpu_workers_and_to_gpu_workers_only_without_one():
    job = waiting("j", gpus=0)
    assert placed(plan(snapshot([job], [Node("gpu", 2), Node("cpu", 0)]))) == {"j": "cpu"}
    busy = [running("x", "cpu", gpus=0)]
    found = plan(snapshot([job], [Node("gpu", 2), Node("cpu", 0)], busy))
    assert reasons(found)["j"] == (WaitReason.BUSY, "no free CPU slot")
    full = [running("x", "gpu", gpus=2)]  # a job without GPU takes none
    assert placed(plan(snapshot([job], [Node("gpu", 2)], full))) == {"j": "gpu"}


def test_a_job_for_two_gpus_reserves_and_shorter_ones_may_pass():
    nodes = [Node("m", 2)]
    active = [running("x", "m", seconds=HOUR)]
    jobs = [
        waiting("big", 1, gpus=2, seconds=HOUR),
        waiting("long", 2, seconds=2 * HOUR),
        waiting("unknown", 3),
        waiting("short", 4, seconds=HOUR / 2),
    ]
    found = plan(snapshot(jobs, nodes, active))
    assert placed(found) == {"short": "m"}
    assert reasons(found)["big"][0] is WaitReason.BUSY
    for name in ("long", "unknown"):
        wait_reason, reason = reasons(found)[name]
        assert (wait_reason, reason) == (
            WaitReason.RESERVED,
            "free GPUs are reserved for a job of a that needs 2 GPUs",
        )


def test_a_long_job_may_pass_on_gpus_that_the_reservation_does_not_need():
    active = [running("x", "m", gpus=2, seconds=HOUR)]
    jobs = [waiting("big", 1, gpus=3), waiting("long", 2, seconds=9 * HOUR)]
    found = plan(snapshot(jobs, [Node("m", 4)], active))
    assert placed(found) == {"long": "m"}  # 3 of 4 are free in an hour all the same


def test_quotas():
    nodes, active = [Node("m", 8)], [running("x", "m", gpus=3)]
    limited = {"a": Share(max_running_gpus=4)}
    jobs = [waiting("one", 1), waiting("two", 2), waiting("other", 3, team="b")]
    found = plan(snapshot(jobs, nodes, active, **limited))
    assert set(placed(found)) == {"one", "other"}
    assert reasons(found)["two"] == (WaitReason.QUOTA, "team quota used: 4 of 4 GPUs run")
    spent = {"a": Share(over_budget="team quota used: 9 of 9 GPU-seconds in the last day")}
    found = plan(snapshot([waiting("one"), waiting("cpu", gpus=0)], nodes, **spent))
    assert placed(found) == {"cpu": "m"}
    assert reasons(found)["one"][0] is WaitReason.QUOTA


def test_draining_and_sick_workers_get_nothing_and_it_is_said():
    nodes = [
        Node("d", 1, state=WorkerState.DRAINING),
        Node("s", 1, state=WorkerState.SICK),
    ]
    found = plan(snapshot([waiting("j")], nodes))
    assert reasons(found)["j"] == (
        WaitReason.NO_WORKER,
        "every worker with 1 GPU is draining or sick",
    )
    assert reasons(plan(snapshot([waiting("j")], [])))["j"][1] == "no training worker is alive"


def test_a_job_that_failed_waits_its_back_off():
    job = replace(waiting("j"), not_before=NOW + timedelta(seconds=20))
    found = plan(snapshot([job], [Node("m", 1)]))
    assert reasons(found)["j"] == (WaitReason.BACK_OFF, "tried again in 20 s")


def test_the_fewest_jobs_of_the_lowest_class_yield():
    active = [
        running("low", "m1", priority=3, preemptible=True),
        running("normal", "m1", priority=2, preemptible=True),
        running("two", "m2", gpus=2, priority=3, preemptible=True),
    ]
    nodes = [Node("m1", 2), Node("m2", 2)]
    for gpus, victims in ((1, {"low": "u"}), (2, {"two": "u"})):
        now = snapshot([waiting("u", priority=0, gpus=gpus)], nodes, active)
        assert preemptions(now, plan(now)) == victims


def test_nothing_yields_to_its_own_class_or_unasked_or_twice():
    nodes = [Node("m", 1)]
    for victim, job in (
        (running("v", "m", priority=1, preemptible=True), waiting("j", priority=1)),
        (running("v", "m", priority=3, preemptible=False), waiting("j", priority=0)),
        (
            running("v", "m", priority=3, preemptible=True, yielding_to="j"),
            waiting("j", priority=0),
        ),
    ):
        now = snapshot([job], nodes, [victim])
        assert preemptions(now, plan(now)) == {}
    old = waiting("old", priority=3, hours=999)  # aging lifts a job's place, not its class
    now = snapshot([old], nodes, [running("v", "m", priority=2, preemptible=True)])
    assert preemptions(now, plan(now)) == {}
    aged = running("v", "m", priority=3, preemptible=True, hours=25)  # and protects who runs
    now = snapshot([waiting("j", priority=2)], nodes, [aged])
    assert preemptions(now, plan(now)) == {}


def test_what_others_have_yielded_is_kept_until_there_is_enough_of_it():
    active = [running("v", "m", priority=3, preemptible=True, yielding_to="u")]
    jobs = [waiting("u", 1, priority=0, gpus=2), waiting("v2", 2, priority=3, seconds=1.0)]
    found = plan(snapshot(jobs, [Node("m", 2)], active))
    assert placed(found) == {}
    assert reasons(found)["v2"][0] is WaitReason.RESERVED


def test_a_forecast_follows_the_plan_in_time():
    jobs = [waiting(f"j{n}", n, seconds=HOUR) for n in range(4)]
    now = snapshot(jobs, [Node("m", 2)], [running("x", "m", gpus=2, seconds=100)])
    assert forecast(now) == {"j0": 100, "j1": 100, "j2": 100 + HOUR, "j3": 100 + HOUR}
    assert forecast(now, stretch=2)["j2"] == 200 + 2 * HOUR
    unknown = snapshot(jobs, [Node("m", 2)], [running("x", "m", gpus=2)])
    assert forecast(unknown) == {}


machines_of = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda gpus: [Node(f"m{n}", count) for n, count in enumerate(gpus)]
)
job_of = st.builds(
    waiting,
    name=st.just(""),
    team=st.sampled_from("abc"),
    priority=st.integers(0, 3),
    gpus=st.integers(0, 3),
    seconds=st.none() | st.floats(1, 1e5),
    hours=st.floats(0, 100),
)
jobs_of = st.lists(job_of, max_size=25).map(
    lambda jobs: [replace(job, job_id=f"j{n}", arrival=n) for n, job in enumerate(jobs)]
)
share_of = st.builds(
    Share,
    weight=st.floats(0.1, 10),
    recent=st.floats(0, 1e6),
    max_running_gpus=st.none() | st.integers(0, 5),
)


@given(jobs_of, machines_of, st.dictionaries(st.sampled_from("abc"), share_of))
def test_no_plan_gives_a_gpu_twice_or_passes_a_quota_or_forgets_a_job(jobs, nodes, shares):
    found = plan(ClusterSnapshot(NOW, jobs, [], nodes, shares))
    assert [placement.position for placement in found] == list(range(1, len(jobs) + 1))
    assert {placement.job.job_id for placement in found} == {job.job_id for job in jobs}
    for node in nodes:
        here = [v.job.request.gpus for v in found if v.worker_id == node.worker_id]
        assert sum(here) <= node.gpus
        assert here.count(0) <= 1
    for team, share in shares.items():
        gpus = sum(v.job.request.gpus for v in found if v.worker_id and v.job.team == team)
        assert share.max_running_gpus is None or gpus <= share.max_running_gpus
    assert all(bool(v.worker_id) == (v.wait_reason is WaitReason.NONE) for v in found)


@given(jobs_of, machines_of)
def test_equal_jobs_are_strictly_first_come_first_served(jobs, nodes):
    jobs = [replace(job, seconds=None, since=NOW) for job in jobs]
    found = plan(snapshot(jobs, nodes))
    for kind in {(job.team, job.priority, job.request) for job in jobs}:
        alike = [v for v in found if (v.job.team, v.job.priority, v.job.request) == kind]
        arrivals = [v.job.arrival for v in alike]
        assert arrivals == sorted(arrivals)
        lucky = [bool(v.worker_id) for v in alike]
        assert lucky == sorted(lucky, reverse=True)


@given(jobs_of, machines_of)
def test_a_reserved_job_is_never_delayed_by_those_that_pass_it(jobs, nodes):
    """With exact durations, whoever is first when nothing fits starts no later than alone."""
    jobs = [replace(job, seconds=job.seconds or HOUR) for job in jobs]
    now = snapshot(jobs, nodes)
    blocked = [v for v in plan(now) if v.wait_reason is WaitReason.BUSY and v.job.request.gpus > 1]
    if not blocked:
        return
    head = blocked[0].job
    ahead = [v.job for v in plan(now) if v.position <= blocked[0].position]
    alone = forecast(snapshot(ahead, nodes))
    busy = [Running(**_run(v)) for v in plan(now) if v.worker_id]
    rest = [job for job in ahead if job.job_id not in {r.job_id for r in busy}]
    together = forecast(snapshot(rest, nodes, busy))
    if head.job_id in alone:
        assert together[head.job_id] <= alone[head.job_id] + 1e-6


def _run(placement):
    job = placement.job
    return {
        "job_id": job.job_id,
        "team": job.team,
        "priority": job.priority,
        "request": job.request,
        "worker_id": placement.worker_id,
        "since": job.since,
        "seconds": job.seconds,
    }
