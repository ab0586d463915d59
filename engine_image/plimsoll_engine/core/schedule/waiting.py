"""Queue waiting requests, and share the engine fairly between tenants.

The new requests of the tenant with the fewest computed tokens start first, by priority and age. A
preempted request keeps its place, and resumes before new requests start. (This is the counter of
Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.)
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator

from plimsoll_engine.core.schedule.request import Request


def get_urgency(request: Request) -> tuple[int, int]:
    """Return the sort key of a tenant's new requests: the most urgent first, then the oldest."""
    return request.priority, request.order


def get_place(request: Request) -> int:
    """Return the place of ``request``: the sort key of running and preempted requests."""
    assert request.place is not None
    return request.place


class WaitingQueue:
    """Queue of waiting requests, with the number of computed tokens of each tenant."""

    def __init__(self) -> None:
        # Sorted by place.
        self._preempted: list[Request] = []
        # By tenant, sorted by urgency.
        self._new: dict[str, list[Request]] = {}
        self._orders = 0
        self._places = 0
        self._present: Counter[str] = Counter()
        # For each tenant with a waiting or running request.
        self.computed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._new.values()))

    def __contains__(self, request: Request) -> bool:
        return any(request is one for one in self)

    def __iter__(self) -> Iterator[Request]:
        yield from self._preempted
        for queue in self._new.values():
            yield from queue

    def add(self, request: Request) -> None:
        """Add a new request."""
        request.order = self._orders
        self._orders += 1
        if not self._present[request.tenant]:
            # Idle tenants accumulate no credit.
            self.computed[request.tenant] = min(self.computed.values(), default=0)
        self._present[request.tenant] += 1
        self._add_new(request)

    def requeue(self, request: Request) -> None:
        """Add a preempted request, which keeps its place."""
        insort(self._preempted, request, key=get_place)

    def requeue_for(self, request: Request, replacement: Request) -> None:
        """Queue the preempted ``request`` as new, and give its place to ``replacement``."""
        self.remove(replacement)
        replacement.place, request.place = request.place, None
        self.requeue(replacement)
        self._add_new(request)

    def peek(self) -> Request | None:
        """Return the request that starts next, without removing it; None if no request waits."""
        if self._preempted:
            stopped = self._preempted[0]
            return self.find_more_urgent(stopped) or stopped
        return self.find_next_new()

    def find_next_new(self) -> Request | None:
        """Return the new request that starts next; None if there are no new requests."""
        heads = (queue[0] for queue in self._new.values())
        return min(heads, key=lambda one: (self.computed[one.tenant], one.order), default=None)

    def find_more_urgent(self, request: Request) -> Request | None:
        """Return the most urgent waiting request of the same tenant.

        Return None if it is not more urgent than ``request``.
        """
        same = [one for one in self._preempted if one.tenant == request.tenant]
        same += self._new.get(request.tenant, [])[:1]
        best = min(same, key=get_urgency, default=None)
        return best if best is not None and best.priority < request.priority else None

    def start(self, request: Request) -> None:
        """Remove ``request`` from the queue, and give it a place if it has none."""
        if request.place is None:
            same = (one for one in self._preempted if one.tenant == request.tenant)
            stopped = next((one for one in same if one.priority > request.priority), None)
            if stopped is not None:  # ``request`` takes over its turn and place
                self._preempted.remove(stopped)
                self.requeue_for(stopped, request)
        self.remove(request)
        if request.place is None:
            request.place = self._places
            self._places += 1

    def remove(self, request: Request) -> None:
        """Remove ``request``. Raises ValueError if it is not waiting."""
        if request.place is not None:
            self._preempted.remove(request)
            return
        queue = self._new.get(request.tenant, [])
        queue.remove(request)
        if not queue:
            del self._new[request.tenant]

    def charge_tokens(self, request: Request, num_tokens: int) -> None:
        """Add ``num_tokens`` to the computed tokens of the request's tenant."""
        self.computed[request.tenant] += num_tokens

    def forget_request(self, request: Request) -> None:
        """Record that ``request`` has ended."""
        self._present[request.tenant] -= 1
        if not self._present[request.tenant]:
            del self._present[request.tenant]
            del self.computed[request.tenant]

    def find_problems(self) -> list[str]:
        """Return an audit message for each inconsistency in this queue."""
        found = []
        places = [request.place for request in self._preempted]
        if None in places or any(r.place is not None for q in self._new.values() for r in q):
            found.append("a new request in the queue has a place, or a preempted request has none")
        if self._present.keys() != self.computed.keys():
            found.append(
                f"{len(self.computed)} tenants have a token count, but {len(self._present)} have"
                " requests"
            )
        return found

    def _add_new(self, request: Request) -> None:
        insort(self._new.setdefault(request.tenant, []), request, key=get_urgency)
