"""What no request gets past: key before body, sizes, strict JSON, known parameters; the audit."""

import json
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from fastapi.testclient import TestClient

from app.auth.limits import REFUSALS_PER_MINUTE
from app.gate import MAX_JSON_BYTES
from app.main import create_app
from tests.servers import bearer
from tests.waiting import wait_for


def endless(read):
    for _ in range(1000):
        read.append(1)
        yield b" " * 65536


@pytest.mark.parametrize("path", ["/jobs", "/suites?name=x", "/measures/preview", "/keys"])
def test_nobody_without_a_key_has_his_body_read(settings, path):
    read = []
    with TestClient(create_app(settings)) as client:
        answer = client.post(path, content=endless(read), headers={"Authorization": "Bearer x"})
    assert answer.status_code == 401


def test_a_body_is_not_read_beyond_its_limit(api):
    for body in (b'"' + b"x" * MAX_JSON_BYTES + b'"', endless([])):
        answer = api.post("/jobs", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, "upload_too_large")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested too deeply"),
        (b'{"name": NaN}', "NaN is not JSON"),
        (b'{"training": {"beta": 1e999}}', "too large a number"),
        (b'{"name": "a", "name": "b"}', "'name' is there twice"),
        (b'{"name": "\xff"}', "not UTF-8"),
        (b"{", "not JSON"),
    ],
)
def test_json_that_some_part_could_not_hold_is_refused_at_the_door(api, body, said):
    for path in ("/jobs", "/sweeps", "/measures/preview", "/webhooks"):
        answer = api.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, path
        assert said in answer.json()["detail"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate"])
def test_compressed_bodies_are_refused_alike(api, encoding):
    for path in ("/jobs", "/suites?name=x"):
        answer = api.post(path, content=b"x", headers={"Content-Encoding": encoding})
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/jobs?stauts=queued", "stauts: no such parameter; did you mean 'status'?"),
        ("/jobs?status=queued&status=failed", "status: given more than once"),
        ("/teams?x=1", "x: no such parameter; there are: none"),
    ],
)
def test_parameters_that_do_nothing_are_refused_by_name(api, path, said):
    answer = api.get(path)
    assert (answer.status_code, answer.json()["detail"]) == (422, said)


def test_a_misspelt_dry_run_submits_nothing(api, job_spec, arithmetic):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    answer = api.post("/jobs?dryrun=true", json=job_spec)
    assert answer.json()["detail"] == "dryrun: no such parameter; did you mean 'dry_run'?"
    assert api.get("/jobs").json()["items"] == []


def actions(database_url):
    with psycopg.connect(database_url) as connection:
        return [row[0] for row in connection.execute("SELECT action FROM audit ORDER BY arrival")]


def test_the_audit_hangs_on_what_was_stored_never_on_the_text_of_a_request(
    api, job_spec, arithmetic, database_url
):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    assert actions(database_url) == ["POST /suites"]
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())  # there already
    api.post("/jobs?dry_run=true", json=job_spec)
    assert actions(database_url) == ["POST /suites"]
    assert api.post("/jobs?dry_run=false", json=job_spec).status_code == 201
    assert (
        api.post("/keys?dry_run=x", json={"team": "default", "role": "viewer"}).status_code == 422
    )
    assert api.post("/keys", json={"team": "default", "role": "viewer"}).status_code == 201
    job = api.get("/jobs").json()["items"][0]["id"]
    for path in ("/jobs", f"/jobs/{job}", "/queue", "/workers", "/teams", f"/jobs/{job}/events"):
        api.get(path)
    api.post(f"/jobs/{job}/cancel")
    assert actions(database_url) == [
        *("POST /suites", "POST /jobs", "POST /keys", "POST /jobs/{job_id}/cancel")
    ]


def test_who_guesses_keys_is_slowed_down_and_named_and_nobody_else_is(settings, capsys):
    with TestClient(create_app(settings)) as client:
        codes = [
            client.get("/jobs", headers={"Authorization": f"Bearer drs_{n}"}).status_code
            for n in range(REFUSALS_PER_MINUTE + 5)
        ]
        assert (codes[0], codes[-1]) == (401, 429)
        assert client.get("/jobs", headers=bearer("viewer")).status_code == 200
    assert "auth.refused" in capsys.readouterr().out


def test_statements_are_logged_without_what_users_sent(api, capsys):
    api.post("/webhooks", json={"url": "https://example.com/s3cr3t\x00"})
    api.get("/jobs", params={"name": "s3cr3t\x00"})
    assert "s3cr3t" not in capsys.readouterr().out


def test_heads_are_answered_as_gets_without_a_body(api):
    answer = api.head("/jobs")
    assert (answer.status_code, answer.content) == (200, b"")
    assert api.head("/healthz").status_code == 200


def test_deep_answers_of_agents_are_fine(api):
    text = json.dumps({"a": ["[[[[" * 500]})
    answer = api.post("/jobs", content=text, headers={"Content-Type": "application/json"})
    assert "nested" not in answer.text


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"max_step": 3}, "max_step", "did you mean 'training.max_steps'?"),
        ({"learning_rate": 1}, "learning_rate", "did you mean 'training.learning_rate'?"),
        ({"zzz": 1}, "zzz", "no such field"),
        (
            {"rewards": [{"measure": {"type": "regex", "pattrn": "x"}}]},
            "rewards.0.measure.pattrn",
            "no such field",
        ),
        ({"agent": {}}, "agent.model", "Field required"),
        ({"training": {"max_steps": 2**31}}, "training.max_steps", "less than or equal"),
        ({"agent": {"model": "x" * 5000}}, "agent.model", "at most 1000"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent_with_what_may_be_meant(
    api, job_spec, change, field, said
):
    answer = api.post("/jobs", json={**job_spec, **change})
    assert answer.status_code == 422
    problems = {problem["field"]: problem["message"] for problem in answer.json()["errors"]}
    assert said in problems[field], problems


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
@pytest.mark.parametrize("name", ["since", "until"])
def test_times_that_no_report_has_are_refused(api, name, time):
    answer = api.get("/usage", params={name: time})
    assert (answer.status_code, answer.json()["detail"][:5]) == (422, name[:5])


def test_limits_of_a_team_change_one_by_one(api):
    api.put("/teams/new", json={"weight": 2, "max_queued_jobs": 5})
    changed = api.patch("/teams/new", json={"max_running_gpus": 3, "max_queued_jobs": None}).json()
    assert (changed["weight"], changed["max_queued_jobs"], changed["max_running_gpus"]) == (
        2,
        None,
        3,
    )
    assert api.patch("/teams/nobody", json={}).status_code == 404
    assert api.patch("/teams/new", json={"weight": None}).status_code == 422


def test_two_requests_make_one_team(api):
    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(lambda _: api.put("/teams/both", json={}).status_code, range(16)))
    assert sorted(codes) == [200] * 15 + [201]


def test_the_queue_of_a_team_has_an_end_and_urgent_is_for_operators(settings, job_spec, arithmetic):
    few = settings.model_copy(update={"max_queued_jobs": 2})
    with TestClient(create_app(few)) as client:
        client.headers = bearer("submitter")
        client.post("/suites?name=arithmetic", content=arithmetic.to_archive())
        urgent = client.post("/jobs", json={**job_spec, "priority": "urgent"})
        assert urgent.json()["errors"][0]["field"] == "priority"
        codes = [client.post("/jobs", json=job_spec).status_code for _ in range(3)]
        assert codes == [201, 201, 403]
        with ThreadPoolExecutor(8) as threads:  # nor do many at once get past it
            client.post(f"/jobs/{client.get('/jobs').json()['items'][0]['id']}/cancel")
            codes = list(
                threads.map(lambda _: client.post("/jobs", json=job_spec).status_code, range(8))
            )
        assert codes.count(201) == 1


def test_the_bytes_of_an_upload_count_before_it_is_stored(api, arithmetic):
    size = len(arithmetic.to_archive())
    api.put("/teams/default", json={"max_storage_bytes": size - 1})
    answer = api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    assert (answer.status_code, answer.json()["code"]) == (403, "quota_exceeded")
    api.put("/teams/default", json={"max_storage_bytes": size})
    assert api.post("/suites?name=arithmetic", content=arithmetic.to_archive()).status_code == 201


def test_a_sweep_is_tried_dry_and_made_once_for_a_key(api, job_spec, arithmetic):
    api.post("/suites?name=arithmetic", content=arithmetic.to_archive())
    base = {name: value for name, value in job_spec.items() if name != "name"}
    sweep = {"name": "s", "base": base, "grid": {"training.seed": [0, 1]}}
    assert api.post("/sweeps?dry_run=true", json=sweep).json() == {"jobs": 2}
    assert api.get("/jobs").json()["items"] == []
    headers = {"Idempotency-Key": "k"}
    first, again = (api.post("/sweeps", json=sweep, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = api.post("/sweeps", json={**sweep, "name": "t"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert len(api.get("/jobs").json()["items"]) == 2


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"training.seed": [1, 1, 1]}, "has a value twice"),
        ({"training.learning_rate": [1, 1.0]}, "has a value twice"),
        ({"training": [{}], "training.seed": [1]}, "is inside"),
    ],
)
def test_a_grid_that_makes_one_job_twice_is_refused(api, job_spec, grid, said):
    answer = api.post("/sweeps", json={"name": "s", "base": job_spec, "grid": grid})
    assert answer.status_code == 422
    assert said in answer.json()["detail"]


def test_below_a_path_nothing_leads_outside(settings):
    below = settings.model_copy(update={"root_path": "/dressage"})
    with TestClient(create_app(below)) as client:
        home = client.get("/", follow_redirects=False)
        assert home.headers["location"] == "docs"
        assert "url: 'openapi.json'" in client.get("/docs").text.replace('"', "'")


def test_origins_are_off_and_can_be_allowed(settings, api):
    origin = {"Origin": "https://tools.example.com"}
    asked = {**origin, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in api.get("/healthz", headers=origin).headers
    some = settings.model_copy(update={"allowed_origins": ["https://tools.example.com"]})
    with TestClient(create_app(some)) as client:
        allowed = client.options("/jobs", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://tools.example.com"


def test_ready_means_that_jobs_run(api, database_url):
    answer = api.get("/readyz")
    assert answer.status_code == 503
    checks = answer.json()["checks"]
    assert checks.pop("scheduler") == "none has been seen: start python -m worker.scheduler"
    assert set(checks.values()) == {"ok"}
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO heartbeats (name, seen_at, problems) VALUES ('scheduler', now(), '{}')"
        )
    wait_for(lambda: api.get("/readyz").status_code == 200)
    with psycopg.connect(database_url) as connection:
        connection.execute("""UPDATE heartbeats SET problems = '{"webhooks": "ValueError: x"}'""")
    wait_for(lambda: api.get("/readyz").status_code == 503)
    assert api.get("/readyz").json()["checks"]["scheduler"] == "webhooks: ValueError: x"
