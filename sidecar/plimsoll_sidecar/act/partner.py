"""Test a restarted engine with a request through it and through each of its partners.

A prefill engine answers with one token and with the location of its KV blocks. The decode engine
reads the blocks from there, and continues. The first request after a restart makes both engines
connect again. The supervisor sends this request, so that no client's request fails if the engines
cannot connect.
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

MAX_PARTNERS = 4
"""Maximum number of partners with which a restarted engine is tested."""
REQUEST_TIMEOUT_S = 20.0
"""Seconds for one request. The first one after a restart connects the two engines."""
PARTNER_TEST_TIMEOUT_S = 60.0
"""Seconds after which no further partner is tested."""
PROMPT_TOKENS = 128
"""Length of the prompt: several KV blocks, because only whole blocks are transferred."""
MAX_TOKEN_ID = 250
"""Largest token ID in a prompt. Every tokenizer has the IDs up to it."""
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"


class PartnerTestResult(NamedTuple):
    """Result of a test with partners. ``Unknown`` means that the engines were not tested."""

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
    """The engines with which this one exchanges KV blocks.

    ``role`` is the role of this engine. ``find_partners`` returns the URLs of the ready partners by
    pod; it may raise KubeError.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        role: PodRole,
        find_partners: Callable[[], Mapping[str, str]],
    ) -> None:
        self._endpoint, self._role, self._find_partners = endpoint, role, find_partners

    def meet(self) -> PartnerTestResult:
        """Send a request through this engine and each of its ready partners."""
        try:
            partners = sorted(self._find_partners().items())
        except KubeError as error:
            return PartnerTestResult(Outcome.UNKNOWN, f"cannot find the partners: {error}")
        wanted = PARTNER_ROLES[self._role].lower()
        if not partners:
            return PartnerTestResult(Outcome.UNKNOWN, f"no {wanted} pod is ready")
        chosen = random.sample(partners, min(MAX_PARTNERS, len(partners)))
        deadline, met = time.monotonic() + PARTNER_TEST_TIMEOUT_S, 0
        for pod, url in chosen:
            if met and time.monotonic() > deadline:
                break
            found = self._meet_one(pod, url)
            if found.outcome is not Outcome.SUCCEEDED:
                return found
            met += 1
        many = f"{met} {wanted} pod{'s' if met > 1 else ''}"
        return PartnerTestResult(
            Outcome.SUCCEEDED, f"a request went through this engine and {many}"
        )

    def _meet_one(self, pod: str, url: str) -> PartnerTestResult:
        own, other = HttpClient(self._endpoint.serving_url), HttpClient(url)
        prefills = self._role is PodRole.PREFILL
        source, sink = (own, other) if prefills else (other, own)
        names = ("this engine", f"pod {pod}")
        source_name, sink_name = names if prefills else names[::-1]
        # Blocks that the decode engine already has would not be transferred.
        prompt = [random.randrange(MAX_TOKEN_ID) for _ in range(PROMPT_TOKENS)]
        first, trouble = self._complete(source, source_name, prompt, {"do_remote_decode": True})
        if first is None:
            return trouble
        if first.kv_transfer_params is None:
            return PartnerTestResult(
                Outcome.UNKNOWN,
                f"{source_name} answered without kv_transfer_params, so no KV blocks were sent",
            )
        second, trouble = self._complete(sink, sink_name, prompt, first.kv_transfer_params)
        return trouble if second is None else PartnerTestResult(Outcome.SUCCEEDED, "")

    def _complete(
        self, server: HttpClient, name: str, prompt: Sequence[int], params: object
    ) -> tuple[_Completion | None, PartnerTestResult]:
        """Send a completion request. Return its answer, or None and the result of the test.

        If the server cannot be reached, or refuses the request itself, the result is ``Unknown``.
        """
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": params,
        }
        try:
            model = self._endpoint.model or _read_model(server)
            data = json.dumps(body | {"model": model}).encode()
        except (EngineError, MalformedError) as error:
            return None, PartnerTestResult(Outcome.UNKNOWN, f"{name} does not answer: {error}")
        try:
            status, answer = server.call("POST", COMPLETIONS, REQUEST_TIMEOUT_S, data)
            found = decode(answer, _Completion) if status == 200 else None
        except (EngineError, MalformedError) as error:
            return None, PartnerTestResult(Outcome.FAILED, f"the request to {name} failed: {error}")
        if found is None:
            outcome = Outcome.FAILED if status >= 500 else Outcome.UNKNOWN
            return None, PartnerTestResult(outcome, f"the request to {name} failed: HTTP {status}")
        if any(one.finish_reason == "error" for one in found.choices):
            return None, PartnerTestResult(
                Outcome.FAILED, f"the request to {name} ended with an error"
            )
        return found, PartnerTestResult(Outcome.SUCCEEDED, "")


def _read_model(server: HttpClient) -> str:
    """Return the first model that the server lists. Raises EngineError and MalformedError."""
    status, body = server.call("GET", MODELS, REQUEST_TIMEOUT_S)
    models = decode(body, _Models).data if status == 200 else []
    if not models:
        raise EngineError(f"GET {MODELS}: HTTP {status}: the answer lists no model")
    return models[0].id


def create_partners(
    config: SupervisorConfig, leases: LeaseSlots, slices: EndpointSlices
) -> Partners | None:
    """Return the partners of this pod of a policy; None if its role has no partners.

    All engines of a graph listen on the same port.
    """
    role = config.service.role
    if config.service.kind != POLICY_KIND or role not in PARTNER_ROLES or config.service.is_worker:
        return None
    assert role is not None
    known, own = role, urlsplit(config.engine.serving_url)

    def find_partners() -> dict[str, str]:
        found = slices.find_ready_addresses(leases.list_partners(known))
        return {
            pod: f"{own.scheme}://{f'[{one}]' if ':' in one else one}:{own.port or 80}"
            for pod, one in found.items()
        }

    return Partners(config.engine, known, find_partners)
