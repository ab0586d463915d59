"""What several folders of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.clients.api_server import ApiServer


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server
