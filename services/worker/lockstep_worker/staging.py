"""The host's way to the device without waiting: arrays go through page-locked memory, copied in stream order."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_ALIGN: Final = 64


class Staging:
    """Copies arrays to a device. On CUDA, `put` returns at once: the copy is queued on the current stream.

    Page-locked memory is a ring of equal parts. A part is used again when the copies out of it are known to be done, so the host
    waits only if it is `parts` parts ahead of the device. On CPU an array is its own tensor.
    """

    def __init__(self, device: torch.device, *, part_bytes: int = 1 << 20, parts: int = 4) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._part_bytes = part_bytes
        self._used = 0
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        if self._pinned:
            for _ in range(parts):
                self._free.append((torch.empty(part_bytes, dtype=torch.uint8, pin_memory=True), None))
            self._part, _ = self._free.popleft()

    def put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """The array on the device. It may be changed afterwards on CUDA; on CPU the tensor is a view of it."""
        host = torch.from_numpy(array)
        if not self._pinned:
            return host
        if array.nbytes == 0:
            return torch.empty(array.shape, dtype=host.dtype, device=self.device)
        if array.nbytes > self._part_bytes:  # rare and large: worth page-locking for itself
            return host.pin_memory().to(self.device, non_blocking=True)
        start = self._reserve(array.nbytes)
        staged = self._part[start : start + array.nbytes].view(host.dtype).view(host.shape)
        staged.copy_(host)
        return staged.to(self.device, non_blocking=True)

    def _reserve(self, size: int) -> int:
        start = -(-self._used // _ALIGN) * _ALIGN
        if start + size > self._part_bytes:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._free.append((self._part, done))
            self._part, busy = self._free.popleft()
            if busy is not None:
                busy.synchronize()
            start = 0
        self._used = start + size
        return start
