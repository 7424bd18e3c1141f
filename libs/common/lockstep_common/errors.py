"""One tree of errors for all services; each carries its gRPC status and its HTTP code.

    LockstepError                 internal            INTERNAL             500
    |- InvalidRequest             invalid_request     INVALID_ARGUMENT     400   the request is at fault; `param` names the field
    |  |- ContextLengthExceeded   context_length_exceeded                  400
    |- Unauthenticated            unauthenticated     UNAUTHENTICATED      401
    |- NotFound                   not_found           NOT_FOUND            404
    |  |- RequestLost             request_lost                             404   the scheduler does not hold it (any more)
    |- Overloaded                 overloaded          RESOURCE_EXHAUSTED   429   come back later: `retry_after_ms`
    |- Cancelled                  cancelled           CANCELLED            499   by its owner
    |- DeadlineExceeded           deadline_exceeded   DEADLINE_EXCEEDED    504   the message names what was missing
    |- Unavailable                unavailable         UNAVAILABLE          503   retry may help: a process is away, or draining
    |- Conflict                   conflict            FAILED_PRECONDITION  409   stale epoch or term, gap in a sequence, unequal config
    |- Unsupported                unsupported         UNIMPLEMENTED        501
    |- ConfigError                config              FAILED_PRECONDITION  500   a setting or a file; only at start-up

Across a process border an error is an `ErrorDetail` (common.proto): code, message, param, retry_after_ms.
`from_code` turns it back into the class it was.
"""

from __future__ import annotations

from typing import ClassVar


class LockstepError(Exception):
    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms


class InvalidRequest(LockstepError):
    code, grpc_status, http = "invalid_request", "INVALID_ARGUMENT", 400


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class Unauthenticated(LockstepError):
    code, grpc_status, http = "unauthenticated", "UNAUTHENTICATED", 401


class NotFound(LockstepError):
    code, grpc_status, http = "not_found", "NOT_FOUND", 404


class RequestLost(NotFound):
    code = "request_lost"


class Overloaded(LockstepError):
    code, grpc_status, http = "overloaded", "RESOURCE_EXHAUSTED", 429


class Cancelled(LockstepError):
    code, grpc_status, http = "cancelled", "CANCELLED", 499


class DeadlineExceeded(LockstepError):
    code, grpc_status, http = "deadline_exceeded", "DEADLINE_EXCEEDED", 504


class Unavailable(LockstepError):
    code, grpc_status, http = "unavailable", "UNAVAILABLE", 503


class Conflict(LockstepError):
    code, grpc_status, http = "conflict", "FAILED_PRECONDITION", 409


class Unsupported(LockstepError):
    code, grpc_status, http = "unsupported", "UNIMPLEMENTED", 501


class ConfigError(LockstepError):
    code, grpc_status, http = "config", "FAILED_PRECONDITION", 500


def _tree(root: type[LockstepError]) -> dict[str, type[LockstepError]]:
    return {root.code: root} | {code: cls for sub in root.__subclasses__() for code, cls in _tree(sub).items()}


BY_CODE = _tree(LockstepError)


def from_code(code: str, message: str, *, param: str = "", retry_after_ms: int = 0) -> LockstepError:
    """The error that crossed a process border; a code of a newer version is a plain LockstepError."""
    return BY_CODE.get(code, LockstepError)(message, param=param, retry_after_ms=retry_after_ms)
