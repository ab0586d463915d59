"""No grammar of one client costs the others more than a moment: trials, turns and slow masks.

Tests ``core/grammar/grammars.py``.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.grammar import matcher, trial
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, GrammarError, Vocabulary
from plimsoll_engine.core.grammar.trial import TrialPassed, TrialServer
from plimsoll_engine.errors import GrammarServerLostError
from plimsoll_engine.memory.audit import run_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages.worker_ipc import Grammar, RequestFailure, Token
from plimsoll_engine.process import host_memory

BOMB = Grammar("lark", f"start: /{'a?' * 20_000}/", "structured_outputs.grammar")
"""Takes llguidance minutes, whatever its limits."""
ALLOCATES = Grammar("lark", "start: " + '("a" "b"){0,900} ' * 3_000, "structured_outputs.grammar")
"""More symbols than llguidance can count."""
AMBIGUOUS = "start: s\n s: " + " | ".join("s " * count for count in range(2, 150)) + ' | "a"'
"""Compiles in no time, and each token takes longer than the one before, up to seconds."""


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoint: Path) -> Vocabulary:
    found = Vocabulary.load(tiny_checkpoint)
    assert found is not None
    return found


@pytest.fixture
def trials(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialServer]:
    # Beside other tests a process with the niceness of trials gets no CPU time.
    monkeypatch.setattr(trial, "TRIAL_NICENESS", 0)
    server = TrialServer.fork(vocabulary.compile_for_trial)
    yield server
    server.close()


@pytest.fixture
def grammars(vocabulary: Vocabulary, trials: TrialServer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary, trials=trials)
    yield made
    made.close()


def outcomes(grammars: GrammarCompiler, count: int, timeout_s: float = 60.0) -> dict[str, Any]:
    """The first ``count`` outcomes, in the order in which they came."""
    found: dict[str, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {list(found)}"
        found |= dict(grammars.collect_finished(0.05))
    return found


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("grammar", [BOMB, ALLOCATES], ids=["cpu", "symbols"])
def test_a_grammar_that_takes_too_much_is_refused_and_remembered(
    grammar: Grammar, grammars: GrammarCompiler, trials: TrialServer
) -> None:
    for attempt in range(6):
        grammars.start_compilation(f"bomb-{attempt}", grammar, [])
        error = outcomes(grammars, 1)[f"bomb-{attempt}"]
        assert isinstance(error, GrammarError)
        if not error.unavailable:  # a busy machine says so, and remembers nothing
            break
    assert error.field == grammar.field
    assert "make the grammar smaller" in error.why or "too large" in error.why
    assert "backtrace" not in error.why
    begun = time.process_time()
    grammars.start_compilation("again", grammar, [])
    assert isinstance(outcomes(grammars, 1)["again"], GrammarError)
    assert time.process_time() - begun < 1.0


def test_remembered_refusals_are_in_the_ledger(grammars: GrammarCompiler) -> None:
    before = grammars.bytes
    grammars.start_compilation("wrong", Grammar("regex", "("), [])
    outcomes(grammars, 1)
    assert before < grammars.bytes <= before + 1000


def test_a_trial_that_grows_beyond_its_memory_ends_alone(
    vocabulary: Vocabulary,
) -> None:
    def grow(_: Grammar) -> TrialPassed:
        held = []
        while True:
            held.append(b"x" * (16 << 20))

    server = TrialServer.fork(grow)
    grammars = GrammarCompiler(vocabulary, trials=server)
    grammars.start_compilation("large", Grammar("regex", "a"), [])
    error = outcomes(grammars, 1)["large"]
    assert isinstance(error, GrammarError)
    assert "MiB" in error.why
    grammars.close()


def test_a_small_grammar_of_another_tenant_is_not_behind_thirty_large_ones(
    grammars: GrammarCompiler,
) -> None:
    for number in range(30):
        bomb = Grammar("lark", f"{BOMB.text}\n// {number}", BOMB.field)
        grammars.start_compilation(f"bomb-{number}", bomb, [], "nasty")
    grammars.start_compilation("small", Grammar("regex", "[a-z]+"), [], "other")
    begun = time.monotonic()
    first = outcomes(grammars, 1)
    assert list(first) == ["small"]
    assert time.monotonic() - begun < 2.0
    assert len(grammars) == 30
    for number in range(30):
        assert grammars.cancel(f"bomb-{number}")


def test_an_abort_kills_the_trial(grammars: GrammarCompiler, trials: TrialServer) -> None:
    grammars.start_compilation("bomb", BOMB, [])
    deadline = time.monotonic() + 20
    while not (num_in_progress := children(trials.pid)):
        assert time.monotonic() < deadline
    assert grammars.cancel("bomb")
    while children(trials.pid):
        assert time.monotonic() < deadline, num_in_progress
    assert len(grammars) == 0
    grammars.start_compilation("next", Grammar("regex", "[a-z]+"), [])
    outcome = outcomes(grammars, 1)["next"]
    assert isinstance(outcome, matcher.Matcher)


def test_without_the_server_the_worker_cannot_go_on(
    grammars: GrammarCompiler, trials: TrialServer
) -> None:
    os.kill(trials.pid, signal.SIGKILL)
    os.waitpid(trials.pid, 0)
    grammars.start_compilation("any", Grammar("regex", "a"), [])
    with pytest.raises(GrammarServerLostError):
        outcomes(grammars, 1)


def test_the_ledger_knows_what_a_trial_holds(grammars: GrammarCompiler) -> None:
    before = grammars.bytes
    grammars.start_compilation("bomb", BOMB, [])
    deadline = time.monotonic() + 20
    while grammars.bytes <= before:
        assert time.monotonic() < deadline
        assert not grammars.collect_finished()
    assert grammars.bytes <= grammars.bytes_bound
    grammars.cancel("bomb")


def test_the_cache_is_charged_with_what_a_compiled_grammar_holds(
    vocabulary: Vocabulary, grammars: GrammarCompiler
) -> None:
    """Optional parts one after the other: more than any estimate from the text's length."""
    text = 'start: "0" ' + 'A? "b"? ' * 4_000 + "\nA: /[a-c]/\n"
    before = host_memory.read_malloc_bytes()[0]
    assert before is not None
    alone = vocabulary.compile(Grammar("lark", text))
    held = (host_memory.read_malloc_bytes()[0] or 0) - before
    del alone
    charged = grammars.bytes
    grammars.start_compilation("large", Grammar("lark", text), [])
    assert isinstance(outcomes(grammars, 1)["large"], matcher.Matcher)
    assert held > 4 << 20
    assert grammars.bytes - charged > 0.9 * held


SOME_DATA = bytes(1 << 20)


class SlowMatcher(matcher.Matcher):
    """Uses CPU time for each token without Python's lock, as a real one that is ambiguous does."""

    __slots__ = ()

    def consume_token(self, token_id: int) -> None:
        end = time.thread_time() + 1.5 * matcher.MAX_MASK_CPU_S
        while time.thread_time() < end:
            hashlib.sha256(SOME_DATA)
        super().consume_token(token_id)


def test_a_slow_mask_ends_its_request_and_no_step_waits_for_it(
    make_engine: Any, vocabulary: Vocabulary, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll_engine.core.grammar.grammars.Matcher", SlowMatcher)
    engine: EngineCore = make_engine(num_blocks=128, grammars=GrammarCompiler(vocabulary))
    field = "structured_outputs.regex"
    engine.submit(helpers.submit("slow", [6] * 9, 20, grammar=Grammar("regex", "[a-z]+", field)))
    while not engine.scheduler.running:
        engine.step()
    engine.submit(helpers.submit("good", [5] * 9, 200, ignore_eos=True))
    dropped: list[RequestFailure] = []
    tokens: list[Token] = []
    meanwhile, deadline = 0, time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < deadline
        output = engine.step()
        dropped += output.dropped
        meanwhile += 0 if dropped else len(output.tokens)
        tokens += output.tokens
    assert [(d.request_id, d.reason, d.param) for d in dropped] == [("slow", "invalid", field)]
    assert "allowed next tokens" in dropped[0].message
    assert sum(token.request_id == "good" for token in tokens) == 200
    assert meanwhile > 10, "steps waited for the slow mask"
    assert run_audit(engine, Ledger())[2] == []
    engine.submit(helpers.submit("again", [6] * 9, 20, grammar=Grammar("regex", "[a-z]+", field)))
    again: list[RequestFailure] = []
    while engine.has_work:
        assert time.monotonic() < deadline
        again += engine.step().dropped
    assert [d.reason for d in again] == ["invalid"]


def test_an_ambiguous_grammar_never_holds_a_step(
    make_engine: Any, vocabulary: Vocabulary, trials: TrialServer, helpers: Any
) -> None:
    """The real thing: whatever llguidance does with it, the other request's steps go on."""
    engine: EngineCore = make_engine(
        num_blocks=128, grammars=GrammarCompiler(vocabulary, trials=trials)
    )
    grammar = Grammar("lark", AMBIGUOUS, "structured_outputs.grammar")
    engine.submit(helpers.submit("nasty", [6] * 9, 60, grammar=grammar))
    engine.submit(helpers.submit("good", [5] * 9, 200, ignore_eos=True))
    tokens: list[Token] = []
    longest, deadline = 0.0, time.monotonic() + 60
    while engine.has_work:
        assert time.monotonic() < deadline
        begun = time.thread_time()
        tokens += engine.step().tokens
        longest = max(longest, time.thread_time() - begun)
    assert longest < 0.5  # CPU time, so that a busy machine does not matter
    assert sum(token.request_id == "good" for token in tokens) == 200
    assert run_audit(engine, Ledger())[2] == []


class Pausing:
    """llguidance's matcher on a machine that pauses once, for so many seconds."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def consume_token(self, _token_id: int) -> bool:
        time.sleep(self.pause_s)
        self.pause_s = 0.0
        return True

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        return b"\xff"


def test_a_pause_of_the_machine_makes_no_grammar_slow_for_good() -> None:
    masks = matcher.MaskThreads(1 << 20)
    paused = matcher.Matcher(cast(Any, Pausing(0.2)), "f", 1, "tenant", ("a", "b"))
    masks.advance(paused, 1)
    masks.wait_for_masks(0.01)
    assert (paused.busy, paused.slow) == (True, True)
    while paused.busy:
        masks.wait_for_masks(0.01)
        time.sleep(0.01)
    assert not paused.slow
    masks.advance(paused, 2)
    masks.wait_for_masks(5.0)
    assert not paused.busy, "a step waits for it again"
    masks.close()


def test_a_mask_that_the_machine_is_too_busy_for_says_so_and_is_not_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    monkeypatch.setattr(matcher, "MAX_MASK_WALL_S", 0.05)
    grammars = GrammarCompiler(vocabulary)
    slow = matcher.Matcher(cast(Any, Pausing(0.3)), "f", 1, "tenant", ("a", "b"))
    grammars.masks.advance(slow, 1)
    while not grammars.masks.give_up_if_overdue(slow):
        time.sleep(0.01)
    error = grammars.refuse_overdue(slow)
    assert error.unavailable
    assert "busy" in error.why
    assert grammars.bytes == GrammarCompiler(vocabulary).bytes, "it is not remembered"
    grammars.close()


def test_a_machine_without_threads_makes_grammars_wait_or_asks_to_send_them_again(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(matcher, "MAX_MASK_WALL_S", 0.05)
    grammars = GrammarCompiler(vocabulary)
    waits = matcher.Matcher(cast(Any, Pausing(0.0)), "f", 1, "tenant", ("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        grammars.start_compilation("a", Grammar("regex", "a+"), [])
        grammars.masks.advance(waits, 1)
        grammars.masks.wait_for_masks(0.01)
        assert waits.busy
        assert not grammars.masks.give_up_if_overdue(waits)
        time.sleep(0.06)
        assert grammars.masks.give_up_if_overdue(waits)
        assert grammars.refuse_overdue(waits).unavailable
    error = outcomes(grammars, 1)["a"]
    assert isinstance(error, GrammarError)
    assert error.unavailable
    grammars.start_compilation("b", Grammar("regex", "a+"), [])
    assert isinstance(outcomes(grammars, 1)["b"], matcher.Matcher)
    grammars.close()


def test_a_trial_that_gets_no_time_is_no_fault_of_its_grammar(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary
) -> None:
    def sleep(_: Grammar) -> TrialPassed:
        time.sleep(5.0)
        return TrialPassed(1)

    monkeypatch.setattr(trial, "TRIAL_TIMEOUT_S", 0.2)
    grammars = GrammarCompiler(vocabulary, trials=TrialServer.fork(sleep))
    for name in "ab":
        grammars.start_compilation(name, Grammar("regex", "a"), [])
        error = outcomes(grammars, 1)[name]
        assert isinstance(error, GrammarError)
        assert error.unavailable
        assert "busy" in error.why
    grammars.close()


def _kill(_: Grammar) -> TrialPassed:
    """As the kernel does if the machine lacks memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return TrialPassed(1)


def _kill_server(_: Grammar) -> TrialPassed:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(20)
    return TrialPassed(1)


@pytest.mark.parametrize("end", [_kill, _kill_server])
def test_a_trial_that_is_killed_is_no_fault_of_its_grammar(
    end: Any, vocabulary: Vocabulary
) -> None:
    grammars = GrammarCompiler(vocabulary, trials=TrialServer.fork(end))
    grammars.start_compilation("a", Grammar("regex", "a"), [])
    error = outcomes(grammars, 1)["a"]
    assert isinstance(error, GrammarError)
    assert error.unavailable
    assert "lack of memory" in error.why
    assert grammars.bytes == GrammarCompiler(vocabulary).bytes, "it is not remembered"
    grammars.close()


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV])
def test_a_trial_that_its_limits_end_refuses_its_grammar(
    number: signal.Signals, vocabulary: Vocabulary
) -> None:
    def end(_: Grammar) -> TrialPassed:
        assert resource.getrlimit(resource.RLIMIT_CPU) == (
            trial.MAX_TRIAL_CPU_S + 1,
            trial.MAX_TRIAL_CPU_S + 2,
        )
        os.kill(os.getpid(), number)
        return TrialPassed(1)

    grammars = GrammarCompiler(vocabulary, trials=TrialServer.fork(end))
    grammars.start_compilation("a", Grammar("regex", "a"), [])
    error = outcomes(grammars, 1)["a"]
    assert isinstance(error, GrammarError)
    assert not error.unavailable
    assert "make the grammar smaller" in error.why
    grammars.close()


def test_what_follows_a_complete_text_is_no_mismatch(grammars: GrammarCompiler) -> None:
    """With ``ignore_eos``, ends follow a text; a next worker reads them again."""
    end = 0
    grammars.start_compilation("a", Grammar("regex", ""), [end, end, end])
    found = outcomes(grammars, 1)["a"]
    assert isinstance(found, matcher.Matcher), found
    assert found.complete


def test_a_worker_with_nothing_else_to_do_waits_for_slow_masks() -> None:
    """Otherwise its loop takes the CPU that the mask needs."""
    masks = matcher.MaskThreads(1 << 20)
    paused = matcher.Matcher(cast(Any, Pausing(0.3)), "f", 1, "tenant", ("a", "b"))
    masks.advance(paused, 1)
    masks.wait_for_masks(0.01)
    assert paused.slow
    begun, turns = time.monotonic(), 0
    while paused.busy:
        masks.wait_for_masks(0.05, is_idle=True)
        turns += 1
    assert turns <= (time.monotonic() - begun) / 0.05 + 1
    masks.close()
