"""The fake of the API server does all that ``runtime/client.py`` assumes of the real one.

``tests/cluster/operator/test_api_cases.py`` runs the same cases against the real one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from plimsoll_operator.runtime.client import ApiError
from tests.api_cases import MAP, each_case, made
from tests.fake_api import FakeApi

if TYPE_CHECKING:
    from tests.lab.definitions import Definitions


@each_case
def test_it_answers_as_an_api_server(definitions: Definitions, case: Any) -> None:
    api = FakeApi(definitions)
    api.lacking = {"PodMonitor", "PrometheusRule"}
    asyncio.run(case(api, "ns"))


def test_a_server_that_asks_for_patience_gets_it_and_some_day_an_error() -> None:
    async def ask() -> None:
        api = FakeApi(tries=3)
        api.busy = 2
        assert await api.apply(MAP, made("ConfigMap", "ns"))
        assert api.refusals == 2
        api.busy = 3
        with pytest.raises(ApiError) as refused:
            await api.get(MAP, "ns", "one")
        assert (refused.value.status, refused.value.is_lasting) == (429, False)

    asyncio.run(ask())
