"""Everything the service documents, thrown at it: no answer may be a 5xx or undocumented."""

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from app.main import create_app

PLENTY = hypothesis.settings(
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def test_no_request_breaks_the_service(settings, suite):
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(settings))
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        tried.add(operation.label)

        @PLENTY
        @hypothesis.given(case=operation.as_strategy())
        def attack(case):
            response = case.call()
            case.validate_response(
                response, checks=[not_a_server_error, response_schema_conformance]
            )

        attack()
    assert {"POST /jobs", "POST /suites", "GET /jobs/{job_id}/events"} <= tried
