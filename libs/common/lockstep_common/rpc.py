"""gRPC as all Lockstep services use it: options that keep long streams alive, TLS and a shared token, health, errors,
and the messages of common.proto that several services read and write.

Errors cross the wire as a status with an `ErrorDetail` in the binary trailer `lockstep-error-bin`; `abort` writes it,
`from_rpc_error` reads it back into the class of lockstep_common.errors that was raised on the other side.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lockstep_common import errors
from lockstep_common.errors import ConfigError, LockstepError
from lockstep_common.steps import PromptScores, Sampling, WorkerFacts, f32, u32
from lockstep_proto.v1 import common_pb2, worker_pb2

ERROR_TRAILER = "lockstep-error-bin"
TOKEN_HEADER = "authorization"

# Pings every 20 s on an idle connection; a server that counted them as abuse would cut streams during long steps.
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True)
class Security:
    """TLS material (paths; empty is plain text) and a token that callers must send (empty is none).

    With `ca` a server demands client certificates and a client trusts that authority only: mutual TLS.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("TLS needs a certificate and its key: set both tls_cert and tls_key, or neither")

    def __repr__(self) -> str:
        return f"Security(cert={self.cert!r}, ca={self.ca!r}, token={'***' if self.token else ''!r})"


PLAIN = Security()


def make_server(security: Security = PLAIN) -> grpc.aio.Server:
    """A server without ports. Every method but health needs the token, if there is one."""
    interceptors = [_TokenInterceptor(security.token)] if security.token else []
    return grpc.aio.server(options=_SERVER_OPTIONS, interceptors=interceptors)


def bind(server: grpc.aio.Server, address: str, security: Security = PLAIN) -> int:
    """Binds `host:port` (port 0: any) and returns the port; ConfigError if it is taken."""
    try:
        if security.cert:
            credentials = grpc.ssl_server_credentials(
                [(_read(security.key), _read(security.cert))],
                root_certificates=_read(security.ca) if security.ca else None,
                require_client_auth=bool(security.ca),
            )
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    if port == 0:
        raise ConfigError(f"cannot listen on {address}: the address is in use or not ours")
    return port


def open_channel(address: str, security: Security = PLAIN) -> grpc.aio.Channel:
    """A channel to `host:port`; connects on first use and again after a failure."""
    if security.cert or security.ca:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(security.ca) if security.ca else None,
            private_key=_read(security.key) if security.key else None,
            certificate_chain=_read(security.cert) if security.cert else None,
        )
        return grpc.aio.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def call_metadata(security: Security) -> tuple[tuple[str, str], ...]:
    """Metadata that every call must carry."""
    return ((TOKEN_HEADER, f"Bearer {security.token}"),) if security.token else ()


class Health:
    """grpc.health.v1 of one server: "" is liveness, a service's name is readiness."""

    def __init__(self, server: grpc.aio.Server, *services: str) -> None:
        self._servicer = health.aio.HealthServicer()
        self._services = services
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        await self._servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.ready(False)

    async def ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._servicer.set(service, status)

    async def draining(self) -> None:
        """Call before `server.stop`, so that callers turn away first."""
        await self._servicer.enter_graceful_shutdown()


def detail(error: LockstepError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        code=error.code, message=error.message, param=error.param, retry_after_ms=error.retry_after_ms
    )


def from_detail(message: common_pb2.ErrorDetail) -> LockstepError:
    return errors.from_code(message.code, message.message, param=message.param, retry_after_ms=message.retry_after_ms)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: LockstepError) -> NoReturn:
    """Ends a call with the error's status and detail."""
    trailer = ((ERROR_TRAILER, detail(error).SerializeToString()),)
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, trailer)
    raise AssertionError("abort returned")


def write_sampling(sampling: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_ids=np.array(sampling.stop_ids, "<u4").tobytes(),
        bias_ids=np.array([i for i, _ in sampling.bias], "<u4").tobytes(),
        bias_values=np.array([value for _, value in sampling.bias], "<f4").tobytes(),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if sampling.prompt_logprobs >= 0 else None,
    )


def read_sampling(message: common_pb2.Sampling) -> Sampling:
    """InvalidRequest if an array is not whole, or the two of the bias differ in length."""
    try:
        bias = tuple(zip(u32(message.bias_ids).tolist(), f32(message.bias_values).tolist(), strict=True))
        stop_ids = tuple(u32(message.stop_ids).tolist())
    except ValueError as error:
        raise errors.InvalidRequest(f"the sampling parameters cannot be read: {error}", param="sampling") from None
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        stop_ids=stop_ids,
        bias=bias,
        logprobs=message.logprobs,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else -1,
    )


def write_scores(scores: PromptScores) -> common_pb2.PromptLogprobs:
    return common_pb2.PromptLogprobs(
        logprobs=scores.logprobs.tobytes(),
        ranks=scores.ranks.tobytes(),
        width=scores.ids.shape[1],
        ids=scores.ids.tobytes(),
        values=scores.values.tobytes(),
    )


def read_scores(message: common_pb2.PromptLogprobs) -> PromptScores:
    """ValueError if the arrays do not fit together."""
    logprobs, ranks = f32(message.logprobs), u32(message.ranks)
    shape = (len(ranks), message.width)
    if len(logprobs) != len(ranks):
        raise ValueError(f"{len(logprobs)} log probabilities for {len(ranks)} ranks")
    return PromptScores(logprobs, ranks, u32(message.ids).reshape(shape), f32(message.values).reshape(shape))


_BY_STATUS: dict[grpc.StatusCode, type[LockstepError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Conflict,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
}


def from_rpc_error(error: grpc.RpcError, peer: str) -> LockstepError:
    """The LockstepError behind a failed call; `peer` says in the message who failed."""
    trailers = error.trailing_metadata() if isinstance(error, grpc.aio.AioRpcError) else None
    for key, value in trailers or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            return from_detail(common_pb2.ErrorDetail.FromString(value))
    if isinstance(error, grpc.aio.AioRpcError):
        cls = _BY_STATUS.get(error.code(), LockstepError)
        return cls(f"{peer}: {error.details() or error.code().name}")
    return LockstepError(f"{peer}: {error}")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read TLS file {path}: {error.strerror}") from error


class _TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith("/grpc.health.v1.Health/"):
            return await continuation(handler_call_details)
        for key, value in handler_call_details.invocation_metadata or ():
            if key == TOKEN_HEADER:
                raw = value if isinstance(value, bytes) else value.encode()
                if hmac.compare_digest(raw, self._expected):
                    return await continuation(handler_call_details)
        handler = await continuation(handler_call_details)
        return _refusal(handler)


def _refusal(handler: grpc.RpcMethodHandler[Any, Any] | None) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape that answers UNAUTHENTICATED (the shape must fit the call that comes in)."""
    error = errors.Unauthenticated("send the token of this deployment as 'authorization: Bearer ...'")

    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await abort(context, error)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await abort(context, error)
        yield  # an async generator, as stream handlers are

    if handler is None or not (handler.request_streaming or handler.response_streaming):
        return grpc.unary_unary_rpc_method_handler(unary)  # type: ignore[arg-type,unused-ignore]
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)  # type: ignore[arg-type,unused-ignore]
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)  # type: ignore[arg-type,unused-ignore]
    return grpc.stream_unary_rpc_method_handler(unary)  # type: ignore[arg-type,unused-ignore]


def write_facts(facts: WorkerFacts) -> worker_pb2.WorkerFacts:
    return worker_pb2.WorkerFacts(
        model=facts.model,
        config_hash=facts.config_hash,
        device=facts.device,
        dtype=facts.dtype,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        max_rows=facts.max_rows,
        weights_epoch=facts.weights_epoch,
        groups=[
            worker_pb2.KvGroup(kind=g.kind, block_size=g.block_size, num_blocks=g.num_blocks, dtype=g.dtype)
            for g in facts.groups
        ],
        deterministic=facts.deterministic,
        routed_experts=facts.routed_experts,
        generated_reusable=facts.generated_reusable,
        moe_layers=facts.moe_layers,
        routed_expert_count=facts.routed_expert_count,
        expert_slots=facts.expert_slots,
        expert_groups=facts.expert_groups,
        dp=facts.dp,
        cp=facts.cp,
        rank=facts.rank,
        kept_epoch=facts.kept_epoch,
        max_batched_tokens=facts.max_batched_tokens,
    )
