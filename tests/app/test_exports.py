"""Exports that are asked for after the training, and those that no worker here can make."""

import asyncio

import psycopg
import pytest
from fastapi.testclient import TestClient

from app.db.engine import create_engine, create_sessions, unit_of_work
from app.db.models import ExportRow
from app.lifecycle.exports import switch_export
from app.lifecycle.jobs import IllegalTransition
from app.main import create_app
from app.workers.repository import beat
from dressage.spec.status import ExportStatus
from tests.servers import bearer
from tests.workers import presence, register


@pytest.fixture
def trained(api, suite, job_spec, database_url):
    """A job that has succeeded."""
    job = api.post("/jobs", json=job_spec).json()["id"]
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE jobs SET status = 'succeeded', finished_at = now()")
        connection.execute(
            "INSERT INTO artifacts (id, job_id, kind, name, size, sha256) "
            "VALUES ('artifact_1', %s, 'adapter', 'adapter.tar', 1, 'x')",
            (job,),
        )
    return job


def test_an_export_is_made_once_and_again_when_it_failed(api, trained, database_url):
    url = f"/jobs/{trained}/exports"
    first = api.post(url, json={"type": "gguf", "quantization": "f16"})
    assert (first.status_code, first.json()["status"]) == (201, "queued")
    again = api.post(url, json={"type": "gguf", "quantization": "f16"})
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE exports SET status = 'failed', attempts = 3, message = 'x'")
    retried = api.post(url, json={"type": "gguf", "quantization": "f16"})
    assert (retried.status_code, retried.json()["id"]) == (201, first.json()["id"])
    assert (retried.json()["status"], retried.json()["message"]) == ("queued", None)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE exports SET status = 'succeeded'")
    done = api.post(url, json={"type": "gguf", "quantization": "f16"})
    assert (done.status_code, done.json()["status"]) == (200, "succeeded")
    compared = api.post(url, json={"type": "gguf", "quantization": "f16", "parity_cases": 8})
    assert (compared.status_code, compared.json()["status"]) == (201, "queued")
    assert [e["name"] for e in api.get(url).json()] == ["gguf-f16"]
    assert api.get(f"/jobs/{trained}").json()["status"] == "succeeded"


def test_a_job_that_is_not_trained_has_nothing_to_export(api, suite, job_spec):
    job = api.post("/jobs", json=job_spec).json()["id"]
    answer = api.post(f"/jobs/{job}/exports", json={"type": "merged"})
    assert (answer.status_code, answer.json()["code"]) == (409, "job_not_trained")


def test_a_gguf_adapter_needs_an_adapter(api, suite, job_spec):
    job_spec["training"]["lora"] = None
    job_spec["exports"] = [{"type": "merged"}, {"type": "gguf_adapter"}]
    problem = api.post("/jobs", json=job_spec).json()["errors"][0]
    assert problem["field"] == "exports.1.type"


@pytest.mark.parametrize("name", ["", "a b", "a/b/c/d", "-x", "x" * 81, "x:", "../x"])
def test_names_that_ollama_would_refuse(api, suite, job_spec, name):
    job_spec["exports"] = [{"type": "ollama", "name": name}]
    answer = api.post("/jobs", json=job_spec)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].startswith("exports.0")


def test_ollama_servers_are_those_of_the_operator(api, suite, job_spec, settings):
    job_spec["exports"] = [{"type": "ollama", "name": "x"}]
    refused = api.post("/jobs", json=job_spec)
    assert "DRESSAGE_OLLAMA_URLS" in refused.json()["detail"]
    allowed = settings.model_copy(update={"ollama_urls": ["http://ollama:11434"]})
    with TestClient(create_app(allowed), headers=bearer("operator")) as other:
        assert other.post("/jobs", json=job_spec).status_code == 201
        job_spec["exports"][0]["server"] = "http://169.254.169.254"
        refused = other.post("/jobs", json=job_spec).json()
        assert refused["errors"][0]["field"] == "exports.0.server"
        assert "allowed: http://ollama:11434" in refused["detail"]


async def add_worker(settings, **versions):
    engine = create_engine(settings.sqlalchemy_url, pooled=False)
    async with unit_of_work(create_sessions(engine)) as session:
        found = presence(queue="exports")
        found.versions.update(versions)
        await beat(session, "able", found)


def test_k_quants_are_refused_where_no_worker_can_make_them(api, suite, job_spec, settings):
    job_spec["exports"] = [{"type": "gguf", "quantization": "q4_k_m"}]
    assert api.post("/jobs", json=job_spec).status_code == 201  # nobody is alive to ask
    asyncio.run(register(settings.sqlalchemy_url, "unable", queue="exports"))
    refused = api.post("/jobs", json=job_spec).json()
    assert refused["errors"][0]["field"] == "exports.0.quantization"
    assert "scripts/build-llama-quantize" in refused["detail"]
    asyncio.run(add_worker(settings, **{"llama-quantize": "yes"}))
    assert api.post("/jobs", json=job_spec).status_code == 201


def test_an_export_is_found_where_location_says_and_in_the_audit_trail(api, trained):
    made = api.post(f"/jobs/{trained}/exports", json={"type": "merged"})
    assert made.headers["location"] == f"/jobs/{trained}/exports/{made.json()['id']}"
    assert api.get(made.headers["location"]).json() == made.json()
    assert api.get(f"/jobs/{trained}/exports/export_none").json()["code"] == "not_found"
    assert made.json()["id"] in api.get("/audit").json()["items"][0]["target"]


@pytest.mark.parametrize("to", ExportStatus)
@pytest.mark.parametrize("before", ExportStatus)
def test_the_whole_transition_table_of_exports(api, trained, settings, before, to):
    identity = api.post(f"/jobs/{trained}/exports", json={"type": "merged"}).json()["id"]
    allowed = {
        "queued": {"running", "cancelled"},
        "running": {"queued", "succeeded", "failed", "cancelled"},
        **{ended: {"queued"} for ended in ("succeeded", "failed", "cancelled")},
    }

    async def go():
        sessions = create_sessions(create_engine(settings.sqlalchemy_url, pooled=False))
        async with unit_of_work(sessions) as session:
            export = await session.get_one(ExportRow, identity)
            export.status = before
            await switch_export(session, export, to)

    if to in allowed[before]:
        asyncio.run(go())
        (shown,) = api.get(f"/jobs/{trained}/exports").json()
        assert shown["status"] == to
        assert (shown["finished_at"] is None) == (to in ("queued", "running"))
        (event,) = api.get(f"/jobs/{trained}/events", params={"type": "export"}).json()["items"][
            -1:
        ]
        assert (event["data"]["export"], event["data"]["status"]) == ("merged", to)
    else:
        with pytest.raises(IllegalTransition):
            asyncio.run(go())
        assert api.get(f"/jobs/{trained}/exports").json()[0]["status"] == "queued"
