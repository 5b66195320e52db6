"""What can go wrong between a client and the service."""

from typing import Any

import httpx2


class DressageError(Exception):
    """Base of the client's errors."""


class ServiceUnreachable(DressageError):
    """Nothing answers at the address."""


class DownloadCorrupt(DressageError):
    """What arrived does not have the announced checksum."""


class ApiError(DressageError):
    """The service refused.

    Attributes:
        status: HTTP status.
        code: Stable, for programs.
        detail: What is wrong and what to do.
        errors: Every single problem, with `field`, `line` and `message`.
    """

    def __init__(self, status: int, code: str, detail: str, errors: list[dict[str, Any]]) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.errors = status, code, detail, errors

    @classmethod
    def from_response(cls, response: httpx2.Response) -> "ApiError":
        """Read a problem, or whatever else came (a proxy's page, say)."""
        try:
            body = response.json()
            return cls(response.status_code, body["code"], body["detail"], body["errors"])
        except (ValueError, KeyError, TypeError):
            html = "html" in response.headers.get("content-type", "")
            said = "a page, not an answer of the service" if html else response.text[:200]
            text = f"HTTP {response.status_code} from {response.url.host}: {said}"
            return cls(response.status_code, "http_error", text, [])
