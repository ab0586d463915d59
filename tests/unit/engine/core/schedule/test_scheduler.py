"""Continuous batching without a model: budgets hold, everybody finishes, no block is lost."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import FAIRNESS_PREEMPTION_WAIT_S, Chunk, Scheduler
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Sampling, Submit

BLOCK = 4


def make(blocks: int, seqs: int = 4, budget: int = 16, length: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), seqs, budget, length)


def request(name: str, prompt: list[int], max_tokens: int, **fields: Any) -> Request:
    return Request.create(Submit(name, prompt, Sampling(max_tokens=max_tokens), **fields))


def starts(scheduler: Scheduler, steps: int = 500) -> list[str]:
    """Work off what is queued; the names in the order of their first start."""
    order: list[str] = []
    for _ in range(steps):
        chunks = scheduler.schedule()
        if not chunks:
            break
        order += [c.request.request_id for c in chunks if c.request.request_id not in order]
        advance(scheduler, chunks)
    assert not scheduler.running
    assert not len(scheduler.waiting)
    return order


def advance(scheduler: Scheduler, chunks: list[Chunk]) -> list[Request]:
    """What the engine does with a step, every sampled token being 0; the requests that ended."""
    ended = []
    for chunk in chunks:
        scheduler.record_computed(chunk)
        if chunk.request.num_uncomputed:
            continue
        chunk.request.token_ids.append(0)
        if chunk.request.get_finish_reason(0, scheduler.max_model_len):
            scheduler.remove(chunk.request)
            chunk.request.release(scheduler.pool)
            ended.append(chunk.request)
    return ended


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 20), st.sampled_from("ab")),
        min_size=1,
        max_size=8,
    ),
    blocks=st.integers(1, 24),
    seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
)
def test_every_request_that_can_run_finishes(
    work: list[tuple[int, int, int, str]], blocks: int, seqs: int, budget: int
) -> None:
    """Each has waited so long that its tenant gets a share of the places and blocks."""
    scheduler = make(blocks, seqs, budget)
    expected = set()
    for number, (length, family, max_tokens, tenant) in enumerate(work):
        item = request(str(number), [family] * length, max_tokens, tenant=tenant)
        if scheduler.get_refusal_reason(item) is None:
            scheduler.add(item)
            expected.add(item.request_id)
    done: set[str] = set()
    for _ in range(20_000):
        if not scheduler.running and not len(scheduler.waiting):
            break
        chunks = scheduler.schedule()
        assert chunks, "work is left and nothing was scheduled"
        assert sum(chunk.count for chunk in chunks) <= budget
        assert len(scheduler.running) <= seqs
        assert scheduler.pool.find_problems() == []
        done |= {ended.request_id for ended in advance(scheduler, chunks)}
    assert done == expected
    assert scheduler.pool.num_used == 0


def test_a_long_prompt_is_computed_in_chunks_beside_a_decode() -> None:
    scheduler = make(blocks=32, budget=10)
    scheduler.add(request("short", [1, 2], 20))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("long", list(range(25)), 2))
    counts = []
    for _ in range(3):
        chunks = scheduler.schedule()
        counts.append([(chunk.request.request_id, chunk.count) for chunk in chunks])
        advance(scheduler, chunks)
    assert counts == [
        [("short", 1), ("long", 9)],
        [("short", 1), ("long", 9)],
        [("short", 1), ("long", 7)],
    ]


def test_a_second_prompt_takes_the_blocks_of_the_same_beginning() -> None:
    scheduler = make(blocks=32, budget=64)
    scheduler.add(request("first", list(range(13)), 1))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("second", [*range(12), 99, 98], 1))
    (chunk,) = scheduler.schedule()
    assert (chunk.request.computed, chunk.count) == (12, 2)
    assert scheduler.prefix_hit_tokens_total == 12


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    scheduler = make(blocks=32, budget=64)
    for name in ("first", "second"):
        scheduler.add(request(name, list(range(12)), 1))
        (chunk,) = scheduler.schedule()
        count = chunk.count
        advance(scheduler, [chunk])
    assert count == BLOCK


def test_the_youngest_is_preempted_and_the_oldest_never() -> None:
    scheduler = make(blocks=6, budget=64)
    for name in ("old", "young"):
        scheduler.add(request(name, [ord(name[0])] * 8, 14))
    order = []
    while scheduler.running or len(scheduler.waiting):
        order += [ended.request_id for ended in advance(scheduler, scheduler.schedule())]
    assert order == ["old", "young"]
    assert scheduler.preemptions_total >= 1


def test_a_higher_priority_goes_first_and_takes_place_and_blocks() -> None:
    scheduler = make(blocks=6, seqs=2, budget=64)
    for name in ("low", "lower"):
        scheduler.add(request(name, [ord(name[-1])] * 8, 8, priority=len(name)))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("high", [7] * 16, 4, priority=-1))
    chunks = scheduler.schedule()
    assert [chunk.request.request_id for chunk in chunks] == ["high"]
    assert sorted(r.request_id for r in scheduler.waiting) == ["low", "lower"]
    advance(scheduler, chunks)
    assert starts(scheduler)[:2] == ["high", "low"]


def test_a_long_prefill_of_low_priority_gives_the_budget_to_a_higher_one() -> None:
    scheduler = make(blocks=32, budget=8)
    scheduler.add(request("low", list(range(60)), 2, priority=1))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("high", [9] * 5, 2))
    counts = [(chunk.request.request_id, chunk.count) for chunk in scheduler.schedule()]
    assert counts == [("high", 5), ("low", 3)]


def test_a_tenant_with_a_long_queue_lets_the_others_in() -> None:
    scheduler = make(blocks=64, seqs=1, budget=64)
    for number in range(8):
        scheduler.add(request(f"big-{number}", [number] * 8, 4, tenant="big"))
    advance(scheduler, scheduler.schedule())
    for number in range(2):
        scheduler.add(request(f"small-{number}", [40 + number] * 8, 4, tenant="small"))
    order = starts(scheduler)
    assert order[:4] == ["big-0", "small-0", "big-1", "small-1"]
    assert scheduler.waiting.computed == {}


def test_tenants_share_tokens_and_not_requests() -> None:
    scheduler = make(blocks=64, seqs=1, budget=64)
    for number in range(12):
        scheduler.add(request(f"long-{number}", [number] * 30, 1, tenant="long"))
        scheduler.add(request(f"short-{number}", [50 + number] * 10, 1, tenant="short"))
    first = starts(scheduler)[:12]
    assert 2.5 <= sum(n.startswith("short") for n in first) / sum(
        n.startswith("long") for n in first
    ) <= 3.5  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    loud=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(-(1 << 31), 5)),
        min_size=1, max_size=12,
    ),
    quiet=st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(-5, (1 << 31) - 1)),
    blocks=st.integers(16, 24),
    seqs=st.integers(1, 4),
    before=st.integers(0, 30),
)  # fmt: skip
def test_no_priority_of_one_tenant_starves_another(
    loud: list[tuple[int, int, int]],
    quiet: tuple[int, int, int],
    blocks: int,
    seqs: int,
    before: int,
) -> None:
    """The loud tenant has a dozen requests here at all times and asks for what it likes."""
    scheduler, number, done = make(blocks, seqs, budget=16), 0, False

    def ask(name: str, what: tuple[int, int, int], tenant: str) -> None:
        length, max_tokens, priority = what
        made = request(name, [number % 9] * length, max_tokens, tenant=tenant, priority=priority)
        if scheduler.get_refusal_reason(made) is None:
            scheduler.add(made)

    for step in range(before + 400):
        if step == before:
            ask("quiet", quiet, "quiet")
        while scheduler.waiting._present["loud"] < 12:
            ask(str(number), loud[number % len(loud)], "loud")
            number += 1
        ended = advance(scheduler, scheduler.schedule())
        done = done or any(one.request_id == "quiet" for one in ended)
        if done:
            break
    assert done, "starves"


def test_a_priority_takes_no_place_of_another_tenant() -> None:
    scheduler = make(blocks=64, seqs=2, budget=64)
    scheduler.add(request("mine", [1] * 8, 30, tenant="loud", priority=5))
    scheduler.add(request("yours", [2] * 8, 30, tenant="quiet", priority=9))
    advance(scheduler, scheduler.schedule())
    scheduler.add(request("urgent", [3] * 8, 4, tenant="loud", priority=-(1 << 31)))
    running = [chunk.request.request_id for chunk in scheduler.schedule()]
    assert sorted(running) == ["urgent", "yours"]
    assert [one.request_id for one in scheduler.waiting] == ["mine"]


def hoarded(count: int, blocks: int = 60, seqs: int = 4, length: int = 8) -> Scheduler:
    """Return a scheduler that runs ``count`` long requests of one tenant."""
    scheduler = make(blocks=blocks, seqs=seqs, budget=200)
    for number in range(count):
        scheduler.add(request(f"big-{number}", [number] * length, 50, tenant="big"))
    advance(scheduler, scheduler.schedule())
    assert len(scheduler.running) == min(count, seqs)
    return scheduler


def tenants(scheduler: Scheduler) -> list[str]:
    return sorted(one.tenant for one in scheduler.running)


def test_a_tenant_gives_up_places_to_one_that_waits_until_both_have_as_many() -> None:
    scheduler = hoarded(6)
    soon = time.monotonic() - FAIRNESS_PREEMPTION_WAIT_S / 2
    scheduler.add(request("patient", [20] * 8, 50, tenant="small", arrived=soon))
    advance(scheduler, scheduler.schedule())
    assert tenants(scheduler) == ["big"] * 4
    for number in range(5):
        scheduler.add(request(f"small-{number}", [30 + number] * 8, 50, tenant="small"))
    scheduler.remove(next(one for one in scheduler.waiting if one.request_id == "patient"))
    for _ in range(10):
        advance(scheduler, scheduler.schedule())
    assert tenants(scheduler) == ["big", "big", "small", "small"]
    assert scheduler.preemptions_total == 2
    assert [r.request_id for r in scheduler.running if r.tenant == "big"] == ["big-0", "big-1"]
    done = set(starts(scheduler))
    assert {f"big-{number}" for number in range(6)} <= done


def test_a_tenant_gives_up_blocks_too_but_not_for_a_prompt_that_would_hold_more() -> None:
    scheduler = hoarded(6, blocks=12, seqs=8)
    assert not scheduler.pool.num_available
    scheduler.add(request("huge", [20] * 44, 4, tenant="huge"))
    advance(scheduler, scheduler.schedule())
    assert "huge" not in tenants(scheduler)
    scheduler.remove(next(one for one in scheduler.waiting if one.tenant == "huge"))
    before = scheduler.preemptions_total
    scheduler.add(request("small", [30] * 15, 4, tenant="small"))
    advance(scheduler, scheduler.schedule())
    assert "small" in tenants(scheduler)
    assert scheduler.preemptions_total > before


def test_a_salt_keeps_the_prefix_cache_apart() -> None:
    scheduler = make(blocks=32, budget=64)
    hits = []
    for salt in ("", "a", "a", "b", ""):
        scheduler.add(request("r", list(range(13)), 1, cache_salt=salt))
        hits.append(scheduler.schedule()[0].request.computed)
        (running,) = scheduler.running
        advance(scheduler, [Chunk(running, running.num_uncomputed)])
    assert hits == [0, 0, 12, 0, 12]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "output", "message"),
    [
        ([], 1, [], "the prompt is empty"),
        ([1], 2, [5, 6], "has already generated all 2 tokens that max_tokens allows"),
        ([1] * 64, 1, [], "64 tokens, which leaves no room for output in max_model_len 64"),
        ([1] * 10, 15, [], "25 tokens, which need 7 KV blocks, but the pool has 4"),
    ],
)
def test_what_can_never_run_is_refused_with_a_reason(
    prompt: list[int], max_tokens: int, output: list[int], message: str
) -> None:
    item = Request.create(Submit("x", prompt, Sampling(max_tokens=max_tokens), output))
    with pytest.raises(ValueError, match=message):
        raise ValueError(make(blocks=4).get_refusal_reason(item))


def test_a_suspect_waits_for_blocks_that_no_running_request_has() -> None:
    """They are handed over or under way to the host, and come back by themselves."""
    scheduler = make(4)
    scheduler.add(request("suspect", [1] * 9, 2))
    (suspect,) = scheduler.waiting
    held = scheduler.pool.allocate(3)
    assert held is not None
    assert scheduler.schedule(suspect) == []
    scheduler.pool.release(held)
    (chunk,) = scheduler.schedule(suspect)
    assert chunk.request is suspect
