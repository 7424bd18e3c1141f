"""Ranks that exchange tensors, and how: nobody else, through the host (gloo), or from device to device (NCCL).

All ranks of a communicator call the same methods in the same order, a rank with nothing to say too. Each call has a name and is
recorded; GroupLost says in which one the group broke. Tensors travel as bytes, so any dtype will do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from lockstep_common.errors import Unsupported
from lockstep_worker.collectives.record import CollectiveId, Recorder
from lockstep_worker.protocol import GroupLost

_KEY_BYTES: Final = 128


class Communicator(Protocol):
    """What `size` ranks do together; this one is `rank`."""

    rank: int
    size: int

    def all_gather(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]: everybody's x, by rank. All have the same shape and dtype."""
        ...

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to gather, and returns at once: a call that gives what `all_gather` gives. x must stay as it is until then."""
        ...

    def all_to_all(self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """The first sent[0] rows of x [sum(sent), ...] go to rank 0, the next sent[1] to rank 1, and so on; returns
        [sum(received), ...], by rank. What a rank sends to another is what that one receives from it."""
        ...

    def all_to_all_later(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Begins, and returns at once: a call that gives what `all_to_all` gives. x must stay as it is until then."""
        ...

    def swap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [size, ...]: part i goes to rank i; returns [size, ...], part j from rank j."""
        ...

    def swap_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins, and returns at once: a call that gives what `swap` gives. x must stay as it is until then."""
        ...

    def broadcast(self, name: str, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """x of rank `source`, on all ranks; the others' x (of the same shape and dtype) is overwritten. Returns x."""
        ...

    def maximum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Element by element the largest of all ranks' x, written over x. Returns x."""
        ...

    def process_group(self) -> Any:
        """torch's process group of these ranks, for libraries that want one. Unsupported without NCCL."""
        ...

    def abort(self) -> None:
        """Makes collectives that wait fail, those in captured graphs too, where that can be done; from any thread."""
        ...

    def close(self) -> None: ...


class Alone:
    """A communicator of one rank."""

    rank = 0
    size = 1

    def all_gather(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: x[None]

    def all_to_all(self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x

    def all_to_all_later(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        return lambda: x

    def swap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x

    def swap_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: x

    def broadcast(self, name: str, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x

    def maximum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x

    def process_group(self) -> Any:
        raise Unsupported("a group of one has no process group")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class _OverGroup:
    """A communicator over one of torch's process groups."""

    _on_host = True

    def __init__(self, scope: str, group: Any, recorder: Recorder, rank: int, size: int) -> None:
        self._scope = scope
        self.rank, self.size = rank, size
        self.compared: tuple[str, ...] = ()  # names of the ranks, if they compare which collective each of them begins
        self._group = group
        self._recorder = recorder

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        with self._recorder.during(name, self._scope) as collective:
            if self.compared:
                self._compare(collective)
            yield

    def _compare(self, mine: CollectiveId) -> None:
        """GroupLost names the first rank that begins another collective: sizes that do not fit would end processes."""
        key = torch.zeros(_KEY_BYTES, dtype=torch.uint8)
        data = mine.key.encode()[:_KEY_BYTES]
        key[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        outgoing = key if self._on_host else key.cuda()
        result = outgoing.new_empty(self.size * _KEY_BYTES)
        self._call(mine.name, self._call(mine.name, lambda: self._group._allgather_base(result, outgoing)).wait)
        for theirs, peer in zip(result.cpu().view(self.size, -1), self.compared, strict=True):
            if not torch.equal(theirs, key):
                other = bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace")
                raise GroupLost(f"out of step: {peer} had {other} where this rank had {mine.key}")

    def all_gather(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with self._during(name):
            return self._finish(name, *self._begin_gather(name, x))

    def all_gather_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        with self._during(name):
            return self._later(name, *self._begin_gather(name, x))

    def all_to_all(self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        with self._during(name):
            return self._finish(name, *self._begin_all_to_all(name, x, sent, received))

    def all_to_all_later(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        with self._during(name):
            return self._later(name, *self._begin_all_to_all(name, x, sent, received))

    def swap(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with self._during(name):
            return self._finish(name, *self._begin_swap(name, x))

    def swap_later(self, name: str, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        with self._during(name):
            return self._later(name, *self._begin_swap(name, x))

    def broadcast(self, name: str, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        data = self._outgoing(x)
        with self._during(name):
            work = self._call(name, lambda: self._group.broadcast([data], options))
            return self._finish(name, work, lambda: self._over(x, data))

    def maximum(self, name: str, x: torch.Tensor) -> torch.Tensor:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        data = self._numbers(x)
        with self._during(name):
            work = self._call(name, lambda: self._group.allreduce([data], options))
            return self._finish(name, work, lambda: x if data is x else x.copy_(data))

    def abort(self) -> None:
        pass  # gloo cannot; its collectives end by their timeout, or when another rank's connections close

    def close(self) -> None:
        self._group = None  # and its connections

    def process_group(self) -> Any:
        raise Unsupported(
            "only NCCL has a process group for others: give --collectives auto and each worker its own GPU"
        )

    def _begin_gather(self, name: str, x: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        outgoing = self._outgoing(x)
        result = outgoing.new_empty(self.size * outgoing.shape[0])
        work = self._call(name, lambda: self._group._allgather_base(result, outgoing))
        return work, lambda: self._incoming(result, (self.size, *x.shape), x)

    def _begin_all_to_all(
        self, name: str, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        outgoing, width = self._outgoing(x), math.prod(x.shape[1:]) * x.dtype.itemsize
        result = outgoing.new_empty(sum(received) * width)
        splits = [[count * width for count in counts] for counts in (received, sent)]
        work = self._call(name, lambda: self._group.alltoall_base(result, outgoing, *splits))
        return work, lambda: self._incoming(result, (sum(received), *x.shape[1:]), x)

    def _begin_swap(self, name: str, x: torch.Tensor) -> tuple[Any, Callable[[], torch.Tensor]]:
        outgoing = self._outgoing(x)
        result = torch.empty_like(outgoing)
        work = self._call(name, lambda: self._group.alltoall_base(result, outgoing, [], []))
        return work, lambda: self._incoming(result, x.shape, x)

    def _later(self, name: str, work: Any, result: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def finish() -> torch.Tensor:
            with self._recorder.during(f"{name}, arrival", self._scope):
                return self._finish(name, work, result)

        return finish

    def _call(self, name: str, begin: Callable[[], Any]) -> Any:
        try:
            return begin()
        except RuntimeError as error:
            raise GroupLost(f"the group broke in {name}: {error}") from error

    def _finish(self, name: str, work: Any, result: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._call(name, work.wait)
        return result()

    def _outgoing(self, x: torch.Tensor) -> torch.Tensor:
        """The bytes of x, flat, where the group takes them."""
        return _bytes(x)

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def _incoming(self, data: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return data.view(like.dtype).view(*shape)

    def _over(self, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """x, with these bytes."""
        if data.data_ptr() != x.data_ptr():
            x.copy_(self._incoming(data, x.shape, x))
        return x


class OverHost(_OverGroup):
    """gloo, on the CPU; tensors of other devices take the way through the host's memory."""

    def __init__(
        self, scope: str, store: Store, recorder: Recorder, rank: int, size: int, *, host: str, timeout: timedelta
    ) -> None:
        """`scope`: what records call it. `host`: an address of this machine that the other ranks reach. RuntimeError if they do not come in time."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        super().__init__(scope, ProcessGroupGloo(store, rank, size, options), recorder, rank, size)

    def _outgoing(self, x: torch.Tensor) -> torch.Tensor:
        return _bytes(x.cpu())

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu()

    def _incoming(self, data: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return super()._incoming(data, shape, like).to(like.device)


class OverNccl(_OverGroup):
    """NCCL: from device to device, in the order of the current stream."""

    def __init__(
        self, scope: str, store: Store, recorder: Recorder, rank: int, size: int, *, timeout: timedelta
    ) -> None:
        from torch.distributed import ProcessGroupNCCL  # only CUDA builds of torch have it

        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
            os.environ.setdefault(name, "0")  # a rank that is lost must not end this process: others decide
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        super().__init__(scope, ProcessGroupNCCL(store, rank, size, options), recorder, rank, size)
        self.store = store

    def process_group(self) -> Any:
        group = ProcessGroup(self.store, self.rank, self.size)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, self._group)
        return group

    _on_host = False

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()
        super().close()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
