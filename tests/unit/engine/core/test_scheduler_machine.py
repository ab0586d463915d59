"""Whatever order of events: every block, place and count of the scheduler stays accounted for.

Tests ``core/schedule/scheduler.py``.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk, Scheduler
from plimsoll_engine.core.schedule.waiting import get_place, get_urgency
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Sampling, Submit

BLOCK, BLOCKS, SEQS, BUDGET, LENGTH = 4, 10, 3, 12, 40


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, end, are aborted, and are stopped by a failed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(BlockPool(BLOCKS, BLOCK), SEQS, BUDGET, LENGTH)
        self.alive: dict[str, Request] = {}
        self.number = 0
        self.put_off: set[str] = set()
        """Those that this step leaves for a better one: it computes blocks that they can share, or
        has too few tokens left to begin a prompt with."""
        start = self.scheduler._start_waiting

        def spy(request: Request, budget: int) -> Chunk | None:
            chunk = start(request, budget)
            if chunk is not None and not chunk.count:
                self.put_off.add(request.request_id)
            return chunk

        self.scheduler._start_waiting = spy  # type: ignore[method-assign]

    @rule(
        length=st.integers(1, 30),
        family=st.integers(0, 2),
        max_tokens=st.integers(1, 9),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "s"]),
    )
    def submit(
        self, length: int, family: int, max_tokens: int, priority: int, tenant: str, salt: str
    ) -> None:
        self.number += 1
        submit = Submit(
            str(self.number), [family] * length, Sampling(max_tokens=max_tokens),
            priority=priority, tenant=tenant, cache_salt=salt,
        )  # fmt: skip
        request = Request.create(submit)
        if self.scheduler.get_refusal_reason(request) is None:
            self.scheduler.add(request)
            self.alive[request.request_id] = request

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._end(self.alive[data.draw(st.sampled_from(sorted(self.alive)))])

    @precondition(lambda self: self.alive)
    @rule()
    def step(self) -> None:
        self.put_off.clear()
        chunks = self.scheduler.schedule()
        assert chunks, "work is left and nothing was scheduled"
        assert sum(chunk.count for chunk in chunks) <= BUDGET
        assert len({id(chunk.request) for chunk in chunks}) == len(chunks)
        head = self.scheduler.waiting.peek()
        if head is not None and head.request_id not in self.put_off:
            same = (c.request for c in chunks if c.request.tenant == head.tenant)
            assert all(request.priority <= head.priority for request in same)
        self._advance(chunks)

    @precondition(lambda self: self.scheduler.running)
    @rule()
    def fail_a_batch(self) -> None:
        suspects = [chunk.request for chunk in self.scheduler.schedule()]
        for request in suspects:
            self.scheduler.preempt(request)
        for request in suspects:
            if any(request is one for one in self.scheduler.waiting):
                (chunk,) = self.scheduler.schedule(request)
                assert chunk.request is request
                self._advance([chunk])

    def _advance(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            request = chunk.request
            assert len(request.block_ids) * BLOCK >= request.computed + chunk.count
            self.scheduler.record_computed(chunk)
            if not request.num_uncomputed:
                request.append(self.number % 3)
                if request.get_finish_reason(0, LENGTH):
                    self._end(request)

    def _end(self, request: Request) -> None:
        del self.alive[request.request_id]
        self.scheduler.remove(request)
        request.release(self.scheduler.pool)

    @invariant()
    def everything_adds_up(self) -> None:
        scheduler = self.scheduler
        assert scheduler.pool.find_problems() == []
        assert scheduler.pool.prefix.find_problems() == []
        assert scheduler.waiting.find_problems() == []
        assert len(scheduler.running) <= SEQS
        assert scheduler.running == sorted(scheduler.running, key=get_place)
        assert len({request.place for request in scheduler.running}) == len(scheduler.running)
        for tenant in "ab":
            same = [request for request in scheduler.running if request.tenant == tenant]
            priorities = [get_urgency(request)[0] for request in same]
            assert priorities == sorted(priorities)
        queued = Counter(r.request_id for r in [*scheduler.running, *scheduler.waiting])
        assert queued == Counter(self.alive.keys())
        held = Counter(block for request in self.alive.values() for block in request.block_ids)
        assert held == scheduler.pool.count_references()
        assert all(not request.block_ids for request in scheduler.waiting)
        tenants = {request.tenant for request in self.alive.values()}
        assert scheduler.waiting.computed.keys() == tenants

    def teardown(self) -> None:
        for _ in range(2_000):
            if not self.alive:
                break
            self.step()
        assert not self.alive, "requests starve"
        assert self.scheduler.pool.num_used == 0
        self.everything_adds_up()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
