"""The admin port: restarts asked for at the same time, calls without the token, garbage."""

from __future__ import annotations

import asyncio
import json
import time

from bench.abuse_scene import HOST, Answer, Class, Played, Scene, at_once, exchange

RESTART_S = 60.0


def call(scene: Scene, method: str, path: str, body: object = None, token: str = "") -> bytes:
    content = (
        b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    head = (
        f"{method} /admin/v1{path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(content)}\r\n"
        f"Authorization: Bearer {token or scene.admin_token}\r\n\r\n"
    )
    return head.encode() + content


async def concurrent_restarts(scene: Scene) -> Played:
    """Twenty people restart one replica at the same time: one of them does."""
    count, played = 20, Played()
    status = await exchange(scene.admin_port, call(scene, "GET", "/status"))
    epoch = json.loads(status.body)["epoch"]
    answers = await at_once(
        exchange(scene.admin_port, call(scene, "POST", "/restart", {
            "operation_id": f"person-{number}", "expected_epoch": epoch,
        }))
        for number in range(count)
    )  # fmt: skip
    played.saw(answers)
    taken = [n for n, answer in enumerate(answers) if answer.status == 202]
    played.figures["restarts_accepted_count"] = len(taken)
    deadline = time.monotonic() + RESTART_S
    while taken and time.monotonic() < deadline:
        path = f"/operations/person-{taken[0]}"
        found = await exchange(scene.admin_port, call(scene, "GET", path))
        if found.status == 200 and json.loads(found.body)["state"] != "running":
            break
        await asyncio.sleep(0.1)
    return played


async def admin_garbage(scene: Scene) -> Played:
    """Without the token, with bodies that are none, on paths that are not there."""
    played = Played()
    bodies = (b"", b"[", b"{}", b"[" * 60_000, b'{"operation_id": 5}', b"\xff" * 100, b" " * 70_000)
    for _ in range(scene.many(20, 2)):
        answers: list[Answer] = []
        for verb in ("trim", "drain", "restart", "shutdown", "resume", "nothing"):
            for body in bodies:
                sent = call(scene, "POST", f"/{verb}", body)
                answers.append(await exchange(scene.admin_port, sent))
            sent = call(scene, "POST", f"/{verb}", {}, token="wrong")
            answers.append(await exchange(scene.admin_port, sent))
        played.saw(answers)
    return played


CLASSES: dict[str, Class] = {one.__name__: one for one in (concurrent_restarts, admin_garbage)}
RESTARTS = {"concurrent_restarts": 1}
"""Restarts that a class asks for by itself."""
