"""Everything the service documents, thrown at it: no answer may be a 5xx or undocumented."""

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.openapi.checks import response_schema_conformance

from app.main import create_app


@pytest.fixture
def service_schema(settings, suite):
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(settings))


schema = schemathesis.pytest.from_fixture("service_schema")


@schema.parametrize()
@hypothesis.settings(
    max_examples=12, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_breaks_the_service(case):
    case.call_and_validate(checks=[not_a_server_error, response_schema_conformance])
