"""Manual actions on one replica, run in its supervisor's container by ``kubectl exec``.

    python -m plimsoll_sidecar.ask status
    python -m plimsoll_sidecar.ask restart --expected-epoch 3f9c21d0:4

An action is sent to the running supervisor, because loading all modules in a new process takes
seconds. The exit status is 0 for success, 1 for a failed or refused action, and 2 if the action
could not be attempted.
"""

from __future__ import annotations

import socket
import sys

from plimsoll_api.names import ASK_SOCKET, DEFAULT_DRAIN_S, compute_action_limit_s

STATE_DIR = "/var/lib/plimsoll"
CHUNK_BYTES = 1 << 16
INTERRUPTED_ANSWER = (
    '{"outcome":"Unknown","message":"the supervisor ended during the action: check the '
    "replica's incidents and its epoch before you try again\"}"
)
TIMEOUT_ANSWER = (
    '{"outcome":"Unknown","message":"the supervisor did not answer in time and may still act: '
    "check the replica's incidents and its epoch before you try again\"}"
)


def send_to_supervisor(arguments: list[str]) -> tuple[int, str] | None:
    """Send an action to the supervisor, and return the exit status and the answer.

    None if no supervisor is running, or if the supervisor does not perform this action.
    """
    if not arguments or arguments[0] in ("status", "-h", "--help"):
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        try:
            line.settimeout(
                compute_action_limit_s(
                    float(_find_option(arguments, "--deadline") or DEFAULT_DRAIN_S)
                )
            )
            line.connect(f"{_find_option(arguments, '--state-dir') or STATE_DIR}/{ASK_SOCKET}")
        except ValueError:
            return None  # the parser reports the invalid deadline
        except OSError:
            return None
        try:
            line.sendall("\0".join(arguments).encode())
            line.shutdown(socket.SHUT_WR)
            data = b""
            while piece := line.recv(CHUNK_BYTES):
                data += piece
        except TimeoutError:
            return 1, TIMEOUT_ANSWER
        except OSError:
            data = b""
    status, separator, text = data.decode(errors="replace").partition("\n")
    if not separator or not status.isdigit():
        return 1, INTERRUPTED_ANSWER
    return int(status), text


def _find_option(arguments: list[str], name: str) -> str | None:
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def main(argv: list[str] | None = None) -> int:
    """Perform an action in the supervisor or in this process. Return the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    answer = send_to_supervisor(arguments)
    if answer is None:
        from plimsoll_sidecar import manual

        answer = manual.run_command(arguments)
    status, text = answer
    (sys.stderr if status == 2 else sys.stdout).write(text + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
