"""Becomes the process of a service that cannot outlive its supervisor: `python child.py SUPERVISOR_PID COMMAND...`.

A script of its own instead of a hook between fork and exec: such a hook is not safe in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"prctl failed: {command[0]} would outlive its supervisor")
    if os.getppid() != supervisor:  # it died before the line above
        sys.exit("the supervisor is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
