"""What a person asks of one replica, run in its supervisor's container by ``kubectl exec``.

    python -m plimsoll_sidecar.ask status
    python -m plimsoll_sidecar.ask restart --expected-epoch 3f9c21d0:4

Whoever may exec into the pod may do this: the cluster's RBAC decides. An action is handed to the
running supervisor, through a socket that only its own user may open, because a person waits for the
answer and a new process takes seconds to load. Without a supervisor, and for ``status``, which
reports what this container sees, the work is done here: :mod:`plimsoll_sidecar.manual`.

Imports are few on purpose. Exit status: 0 done, 1 failed or refused, 2 it cannot be asked.
"""

from __future__ import annotations

import socket
import sys

from plimsoll_api.names import ASK_SOCKET, DRAIN_S, action_limit_s

STATE_DIR = "/var/lib/plimsoll"
CHUNK = 1 << 16
CUT_OFF = (
    '{"outcome":"Unknown","message":"the supervisor ended while it acted: look at the replica\'s'
    ' incidents, and at its epoch, before you try again"}'
)
NO_ANSWER = (
    '{"outcome":"Unknown","message":"the supervisor has not answered in time and may still act:'
    " look at the replica's incidents, and at its epoch, before you try again\"}"
)


def handed_over(arguments: list[str]) -> tuple[int, str] | None:
    """Status and text from the supervisor; None where none listens: nothing was begun then."""
    if not arguments or arguments[0] in ("status", "-h", "--help"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.settimeout(action_limit_s(float(_option(arguments, "--deadline") or DRAIN_S)))
            line.connect(f"{_option(arguments, '--state-dir') or STATE_DIR}/{ASK_SOCKET}")
        except ValueError:
            return None  # the parser says what is wrong with the deadline
        except OSError:
            return None
        try:
            line.sendall("\0".join(arguments).encode())
            line.shutdown(socket.SHUT_WR)
            data = b""
            while piece := line.recv(CHUNK):
                data += piece
        except TimeoutError:
            return 1, NO_ANSWER
        except OSError:
            data = b""
    status, separator, text = data.decode(errors="replace").partition("\n")
    if not separator or not status.isdigit():
        return 1, CUT_OFF
    return int(status), text


def _option(arguments: list[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def main(argv: list[str] | None = None) -> int:
    """Hand the action to the running supervisor, or carry it out here if none answers.

    Returns the exit status.
    """
    arguments = sys.argv[1:] if argv is None else argv
    found = handed_over(arguments)
    if found is None:
        from plimsoll_sidecar import manual

        found = manual.run(arguments)
    status, text = found
    (sys.stderr if status == 2 else sys.stdout).write(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
