"""kopf's webhook server, and what it serves with. Part of every replica, of standbys, too."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import kopf

from plimsoll_operator.admission.configuration import Address
from plimsoll_operator.admission.policies import Policies
from plimsoll_operator.admission.review import RESULTS, Reviewer
from plimsoll_operator.admission.upkeep import Upkeep
from plimsoll_operator.config import Config, Webhook
from plimsoll_operator.runtime.background import Background
from plimsoll_operator.runtime.client import Api

log = logging.getLogger(__name__)

NEVER_S = 10 * 365 * 86_400.0
"""kopf restarts its server for a new certificate. Ours is loaded in place instead, so that no
request finds the port closed."""


class Tally(Protocol):
    """What is counted of the webhook."""

    def admitted(self, result: str, count: int = 1) -> None:
        """``count`` reviews ended with ``result``."""

    def certificate(self, secret: str, expires_s: float) -> None:
        """Note that the certificate of ``secret`` is served until ``expires_s``, Unix seconds."""


class Admission:
    """``start`` it before the election; ``stop`` it at the end."""

    def __init__(
        self,
        api: Api,
        config: Config,
        webhook: Webhook,
        leading: Callable[[], bool],
        tally: Tally,
    ) -> None:
        policies = Policies()
        for result in RESULTS:
            tally.admitted(result, 0)
        self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-webhook-"))
        self._port = webhook.port
        self._review = Reviewer(policies, config.images, tally.admitted)
        self._upkeep = Upkeep(
            api,
            policies,
            Address(webhook.namespace, webhook.name, webhook.url),
            webhook.name,
            config.namespaces,
            leading,
            self._folder,
            webhook.provided,
            partial(tally.certificate, f"{webhook.namespace}/{webhook.name}"),
            clocks=config.clocks,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def current(self) -> bool:
        """Return whether the present policies inject pods that are created now.

        The answer is what this replica can tell.
        """
        return self._upkeep.current()

    def start(self, background: Background) -> None:
        """Serve from now on. No failure of it ends the operator: pods start without it."""
        parts: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "admission": self._serve,
            "admission-upkeep": self._upkeep.run,
        }
        for name, part in parts.items():
            kept = partial(background.keep, name, part, needed=False)
            self._tasks.append(asyncio.create_task(kept()))

    async def stop(self) -> None:
        """Close the port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        await self._upkeep.serving.wait()
        server = kopf.WebhookServer(
            port=self._port,
            host="localhost",
            context=self._upkeep.context,
            certfile=self._upkeep.certfile,
            pkeyfile=self._upkeep.keyfile,
            file_check_interval=NEVER_S,
        )
        async with server:
            async for _ in server(self._review):
                log.info("admission is served on port %d", self._port)
