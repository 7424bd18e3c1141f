"""Errors as OpenAI's clients expect them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from lockstep_common.errors import LockstepError, NotFound, Unauthenticated

MAX_MESSAGE_CHARS = 600

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_object(error: LockstepError) -> dict[str, Any]:
    """The value under "error"."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "..."
    return {
        "message": message,
        "type": _TYPES.get(error.http, "server_error"),
        "param": error.param or None,
        "code": _code(error),
    }


def error_event(error: LockstepError) -> bytes:
    """The error inside a stream."""
    return b"data: " + orjson.dumps({"error": error_object(error)}) + b"\n\n"


def error_response(error: LockstepError) -> Response:
    headers = {}
    if error.http in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return plain_error(error.http, error_object(error), headers)


def plain_error(status: int, value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps({"error": value}), status, headers, "application/json")


def _code(error: LockstepError) -> str:
    if isinstance(error, NotFound) and error.param == "model":
        return "model_not_found"
    if isinstance(error, Unauthenticated):
        return "invalid_api_key"
    return error.code
