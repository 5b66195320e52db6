"""Everything the service refuses, as RFC 9457 problems with a stable code.

The tree opens the file; the handlers that turn it into `application/problem+json` close it.
"""

import errno
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from app.storage import StorageUnavailable

log = structlog.get_logger()


class FieldProblem(BaseModel):
    """One thing wrong with the request."""

    field: str | None = Field(default=None, description="Path of the field, `training.batch_size`.")
    line: int | None = Field(default=None, description="Line of an uploaded file, from 1.")
    message: str


class Problem(BaseModel):
    """The body of every error."""

    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(description="Stable; for programs.")
    detail: str = Field(description="What is wrong and what to do; for people.")
    errors: list[FieldProblem] = []


class ServiceError(Exception):
    """Base of everything the service refuses."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "bad_request"

    def __init__(self, detail: str, errors: list[FieldProblem] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors or []


class Unauthorized(ServiceError):
    """There is no key, or not a valid one."""

    status, code = 401, "unauthorized"


class NotAllowed(ServiceError):
    """The key's role does not allow it."""

    status, code = 403, "not_allowed"


class QuotaExceeded(ServiceError):
    """The team has what it may have."""

    status, code = 403, "quota_exceeded"


class TooManyRequests(ServiceError):
    """The key asks too often, or its team for too much at once."""

    status, code = 429, "too_many_requests"

    def __init__(self, wait_seconds: float, detail: str | None = None) -> None:
        super().__init__(detail or f"asked too often; wait {wait_seconds:.1f} s")
        self.wait_seconds = wait_seconds


class SuiteInUse(ServiceError):
    """Jobs point to the suite."""

    status, code = 409, "suite_in_use"


class RangeNotSatisfiable(ServiceError):
    """A file ends before the range that is asked for."""

    status, code = 416, "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"the file has {size} bytes")
        self.size = size


class NotFound(ServiceError):
    """There is no such thing (or not for this team)."""

    status, code = 404, "not_found"


class JobFinished(ServiceError):
    """The job has ended; there is nothing to change."""

    status, code = 409, "job_already_finished"


class JobNotTrained(ServiceError):
    """There is no trained model to ask."""

    status, code = 409, "job_not_trained"


class JobNotPausable(ServiceError):
    """Its training is over, or about to be."""

    status, code = 409, "job_not_pausable"


class JobNotRetryable(ServiceError):
    """It has not failed."""

    status, code = 409, "job_not_retryable"


class JobNotEnded(ServiceError):
    """What still lives is not deleted."""

    status, code = 409, "job_not_ended"


class JobNotPaused(ServiceError):
    """Only a paused job can be resumed."""

    status, code = 409, "job_not_paused"


class IdempotencyKeyReused(ServiceError):
    """The key came with another body before."""

    status, code = 422, "idempotency_key_reused"


class UploadTooLarge(ServiceError):
    """The upload is over the operator's limit."""

    status, code = 413, "upload_too_large"


class UnsupportedEncoding(ServiceError):
    """The body is compressed."""

    status, code = 415, "unsupported_encoding"


class SuiteInvalid(ServiceError):
    """The uploaded suite has errors; every line is listed."""

    status, code = 422, "suite_invalid"


class JobInvalid(ServiceError):
    """The specification is well-formed but cannot run."""

    status, code = 422, "job_invalid"

    @classmethod
    def of(cls, problems: list[FieldProblem]) -> "JobInvalid":
        """The refusal that lists these problems; its sentence is the first of them."""
        return cls(f"{problems[0].field}: {problems[0].message}", problems)


class InvalidRequest(ServiceError):
    """The request does not have the documented form."""

    status, code = 422, "validation_error"


PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Problem, "description": "Refused; see `code` and `errors`."},
    "5XX": {"model": Problem, "description": "Not the caller's fault; safe to try again."},
}


def add_handlers(api: FastAPI) -> None:
    """Answer every error as a problem."""
    api.add_exception_handler(ServiceError, _service_error)
    api.add_exception_handler(RequestValidationError, _validation_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(OperationalError, _database_error)
    api.add_exception_handler(StorageUnavailable, _storage_error)
    api.add_exception_handler(InterfaceError, _database_error)
    api.add_exception_handler(PoolTimeout, _database_error)
    api.add_exception_handler(DataError, _data_error)
    api.add_exception_handler(OSError, _os_error)
    api.add_exception_handler(Exception, _unexpected)


def _respond(
    status: int, code: str, detail: str, errors: list[FieldProblem] | None = None
) -> JSONResponse:
    problem = Problem(
        title=code.replace("_", " "), status=status, code=code, detail=detail, errors=errors or []
    )
    return JSONResponse(
        problem.model_dump(), status_code=status, media_type="application/problem+json"
    )


async def _service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    response = _respond(error.status, error.code, error.detail, error.errors)
    if isinstance(error, Unauthorized):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RangeNotSatisfiable):
        response.headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(error, TooManyRequests):
        response.headers["Retry-After"] = str(math.ceil(error.wait_seconds))
    return response


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    state = request.app.state
    if not hasattr(state, "field_names"):  # made when it is first needed
        state.field_names = field_names(request.app.openapi())
    known = state.field_names
    problems = [
        FieldProblem(
            # The first part says body, query, path or header.
            field=".".join(map(str, plain_path(error.body, e["loc"][1:]))) or None,
            message=message_of(e, known),
        )
        for e in error.errors()
    ]
    problems = list({(p.field, p.message): p for p in problems}.values())
    first = problems[0]
    detail = f"{first.field}: {first.message}" if first.field else first.message
    return _respond(422, "validation_error", detail, problems)


MISSING = object()


def plain_path(body: Any, path: Sequence[str | int]) -> list[str | int]:
    """Where in the body something is wrong, without the names of types that pydantic adds."""
    found: list[str | int] = []
    place = body
    for at, part in enumerate(path):
        inner = _inside(place, part)
        if inner is not MISSING:
            place = inner
        elif isinstance(place, dict | list):
            is_last = at == len(path) - 1
            if not (is_last and isinstance(place, dict) and str(part).isidentifier()):
                continue  # of a type, unless it is a field that is not there
        elif found:
            continue
        found.append(part)
    return found


def _inside(place: Any, part: str | int) -> Any:
    if isinstance(place, dict):
        return place.get(part, MISSING)
    if isinstance(place, list) and isinstance(part, int) and part < len(place):
        return place[part]
    return MISSING


def message_of(problem: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """A problem of pydantic's as a sentence.

    Args:
        problem: As `errors()` gives it.
        known: Every field of every request, with where it is.
    """
    if problem["type"] != "extra_forbidden":
        return str(problem["msg"]).removeprefix("Value error, ")
    name = str(problem["loc"][-1])
    near = [name] if name in known else get_close_matches(name, known, 1, cutoff=0.75)
    return f"no such field; did you mean {known[near[0]]!r}?" if near else "no such field"


def field_names(document: Mapping[str, Any]) -> dict[str, str]:
    """Every field of a job, with its place, out of the API's description."""
    schemas, found = document["components"]["schemas"], dict[str, str]()

    def walk(schema: Mapping[str, Any], place: str, seen: tuple[str, ...]) -> None:
        items = [schema["items"]] if "items" in schema else []
        for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *items):
            walk(part, place, seen)
        name = str(schema.get("$ref", "")).rsplit("/", 1)[-1]
        if name and name not in seen:
            for field, inner in schemas[name].get("properties", {}).items():
                found.setdefault(field, f"{place}{field}")
                walk(inner, f"{place}{field}.", (*seen, name))

    spec = next(name for name in ("JobSpec", "JobSpec-Input") if name in schemas)
    walk({"$ref": f"#/components/schemas/{spec}"}, "", ())
    return found


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = _respond(error.status_code, code, str(error.detail))
    response.headers.update(error.headers or {})
    return response


async def _database_error(request: Request, error: Exception) -> JSONResponse:
    log.error("database.error", path=request.url.path, error=str(error))
    return _respond(
        503, "database_unavailable", "the database does not answer; nothing changed, try again"
    )


async def _storage_error(request: Request, error: Exception) -> JSONResponse:
    log.error("storage.error", path=request.url.path, error=str(error))
    return _respond(
        503, "storage_unavailable", "the artifact store does not answer; nothing changed, try again"
    )


async def _data_error(request: Request, error: Exception) -> JSONResponse:
    return _respond(
        422, "validation_error", "the request has a character or number that cannot be stored"
    )


async def _os_error(request: Request, error: Exception) -> JSONResponse:
    if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return await _unexpected(request, error)
    log.error("disk.full", path=request.url.path, error=str(error))
    return _respond(507, "disk_full", "the disk of the service is full; nothing changed")


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.exception("request.failed", path=request.url.path, exc_info=error)
    return _respond(500, "internal_error", "an error of ours; it is in the service's log")
