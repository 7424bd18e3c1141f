"""The routes of the REST interface. Each parses its body, asks the door, and answers; all else happens elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, cast

import orjson
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from lockstep_common.errors import Cancelled, InvalidRequest, NotFound
from lockstep_router.fleet import Fleet
from lockstep_router.http.answers import Answer
from lockstep_router.metrics import Metrics
from lockstep_router.session import Sessions
from lockstep_router.validate import Door

MAX_BODY_BYTES: Final = 8 << 20

router = APIRouter()


@dataclass(frozen=True)
class Context:
    """What the routes work with."""

    door: Door
    fleet: Fleet
    sessions: Sessions
    metrics: Metrics
    started: int  # seconds since 1970
    root: str = ""  # what the served model is, for /v1/models
    version: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # for people; secrets masked
    degraded: Callable[[], list[str]] = list  # what is away without making the router unready

    @property
    def ready(self) -> bool:
        return self.fleet.ready and not self.sessions.draining


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    context, arrival = _context(request), _now(request)
    return Answer(context.sessions, await context.door.chat(await _body(request)), arrival=arrival)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    context, arrival = _context(request), _now(request)
    return Answer(context.sessions, await context.door.completion(await _body(request)), arrival=arrival)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    context = _context(request)
    return _json({"object": "list", "data": [_model(context, name) for name in context.door.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    context = _context(request)
    if name not in context.door.names:
        raise NotFound(f"the model '{name[:256]}' does not exist", param="model")
    return _json(_model(context, name))


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    door = _context(request).door
    body = await _body(request)
    ids, limit = await door.tokenize(body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids}
    if body.get("return_token_strs") is True:
        answer["token_strs"] = [door.tokenizer.vocabulary.token_text(i) for i in ids]
    return _json(answer)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    return _json({"prompt": await _context(request).door.detokenize(await _body(request))})


@router.get("/livez")
async def livez() -> Response:
    return Response("ok", media_type="text/plain")


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    context = _context(request)
    why = "ready" if context.ready else "draining" if context.sessions.draining else "no engine group is ready"
    return _json({"ready": context.ready, "status": why, "degraded": context.degraded()}, 200 if context.ready else 503)


@router.get("/health")
async def health(request: Request) -> Response:
    return Response(status_code=200 if _context(request).ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(_context(request).metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/version")
async def version(request: Request) -> Response:
    context = _context(request)
    groups = [
        {
            "address": link.address,
            "connected": link.connected,
            "facts": dataclasses.asdict(link.facts) if link.facts is not None else None,
            "load": dataclasses.asdict(link.load),
        }
        for link in context.fleet.links
    ]
    return _json({"version": context.version, "settings": context.settings, "groups": groups})


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


def _now(request: Request) -> float:
    return _context(request).sessions.clock.now()


async def _body(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Its size is bounded before it is read."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return parse_body(b"".join(parts))


def parse_body(data: bytes) -> dict[str, Any]:
    """A body as a JSON object; InvalidRequest says what is wrong with it."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if path := _lone_surrogate(data):
            raise InvalidRequest(f"{path} holds a lone surrogate (half of a UTF-16 pair)", param=path) from None
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _lone_surrogate(data: bytes) -> str:
    """Where in a body the first escaped half of a UTF-16 pair stands; empty if that is not what is wrong with it."""
    if b"\\ud" not in data.lower():
        return ""
    try:
        places = [("", json.loads(data))]
    except (ValueError, RecursionError):
        return ""
    while places:
        path, value = places.pop()
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            return path or "the body"
        if isinstance(value, dict):
            places += [(f"{path}.{key[:64]}" if path else key[:64], item) for key, item in value.items()]
        elif isinstance(value, list):
            places += [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    return ""


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"the body is larger than {MAX_BODY_BYTES} bytes")


def _model(context: Context, name: str) -> dict[str, Any]:
    facts = [link.facts for link in context.fleet.links if link.facts is not None]
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "lockstep",
        "root": context.root or name,
        "parent": None,
        "max_model_len": min((f.max_model_len for f in facts), default=None),
        "permission": [],
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
