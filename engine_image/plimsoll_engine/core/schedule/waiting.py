"""Who waits for the batch, and who is next.

Fairness between tenants comes first: the next new request is of the tenant for which the fewest
tokens were computed. Priorities order a tenant's own requests alone, the lowest number first, then
the oldest. So a tenant that queues a thousand requests waits behind its own, one with long prompts
has its turn less often, and whatever priority it asks for, another tenant waits no longer for it.

A request that runs has a place, numbered in the order in which the places were given. Where it is
stopped to make room it keeps its place and goes on before anybody new begins. A more urgent request
of the same tenant may take that place over; the one that had it then waits like a new one. So
priorities move requests between a tenant's places and never win it another one.

A tenant's count begins, whenever it comes back, at the lowest of those that are here: it cannot
save up turns while it asks for nothing. (The counter is that of Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024, with the tokens that are really computed as the cost.)
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from plimsoll_engine.core.schedule.request import Request


def urgency(request: Request) -> tuple[int, int]:
    """Sorts the requests of one tenant: the most urgent first, then the oldest."""
    return request.priority, request.order


def place(request: Request) -> int:
    """Sorts requests that run or were stopped, of all tenants."""
    assert request.place is not None
    return request.place


class WaitingQueue:
    """Also keeps the tenants' counts, of which running requests are part."""

    def __init__(self) -> None:
        self._stopped: list[Request] = []
        """Those that have a place, by its number."""
        self._new: dict[str, list[Request]] = {}
        """All others, by tenant and urgency."""
        self._orders = 0
        self._places = 0
        self._present: Counter[str] = Counter()
        self.computed: dict[str, int] = {}
        """Tokens computed for each tenant that has a request here or running."""

    def __len__(self) -> int:
        return len(self._stopped) + sum(map(len, self._new.values()))

    def __contains__(self, request: Request) -> bool:
        return any(request is one for one in self)

    def __iter__(self) -> Iterator[Request]:
        yield from self._stopped
        for queue in self._new.values():
            yield from queue

    def add(self, request: Request) -> None:
        """Take in a new request."""
        request.order = self._orders
        self._orders += 1
        if not self._present[request.tenant]:
            self.computed[request.tenant] = min(self.computed.values(), default=0)
        self._present[request.tenant] += 1
        self._add_new(request)

    def put_back(self, request: Request) -> None:
        """Take in a request that was stopped; it keeps its place."""
        insort(self._stopped, request, key=place)

    def give_up(self, request: Request, heir: Request) -> None:
        """Take in a request that was stopped for ``heir``, which waits and gets its place."""
        self.remove(heir)
        heir.place, request.place = request.place, None
        self.put_back(heir)
        self._add_new(request)

    def head(self) -> Request | None:
        """Return the next request, which stays; None where nobody waits."""
        if self._stopped:
            stopped = self._stopped[0]
            return self.more_urgent(stopped) or stopped
        heads = (queue[0] for queue in self._new.values())
        return min(heads, key=lambda one: (self.computed[one.tenant], one.order), default=None)

    def more_urgent(self, request: Request) -> Request | None:
        """Return the most urgent one that waits of the same tenant, if its priority is higher."""
        same = [one for one in self._stopped if one.tenant == request.tenant]
        same += self._new.get(request.tenant, [])[:1]
        best = min(same, key=urgency, default=None)
        return best if best is not None and best.priority < request.priority else None

    def start(self, request: Request) -> None:
        """Take ``request`` out; it has a place from now on."""
        if request.place is None:
            same = (one for one in self._stopped if one.tenant == request.tenant)
            stopped = next((one for one in same if one.priority > request.priority), None)
            if stopped is not None:  # it is that one's turn
                self._stopped.remove(stopped)
                self.give_up(stopped, request)
        self.remove(request)
        if request.place is None:
            request.place = self._places
            self._places += 1

    def remove(self, request: Request) -> None:
        """Take ``request`` out; ValueError where it does not wait."""
        if request.place is not None:
            self._stopped.remove(request)
            return
        queue = self._new.get(request.tenant, [])
        queue.remove(request)
        if not queue:
            del self._new[request.tenant]

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
        """Return what is wrong with this queue, for the audit; nothing on a sound one."""
        found = []
        places = [request.place for request in self._stopped]
        if None in places or any(r.place is not None for q in self._new.values() for r in q):
            found.append("requests wait among those of the other kind")
        if self._present.keys() != self.computed.keys():
            found.append(
                f"{len(self.computed)} tenants have a count, {len(self._present)} are here"
            )
        return found

    def _add_new(self, request: Request) -> None:
        insort(self._new.setdefault(request.tenant, []), request, key=urgency)
