"""The doors that `lockstep bench serve` can knock at. A backend sends one request and times its answer; prompts are token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep_bench.stats import Served
from lockstep_common.errors import ConfigError

ADDRESSES = {"rest": "http://127.0.0.1:8000", "grpc": "127.0.0.1:8001", "scheduler": "127.0.0.1:8002"}


@dataclass(frozen=True, slots=True)
class Generation:
    """What every request of a run asks for."""

    model: str
    input_len: int
    output_len: int
    temperature: float
    ignore_eos: bool


class Backend(Protocol):
    def prepare(self, prompt: Sequence[int]) -> Any:
        """A request, as far as it can be made before the clock runs."""
        ...

    async def complete(self, request: Any) -> Served:
        """Sends a prepared request and times its answer. LockstepError if it fails or is not complete."""
        ...

    async def close(self) -> None: ...


async def connect(kind: str, address: str, generation: Generation, api_key: str = "") -> Backend:
    """rest: any OpenAI-compatible server; grpc: a router's gRPC door; scheduler: a scheduler's own door."""
    match kind:
        case "rest":
            from lockstep_bench.rest import RestBackend

            return await RestBackend.connect(address, generation, api_key)
        case "grpc":
            from lockstep_bench.inference import InferenceBackend

            return await InferenceBackend.connect(address, generation, api_key)
        case "scheduler":
            from lockstep_bench.client import SessionBackend

            return await SessionBackend.connect(address, generation)
    raise ConfigError(f"--backend {kind!r}: give one of {', '.join(ADDRESSES)}")
