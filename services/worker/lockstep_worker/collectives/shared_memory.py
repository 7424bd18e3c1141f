"""Memory of each rank that the kernels of all ranks read and write: torch's symmetric memory, between GPUs of one machine.

It is set up when a group is joined, by all ranks together, and given back when it is left. NVLink's multicast is not used.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from lockstep_common.errors import Unsupported
from lockstep_worker.collectives.communicator import OverNccl
from lockstep_worker.collectives.groups import Group

log = logging.getLogger(__name__)

_MAPPED_S: Final = 10.0  # in which memory must be mapped: less than ranks wait for each other's word on it
_NUMBER = re.compile(r"/(\d+)/(\d+)$")
_names = itertools.count()


class SharedMemory:
    """parts[r]: uint8 [bytes], of rank r; zero at first."""

    def __init__(self, parts: Sequence[torch.Tensor], handle: Any = None) -> None:
        self.parts = tuple(parts)
        self._handle = handle  # keeps the mappings

    def close(self) -> None:
        """Once nothing on this device uses it any more. Other ranks' mappings last until they close theirs."""
        self.parts, self._handle = (), None


def share_memory(group: Group, nbytes: int, device: torch.device) -> SharedMemory:
    """So many bytes of each rank. All ranks of a group call it together, and it fails on all or on none: Unsupported says why."""
    if not isinstance(group.world, OverNccl):
        raise Unsupported(
            "memory is shared between GPUs that NCCL joins; this group's workers talk through their hosts"
        )
    machines = group.everybody.all_gather("machine", _machine()).flatten().tolist()
    if len(set(machines)) > 1:
        raise Unsupported("memory is shared within one machine, and this group's workers are on several")
    found: list[SharedMemory] = []
    problem = _within(_MAPPED_S, lambda: found.append(_map(group.world, nbytes, device)))
    log.debug("shared memory: %s", problem or "mapped")
    if group.meet(int(bool(problem))):
        raise Unsupported(f"memory cannot be shared between these GPUs: {problem or 'another worker could not map it'}")
    return found[0]


def _map(world: Any, nbytes: int, device: torch.device) -> SharedMemory:
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
    from torch.distributed import _symmetric_memory as symmetric

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # each worker sees its GPU as the first
    name: Any = f"lockstep-memory-{next(_names)}"
    with torch.cuda.device(device):
        mine = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        mine.zero_()
        torch.cuda.synchronize(device)  # zero before others can write
        store = Renumbered(world.store, timedelta(seconds=_MAPPED_S))  # lives as long as this name does
        ranks = ProcessGroup(store, world.rank, world.size)
        _register_process_group(name, ranks)
        try:
            handle = _SymmetricMemory.rendezvous(mine, name)
        except RuntimeError as error:
            if "group info" not in str(error):
                raise
            _SymmetricMemory.set_group_info(name, world.rank, world.size, store)  # as earlier releases of torch want it
            handle = _SymmetricMemory.rendezvous(mine, name)
        finally:
            _unregister_process_group(name)
        parts = [
            mine if rank == world.rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in range(world.size)
        ]
    return SharedMemory(parts, (handle, mine, store))


class Renumbered(Store):
    """A group's store for torch's exchange of memory, whose keys end in /number/rank.

    torch numbers such exchanges from a process's beginning on, so ranks that have not been in the same groups would wait under
    different keys. Here they count from the group's beginning.
    """

    def __init__(self, inner: Store, timeout: timedelta) -> None:
        super().__init__()
        self._inner, self._timeout = inner, timeout
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        def counted(found: re.Match[str]) -> str:
            number = self._numbers.setdefault(found[1], len(self._numbers))
            return f"/{number}/{found[2]}"

        return "shared-memory/" + _NUMBER.sub(counted, key)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(self._key(key)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait([self._key(key) for key in keys], timeout or self._timeout)


def _machine() -> torch.Tensor:
    """int64 [1]: equal on workers that can hand each other open files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    spaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("pid", "mnt")]
    digest = hashlib.sha256("\n".join([boot, *spaces]).encode()).digest()
    return torch.frombuffer(bytearray(digest[:8]), dtype=torch.int64)


def _within(seconds: float, work: Any) -> str:
    """What went wrong, empty if nothing: torch waits without bounds for ranks that die while they hand over memory."""
    problems: list[str] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:  # whatever it is, all ranks must learn of it
            problems.append(str(error).partition("\n")[0] or repr(error))

    thread = threading.Thread(target=guarded, name="shared memory", daemon=True)
    thread.start()
    thread.join(seconds)
    return f"not mapped within {seconds:g} s" if thread.is_alive() else "".join(problems)
