"""A finished request dies by reference counting alone, whatever its end.

Tests ``core/engine_core.py``.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import msgspec
import pytest

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, Vocabulary
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import Grammar, Submit
from plimsoll_faults.defects.requests import CyclicRequest

Scenario = Callable[[EngineCore, Any], None]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def finished(engine: EngineCore, helpers: Any) -> None:
    engine.submit(helpers.submit("a", [3, 4, 5], 6))
    helpers.finish(engine)


def stopped(engine: EngineCore, helpers: Any) -> None:
    engine.submit(helpers.submit("a", [3, 4, 5], 60, stop_token_ids=list(range(512))))
    helpers.finish(engine)


def aborted_while_waiting(engine: EngineCore, helpers: Any) -> None:
    engine.submit(helpers.submit("a", [3, 4, 5], 6))
    assert engine.abort("a")


def aborted_while_running(engine: EngineCore, helpers: Any) -> None:
    engine.submit(helpers.submit("a", [3] * 110, 20))  # longer than the budget: between chunks
    engine.submit(helpers.submit("b", [4] * 9, 60))
    for _ in range(3):
        engine.step()
    assert engine.abort("a")
    assert engine.abort("b")
    assert not engine.abort("b")


def refused(engine: EngineCore, helpers: Any) -> None:
    assert engine.submit(helpers.submit("a", [3] * 300, 6)) is not None


def errored(engine: EngineCore, helpers: Any) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("broken forward")

    for name in "abc":
        engine.submit(helpers.submit(name, [ord(name)] * 9, 6))
    launch = engine.runner.launch
    engine.runner.launch = fails  # type: ignore[method-assign,assignment]
    dropped = [d.request_id for _ in range(9) if engine.has_work for d in engine.step().dropped]
    assert sorted(dropped) == ["a", "b", "c"]
    engine.runner.launch = launch  # type: ignore[method-assign]


def preempted_then_finished(engine: EngineCore, helpers: Any) -> None:
    for number in range(6):
        engine.submit(helpers.submit(str(number), [number] * 20, 60))
    helpers.finish(engine)
    assert engine.scheduler.preemptions_total > 0


def closed_at_work(engine: EngineCore, helpers: Any) -> None:
    engine.submit(helpers.submit("a", [3, 4, 5], 60))
    engine.step()
    engine.close()


SCENARIOS: list[Scenario] = [
    finished,
    stopped,
    aborted_while_waiting,
    aborted_while_running,
    refused,
    errored,
    preempted_then_finished,
    closed_at_work,
]


def leftovers(
    engine: EngineCore, make: Callable[[Submit], Request], act: Scenario, helpers: Any
) -> int:
    """How many requests are alive after ``act``, by the audit's rule and by our own count."""
    engine.make_request = make
    act(engine, helpers)
    assert not engine.has_work
    idle, rules, findings = run_audit(engine, Ledger())
    assert idle
    assert "released_requests_die" in rules
    assert bool(len(engine.live)) == any(f.rule == "released_requests_die" for f in findings)
    assert [f for f in findings if f.rule != "released_requests_die"] == []
    return len(engine.live)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("act", SCENARIOS)
def test_no_request_survives_its_release(act: Scenario, make_engine: Any, helpers: Any) -> None:
    engine = make_engine(num_blocks=34, budget=48)
    assert leftovers(engine, Request.create, act, helpers) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("act", [scenario for scenario in SCENARIOS if scenario is not refused])
def test_a_request_that_stores_its_hasher_is_caught(
    act: Scenario, make_engine: Any, helpers: Any
) -> None:
    """The real bug put back: the same check must find it, in every end."""

    def make_cyclic(submit: Submit) -> Request:
        request = CyclicRequest.create(submit)
        assert isinstance(request, CyclicRequest)
        request.add_cycle(block_size=4, payload_bytes=1 << 16)
        return request

    engine = make_engine(num_blocks=34, budget=48)
    assert leftovers(engine, partial(make_cyclic), act, helpers) > 0


def test_release_may_be_called_again(make_engine: Any, helpers: Any) -> None:
    engine = make_engine()
    engine.submit(helpers.submit("a", [3, 4, 5], 60))
    engine.step()
    request = engine.requests["a"]
    engine.abort("a")
    request.release(engine.pool)
    assert engine.pool.find_problems() == []
    assert engine.pool.num_used == 0


def test_a_request_that_ends_while_its_grammar_takes_in_a_token_is_gone(
    make_engine: Any, helpers: Any, tiny_checkpoint: Path, no_collector: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    vocabulary = Vocabulary.load(tiny_checkpoint)
    assert vocabulary is not None
    engine: EngineCore = make_engine(num_blocks=48, grammars=GrammarCompiler(vocabulary))
    monkeypatch.setattr(
        engine.grammars.masks, "advance", lambda matcher, _: setattr(matcher, "busy", True)
    )
    engine.submit(helpers.submit("a", [5] * 9, 20, grammar=Grammar("regex", "[a-z]+")))
    while not engine._unconfirmed:
        engine.step()
    assert engine.abort("a")
    assert len(engine.live) == 0


@pytest.mark.parametrize("text", ["[a-z", "(a{1000}){1000}b{9999}"])
def test_a_refused_grammar_leaves_no_cycle(
    text: str, make_engine: Any, helpers: Any, tiny_checkpoint: Path, no_collector: None
) -> None:
    vocabulary = Vocabulary.load(tiny_checkpoint)
    assert vocabulary is not None
    engine: EngineCore = make_engine(num_blocks=48, grammars=GrammarCompiler(vocabulary))
    engine.submit(helpers.submit("a", [5] * 9, 20, grammar=Grammar("regex", text)))
    (job,) = map(ref, engine.grammars._jobs.values())
    while engine.has_work:
        engine.step()
    deadline = time.monotonic() + 5
    while job() is not None and time.monotonic() < deadline:  # its thread lets go last
        time.sleep(0.01)
    assert job() is None


def test_the_choices_of_a_long_prompt_take_little_and_are_in_the_ledger(
    make_engine: Any, helpers: Any
) -> None:
    """Each has its own tokens, which came in a message of its own."""
    engine: EngineCore = make_engine(num_blocks=48)
    prompt = [300 + number for number in range(100)]
    body = msgspec.msgpack.encode(helpers.submit("a", prompt, 1))
    engine.scheduler.max_model_len = 1 << 20
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        requests = [
            Request.create(msgspec.structs.replace(submit, prompt_ids=submit.prompt_ids * 1000))
            for submit in (msgspec.msgpack.decode(body, type=Submit) for _ in range(8))
        ]
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    engine.requests = {str(number): request for number, request in enumerate(requests)}
    counted = engine.count_request_bytes()
    engine.requests = {}
    assert held < 5 * 8 * 100_000
    assert 0.8 * held < counted <= held
