"""Run a command that the kernel kills when its parent exits.

    python -m plimsoll_cli.local.parent_death PARENT_PID COMMAND...

The kernel sends SIGKILL to the command (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import sys

from plimsoll_engine.process.parent_death import die_with_parent


def main(arguments: list[str]) -> None:
    """Ask the kernel for SIGKILL at the parent's exit, and then execute the command."""
    parent, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent)
    os.execv(command[0], command)  # noqa: S606 - a shell would be in between


if __name__ == "__main__":
    main(sys.argv[1:])
