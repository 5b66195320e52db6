"""Everything the service documents, thrown at it: no answer may be a 5xx or undocumented."""

import re
from urllib.parse import urljoin

import hypothesis
import jsonschema
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from app.main import create_app
from tests.servers import bearer

PLENTY = hypothesis.settings(
    max_examples=25,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def test_no_request_breaks_the_service(settings, suite):
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(settings))
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.label)
        if operation.label == "GET /readyz":
            continue  # 503 is what it says where there is no scheduler, as here

        @PLENTY
        @hypothesis.given(case=operation.as_strategy())
        def attack(case):
            response = case.call(headers=bearer("operator"))
            case.validate_response(
                response, checks=[not_a_server_error, response_schema_conformance]
            )

        attack()
    assert {"POST /jobs", "POST /suites", "GET /jobs/{job_id}/events"} <= tried


def test_every_route_shows_an_example_that_its_schema_accepts(api):
    document = api.get("/openapi.json").json()
    validator = jsonschema.Draft202012Validator(document)
    without = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            bodies = [
                operation.get("requestBody", {}),
                *(v for code, v in operation["responses"].items() if code in ("200", "201")),
            ]
            contents = [b["content"]["application/json"] for b in bodies if _is_json(b)]
            shown = [(c, c["example"]) for c in contents if "example" in c]
            shown += [(c, e["value"]) for c in contents for e in c.get("examples", {}).values()]
            for content, example in shown:
                validator.evolve(schema={**document, **content["schema"]}).validate(example)
            if contents and not shown and not path.endswith("z"):
                without.append(f"{method} {path}")
    assert without == []


def _is_json(body):
    return "application/json" in body.get("content", {})


def test_the_documentation_needs_no_internet(api):
    page = api.get("/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert "//" not in link, link
        assert api.get(urljoin("/docs", link)).status_code == 200
