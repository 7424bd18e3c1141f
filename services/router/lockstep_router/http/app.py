"""The REST application: routes, the guard before all of them, and errors in one form."""

from __future__ import annotations

import hmac
import logging
import re
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep_common.errors import LockstepError, Unauthenticated
from lockstep_router.http.errors import error_object, error_response, plain_error
from lockstep_router.http.routes import Context, router
from lockstep_router.metrics import Metrics

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})  # all that answer without the key
MAX_HEADERS: Final = 128
MAX_HEADER_BYTES: Final = 64 << 10
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")


def build_app(context: Context, *, api_key: str = "") -> FastAPI:
    app = FastAPI(title="Lockstep", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.state.context = context
    app.include_router(router)
    app.add_exception_handler(LockstepError, _lockstep_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, api_key=api_key, metrics=context.metrics)
    return app


class Guard:
    """Before every route, known or not: bounded headers, and the key."""

    def __init__(self, app: ASGIApp, *, api_key: str, metrics: Metrics) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else b""
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no websockets here
        headers = scope["headers"]
        answer = _Answer(scope, send, self._metrics)
        if len(headers) > MAX_HEADERS or sum(len(k) + len(v) for k, v in headers) > MAX_HEADER_BYTES:
            error = LockstepError(f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them")
            await plain_error(431, error_object(error) | {"type": "invalid_request_error"})(scope, receive, answer)
        elif self._expected and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            error = Unauthenticated("send the key as 'Authorization: Bearer KEY'")
            await error_response(error)(scope, receive, answer)
        else:
            try:
                await self._app(scope, receive, answer)
            except Exception:  # answered outside of this guard
                answer.count(500)
                raise

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return hmac.compare_digest(_header(headers, b"authorization"), self._expected)


class _Answer:
    """`send` of one request: counts its status once and echoes the client's request id, if it is a harmless one."""

    __slots__ = ("_counted", "_metrics", "_scope", "_send")

    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self._counted = False

    async def __call__(self, message: Message) -> None:
        if not self._counted:
            self.count(message["status"])
            request_id = _header(self._scope["headers"], b"x-request-id")
            if _REQUEST_ID.fullmatch(request_id):
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await self._send(message)

    def count(self, status: int) -> None:
        if not self._counted:
            self._counted = True
            self._metrics.http(getattr(self._scope.get("route"), "path", "other"), status)


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


async def _lockstep_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LockstepError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    value = {"message": str(error.detail)[:300], "type": "invalid_request_error", "param": None, "code": None}
    return plain_error(error.status_code, value, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    """A fault of ours: it is logged where it was raised, and nothing of it is told outside."""
    value: dict[str, Any] = {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}
    return plain_error(500, value)
