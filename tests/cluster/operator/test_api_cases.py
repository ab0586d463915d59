"""The API server answers as the operator's client and the tests' fake assume."""

from __future__ import annotations

import asyncio
from typing import Any

from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.queue import RateLimit
from tests.api_cases import CASES


def test_a_server_answers_as_its_fake(kubectl: Any) -> None:
    """All cases in one namespace: no case leaves objects behind."""
    asyncio.run(_all(kubectl))


async def _all(kubectl: Any) -> None:
    api = await Api.connect(str(kubectl.kubeconfig), 30.0, RateLimit(500, 500))
    wrong = []
    try:
        for number, case in enumerate(CASES):
            space = f"{kubectl.namespace}-{number}"
            kubectl("create", "namespace", space)
            try:
                await case(api, space)
            except Exception as error:
                wrong.append(f"{case.__name__}: {error!r}")
            kubectl("delete", "namespace", space, "--wait=false")
    finally:
        await api.close()
    assert wrong == []
