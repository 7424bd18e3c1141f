"""Where Lockstep keeps files of its own: models, logs, and the private directory of a running `lockstep up`."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RUN_PREFIX = "lockstep-up-"


def cache_root() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` in the user's cache directory."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path` (created if need be); waits for other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def run_directory() -> Iterator[Path]:
    """A private temporary directory, removed at the end; sweeps those whose owner was killed before it could do so."""
    _sweep()
    path = Path(tempfile.mkdtemp(prefix=_RUN_PREFIX))
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _sweep() -> None:
    """A directory whose lock can be taken has no living owner."""
    for path in Path(tempfile.gettempdir()).glob(_RUN_PREFIX + "*"):
        try:
            with (path / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another user's, or one that is in use
            continue
