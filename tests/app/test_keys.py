"""Who may ask for what: keys, roles, teams, quotas, the audit trail."""

import asyncio
import csv
import io
import re
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from fastapi.testclient import TestClient

from app.admin import first_key
from app.auth.keys import Caller
from app.auth.limits import RateLimiter
from app.exceptions import TooManyRequests
from app.main import create_app
from dressage.spec.team import Role
from tests.servers import bearer

OPEN = {"/healthz", "/readyz"}


@pytest.fixture
def key(api):
    """`key(team, role)`: headers with a new key; the team is made when it is not there."""

    def go(team, role="submitter", **values):
        if api.get(f"/teams/{team}").status_code == 404:
            assert api.put(f"/teams/{team}", json={}).status_code == 201
        made = api.post("/keys", json={"team": team, "role": role, **values})
        assert made.status_code == 201, made.text
        return {"Authorization": f"Bearer {made.json()['secret']}"}

    return go


@pytest.fixture
def theirs(api, key, arithmetic):
    """Headers of another team, which has a suite of its own."""
    headers = key("theirs")
    made = api.post(
        "/suites",
        params={"name": "arithmetic"},
        content=arithmetic.to_archive(),
        headers=headers,
    )
    assert made.status_code == 201
    return headers


def test_no_route_answers_without_a_valid_key(api):
    document = api.get("/openapi.json").json()
    asked = 0
    for path, methods in document["paths"].items():
        if path in OPEN:
            continue
        for method in methods:
            url = re.sub(r"{\w+}", "x", path)
            for header in ("", "Bearer drs_wrong", "Basic abc"):
                answer = api.request(method, url, headers={"Authorization": header})
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), path
                assert answer.headers["www-authenticate"] == "Bearer"
            asked += 1
    assert asked > 35


def test_a_viewer_changes_nothing(api):
    document = api.get("/openapi.json").json()
    refused = 0
    for path, methods in document["paths"].items():
        for method in set(methods) - {"get"}:
            url = re.sub(r"{\w+}", "x", path)
            answer = api.request(method, url, headers=bearer("viewer"))
            assert (answer.status_code, answer.json()["code"]) == (403, "not_allowed"), path
            refused += 1
    assert refused > 15
    assert api.get("/jobs", headers=bearer("viewer")).status_code == 200


def test_only_operators_run_the_service(api):
    for method, path, body in (
        ("post", "/keys", {"team": "default", "role": "operator"}),
        ("delete", "/keys/key_operator", None),
        ("put", "/teams/default", {}),
        ("post", "/workers/w/drain", None),
        ("post", "/workers/w/activate", None),
    ):
        answer = api.request(method, path, json=body, headers=bearer("submitter"))
        assert (answer.status_code, answer.json()["code"]) == (403, "not_allowed"), path


def test_another_teams_things_are_not_there(api, suite, job_spec, theirs):
    job = api.post("/jobs", json=job_spec).json()["id"]
    sweep = api.post(
        "/sweeps", json={"name": "s", "base": job_spec, "grid": {"training.seed": [0, 1]}}
    ).json()["id"]
    hook = api.post("/webhooks", json={"url": "https://example.com/x"}).json()["id"]
    document = api.get("/openapi.json").json()
    ids = {"job_id": job, "sweep_id": sweep, "webhook_id": hook, "reference": suite["id"]}
    asked = []
    for path, methods in document["paths"].items():
        if not any(f"{{{name}}}" in path for name in ids):
            continue
        url = path
        for name, value in ids.items():
            url = url.replace(f"{{{name}}}", value)
        url = re.sub(r"{\w+}", "x", url)
        for method in methods:
            bodies = {
                "generate": {"prompt": "x"},
                "exports": {"type": "merged"},
                "regrade": {"rewards": ["correct_answer"]},
            }
            body = bodies.get(path.rsplit("/", 1)[1])
            answer = api.request(method, url, headers=theirs, json=body)
            assert answer.status_code == 404, (method, url, answer.text)
            asked.append(path)
    assert len(asked) >= 20
    assert api.get(f"/compare?jobs={job},{job}x", headers=theirs).status_code == 404
    for listing in ("/jobs", "/sweeps", "/jobs?team=default"):
        assert api.get(listing, headers=theirs).json()["items"] == []
    assert api.get("/webhooks", headers=theirs).json() == []
    names = {s["team"] for s in api.get("/suites", headers=theirs).json()["items"]}
    assert names == {"theirs"}
    assert api.get(f"/jobs/{job}").json()["status"] == "queued"  # nothing was changed by trying


def test_a_name_means_the_suite_of_ones_own_team(api, suite, job_spec, theirs):
    job = api.post("/jobs", json=job_spec, headers=theirs).json()
    assert job["team"] == "theirs"
    other = api.post("/jobs", json={**job_spec, "suite": suite["id"]}, headers=theirs)
    assert (other.status_code, other.json()["code"]) == (422, "job_invalid")


def test_an_operator_sees_and_ends_every_teams_jobs(api, job_spec, theirs):
    job = api.post("/jobs", json=job_spec, headers=theirs).json()["id"]
    assert [j["id"] for j in api.get("/jobs").json()["items"]] == [job]
    assert api.get("/jobs", params={"team": "default"}).json()["items"] == []
    assert api.post(f"/jobs/{job}/cancel").json()["status"] == "cancelled"
    again = api.post(f"/jobs/{job}/retry").json()
    assert again["team"] == "theirs"


def test_the_queue_shows_a_place_but_not_what_another_team_sends(api, suite, job_spec, theirs):
    api.post("/jobs", json={**job_spec, "name": "secret"})
    mine = api.post("/jobs", json=job_spec, headers=theirs).json()["id"]
    shown = api.get("/queue", headers=theirs).json()["items"]
    assert {entry["job_id"] for entry in shown} == {None, mine}
    assert "secret" not in str(shown)
    assert "secret" in str(api.get("/queue").json())


def test_a_key_is_shown_once_revoked_for_good_and_expires(api, key, settings):
    made = api.post("/keys", json={"team": "default", "name": "ci"}).json()
    assert made["secret"].startswith(made["prefix"])
    listed = api.get("/keys").json()["items"]
    assert made["secret"] not in str(listed)
    headers = {"Authorization": f"Bearer {made['secret']}"}
    assert api.get("/keys/mine", headers=headers).json()["id"] == made["id"]
    assert api.delete(f"/keys/{made['id']}").json()["revoked_at"]
    old = key("default", expires_at=(datetime.now(UTC) - timedelta(seconds=1)).isoformat())
    with TestClient(create_app(settings)) as other:  # which has not seen the key before
        assert other.get("/keys/mine", headers=headers).status_code == 401
        assert other.get("/keys/mine", headers=old).status_code == 401


def test_a_revoked_key_is_refused_within_seconds(api, key, monkeypatch):
    monkeypatch.setattr("app.auth.keys.CACHE_SECONDS", 0.0)
    headers = key("default")
    mine = api.get("/keys/mine", headers=headers).json()["id"]
    api.delete(f"/keys/{mine}")
    assert api.get("/keys/mine", headers=headers).status_code == 401


def test_only_the_hash_of_a_key_is_stored(api, database_url):
    secret = api.post("/keys", json={"team": "default"}).json()["secret"]
    with psycopg.connect(database_url) as connection:
        stored = connection.execute("SELECT * FROM keys").fetchall()
    assert secret not in str(stored)


def test_keys_are_of_teams_that_exist(api):
    answer = api.post("/keys", json={"team": "nobody"})
    assert answer.status_code == 404
    assert "PUT /teams/nobody" in answer.json()["detail"]


def test_the_first_operator_key_is_made_once(settings, database_url):
    def make(new=False):
        return asyncio.run(first_key.make(settings, even_if_there_is_one=new))

    assert make() is None  # the tests' own is there
    assert make(new=True).startswith("drs_")
    with psycopg.connect(database_url) as connection:
        connection.execute("DELETE FROM keys")
    with (
        pytest.raises(RuntimeError, match=r"app\.admin\.first_key"),
        TestClient(create_app(settings)),
    ):
        pass
    assert make().startswith("drs_")
    assert make() is None


def test_a_key_may_ask_so_often(api, key):
    headers = key("default", requests_per_minute=6)
    statuses = [api.get("/keys/mine", headers=headers) for _ in range(3)]
    assert [s.status_code for s in statuses] == [200, 429, 429]
    assert statuses[-1].json()["code"] == "too_many_requests"
    assert 1 <= int(statuses[-1].headers["retry-after"]) <= 10
    assert api.get("/keys/mine").status_code == 200  # others are not slowed down


def test_a_rested_key_may_ask_at_once_and_then_at_its_rate():
    now = 0.0
    limiter = RateLimiter(60, clock=lambda: now)
    caller = Caller("k", "t", Role.VIEWER, None, None)

    def allowed():
        count = 0
        try:
            for _ in range(100):
                limiter.count(caller)
                count += 1
        except TooManyRequests:
            return count

    assert allowed() == 10
    assert allowed() == 0
    now = 3.0
    assert allowed() == 3


def test_too_many_queued_jobs_are_refused(api, suite, job_spec):
    api.put("/teams/default", json={"max_queued_jobs": 2})
    for _ in range(2):
        assert api.post("/jobs", json=job_spec).status_code == 201
    answer = api.post("/jobs", json=job_spec)
    assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded")
    assert "2 jobs of team 'default' wait, and 2 may" in answer.json()["detail"]
    grid = {"name": "s", "base": job_spec, "grid": {"training.seed": [0, 1]}}
    assert api.post("/sweeps", json=grid).status_code == 403
    assert len(api.get("/jobs").json()["items"]) == 2


def test_files_over_the_limit_are_refused(api, suite, job_spec, arithmetic):
    used = api.get("/teams/default").json()["storage_bytes"]
    assert used == len(arithmetic.to_archive())
    api.put("/teams/default", json={"max_storage_bytes": used})
    for answer in (
        api.post("/jobs", json=job_spec),
        api.post("/suites?name=b", content=arithmetic.to_archive()),
    ):
        assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded")


ATTEMPT = (
    "INSERT INTO attempts (id, kind, work_id, job_id, number, team, worker_id, gpus, gpu_indexes, "
    "lease_token, heartbeats, relayed, outcome, started_at, ended_at) "
    "VALUES (%(id)s, 'train', 'job_1', 'job_1', 1, %(team)s, 'w', %(gpus)s, '[]', %(id)s, 0, 0, "
    "'succeeded', "
    "now() - %(begin)s * interval '1 hour', now() - %(end)s * interval '1 hour') "
)


@pytest.fixture
def used(database_url):
    """`used(team, gpus, from, to)`: an attempt between two times, in hours before now."""

    def go(team, gpus, begin, end):
        with psycopg.connect(database_url) as connection:
            count = connection.execute("SELECT count(*) FROM attempts").fetchone()[0]
            values = {"id": f"a{count}", "team": team, "gpus": gpus, "begin": begin, "end": end}
            connection.execute(ATTEMPT.replace("'job_1'", f"'job_{count}'"), values)

    return go


def test_usage_counts_the_part_of_an_attempt_that_lies_in_the_period(api, used, theirs):
    used("default", 2, begin=30, end=28)
    used("default", 1, begin=2, end=1)
    used("theirs", 4, begin=1.5, end=1)
    since = (datetime.now(UTC) - timedelta(hours=29)).isoformat()
    items = api.get("/usage", params={"since": since}).json()["items"]
    found = {row["team"]: (row["attempts"], row["gpu_seconds"] / 3600) for row in items}
    assert found == {
        "default": (2, pytest.approx(3, abs=0.01)),
        "theirs": (1, pytest.approx(2, abs=0.01)),
    }
    items = api.get("/usage", params={"since": since}, headers=theirs).json()["items"]
    assert {row["team"] for row in items} == {"theirs"}
    text = api.get("/usage", params={"by": "attempt"}, headers={"Accept": "text/csv"}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["team"], row["gpus"], row["outcome"]) for row in rows] == [
        ("default", "2", "succeeded"),
        ("default", "1", "succeeded"),
        ("theirs", "4", "succeeded"),
    ]
    assert api.get("/usage", params={"since": "2020-01-01T00:00:00Z"}).status_code == 422


def test_a_spent_budget_of_gpu_time_holds_jobs_back(api, suite, job_spec, used):
    used("default", 1, begin=3, end=1)
    api.put("/teams/default", json={"gpu_seconds_per_day": 7000})
    asyncio_job = {**job_spec, "resources": {"gpus": 1}}
    waiting = api.post("/jobs", json=asyncio_job).json()["waiting"]
    assert waiting["wait_reason"] == "quota"
    assert waiting["reason"] == "team quota used: 7200 of 7000 GPU-seconds in the last day"
    api.put("/teams/default", json={"gpu_seconds_per_day": 7400})
    assert api.get("/queue").json()["items"][0]["wait_reason"] == "no_worker"


def test_every_change_is_in_the_audit_trail_and_nothing_else(api, suite, job_spec, theirs):
    before = len(api.get("/audit", params={"limit": 200}).json()["items"])
    job = api.post("/jobs", json=job_spec, headers=bearer("submitter")).json()["id"]
    api.post("/jobs?dry_run=true", json=job_spec)
    api.get(f"/jobs/{job}")
    assert api.post("/jobs", json={}).status_code == 422
    api.post(f"/jobs/{job}/cancel")
    assert api.post(f"/jobs/{job}/cancel").status_code == 409
    trail = api.get("/audit", params={"limit": 200}).json()["items"]
    new = [(e["key_id"], e["action"], e["target"]) for e in trail[: len(trail) - before]]
    assert new == [
        ("key_operator", "POST /jobs/{job_id}/cancel", f"/jobs/{job}/cancel"),
        ("key_submitter", "POST /jobs", f"/jobs/{job}"),
    ]
    assert {e["team"] for e in api.get("/audit", headers=theirs).json()["items"]} == {"theirs"}
