"""The error tree: one code a class, and the same class on the other side of a process border."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from lockstep_common import rpc
from lockstep_common.errors import BY_CODE, InvalidRequest, LockstepError, from_code

ALL = sorted(BY_CODE.values(), key=lambda cls: cls.code)


def subclasses(cls: type[LockstepError]) -> set[type[LockstepError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__() if sub.__module__ == cls.__module__))


def test_codes_are_unique() -> None:
    assert set(ALL) == subclasses(LockstepError), "two classes share a code: one of them hides the other"


@pytest.mark.parametrize("cls", ALL)
def test_codes_map_to_grpc_and_http(cls: type[LockstepError]) -> None:
    assert grpc.StatusCode[cls.grpc_status] is not grpc.StatusCode.OK
    assert 400 <= cls.http < 600


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_a_process_border(cls: type[LockstepError]) -> None:
    error = cls("what to do", param="max_tokens", retry_after_ms=250)
    back = rpc.from_detail(rpc.detail(error))
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_ms) == ("what to do", "max_tokens", 250)


@pytest.mark.parametrize("cls", ALL)
def test_an_error_survives_a_failed_call(cls: type[LockstepError]) -> None:
    error = cls("what to do", param="n")
    trailers = grpc.aio.Metadata((rpc.ERROR_TRAILER, rpc.detail(error).SerializeToString()))
    failed = grpc.aio.AioRpcError(grpc.StatusCode[cls.grpc_status], grpc.aio.Metadata(), trailers, details="what to do")
    back = rpc.from_rpc_error(failed, "worker-0")
    assert type(back) is cls and back.param == "n"


def test_a_failed_call_without_detail_names_the_peer() -> None:
    failed = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details="refused"
    )
    back = rpc.from_rpc_error(failed, "worker-0")
    assert back.code == "unavailable" and "worker-0" in back.message and "refused" in back.message


def test_a_code_of_a_newer_version_is_a_plain_error() -> None:
    back = from_code("from_the_future", "hello")
    assert type(back) is LockstepError and back.message == "hello"


def test_context_length_is_an_invalid_request() -> None:
    assert issubclass(BY_CODE["context_length_exceeded"], InvalidRequest)
    assert BY_CODE["context_length_exceeded"].http == 400
