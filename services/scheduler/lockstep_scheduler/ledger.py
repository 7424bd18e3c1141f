"""Where requests and tokens become durable, as the step loop and the server see it; and the ledger that keeps nothing.

The one in Redis is in `redis_ledger.py`, which is imported only where it is used: a scheduler without Redis needs no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lockstep_common.steps import U32
from lockstep_scheduler.request import Choice, Request


class Ledger(Protocol):
    wanted: bool
    """False: nothing is kept, so `append` need not be told the tokens and nobody waits for `open`."""

    term: int
    """The fencing number that every write carries."""

    acked: int
    """Outcomes of all plans up to this seq may be forgotten by the workers."""

    @property
    def durable(self) -> bool:
        """Whether what is written now is kept."""
        ...

    async def open(self, request: Request, timeout: float) -> bool:
        """Writes a request's record; False if that was not confirmed in `timeout` seconds."""
        ...

    def append(self, seq: int, entries: Sequence[tuple[Choice, int, U32]]) -> None:
        """Tokens that an outcome of plan `seq` brought: (choice, its tokens before, tokens). Never waits."""
        ...

    def end(self, choice: Choice, tokens: int) -> None:
        """A choice has ended with so many tokens. Never waits."""
        ...

    def restart(self) -> None:
        """A new epoch counts its plans from 1."""
        ...


class NoLedger:
    """Nothing is durable, so an outcome may be forgotten once it was forwarded."""

    wanted = False
    durable = False

    def __init__(self) -> None:
        self.acked = 0
        self.term = 0

    async def open(self, request: Request, timeout: float) -> bool:
        return False

    def append(self, seq: int, entries: Sequence[tuple[Choice, int, U32]]) -> None:
        self.acked = max(self.acked, seq - 1)  # the routers get this outcome after this call

    def end(self, choice: Choice, tokens: int) -> None:
        pass

    def restart(self) -> None:
        self.acked = 0
