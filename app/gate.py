"""What every request passes before its body is read and its endpoint runs.

FastAPI reads and parses a body before it asks who sends it; here the key comes first, the size is
counted as it comes, and what no endpoint asks for is refused by name.
"""

import asyncio
from collections.abc import Callable, Coroutine
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo

from app.dependencies import current_caller, identify
from app.exceptions import FieldProblem, InvalidRequest, UnsupportedEncoding, UploadTooLarge
from dressage import strict_json

MAX_JSON_BYTES = 8 * 1024**2
LARGE = 64 * 1024  # characters that take longer than a request should hold the others up


class GatedRoute(APIRoute):
    """A route whose requests are checked before their bodies are read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint, behind the gate."""
        endpoint = super().get_route_handler()

        async def handler(request: Request) -> Response:
            if self._needs_key:
                await identify(request)
            self._check_query(request)
            encoding = request.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise UnsupportedEncoding(f"send the body as it is, not in {encoding!r}")
            if self.body_field is not None:
                await _read_json(request)
            return await endpoint(request)

        return handler

    @cached_property
    def _needs_key(self) -> bool:
        return _asks(self.dependant, current_caller)

    @cached_property
    def _query(self) -> dict[str, bool]:
        """Names of query parameters, and whether each may be given more than once."""
        fields = [f for f in get_flat_params(self.dependant) if isinstance(f.field_info, Query)]
        return {field.alias: _is_list(field.field_info) for field in fields}

    def _check_query(self, request: Request) -> None:
        given = [name for name, _ in request.query_params.multi_items()]
        problems = []
        for name in dict.fromkeys(given):
            if name not in self._query:
                near = get_close_matches(name, self._query, 1)
                known = ", ".join(self._query) or "none"
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {known}"
                problems.append(FieldProblem(field=name, message=f"no such parameter; {hint}"))
            elif given.count(name) > 1 and not self._query[name]:
                problems.append(FieldProblem(field=name, message="given more than once"))
        if problems:
            first = problems[0]
            raise InvalidRequest(f"{first.field}: {first.message}", problems)


class ApiRouter(APIRouter):
    """A router with gated routes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=GatedRoute, **options)


async def _read_json(request: Request) -> None:
    """Read the body within its limit, and see that it is JSON that every part of us can hold."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_JSON_BYTES:
        raise UploadTooLarge(f"the body has {announced} bytes; the limit is {MAX_JSON_BYTES}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise UploadTooLarge(f"the body is longer than the limit of {MAX_JSON_BYTES} bytes")
    request._body = bytes(body)  # where `request.body()` keeps what it has read
    if body:
        try:
            text = body.decode()
            if len(text) > LARGE:
                await asyncio.to_thread(strict_json.loads, text, doubled=False)
            else:
                strict_json.loads(text, doubled=False)
        except UnicodeDecodeError:
            raise InvalidRequest("the body is not UTF-8 text") from None
        except ValueError as error:
            raise InvalidRequest(f"the body is not JSON: {error}") from None


def _asks(dependant: Dependant, call: Callable[..., Any]) -> bool:
    return dependant.call is call or any(_asks(part, call) for part in dependant.dependencies)


def _is_list(info: FieldInfo) -> bool:
    return "list" in str(info.annotation)
