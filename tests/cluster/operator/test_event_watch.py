"""A watch of Events in a quiet namespace works on: the API server sends no bookmarks in it.

Tests ``runtime/client.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll_operator.controllers.refused_creations import EVENT_KINDS
from plimsoll_operator.runtime import client
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.queue import RateLimit
from plimsoll_operator.runtime.reflector import Reflector

SILENCE_S = 4.0


def test_a_quiet_namespace_is_no_broken_watch(
    kubectl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_WATCH_SILENCE_S", SILENCE_S)

    async def main() -> int:
        lists: list[int] = []
        api = await Api.connect(str(kubectl.kubeconfig), 30.0, RateLimit(500, 500))
        kind, namespace = EVENT_KINDS[0], kubectl.namespace
        reflector = Reflector(
            api, kind, namespace, lambda found: lists.append(len(found)), lambda *_: None
        )
        running = asyncio.create_task(reflector.run())
        await asyncio.sleep(2.5 * SILENCE_S)
        assert not running.done()
        assert reflector.error is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await api.close()
        return len(lists)

    assert asyncio.run(main()) == 1, "the watch goes on where it ended"
