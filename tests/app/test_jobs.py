import errno
import json

import pytest
from fastapi.testclient import TestClient

from app.main import create_app
from dressage.sandbox.process import SandboxStartError
from tests.servers import bearer


def post(api, spec, **options):
    return api.post("/jobs", json=spec, **options)


def test_a_job_is_stored_with_its_effective_specification(api, suite, job_spec):
    job_spec["training"] |= {"batch_size": 3, "num_generations": 4}
    response = post(api, job_spec)
    assert response.status_code == 201
    job = response.json()
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert job["status"] == "queued"
    assert job["spec"]["suite"] == "arithmetic@1"
    assert job["spec"]["training"]["gradient_accumulation"] == 4
    assert {a["field"] for a in job["adjustments"]} == {"suite", "training.gradient_accumulation"}
    assert job["waiting"]["reason"] == "no training worker is alive"
    again = api.get(f"/jobs/{job['id']}").json()
    assert again | {"waiting": None} == job | {"waiting": None}
    events = api.get(f"/jobs/{job['id']}/events").json()["items"]
    assert [event["type"] for event in events] == ["status", "adjustment", "adjustment"]
    assert [event["seq"] for event in events] == [1, 2, 3]


def test_a_dry_run_stores_nothing(api, suite, job_spec):
    response = api.post("/jobs", json=job_spec, params={"dry_run": True})
    assert response.status_code == 200
    assert response.json()["spec"]["suite"] == "arithmetic@1"
    assert api.get("/jobs").json()["items"] == []


@pytest.mark.parametrize(
    ("change", "field", "sentence"),
    [
        ({"colour": 1}, "colour", "no such field"),
        ({"rewards": []}, "rewards", "at least one measure"),
        (
            {"rewards": ["a", "b"], "reward_weights": [1]},
            None,
            "1 weights for 2 rewards",
        ),
        ({"rewards": ["nope"]}, "rewards.0.measure", "it has correct_answer"),
        ({"suite": "nope"}, "suite", "there is no suite 'nope'"),
        ({"suite": "arithmetic@2"}, "suite", "there is no suite 'arithmetic@2'"),
    ],
)
def test_a_wrong_job_is_refused_by_field(api, suite, job_spec, change, field, sentence):
    response = post(api, {**job_spec, **change})
    assert response.status_code == 422
    problem = response.json()
    assert problem["errors"][0]["field"] == field
    assert sentence in problem["detail"]
    assert api.get("/jobs").json()["items"] == []


def test_an_unknown_tool_is_named(api, suite, job_spec):
    job_spec["agent"]["tools"] = ["calculate", "teleport"]
    problem = post(api, job_spec).json()
    assert problem["code"] == "job_invalid"
    assert problem["errors"][0]["field"] == "agent.tools.1"
    assert "'teleport'" in problem["detail"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"environment": "World", "tools": []}, "there is no environment 'World'"),
        ({"environment": "World"}, "the environment's tools are the agent's"),
    ],
)
def test_a_wrong_environment_is_refused(api, suite, job_spec, change, sentence):
    job_spec["agent"] |= change
    response = post(api, job_spec)
    assert response.status_code == 422
    assert sentence in response.json()["detail"]


def test_built_in_measures_need_no_code(api, suite, job_spec):
    job_spec["rewards"] = [
        {"measure": {"type": "numeric"}},
        {"measure": {"type": "no_tool_errors"}, "weight": 0.2},
        {"measure": {"type": "json_schema", "schema": {"type": "object"}}, "weight": 0.1},
    ]
    response = post(api, job_spec)
    assert response.status_code == 201, response.text
    rewards = response.json()["spec"]["rewards"]
    assert rewards[2]["measure"] == {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"type": "strange"}, "not a JSON schema"),
        ({"properties": {"a": {"$ref": "http://169.254.169.254/"}}}, "must stay inside"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(api, suite, job_spec, schema, sentence):
    job_spec["rewards"] = [{"measure": {"type": "json_schema", "schema": schema}}]
    problem = post(api, job_spec).json()
    assert problem["errors"][0]["field"] == "rewards.0.measure.schema"
    assert sentence in problem["detail"]


def test_a_step_that_needs_more_cases_than_there_are_is_refused(api, suite, job_spec):
    job_spec["training"] |= {"batch_size": 4096, "num_generations": 2}
    problem = post(api, job_spec).json()
    assert problem["errors"][0]["field"] == "training.batch_size"
    assert "2048 cases" in problem["detail"]


def test_echo_without_anything_to_predict_is_refused(api, suite, job_spec):
    job_spec["agent"]["tools"] = []
    job_spec["training"]["echo"] = {"coeff": 0.05}
    problem = post(api, job_spec).json()
    assert problem["errors"][0]["field"] == "training.echo"
    job_spec["training"]["echo"] = {"coeff": 0}
    assert post(api, job_spec).status_code == 201


def model_directory(path, template):
    path.mkdir()
    (path / "config.json").write_text("{}")
    if template is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not show tools"),
        (
            "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
            "does not show results of tools",
        ),
        ("{{ raise_exception('none at all') }}", "does not work: TemplateError: none at all"),
        (
            "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}"
            "{% endfor %}",
            "takes no system message",
        ),
    ],
)
def test_a_model_without_tool_template_is_refused(
    api, suite, job_spec, tmp_path, template, sentence
):
    job_spec["agent"]["model"] = model_directory(tmp_path / "model", template)
    problem = post(api, job_spec).json()
    assert problem["errors"][0]["field"] == "agent.model"
    assert sentence in problem["detail"]


TOOL_TEMPLATE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}{{ m.role }}{% if MARK %} old{% endif %}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("mark", "response_template", "sentence"),
    [
        ("false", None, "give agent.response_template"),
        ("loop.revindex > 2", {"fields": {}}, "rewrites earlier turns"),
    ],
)
def test_a_tool_template_that_cannot_be_trained_is_refused(
    api, suite, job_spec, tmp_path, mark, response_template, sentence
):
    model = model_directory(tmp_path / "model", TOOL_TEMPLATE.replace("MARK", mark))
    job_spec["agent"] |= {"model": model, "response_template": response_template}
    response = api.post("/jobs", json=job_spec)
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "agent.model"
    assert sentence in response.json()["detail"]


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("tokenizer_config.json", "{broken", "cannot be read"),
        ("tokenizer_config.json", "[" * 100_000, "cannot be read"),
        ("tokenizer_config.json", "[1]", "cannot be read"),
        ("chat_template.jinja", "{% for i in range(2000000000) %}{% endfor %}", "Range too big"),
        (
            "chat_template.jinja",
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}"
            "{% endfor %}{% endfor %}",
            "takes longer than",
        ),
        ("chat_template.jinja", "{{ 1 / 0 }}", "does not work: ZeroDivisionError"),
        ("chat_template.jinja", "{% generation %}", "does not work: TemplateSyntaxError"),
        ("chat_template.jinja", "{{ ''.__class__.__mro__ }}", "does not work: SecurityError"),
    ],
)
def test_a_hostile_model_folder_is_a_sentence(
    api, suite, job_spec, tmp_path, monkeypatch, file, content, sentence
):
    monkeypatch.setattr("app.jobs.admission.model.RENDER_SECONDS", 1.0)
    folder = model_directory(tmp_path / "model", None)
    (tmp_path / "model" / file).write_text(content)
    job_spec["agent"]["model"] = folder
    answer = api.post("/jobs", json=job_spec)
    assert answer.status_code == 422
    assert sentence in answer.json()["detail"]


def test_a_sandbox_that_cannot_start_says_nothing_of_the_template(
    api, suite, job_spec, monkeypatch, tmp_path
):
    job_spec["agent"]["model"] = model_directory(tmp_path / "model", TOOL_TEMPLATE + " ")
    job_spec["agent"]["response_template"] = {"fields": {}}

    def broken(_):
        raise SandboxStartError("no more processes")

    with monkeypatch.context() as broken_host:
        broken_host.setattr("app.jobs.admission.model.Sandbox", broken)
        answer = api.post("/jobs", json=job_spec)
        assert "could not be tried: no more processes; submit it again" in answer.json()["detail"]
    assert "could not be tried" not in api.post("/jobs", json=job_spec).text


def test_paths_are_covered_by_the_models_that_are_allowed(settings, job_spec, arithmetic):
    only = settings.model_copy(update={"allowed_models": ["Org/Name"]})
    with TestClient(create_app(only), headers=bearer("operator")) as client:
        client.post("/suites?name=arithmetic", content=arithmetic.to_archive())
        for model in (job_spec["agent"]["model"], "Other/Name", "m0"):
            job_spec["agent"]["model"] = model
            answer = client.post("/jobs", json=job_spec)
            assert "the operator allows only: Org/Name" in answer.json()["detail"]


def test_a_completion_that_the_model_cannot_hold_is_refused(api, suite, job_spec):
    job_spec["training"]["max_completion_length"] = 1025
    answer = api.post("/jobs", json=job_spec)
    assert answer.json()["errors"] == [
        {
            "field": "training.max_completion_length",
            "line": None,
            "message": "the model holds 1024 tokens, prompt included; give less than that",
        }
    ]


@pytest.mark.parametrize("other", ["Calc", "calc:latest", "CALC:LATEST"])
def test_two_exports_to_one_ollama_model_are_refused(api, suite, job_spec, other):
    job_spec["exports"] = [{"type": "ollama", "name": name} for name in ("calc", other)]
    answer = api.post("/jobs", json=job_spec)
    assert "the same export is asked for twice" in answer.json()["detail"]


def test_a_full_disk_is_a_problem(api, suite, job_spec, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("app.suites.endpoints.tempfile.TemporaryFile", full)
    answer = api.post("/suites?name=x", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (507, "disk_full")


def test_an_unknown_tool_template_is_fine_with_a_response_template(api, suite, job_spec, tmp_path):
    model = model_directory(tmp_path / "model", TOOL_TEMPLATE.replace("MARK", "false"))
    job_spec["agent"] |= {"model": model, "response_template": {"fields": {}}}
    assert api.post("/jobs", json=job_spec).status_code == 201


def test_a_model_without_tool_template_is_fine_without_tools(api, suite, job_spec, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    job_spec["agent"]["model"] = model_directory(tmp_path / "model", template)
    job_spec["agent"]["tools"] = []
    assert post(api, job_spec).status_code == 201


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/nowhere/at/all", "there is no model at '/nowhere/at/all'"),
        ("./relative", "absolute path"),
        ("a/b/c", "neither `Org/Name` nor a path"),
    ],
)
def test_a_model_that_is_not_there_is_refused(api, suite, job_spec, model, sentence):
    job_spec["agent"]["model"] = model
    assert sentence in post(api, job_spec).json()["detail"]


def test_an_idempotency_key_creates_one_job(api, suite, job_spec):
    headers = {"Idempotency-Key": "k1"}
    first = post(api, job_spec, headers=headers)
    again = post(api, job_spec, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    other = post(api, {**job_spec, "name": "other"}, headers=headers)
    assert other.status_code == 422
    assert other.json()["code"] == "idempotency_key_reused"
    turned = dict(reversed(job_spec.items()))
    assert post(api, turned, headers=headers).json()["id"] == first.json()["id"]
    assert len(api.get("/jobs").json()["items"]) == 1


def test_lists_have_pages_and_filters(api, suite, job_spec):
    ids = [post(api, {**job_spec, "name": f"job {n % 2}"}).json()["id"] for n in range(5)]
    first = api.get("/jobs", params={"limit": 3}).json()
    rest = api.get("/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [job["id"] for job in first["items"] + rest["items"]] == ids[::-1]
    assert rest["next_cursor"] is None
    api.post(f"/jobs/{ids[0]}/cancel")
    assert len(api.get("/jobs", params={"status": "queued"}).json()["items"]) == 4
    assert len(api.get("/jobs", params={"name": "job 1"}).json()["items"]) == 2
    assert api.get("/jobs", params={"cursor": "x"}).status_code == 422
    assert api.get("/jobs", params={"status": "sleeping"}).json()["errors"][0]["field"] == "status"


def test_a_queued_job_is_cancelled_at_once_and_once(api, suite, job_spec):
    job_spec["exports"] = [{"type": "gguf"}]
    job_id = post(api, job_spec).json()["id"]
    job = api.post(f"/jobs/{job_id}/cancel").json()
    assert (job["status"], job["reason"]) == ("cancelled", "cancelled_by_user")
    assert job["exports"][0]["status"] == "cancelled"
    again = api.post(f"/jobs/{job_id}/cancel")
    assert again.status_code == 409
    assert again.json()["code"] == "job_already_finished"


@pytest.mark.parametrize(
    "path",
    ["", "/events", "/metrics", "/logs", "/rollouts", "/evaluations", "/artifacts", "/artifacts/x"],
)
def test_an_unknown_job_is_not_found(api, path):
    response = api.get(f"/jobs/job_nothing{path}")
    assert response.status_code == 404
    assert response.json()["code"] == "not_found"


def test_broken_json_is_a_problem_not_a_trace(api):
    response = api.post("/jobs", content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"


def test_a_finished_jobs_stream_replays_and_ends(api, suite, job_spec):
    job_id = post(api, job_spec).json()["id"]
    api.post(f"/jobs/{job_id}/cancel")

    def stream(**headers):
        response = api.get(
            f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream", **headers}
        )
        return [line for line in response.text.splitlines() if line.startswith(("id:", "event:"))]

    whole = ["id: 1", "event: status", "id: 2", "event: adjustment", "id: 3", "event: status"]
    assert stream() == [*whole, "event: end"]
    assert stream(**{"Last-Event-ID": "2"}) == [*whole[4:], "event: end"]


def test_another_teams_jobs_are_not_listed(api, suite, job_spec):
    post(api, job_spec)
    assert len(api.get("/jobs", params={"team": "default"}).json()["items"]) == 1
    assert api.get("/jobs", params={"team": "other"}).json()["items"] == []


def test_echo_weights_for_tools_the_agent_lacks_are_refused(api, suite, job_spec):
    job_spec["training"]["echo"] = {"tool_weights": {"calculate": 2, "search": 0.5}}
    problem = post(api, job_spec).json()
    assert [error["field"] for error in problem["errors"]] == ["training.echo.tool_weights.search"]
    job_spec["training"]["echo"] = {"ignore_lines": "("}
    assert post(api, job_spec).json()["errors"][0]["field"] == "training.echo.ignore_lines"


def test_a_queued_job_is_paused_and_resumed_at_once(api, suite, job_spec):
    job = post(api, job_spec).json()["id"]
    paused = api.post(f"/jobs/{job}/pause").json()
    assert (paused["status"], paused["reason"]) == ("paused", "paused_by_user")
    assert api.post(f"/jobs/{job}/pause").json()["status"] == "paused"
    assert api.post(f"/jobs/{job}/resume").json()["status"] == "queued"
    problem = api.post(f"/jobs/{job}/resume")
    assert (problem.status_code, problem.json()["code"]) == (409, "job_not_paused")
    api.post(f"/jobs/{job}/cancel")
    problem = api.post(f"/jobs/{job}/pause")
    assert (problem.status_code, problem.json()["code"]) == (409, "job_not_pausable")


def test_a_cancelled_job_is_retried_as_a_new_one(api, suite, job_spec):
    job = post(api, job_spec).json()
    assert api.post(f"/jobs/{job['id']}/retry").json()["code"] == "job_not_retryable"
    api.post(f"/jobs/{job['id']}/cancel")
    response = api.post(f"/jobs/{job['id']}/retry")
    again = response.json()
    assert response.status_code == 201
    assert response.headers["location"] == f"/jobs/{again['id']}"
    assert again["id"] != job["id"]
    assert (again["status"], again["spec"]) == ("queued", job["spec"])


def test_an_ended_job_is_deleted_with_its_history(api, suite, job_spec):
    job = post(api, job_spec).json()["id"]
    assert api.delete(f"/jobs/{job}").json()["code"] == "job_not_ended"
    api.post(f"/jobs/{job}/cancel")
    assert api.delete(f"/jobs/{job}").status_code == 204
    assert api.get(f"/jobs/{job}").status_code == 404
    assert api.get(f"/jobs/{job}/events").status_code == 404
    assert api.delete(f"/jobs/{job}").status_code == 404


def test_a_job_that_nobody_can_run_says_so_when_it_is_tried_and_when_it_is_submitted(
    api, suite, job_spec
):
    job_spec["resources"] = {"gpus": 2}
    tried = api.post("/jobs?dry_run=true", json=job_spec).json()
    assert tried["warnings"] == ["no training worker is alive: it would wait until one comes"]
    job = post(api, job_spec).json()
    assert (job["waiting"]["wait_reason"], job["waiting"]["reason"]) == (
        *("no_worker", "no training worker is alive"),
    )


def test_what_trainers_mark_in_a_template_is_known_here_too(api, suite, job_spec, tmp_path):
    marked = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}\n"
        "{% endgeneration %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    job_spec["agent"]["model"] = model_directory(tmp_path / "model", marked)
    job_spec["agent"]["response_template"] = {"fields": {}}
    assert post(api, job_spec).status_code == 201


def test_a_response_template_without_fields_is_refused(api, suite, job_spec):
    job_spec["agent"]["response_template"] = {"foo": 1}
    (error,) = post(api, job_spec).json()["errors"]
    assert error["field"] == "agent.response_template"
