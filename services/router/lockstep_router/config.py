"""Settings of the router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep_common.config import setting
from lockstep_common.errors import ConfigError
from lockstep_common.rpc import Security


@dataclass(frozen=True)
class RouterConfig:
    """Lockstep router: OpenAI-compatible REST and gRPC in front of schedulers."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port of the REST interface")
    grpc_port: int = setting(8001, "port of the public gRPC interface (0: off)")
    schedulers: tuple[str, ...] = setting((), "host:port of each scheduler", metavar="LIST")
    redis_url: str = setting("none", "Redis where schedulers register, or none", metavar="URL")
    model: Path = setting(
        Path(), "model directory: tokenizer.json, chat template, generation_config.json", metavar="DIR"
    )
    served_model_name: str = setting("", "name that clients use (default: the directory's)")
    api_key: str = setting("", "key that clients must send as 'Authorization: Bearer KEY'", secret=True)
    ssl_certfile: str = setting(
        "", "certificate of the REST and the public gRPC port (default: plain text)", metavar="FILE"
    )
    ssl_keyfile: str = setting("", "its key", metavar="FILE")
    seed: int = setting(-1, "seed of the generator that gives requests without a seed theirs (-1: a random one)")
    accept_timeout: float = setting(10.0, "seconds that a scheduler may take to accept a request")
    reconnect_timeout: float = setting(10.0, "seconds that accepted requests wait for a scheduler that went away")
    drain_timeout: float = setting(30.0, "seconds that running requests get to end after SIGTERM")
    metrics_port: int = setting(0, "a second port for /metrics alone (0: only on the REST port)")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR")
    tls_cert: str = setting("", "certificate for sessions to schedulers", metavar="FILE")
    tls_key: str = setting("", "its key", metavar="FILE")
    tls_ca: str = setting("", "authority that schedulers' certificates must come from", metavar="FILE")
    internal_token: str = setting("", "token of the internal gRPC ports", secret=True)

    def __post_init__(self) -> None:
        if self.model == Path():
            raise ConfigError("no model given: set --model to a directory with tokenizer.json")
        if not self.schedulers and self.redis_url == "none":
            raise ConfigError("no scheduler given: set --schedulers host:port, or --redis-url to find them in Redis")
        for address in self.schedulers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(f"--schedulers: {address!r} is not host:port")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError(
                "TLS needs a certificate and its key: set both --ssl-certfile and --ssl-keyfile, or neither"
            )
        for name in ("accept_timeout", "reconnect_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
        if self.drain_timeout < 0:
            raise ConfigError("--drain-timeout must not be negative")
        if not -1 <= self.seed < 2**63:
            raise ConfigError("--seed must be -1 or a number from 0 to 2^63 - 1")

    @property
    def name(self) -> str:
        """The name of the served model."""
        return self.served_model_name or self.model.resolve().name

    @property
    def public_security(self) -> Security:
        """Of the public gRPC port."""
        return Security(cert=self.ssl_certfile, key=self.ssl_keyfile, token=self.api_key)

    @property
    def security(self) -> Security:
        """Of the sessions to schedulers."""
        return Security(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, token=self.internal_token)
