"""Errors in the form that OpenAI clients understand, worded and typed as vLLM does."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}


class ApiError(Exception):
    """Ends a request with an error; the gateway's exception handler answers with it.

    Args:
        status: HTTP status.
        message: What happened and the way out, for the client's author.
        param: The parameter of the request that is at fault.
        kind: The error's type; by default the one of the status.
        headers: To be sent with it, such as Retry-After.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, kind: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.kind, self.headers = status, message, param, kind, headers

    def response(self) -> Response:
        """The answer that tells of it."""
        return Response(error_body(self.status, self.message, param=self.param, kind=self.kind), self.status, self.headers, "application/json")


def error_body(status: int, message: str, *, param: str | None = None, kind: str | None = None) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as JSON."""
    return msgspec.json.encode(error_data(status, message, param=param, kind=kind))


def error_data(status: int, message: str, *, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """The same as data."""
    return {"error": {"message": message, "type": kind or _TYPES.get(status) or _fallback(status), "param": param, "code": status}}


def _fallback(status: int) -> str:
    try:
        return HTTPStatus(status).phrase.replace(" ", "") + ("" if status >= 500 else "Error")
    except ValueError:
        return "Error"
