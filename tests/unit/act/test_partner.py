"""A request through an engine and its partner, over real HTTP; and what the Lease says of them.

Tests ``act/partner.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_api.engines import EngineType
from plimsoll_api.roles import PodRole
from plimsoll_api.supervision import RestartBudget
from plimsoll_api.supervisor_config import EngineEndpoint
from plimsoll_sidecar.act import readiness
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import EngineAdapter
from plimsoll_sidecar.act.partner import Partners, PartnerTestResult
from plimsoll_sidecar.act.slots import Slots
from plimsoll_sidecar.clients.kube import KubeError
from plimsoll_sidecar.govern.command import Command, Outcome, Verb
from tests.http_server import Handler, answering

Body = dict[str, Any]
Reply = Callable[[Body], tuple[int, Body]]
PARAMS = {"remote_engine_id": "p", "remote_block_ids": [1, 2], "remote_port": 5557}


def prefill(body: Body) -> tuple[int, Body]:
    choice = {"finish_reason": "length"}
    return 200, {"choices": [choice], "kv_transfer_params": PARAMS | {"do_remote_prefill": True}}


def decode(body: Body) -> tuple[int, Body]:
    return 200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": None}


@contextmanager
def server(host: str, port: int, reply: Reply, asked: list[Body]) -> Iterator[int]:
    class Engine(Handler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"data": [{"id": "llama"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body | {"host": host})
            status, answer = reply(body)
            self.answer(status, json.dumps(answer).encode())

    with answering(Engine, host, port) as used:
        yield used


@contextmanager
def pair(
    role: PodRole, own: Reply, other: Reply | None, partners: int = 1
) -> Iterator[tuple[Partners, list[Body]]]:
    """An engine at 127.0.0.1, and its partners at further addresses and the same port."""
    asked: list[Body] = []
    addresses = {f"other-{at}": f"127.0.0.{at + 2}" for at in range(partners)}
    with ExitStack() as servers:
        port = servers.enter_context(server("127.0.0.1", 0, own, asked))
        for address in addresses.values() if other is not None else ():
            servers.enter_context(server(address, port, cast(Reply, other), asked))
        url = f"http://127.0.0.1:{port}"
        urls = {pod: f"http://{address}:{port}" for pod, address in addresses.items()}
        yield Partners(EngineEndpoint(EngineType.VLLM, url, url), role, lambda: urls), asked


@pytest.mark.parametrize("role", [PodRole.PREFILL, PodRole.DECODE])
def test_a_request_goes_through_the_prefill_engine_to_the_decode_engine(role: PodRole) -> None:
    prefills = role is PodRole.PREFILL
    own, other = (prefill, decode) if prefills else (decode, prefill)
    with pair(role, own, other) as (partner, asked):
        assert partner.send_test_requests().outcome is Outcome.SUCCEEDED
    first, second = asked
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second["kv_transfer_params"] == PARAMS | {"do_remote_prefill": True}
    assert first["prompt"] == second["prompt"]
    assert (first["model"], first["max_tokens"]) == ("llama", 1)
    assert (first["host"] == "127.0.0.1") is prefills


def test_no_two_tries_send_the_same_prompt() -> None:
    with pair(PodRole.DECODE, decode, prefill) as (partner, asked):
        partner.send_test_requests()
        partner.send_test_requests()
    prompts = [tuple(one["prompt"]) for one in asked]
    assert len(set(prompts)) == 2, "a block in a prefix cache would not be transferred"


@pytest.mark.parametrize(
    ("own", "outcome", "told"),
    [
        (lambda body: (500, {}), Outcome.FAILED, "HTTP 500"),
        (lambda body: (200, {"choices": [{"finish_reason": "error"}]}), Outcome.FAILED, "error"),
        (lambda body: (200, {"choices": 1}), Outcome.FAILED, "this engine failed"),
        (lambda body: (401, {}), Outcome.UNKNOWN, "HTTP 401"),
    ],
)
def test_only_an_engine_that_fails_counts_against_the_restart(
    own: Reply, outcome: Outcome, told: str
) -> None:
    with pair(PodRole.DECODE, own, prefill) as (partner, _):
        found = partner.send_test_requests()
    assert found.outcome is outcome
    assert told in found.message


def test_one_partner_of_several_that_fails_is_named() -> None:
    seen: list[Body] = []

    def sometimes(body: Body) -> tuple[int, Body]:
        seen.append(body)
        return decode(body) if len(seen) == 1 else (500, {})

    with pair(PodRole.PREFILL, prefill, sometimes, partners=3) as (partner, asked):
        found = partner.send_test_requests()
    assert found.outcome is Outcome.FAILED
    assert "pod other-" in found.message
    assert len(asked) == 4, "it stops at the first failure"


def test_what_cannot_be_asked_says_nothing() -> None:
    with pair(PodRole.PREFILL, decode, decode) as (partner, _):
        assert partner.send_test_requests().outcome is Outcome.UNKNOWN, (
            "no kv_transfer_params in the answer"
        )
    with pair(PodRole.DECODE, decode, None) as (partner, _):
        assert partner.send_test_requests().outcome is Outcome.UNKNOWN, (
            "nothing listens at its port"
        )
    with pair(PodRole.DECODE, decode, prefill, partners=0) as (partner, _):
        assert partner.send_test_requests() == PartnerTestResult(
            Outcome.UNKNOWN, "the engine was not tested, because no prefill pod is ready"
        )

    def unreadable() -> dict[str, str]:
        raise KubeError(500, "etcd is slow")

    url = "http://127.0.0.1:1"
    broken = Partners(EngineEndpoint(EngineType.VLLM, url, url), PodRole.DECODE, unreadable)
    assert broken.send_test_requests().outcome is Outcome.UNKNOWN


class Fixed(Partners):
    """A partner with a chosen result."""

    def __init__(self, found: PartnerTestResult) -> None:
        self.found = found

    def send_test_requests(self) -> PartnerTestResult:
        return self.found


@pytest.mark.parametrize("kept_out", [False, True])
@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.FAILED, Outcome.UNKNOWN])
def test_the_pod_returns_when_the_pair_serves_or_the_tries_end(
    tmp_path: Path, outcome: Outcome, gives_up: bool, kept_out: bool
) -> None:
    partner = Fixed(PartnerTestResult(outcome, "told"))
    made = Actuator(
        cast(EngineAdapter, None), Slots(), None, lambda command: (), tmp_path, RestartBudget(),
        lambda: None, partner,
    )  # fmt: skip
    if kept_out:
        readiness.set_unready(str(tmp_path), readiness.RESTART, 900.0)
    command = Command(
        verb=Verb.MEET_PARTNER, operation_id="x-1", incident="x", epoch="b:2", gives_up=gives_up
    )
    assert made.execute(command).outcome is outcome
    returns = gives_up or outcome is Outcome.SUCCEEDED
    assert readiness.is_ready(str(tmp_path)) is returns
