"""preStop hook: wait while the pod's endpoints are removed, then drain its engine.

It uses only the standard library, so that it starts fast.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any

from plimsoll_api.names import TOKEN_FILE

ADMIN_API_PREFIX = "/admin/v1"
CALL_TIMEOUT_S = 5.0
# Endpoint changes reach kube-proxy and ingress controllers within seconds. The hook waits for them
# for at most a quarter of the deadline.
MAX_ENDPOINT_REMOVAL_WAIT_S = 5.0
POLL_INTERVAL_S = 0.2


class DrainRefusedError(Exception):
    """The admin API answered with an error. The message begins with the HTTP status."""


def drain(admin_port: int, run_dir: Path, deadline_s: float) -> int:
    """Drain the engine and print errors. Return the exit status.

    The status is 0 if the engine is drained or does not run, 1 if the drain failed, and 2 if the
    token cannot be read.
    """
    end = time.monotonic() + deadline_s
    try:
        token = (run_dir / TOKEN_FILE).read_text(encoding="utf-8").strip()
    except OSError as error:
        print(
            f"drain: cannot read {run_dir / TOKEN_FILE}: {error.strerror}; check --run-dir",
            file=sys.stderr,
        )
        return 2
    time.sleep(min(MAX_ENDPOINT_REMOVAL_WAIT_S, deadline_s / 4))
    try:
        while time.monotonic() < end:
            status = _call_admin_api(admin_port, token, "GET", "/status")
            state = status["state"]
            if state in ("drained", "stopping", "stopped", "failed"):
                return 0
            if state == "serving":
                _start_drain(admin_port, token, status["epoch"], end - time.monotonic())
            time.sleep(POLL_INTERVAL_S)
    except ConnectionRefusedError:
        return 0  # nothing is left to drain
    except (OSError, DrainRefusedError, ValueError, KeyError, http.client.HTTPException) as error:
        print(
            f"drain: a call to the admin API on port {admin_port} failed: {error}", file=sys.stderr
        )
        return 1
    print(f"drain: requests are still running after {deadline_s:g} s", file=sys.stderr)
    return 1


def _start_drain(admin_port: int, token: str, epoch: str, deadline_s: float) -> None:
    # The caller tries again after status 409.
    body = {
        "operation_id": f"prestop-{epoch.replace(':', '-')}-{time.time_ns()}",
        "expected_epoch": epoch,
        "deadline_s": max(0.0, deadline_s),
    }
    try:
        _call_admin_api(admin_port, token, "POST", "/drain", body)
    except DrainRefusedError as error:
        if not str(error).startswith("409"):
            raise


def _call_admin_api(
    admin_port: int, token: str, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", admin_port, timeout=CALL_TIMEOUT_S)
    try:
        connection.request(
            method,
            ADMIN_API_PREFIX + path,
            None if body is None else json.dumps(body),
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        )
        response = connection.getresponse()
        data = response.read()
        if response.status >= 300:
            raise DrainRefusedError(f"{response.status} {data.decode(errors='replace')[:500]}")
        answer = json.loads(data)
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ValueError("the response of the admin API is not a JSON object")
    return answer
