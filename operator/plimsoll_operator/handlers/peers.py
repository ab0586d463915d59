"""When supervisors are told of each other's growth: while an incident of growth is open.

Each text is kept for a minute, so a reconcile in between writes nothing, and a quiet fleet costs no
write at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from plimsoll_api.peers import Peer
from plimsoll_operator.fleet.peers import growing, summary
from plimsoll_operator.kinds import Key, Object
from plimsoll_operator.status.figures import Figures

PUBLISH_S = 60.0
UNKNOWN = Figures()


class Summaries:
    """What was published last for each service and policy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[Key, tuple[float, str]] = {}

    def text(
        self,
        key: Key,
        replicas: Iterable[Peer],
        incidents: Iterable[Object],
        figures: Mapping[str, Figures],
    ) -> str:
        """Return the file to publish now; empty while there is none.

        ``figures`` are by pod; they are empty until the pods were asked.
        """
        suspected = growing(incidents)
        if not suspected:
            self.forget(key)
            return ""
        now, known = self._clock(), self._last.get(key)
        if known is not None and now - known[0] < PUBLISH_S:
            return known[1]
        text = summary([_with_growth(one, figures) for one in replicas], suspected)
        if figures:
            self._last[key] = (now, text)
        return text

    def next_s(self, key: Key) -> float | None:
        """Return the seconds until the next file is due; None while none is."""
        known = self._last.get(key)
        return None if known is None else max(0.0, known[0] + PUBLISH_S - self._clock())

    def forget(self, key: Key) -> None:
        """After the service or policy is gone, or nothing is to be published any more."""
        self._last.pop(key, None)


def _with_growth(peer: Peer, figures: Mapping[str, Figures]) -> Peer:
    found = figures.get(peer.pod, UNKNOWN)
    return replace(peer, host=found.host_growth, device=found.device_growth)
