"""TLS at every port, mutual TLS and the shared token at the internal ones, between real processes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from lockstep_bench.client import SchedulerSession
from lockstep_bench.processes import HOST, Fleet, free_port
from lockstep_common import rpc
from lockstep_common.errors import DeadlineExceeded
from lockstep_common.rpc import Security
from lockstep_common.steps import Sampling
from lockstep_proto.v1 import inference_pb2, inference_pb2_grpc
from tests.tiny_model import make_tiny_model


def openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and node.pem/node.key signed by it; other.pem/other.key by nobody that we know."""
    folder = tmp_path_factory.mktemp("tls")
    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority", cwd=folder)
    openssl(
        "req",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "node.key",
        "-out",
        "node.csr",
        "-subj",
        "/CN=node",
        cwd=folder,
    )
    (folder / "ext").write_text(f"subjectAltName=IP:{HOST},DNS:localhost\n")
    signed = ("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
    openssl(*signed, "-extfile", "ext", "-out", "node.pem", cwd=folder)
    openssl(*new, "-keyout", "other.key", "-out", "other.pem", "-subj", "/CN=other", cwd=folder)
    return folder


async def test_only_known_peers_with_the_token_are_served(certificates: Path) -> None:
    ours = Security(
        str(certificates / "node.pem"), str(certificates / "node.key"), str(certificates / "ca.pem"), "the token"
    )
    flags = ["--tls-cert", ours.cert, "--tls-key", ours.key, "--tls-ca", ours.ca]
    secret = {"LOCKSTEP_WORKER_INTERNAL_TOKEN": ours.token, "LOCKSTEP_SCHEDULER_INTERNAL_TOKEN": ours.token}
    worker, scheduler = free_port(), f"{HOST}:{free_port()}"
    with Fleet() as fleet:
        fleet.python(
            "worker", "-m", "lockstep_worker", "--null-step-ms", "0", "--device", "cpu", "--port", str(worker), *flags, env=secret
        )  # fmt: skip
        running = fleet.python(
            "scheduler", "-m", "lockstep_scheduler", "--workers", f"{HOST}:{worker}", "--host", HOST,
            "--port", scheduler.rsplit(":", 1)[1], *flags, env=secret,
        )  # fmt: skip
        async with await SchedulerSession.open(scheduler, timeout=60, security=ours) as session:
            answer = await session.submit([1, 2, 3], Sampling(max_tokens=5)).answer()
            assert len(answer.tokens[0]) == 5
        stranger = Security(str(certificates / "other.pem"), str(certificates / "other.key"), ours.ca, ours.token)
        for refused in (
            Security(),
            Security(ca=ours.ca, token=ours.token),
            stranger,
            Security(ours.cert, ours.key, ours.ca, "x"),
        ):
            with pytest.raises(DeadlineExceeded):
                await SchedulerSession.open(scheduler, timeout=1.5, security=refused)
        assert ours.token not in running.tail(1000)


async def test_the_public_ports_speak_tls(certificates: Path, tmp_path: Path) -> None:
    model, authority = make_tiny_model(tmp_path / "tiny"), str(certificates / "ca.pem")
    worker, scheduler, rest, front = (free_port() for _ in range(4))
    with Fleet() as fleet:
        fleet.python("worker", "-m", "lockstep_worker", "--model", str(model), "--device", "cpu", "--port", str(worker))
        fleet.python("scheduler", "-m", "lockstep_scheduler", "--workers", f"{HOST}:{worker}", "--port", str(scheduler))
        router = fleet.python(
            "router", "-m", "lockstep_router", "--model", str(model), "--schedulers", f"{HOST}:{scheduler}",
            "--port", str(rest), "--grpc-port", str(front), "--ssl-certfile", str(certificates / "node.pem"),
            "--ssl-keyfile", str(certificates / "node.key"),
        )  # fmt: skip
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority), trust_env=False) as http:
            for _ in range(600):
                router.check()
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(f"https://{HOST}:{rest}/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.1)
            body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
            answer = await http.post(f"https://{HOST}:{rest}/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{HOST}:{rest}/livez")
        channel = rpc.open_channel(f"{HOST}:{front}", Security(ca=authority))
        models = await inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=10
        )
        assert [m.id for m in models.models] == ["tiny"]
        await channel.close()
