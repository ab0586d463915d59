"""Poll the status of a local replica's engine and supervisor."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

import httpx

from plimsoll_api import admin
from plimsoll_api.decoding import MalformedError, decode
from plimsoll_api.engines import EngineType
from plimsoll_api.names import TOKEN_FILE
from plimsoll_api.state import View
from plimsoll_cli.local.plan import SupervisorPlan

POLL_PERIOD_S = 0.5
POLL_TIMEOUT_S = 2.0
RATE_WINDOW_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """Status from the last poll; a field is None if its part of the poll failed."""

    view: View | None = None
    status: admin.Status | None = None
    tokens_per_s: float | None = None


class Poller:
    """Poller that updates ``snapshot`` every half second; only Plimsoll's engine has a status."""

    def __init__(self, plan: SupervisorPlan) -> None:
        self.snapshot = Snapshot()
        self._plan = plan
        self._tokens: deque[tuple[float, str, int]] = deque()

    async def run(self) -> None:
        """Poll until cancelled."""
        async with httpx.AsyncClient(timeout=POLL_TIMEOUT_S, trust_env=False) as client:
            while True:
                view, status = await asyncio.gather(
                    self._poll_supervisor(client), self._poll_engine(client)
                )
                self.snapshot = Snapshot(view, status, self._compute_rate(status))
                await asyncio.sleep(POLL_PERIOD_S)

    async def _poll_supervisor(self, client: httpx.AsyncClient) -> View | None:
        try:
            answer = await client.get(f"{self._plan.supervisor_url}/state")
            answer.raise_for_status()
            return decode(answer.content, View)
        except (httpx.HTTPError, MalformedError):
            return None  # it is restarting, or has no sample yet

    async def _poll_engine(self, client: httpx.AsyncClient) -> admin.Status | None:
        engine = self._plan.config.engine
        if engine.type is not EngineType.PLIMSOLL:
            return None
        try:
            token = (self._plan.run_dir / TOKEN_FILE).read_text().strip()
            answer = await client.get(
                f"{engine.admin_url}{admin.ADMIN_PREFIX}/status",
                headers={"Authorization": f"Bearer {token}"},
            )
            answer.raise_for_status()
            return decode(answer.content, admin.Status)
        except (OSError, httpx.HTTPError, MalformedError):
            return None

    # Over the last :data:`RATE_WINDOW_S`; None if unknown.
    def _compute_rate(self, status: admin.Status | None) -> float | None:
        total = status.load.generation_tokens_total if status else None
        if status is None or total is None:
            self._tokens.clear()
            return None
        now = time.monotonic()
        if self._tokens and self._tokens[-1][1] != status.epoch:
            self._tokens.clear()
        self._tokens.append((now, status.epoch, total))
        while now - self._tokens[0][0] > RATE_WINDOW_S:
            self._tokens.popleft()
        begin, _, first = self._tokens[0]
        return (total - first) / (now - begin) if now > begin else None
