"""Continuous batching without a model: budgets hold, everybody finishes, no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll_engine.core.blocks import BlockPool
from plimsoll_engine.core.request import Request
from plimsoll_engine.core.scheduler import Chunk, Scheduler
from plimsoll_engine.ipc import Sampling, Submit

BLOCK = 4


def make(blocks: int, seqs: int = 4, budget: int = 16, length: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), seqs, budget, length)


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request.of(Submit(name, prompt, Sampling(max_tokens=max_tokens)))


def advance(scheduler: Scheduler, chunks: list[Chunk]) -> list[Request]:
    """What the engine does with a step, every sampled token being 0; the requests that ended."""
    ended = []
    for chunk in chunks:
        scheduler.computed(chunk)
        if chunk.request.uncomputed:
            continue
        chunk.request.token_ids.append(0)
        if chunk.request.finish_reason(0, scheduler.max_model_len):
            scheduler.remove(chunk.request)
            chunk.request.release(scheduler.pool)
            ended.append(chunk.request)
    return ended


@settings(max_examples=200, deadline=None)
@given(
    work=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=8
    ),
    blocks=st.integers(1, 24),
    seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
)
def test_every_request_that_can_run_finishes(
    work: list[tuple[int, int, int]], blocks: int, seqs: int, budget: int
) -> None:
    scheduler = make(blocks, seqs, budget)
    expected = set()
    for number, (length, family, max_tokens) in enumerate(work):
        item = request(str(number), [family] * length, max_tokens)
        if scheduler.refusal(item) is None:
            scheduler.add(item)
            expected.add(item.request_id)
    done: set[str] = set()
    for _ in range(20_000):
        if not scheduler.running and not scheduler.waiting:
            break
        chunks = scheduler.schedule()
        assert chunks, "work is left and nothing was scheduled"
        assert sum(chunk.count for chunk in chunks) <= budget
        assert len(scheduler.running) <= seqs
        assert scheduler.pool.problems() == []
        done |= {ended.request_id for ended in advance(scheduler, chunks)}
    assert done == expected
    assert scheduler.pool.used == 0


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
    while scheduler.running or scheduler.waiting:
        order += [ended.request_id for ended in advance(scheduler, scheduler.schedule())]
    assert order == ["old", "young"]
    assert scheduler.preemptions_total >= 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "output", "message"),
    [
        ([], 1, [], "the prompt is empty"),
        ([1], 2, [5, 6], "all of its max_tokens 2 are already made"),
        ([1] * 64, 1, [], "64 tokens leave no room for output in max_model_len 64"),
        ([1] * 10, 15, [], "25 tokens .* need 7 KV blocks and the pool has 4"),
    ],
)
def test_what_can_never_run_is_refused_with_a_reason(
    prompt: list[int], max_tokens: int, output: list[int], message: str
) -> None:
    item = Request.of(Submit("x", prompt, Sampling(max_tokens=max_tokens), output))
    with pytest.raises(ValueError, match=message):
        raise ValueError(make(blocks=4).refusal(item))
