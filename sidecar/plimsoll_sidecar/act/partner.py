"""Test a restarted engine with its partners: the engines with which it exchanges KV blocks.

A test request goes through a prefill engine and a decode engine. If they cannot connect again, the
supervisor's request fails instead of a client's.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.names import POLICY_KIND
from plimsoll_api.roles import PodRole
from plimsoll_api.supervisor_config import EngineEndpoint, SupervisorConfig
from plimsoll_api.workloads import PARTNER_ROLES
from plimsoll_sidecar.act.slots import LeaseSlots
from plimsoll_sidecar.clients.http import EngineError, HttpClient
from plimsoll_sidecar.clients.kube import EndpointSlices, KubeError
from plimsoll_sidecar.govern.command import Outcome

log = logging.getLogger(__name__)

# Maximum number of partners that test a restarted engine.
MAX_PARTNERS = 4
# The engines may have to connect first.
REQUEST_TIMEOUT_S = 20.0
PARTNER_TEST_TIMEOUT_S = 60.0
# Fills several KV blocks. Only full blocks are transferred.
NUM_PROMPT_TOKENS = 128
# Every tokenizer has the IDs below this one.
TOKEN_ID_LIMIT = 250
COMPLETIONS_PATH, MODELS_PATH = "/v1/completions", "/v1/models"


class PartnerTestResult(NamedTuple):
    """Result of a test with partners. ``Unknown`` means that no test was possible."""

    outcome: Outcome
    message: str


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    kv_transfer_params: dict[str, Any] | None = None


class _Model(msgspec.Struct):
    id: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


class Partners:
    """The engines with which this engine exchanges KV blocks.

    ``find_partners`` returns the URL of each ready partner by pod name. It may raise KubeError.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        role: PodRole,
        find_partners: Callable[[], Mapping[str, str]],
    ) -> None:
        self._endpoint, self._role, self._find_partners = endpoint, role, find_partners

    def send_test_requests(self) -> PartnerTestResult:
        """Test at most ``MAX_PARTNERS`` random partners, until one test fails."""
        try:
            partners = sorted(self._find_partners().items())
        except KubeError as error:
            return PartnerTestResult(
                Outcome.UNKNOWN, f"failed to find the partners of the engine: {error}"
            )
        partner_role = PARTNER_ROLES[self._role].lower()
        if not partners:
            return PartnerTestResult(
                Outcome.UNKNOWN,
                f"the engine was not tested, because no {partner_role} pod is ready",
            )
        chosen = random.sample(partners, min(MAX_PARTNERS, len(partners)))
        deadline, tested = time.monotonic() + PARTNER_TEST_TIMEOUT_S, 0
        for pod, url in chosen:
            if tested and time.monotonic() > deadline:
                break
            result = self._send_test_request(pod, url)
            if result.outcome is not Outcome.SUCCEEDED:
                return result
            tested += 1
        pods = f"{tested} {partner_role} pods" if tested > 1 else f"one {partner_role} pod"
        return PartnerTestResult(
            Outcome.SUCCEEDED, f"test requests through this engine and {pods} succeeded"
        )

    def _send_test_request(self, pod: str, url: str) -> PartnerTestResult:
        own, other = HttpClient(self._endpoint.serving_url), HttpClient(url)
        prefills = self._role is PodRole.PREFILL
        source, sink = (own, other) if prefills else (other, own)
        names = ("this engine", f"pod {pod}")
        source_name, sink_name = names if prefills else names[::-1]
        # Blocks that the decode engine already has would not be transferred.
        prompt = [random.randrange(TOKEN_ID_LIMIT) for _ in range(NUM_PROMPT_TOKENS)]
        first, failure = self._send_completion(
            source, source_name, prompt, {"do_remote_decode": True}
        )
        if first is None:
            return failure
        if first.kv_transfer_params is None:
            return PartnerTestResult(
                Outcome.UNKNOWN,
                f"{source_name} answered without kv_transfer_params, so no KV blocks were sent",
            )
        second, failure = self._send_completion(sink, sink_name, prompt, first.kv_transfer_params)
        return failure if second is None else PartnerTestResult(Outcome.SUCCEEDED, "")

    def _send_completion(
        self, server: HttpClient, server_name: str, prompt: Sequence[int], transfer_params: object
    ) -> tuple[_Completion | None, PartnerTestResult]:
        # Without success, the response is None. The outcome is UNKNOWN if the server cannot be
        # reached or rejects the request.
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": transfer_params,
        }
        try:
            model = self._endpoint.model or _read_model(server)
            data = json.dumps(body | {"model": model}).encode()
        except (EngineError, MalformedError) as error:
            return None, PartnerTestResult(
                Outcome.UNKNOWN, f"failed to read the model from {server_name}: {error}"
            )
        try:
            status, answer = server.call("POST", COMPLETIONS_PATH, REQUEST_TIMEOUT_S, data)
            completion = decode(answer, _Completion) if status == 200 else None
        except (EngineError, MalformedError) as error:
            return None, PartnerTestResult(
                Outcome.FAILED, f"the test request to {server_name} failed: {error}"
            )
        if completion is None:
            outcome = Outcome.FAILED if status >= 500 else Outcome.UNKNOWN
            return None, PartnerTestResult(
                outcome, f"the test request to {server_name} returned HTTP {status}"
            )
        if any(choice.finish_reason == "error" for choice in completion.choices):
            return None, PartnerTestResult(
                Outcome.FAILED,
                f"the test request to {server_name} ended with the finish reason 'error'",
            )
        return completion, PartnerTestResult(Outcome.SUCCEEDED, "")


def _read_model(server: HttpClient) -> str:
    status, body = server.call("GET", MODELS_PATH, REQUEST_TIMEOUT_S)
    models = decode(body, _Models).data if status == 200 else []
    if not models:
        raise EngineError(f"GET {MODELS_PATH} returned HTTP {status} without a model")
    return models[0].id


def create_partners(
    config: SupervisorConfig, leases: LeaseSlots, slices: EndpointSlices
) -> Partners | None:
    """Return the partners of this pod's engine; None if it cannot have any."""
    role = config.service.role
    if config.service.kind != POLICY_KIND or role not in PARTNER_ROLES or config.service.is_worker:
        return None
    assert role is not None
    own_role, engine = role, config.engine
    scheme = urlsplit(engine.serving_url).scheme

    def find_partners() -> dict[str, str]:
        # All engines of the workload listen on the same port.
        addresses = slices.find_ready_addresses(leases.list_partners(own_role))
        return {
            pod: f"{scheme}://{f'[{host}]' if ':' in host else host}:{engine.serving_port}"
            for pod, host in addresses.items()
        }

    return Partners(engine, own_role, find_partners)
