"""The supervisor of a replica outside of any pod that has a pod's service account all the same.

    python supervise_in_lab.py launch ACCOUNT_FOLDER SUPERVISOR_ARGUMENTS...

Launcher and supervisor are the real ones; only the folder of the account's token is another.
"""

import os
import sys
from pathlib import Path

from plimsoll_sidecar import launcher, main
from plimsoll_sidecar.clients import kube


def start(self: launcher.Launcher, now: float) -> None:
    command = [sys.executable, __file__, "supervise", *sys.argv[1:]]
    self._child_pid = os.posix_spawn(sys.executable, command, os.environ)
    self._started_at = now


if __name__ == "__main__":
    role = sys.argv.pop(1)
    if role == "launch":
        launcher.Launcher._start = start  # type: ignore[method-assign]
        sys.exit(launcher.main())
    kube.SERVICE_ACCOUNT_FOLDER = Path(sys.argv.pop(1))
    sys.exit(main.main())
