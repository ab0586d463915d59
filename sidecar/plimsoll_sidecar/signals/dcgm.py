"""Device memory from the DCGM exporter of the pod's node, for containers without the driver.

The exporter's page has ``DCGM_FI_DEV_FB_USED`` and its like in MiB, by UUID. Of a device in MIG
mode it tells slices by an id of their own and the UUID of the whole, so that a slice is unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from plimsoll_api.supervision import EXPORTER_PORT, NODE_IP
from plimsoll_sidecar.act.adapter import EngineError
from plimsoll_sidecar.act.http import Server
from plimsoll_sidecar.signals.device import DeviceBytes
from plimsoll_sidecar.signals.prometheus import reader

SCRAPE_S = 10.0
"""The exporter itself collects each 30 s by default."""
ANSWER_S = 2.0
MIB = 1 << 20
USED, FREE, RESERVED = (f"DCGM_FI_DEV_FB_{name}" for name in ("USED", "FREE", "RESERVED"))


class Dcgm:
    """``url`` without a path. A page that cannot be read leaves all devices unknown."""

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server, self._clock = Server(url), clock
        self._next = 0.0
        self._page: bytes | None = None

    @classmethod
    def of_node(cls) -> Dcgm | None:
        """The exporter that the environment names, None where it names none."""
        host, port = os.environ.get(NODE_IP), os.environ.get(EXPORTER_PORT)
        if not host or not port:
            return None
        return cls(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def memory(self, uuid: str) -> DeviceBytes | None:
        page = self._newest()
        if page is None or not uuid.startswith("GPU-"):
            return None
        names = {name: f'{name}{{UUID="{uuid}"}}' for name in (USED, FREE, RESERVED)}
        found = reader(names.values())(page)
        used, free = found.get(names[USED]), found.get(names[FREE])
        if used is None or free is None:
            return None
        whole = used + free + found.get(names[RESERVED], 0.0)
        return DeviceBytes(used=int(used * MIB), total=int(whole * MIB))

    def _newest(self) -> bytes | None:
        now = self._clock()
        if now >= self._next:
            self._next = now + SCRAPE_S
            try:
                status, page = self._server.call("GET", "/metrics", ANSWER_S)
            except EngineError:
                status, page = 0, b""
            self._page = page if status == 200 else None
        return self._page
