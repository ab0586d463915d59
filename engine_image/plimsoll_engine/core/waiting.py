"""Who waits for the batch, and who is next.

The lowest priority number goes first, always. Within a priority, whoever was stopped to make room
goes on before anybody new begins; new requests take turns by tenant: the next one is of the tenant
for which the fewest tokens were computed, its oldest. So a tenant that queues a thousand requests
waits behind its own, and one with long prompts has its turn less often.

A tenant's count begins, whenever it comes back, at the lowest of those that are here: it cannot
save up turns while it asks for nothing. (The counter is that of Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024, with the tokens that are really computed as the cost.)
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from plimsoll_engine.core.request import Request


def urgency(request: Request) -> tuple[int, int]:
    """Sorts requests: the most urgent first, then the oldest."""
    return request.priority, request.order


@dataclass(slots=True)
class _Level:
    """The waiting requests of one priority."""

    stopped: list[Request] = field(default_factory=list)
    tenants: dict[str, deque[Request]] = field(default_factory=dict)


class WaitingQueue:
    """Also keeps the tenants' counts, of which running requests are part."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._length = 0
        self._orders = 0
        self._present: Counter[str] = Counter()
        self.computed: dict[str, int] = {}
        """Tokens computed for each tenant that has a request here or running."""

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Request) -> bool:
        return any(request is one for one in self)

    def __iter__(self) -> Iterator[Request]:
        for priority in sorted(self._levels):
            level = self._levels[priority]
            yield from level.stopped
            for queue in level.tenants.values():
                yield from queue

    def add(self, request: Request) -> None:
        """Take in a new request."""
        request.order = self._orders
        self._orders += 1
        if not self._present[request.tenant]:
            self.computed[request.tenant] = min(self.computed.values(), default=0)
        self._present[request.tenant] += 1
        level = self._levels.setdefault(request.priority, _Level())
        level.tenants.setdefault(request.tenant, deque()).append(request)
        self._length += 1

    def put_back(self, request: Request) -> None:
        """Take in a request that was stopped."""
        insort(self._levels.setdefault(request.priority, _Level()).stopped, request, key=urgency)
        self._length += 1

    def head(self) -> Request | None:
        """The next request, which stays; None where nobody waits."""
        if not self._levels:
            return None
        level = self._levels[min(self._levels)]
        if level.stopped:
            return level.stopped[0]
        heads = (queue[0] for queue in level.tenants.values())
        return min(heads, key=lambda request: (self.computed[request.tenant], request.order))

    def remove(self, request: Request) -> None:
        """Take ``request`` out; ValueError where it does not wait."""
        level = self._levels.get(request.priority, _Level())
        if request in level.stopped:
            level.stopped.remove(request)
        else:
            queue = level.tenants.get(request.tenant, deque())
            queue.remove(request)
            if not queue:
                del level.tenants[request.tenant]
        if not level.stopped and not level.tenants:
            del self._levels[request.priority]
        self._length -= 1

    def charge(self, request: Request, tokens: int) -> None:
        """``tokens`` more are computed for the request's tenant."""
        self.computed[request.tenant] += tokens

    def forget(self, request: Request) -> None:
        """``request`` ended; a tenant without any is forgotten."""
        self._present[request.tenant] -= 1
        if not self._present[request.tenant]:
            del self._present[request.tenant]
            del self.computed[request.tenant]

    def problems(self) -> list[str]:
        """What is wrong with this queue, for the audit; nothing on a sound one."""
        found = []
        if (counted := sum(1 for _ in self)) != self._length:
            found.append(f"{counted} requests wait, {self._length} are counted")
        if self._present.keys() != self.computed.keys():
            found.append(
                f"{len(self.computed)} tenants have a count, {len(self._present)} are here"
            )
        return found
