"""The same bodies to this engine and to vLLM on the CPU, with the same checkpoint.

Every difference in status, finish reason, calls or usage needs a line in
:mod:`tests.conformance.differences`, which says who is right. Tests ``plimsoll_engine/api``.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3

from bench.result import publish
from tests.conformance import published
from tests.conformance.bodies import RESPONSES, Body, at_random, written
from tests.conformance.differences import THEIRS, Answer, between, reason
from tests.conformance.peers import PEERS
from tests.integration.engine.conftest import MODEL, Engine
from tests.ports import free_port

PEER = PEERS["vllm-0.32.0"]
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (published.ready() and (PEER.home / ".ready").exists()), reason="make engines"
    ),
]
CONTEXT = 512
"""Tokens. Without a bound of its own, SmolLM2 answers some bodies up to its end."""
COUNT = 200
"""Bodies at random."""
SEED = int(os.environ.get("PLIMSOLL_BODIES_SEED", "1"))
"""The result is of the first; others look for more."""
START_S = 600.0
ANSWER_S = 180.0
STOP_S = 60.0
AT_ONCE = 8


@contextmanager
def vllm(folder: Path) -> Iterator[str]:
    """Start vLLM with the same checkpoint; yields its address."""
    port = free_port()
    command = [
        str(PEER.home / "bin" / "vllm"), "serve", str(published.SMOLLM2), f"--port={port}",
        f"--served-model-name={MODEL}", "--dtype=float32", f"--max-model-len={CONTEXT}",
        "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser=hermes",
    ]  # fmt: skip
    environment = os.environ | PEER.environment
    environment["PATH"] = f"{PEER.home / 'bin'}:{environment['PATH']}"
    environment.pop("PYTHONPATH", None)
    path = folder / "log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _serves(url):
            assert process.poll() is None, path.read_text()[-4000:]
            assert time.monotonic() < deadline, path.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(STOP_S)


def _serves(url: str) -> bool:
    try:
        return urllib3.request("GET", f"{url}/health", timeout=5, retries=False).status == 200
    except urllib3.exceptions.HTTPError:
        return False


def ask(url: str, body: Body) -> Answer:
    """Return what the server answers; status 0 where it hangs or the connection breaks."""
    fields = body.fields if "model" in body.fields else {"model": MODEL} | body.fields
    try:
        answer = urllib3.request(
            "POST", url + body.path, body=json.dumps(fields).encode(), timeout=ANSWER_S,
            retries=False, headers={"Content-Type": "application/json"},
        )  # fmt: skip
    except urllib3.exceptions.HTTPError as error:
        return Answer(0, str(error))
    text = answer.data.decode()
    if answer.status != 200:
        return Answer(answer.status, text[:300])
    if body.path == RESPONSES:
        return _response(text)
    streams = text.startswith(("data:", "event:"))
    return _choices(_events(text) if streams else [json.loads(text)])


def _events(text: str) -> list[dict[str, Any]]:
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _choices(parts: list[dict[str, Any]]) -> Answer:
    found = Answer(200)
    whole, reasons = dict[int, str](), dict[int, str]()
    calls: dict[tuple[int, int], list[str]] = {}
    for part in parts:
        if error := part.get("error"):
            statuses = {"unavailable": 503, "internal_error": 500}
            return Answer(statuses.get(error["code"], 400), f"in the stream: {error}")
        if usage := part.get("usage"):
            found.usage = (usage["prompt_tokens"], usage.get("completion_tokens", 0))
        if "tokens" in part or "prompt" in part:  # of /tokenize and /detokenize
            found.texts = [json.dumps(part.get("tokens", part.get("prompt")))]
        for choice in part.get("choices", ()):
            index = choice["index"]
            told = choice.get("message") or choice.get("delta") or choice
            whole[index] = whole.get(index, "") + (told.get("content") or told.get("text") or "")
            reasons[index] = choice.get("finish_reason") or reasons.get(index, "")
            for place, call in enumerate(told.get("tool_calls") or ()):
                one = calls.setdefault((index, call.get("index", place)), ["", ""])
                one[0] += call["function"].get("name") or ""
                one[1] += call["function"].get("arguments") or ""
    found.texts = found.texts or [whole[index] for index in sorted(whole)]
    found.reasons = [reasons[index] for index in sorted(reasons)]
    found.calls = [_call(*calls[key]) for key in sorted(calls)]
    return found


def _response(text: str) -> Answer:
    last = json.loads(text) if text.startswith("{") else _events(text)[-1]
    if "response" in last:
        last = last["response"]
    if last.get("error"):
        return Answer(500, f"in the response: {last['error']}")
    usage = last.get("usage") or {}
    found = Answer(200, usage=(usage.get("input_tokens"), usage.get("output_tokens")))
    found.reasons = [last["status"]]
    for item in last["output"]:
        if item["type"] == "function_call":
            found.calls.append(_call(item["name"], item["arguments"]))
        elif item["type"] == "message":
            found.texts.append("".join(part.get("text", "") for part in item["content"]))
    return found


def _call(name: str, arguments: str) -> str:
    """Return a call in one form, for they are JSON with other white space."""
    try:
        return f"{name}({json.dumps(json.loads(arguments), sort_keys=True)})"
    except ValueError:
        return f"{name}({arguments})"


def ask_all(url: str, bodies: Sequence[Body]) -> list[Answer]:
    """Return the answers to all bodies, in their order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda body: ask(url, body), bodies))


def ask_ours(folder: Path, bodies: Sequence[Body]) -> list[Answer]:
    """Return what this engine answers. It must be clean afterwards."""
    engine = Engine(published.SMOLLM2, folder, f"--max-model-len={CONTEXT}", "--num-blocks=520")
    try:
        answers = ask_all(engine.wait_ready().url, bodies)
        engine.clean()
    finally:
        engine.end()
    return answers


def ask_theirs(folder: Path, bodies: Sequence[Body]) -> list[Answer]:
    """Return what vLLM answers."""
    with vllm(folder) as url:
        return ask_all(url, bodies)


def test_every_difference_has_a_reason(tmp_path_factory: pytest.TempPathFactory) -> None:
    bodies = [*written(), *at_random(SEED, COUNT)]
    one = ask_ours(tmp_path_factory.mktemp("ours"), bodies)
    other = ask_theirs(tmp_path_factory.mktemp("vllm"), bodies)
    rows = []
    for body, mine, yours in zip(bodies, one, other, strict=True):
        for aspect, found, expected in between(body, mine, yours):
            right, why = reason(body, aspect, mine, yours)
            rows.append(
                {"body": body.name, "fields": _shown(body), "differs": aspect, "ours": found,
                 "vllm": expected, "right": right, "why": why}
            )  # fmt: skip
    for status in (0, 500):
        assert [b.name for b, mine in zip(bodies, one, strict=True) if mine.status == status] == []
    unexplained = [row for row in rows if not row["right"]]
    assert not unexplained, json.dumps(unexplained[:20], indent=1, ensure_ascii=False)
    counts = {
        "bodies_count": len(bodies),
        "differing_count": len({row["body"] for row in rows}),
        "ours_wrong_count": sum(row["right"] == THEIRS for row in rows),
        "ours_500_count": sum(answer.status >= 500 for answer in one),
        "ours_hung_count": sum(answer.status == 0 for answer in one),
        "vllm_500_count": sum(answer.status >= 500 for answer in other),
        "vllm_hung_count": sum(answer.status == 0 for answer in other),
    }
    if SEED == 1:
        publish("vllm-beside", counts, {"vllm": PEER.version, "seed": SEED, "differences": rows})


def _shown(body: Body) -> str:
    return json.dumps(body.fields, ensure_ascii=True)[:400]
