"""One log format for all services: `time level service logger [request] message`, to stderr."""

from __future__ import annotations

import contextvars
import logging
import sys

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__("%(asctime)s %(levelname).1s " + service + " %(name)s: %(message)s", "%H:%M:%S")
        self.default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        request = request_id.get()
        if request:
            record.msg = f"[{request}] {record.msg}"
        return super().format(record)


def setup(service: str, level: str = "INFO") -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "httpx", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
