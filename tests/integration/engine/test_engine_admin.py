"""The admin API: token, fence, idempotence, drain and resume, trim, audit."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("token", [None, "", "wrong", "token-of-a-tes", "token-of-a-test2", "é"])
def test_no_token_no_answer(engine: Any, token: str | None) -> None:
    for method, path in (("GET", "/status"), ("POST", "/restart"), ("GET", "/nowhere")):
        code, body = engine.admin(
            method, path, None if method == "GET" else {}, token and token.encode().decode("latin1")
        )
        assert (code, body["code"]) == (401, "Unauthorized")


def test_the_admin_port_is_on_loopback_only(engine: Any) -> None:
    _, port = engine.ports()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    listening = {row[1] for row in rows if row[3] == "0A"}
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening


def test_a_stale_epoch_is_refused(engine: Any) -> None:
    before = engine.status()
    for verb in ("trim", "drain", "restart", "shutdown"):
        for epoch in ("otherboot:1", before["epoch"] + "7"):
            code, body = engine.admin(
                "POST", f"/{verb}", {"operation_id": f"stale-{verb}", "expected_epoch": epoch}
            )
            assert (code, body["code"], body["epoch"]) == (409, "StaleEpoch", before["epoch"])
    code, body = engine.admin("POST", "/resume", {"expected_epoch": "otherboot:1"})
    assert (code, body["code"]) == (409, "StaleEpoch")
    assert engine.status()["state"] == "serving"


def test_the_same_id_is_the_same_operation(engine: Any) -> None:
    epoch = engine.status()["epoch"]
    starts = engine.status()["worker_starts"]
    body = {"operation_id": "once", "expected_epoch": epoch}
    assert engine.admin("POST", "/restart", body)[0] == 202
    assert engine.admin("POST", "/restart", body)[0] == 202
    first = engine.finish("once")
    code, again = engine.admin("POST", "/restart", body)
    assert (code, again) == (202, first)
    assert engine.status()["worker_starts"] == starts + 1
    code, error = engine.admin("POST", "/trim", body)
    assert (code, error["code"]) == (409, "Busy")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"operation_id": "x"},
        {"operation_id": "", "expected_epoch": "a:1"},
        {"operation_id": "x", "expected_epoch": "no epoch"},
        {"operation_id": "x", "expected_epoch": "a:1", "deadline": 3},
        {"operation_id": "x", "expected_epoch": "a:1", "deadline_s": -1},
        {"operation_id": "x", "expected_epoch": "a:1", "scope": "planet"},
        [],
    ],
)
def test_a_body_that_cannot_be_read(engine: Any, body: Any) -> None:
    code, error = engine.admin("POST", "/restart", body)
    assert (code, error["code"]) == (400, "BadRequest")
    assert error["message"]


def test_unknown_things(engine: Any) -> None:
    assert engine.admin("GET", "/operations/never")[1]["code"] == "UnknownOperation"
    assert engine.admin("GET", "/nowhere")[0] == 404
    assert engine.admin("PUT", "/trim")[0] == 405


def test_drain_refuses_new_requests_and_resume_takes_them(engine: Any) -> None:
    with engine.streams(1, 400) as futures:
        engine.begin("drain", "drain-1", deadline_s=60)
        status, body = engine.post("/v1/completions", b'{"model": "tiny", "prompt": "a"}')
        assert (status, body["error"]["code"]) == (503, "not_serving")
        assert engine.get("/ready")[0] == 503
        assert engine.get("/health")[0] == 200
        assert futures[0].result(60).finish_reason == "length"
    assert engine.finish("drain-1")["state"] == "succeeded"
    status = engine.status()
    assert status["state"] == "drained"
    code, status = engine.admin("POST", "/resume", {"expected_epoch": status["epoch"]})
    assert (code, status["state"]) == (200, "serving")
    assert engine.stream(1, 3, False).usage.completion_tokens == 3


def test_a_drain_sends_clients_with_kept_connections_elsewhere(engine: Any) -> None:
    """Through a Service they would stay with this replica, and be refused, until it is gone."""
    idle, busy = (http.client.HTTPConnection("127.0.0.1", engine.ports()[0], 30) for _ in "ab")
    idle.request("GET", "/health")
    idle.getresponse().read()
    wish = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    busy.request("POST", "/v1/completions", json.dumps(wish), headers)
    answer = busy.getresponse()
    kept = [idle.sock, busy.sock]
    engine.begin("drain", "drain-kept", deadline_s=60)
    assert kept[0].recv(1) == b"", "the idle connection is closed"
    assert b"[DONE]" in answer.read(), "a running request is answered to its end"
    assert kept[1].recv(1) == b"", "and its connection closed after that"
    assert engine.finish("drain-kept")["state"] == "succeeded"
    epoch = engine.status()["epoch"]
    assert engine.admin("POST", "/resume", {"expected_epoch": epoch})[0] == 200


def test_a_drain_whose_deadline_passes_breaks_no_request(engine: Any) -> None:
    with engine.streams(1, 600) as futures:
        engine.begin("drain", "drain-2", deadline_s=0.1)
        operation = engine.finish("drain-2")
        assert operation["state"] == "failed"
        assert "1 requests are still running" in operation["error"]
        epoch = engine.status()["epoch"]
        assert engine.admin("POST", "/resume", {"expected_epoch": epoch})[0] == 200
        assert futures[0].result(60).usage.completion_tokens == 600
    engine.clean()


def test_a_drain_that_aborts(engine: Any) -> None:
    with engine.streams(1, 6000) as futures:
        engine.begin("drain", "drain-3", mode="abort")
        with pytest.raises(Exception, match="is draining: send the request again"):
            futures[0].result(60)
    assert engine.finish("drain-3")["state"] == "succeeded"
    epoch = engine.status()["epoch"]
    assert engine.admin("POST", "/resume", {"expected_epoch": epoch})[0] == 200
    engine.clean()


def test_trim_reports_each_step(engine: Any) -> None:
    engine.begin("trim", "trim-1")
    operation = engine.finish("trim-1")
    assert operation["state"] == "succeeded", operation
    names = [step["name"] for step in operation["steps"]]
    assert names[:3] == ["processor_cache_flush", "frontend_gc_collect", "frontend_malloc_trim"]
    assert "gc_collect" in names[3:]


@pytest.mark.parametrize("kind", ["stacks", "gc", "tracemalloc", "torch"])
def test_diagnostics_speak_of_both_processes(engine: Any, kind: str) -> None:
    code, text = engine.admin("GET", f"/diagnostics/{kind}")
    assert code == 200
    assert "== frontend" in text
    assert "== worker" in text
    assert "unknown:" not in text


def test_status_counts_from_the_beginning_of_the_epoch(engine: Any) -> None:
    engine.begin("restart", "zero")
    assert engine.finish("zero")["state"] == "succeeded"
    assert engine.status()["load"]["requests_total"] == 0
    engine.stream(1, 7, False)
    # Before the worker's first report what only it knows is unknown.
    engine.until(lambda: "kv_usage_ratio" in engine.status()["load"], "report of the worker")
    load = engine.status()["load"]
    assert (load["requests_total"], load["generation_tokens_total"]) == (1, 7)
    assert 0.0 <= load["kv_usage_ratio"] <= 1.0
    assert load["kv_lost_ratio"] == 0.0
    assert "encoder_lost_ratio" not in load, "this model has no encoder: unknown, not zero"
    roles = [process["role"] for process in engine.status()["processes"]]
    assert roles == ["frontend", "zygote", "weight_server", "worker"]


def test_clients_that_leave_at_any_moment_leave_nothing(engine: Any) -> None:
    host, port = "127.0.0.1", engine.ports()[0]
    body = b'{"model": "tiny", "prompt": "Ship", "max_tokens": 4000, "stream": %s}'
    for stream in (b"true", b"false"):
        content = body % stream
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        whole = head % len(content) + content
        for sent, wait_s in ((20, 0), (len(whole) - 5, 0.05), (len(whole), 0), (len(whole), 0.3)):
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(whole[:sent])
                time.sleep(wait_s)
    engine.until(lambda: engine.status()["load"]["inflight"] == 0, "release", 5)
    engine.clean()


def test_collections_of_a_busy_engine_find_nothing(engine: Any) -> None:
    """A trim collects in both processes; what it finds would be a cycle of ours."""

    def found() -> dict[str, tuple[int, int]]:
        engine.until(lambda: len(engine.status()["ledger"]) > 3, "a report")
        return {
            process["role"]: (process["full_collections"], process["full_collected"])
            for process in engine.status()["processes"]
            if "full_collections" in process
        }

    def trimmed(operation_id: str) -> dict[str, tuple[int, int]]:
        """What was found once both processes have reported the collection of a trim."""
        before = found()
        assert before.keys() == {"frontend", "worker"}
        engine.begin("trim", operation_id)
        engine.finish(operation_id)
        engine.until(lambda: all(found()[role][0] > before[role][0] for role in before), "reports")
        return found()

    before = trimmed("gc-0")
    with engine.streams(4, 60) as futures:
        assert all(future.result(60).usage.completion_tokens == 60 for future in futures)
    engine.clean()
    after = trimmed("gc-1")
    assert after["worker"][1] == before["worker"][1], "the worker's requests left cycles"
    assert after["frontend"][0] > before["frontend"][0]
