"""All features of the engine at once: each request has its own text, and every book adds up.

Images, drafts, host memory, grammars, adapters, priorities and tenants meet aborts, stops, steps
that fail and restarts of the worker that carry keys and values over. The runner here computes no
model. It stores, for each token, a number of all tokens before it, and draws the next token from
that number: wherever keys and values are another request's, old or never written, a text is wrong.

Tests ``core/engine_core.py``, ``core/schedule/scheduler.py``, ``core/schedule/encoder_cache.py``
and ``core/handover/export.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from plimsoll_api.admin import MemoryKind
from plimsoll_engine.core.engine_core import EngineCore, StepOutput
from plimsoll_engine.core.execute.runner import NextToken, StepResult, count_valid_tokens
from plimsoll_engine.core.grammar.grammars import GrammarError
from plimsoll_engine.core.handover import export
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Chunk, Scheduler
from plimsoll_engine.core.speculation.drafting import Speculation
from plimsoll_engine.kvcache import offload as offloads
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory import audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages import handover
from plimsoll_engine.messages.handover import BlockTable, PoolLayout
from plimsoll_engine.messages.worker_ipc import Grammar, Media, Sampling, Submit
from plimsoll_engine.process.owners import Owner
from tests.unit.engine.core.test_offload_machine import SlowCopies

BLOCK, BLOCKS, SLOTS, SEQS, BUDGET, LENGTH, DRAFTS = 2, 12, 6, 3, 6, 20, 3
NUM_IMAGE_TOKENS, ENCODER_TOKENS = 6, 12
POISON = 99
"""A prompt that begins with it fails in each step."""
RULES = (audit.kv_references_match, audit.queues_match_requests, audit.released_requests_die)
OWN_RULES = {
    "kv_blocks_add_up", "prefix_cache_keys_equal", "offload_adds_up", "encoder_outputs_are_known"
}  # fmt: skip


def state(request: Request | Submit, tokens: Sequence[int]) -> int:
    """What the model would know after ``tokens``: it depends on all that a hash chain covers."""
    adapter = getattr(request.adapter, "number", request.adapter) or 0
    keys = [media.key for media in request.media if media.start < len(tokens)]
    return hash((request.cache_salt, adapter, *keys, *tokens)) >> 1


def drawn(known: int) -> int:
    return known % 7


class Outputs:
    """The runner's encoder outputs, by key."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def __len__(self) -> int:
        return len(self.held)

    nbytes = bytes_per_token = 0

    def find_problems(self, known: set[bytes]) -> list[str]:
        return [f"{key!r} is unknown" for key in self.held - known]

    def free(self, keys: Sequence[bytes]) -> None:
        self.held.difference_update(keys)


class Flight:
    """A step whose results only the device has. It holds no request."""

    def __init__(self) -> None:
        self.found: list[tuple[ref[Request], list[int], int]] = []

    def collect_prompt_scores(self) -> list[Any]:
        return []

    def collect_results(self) -> list[StepResult]:
        return [
            StepResult(request, [NextToken(token, None) for token in tokens], drafts)
            for reference, tokens, drafts in self.found
            if (request := reference()) is not None and not request.released
        ]


class Runner:
    """Computes at once; the engine sees a step's tokens when it lands."""

    device = torch.device("cpu")

    def __init__(self, kv: torch.Tensor) -> None:
        self.kv = kv
        self.outputs = Outputs()
        self.adapters = SimpleNamespace(
            get=Adapter, bytes=0, bytes_bound=0, find_problems=lambda used: []
        )
        self.fails = False
        self.wrong: list[str] = []
        """What no step may find. Raised, it would be one more step that fails."""
        self.newest: dict[int, int] = {}
        """The token of each request that is sampled and not known to the engine, by its id()."""

    def launch(self, chunks: Sequence[Chunk]) -> Flight:
        self._check(sum(chunk.rows for chunk in chunks) <= BUDGET, "rows")
        self._check(len({id(chunk.request) for chunk in chunks}) == len(chunks), "twice")
        self.outputs.held.update(media.key for chunk in chunks for media in chunk.encode)
        fails, self.fails = self.fails, False
        if fails or any(chunk.request.token_ids[0] == POISON for chunk in chunks):
            raise RuntimeError("this step fails")
        flight = Flight()
        for chunk in chunks:
            request, computed = chunk.request, chunk.request.computed
            tokens = list(request.token_ids)
            tokens += [self.newest[id(request)]] if request.in_flight.tokens else []
            for place in range(computed):
                known = state(request, tokens[: place + 1])
                self._check(self._at(request, place) == known, f"other KV at {place}")
            for media in request.media:
                if media.start < computed + chunk.count and computed < media.start + media.length:
                    self._check(media.key in self.outputs.held, "no encoder output")
            rows = [*tokens[: computed + chunk.count], *chunk.drafts]
            self._check(not chunk.drafts or chunk.has_newest_token, "drafts within a prompt")
            self._check(len(rows) <= len(request.block_ids) * BLOCK, "blocks are missing")
            for place in range(computed, len(rows)):
                self._put(request, place, state(request, rows[: place + 1]))
            if chunk.has_newest_token:
                ends = range(len(rows) - len(chunk.drafts), len(rows) + 1)
                found = [drawn(state(request, rows[:end])) for end in ends]
                own = found[: count_valid_tokens(chunk.drafts, found)]
                self.newest[id(request)] = own[0]
                flight.found.append((ref(request), own, len(chunk.drafts)))
        return flight

    def list_owners(self) -> list[Owner]:
        return [Owner(name="kv_pool", kind=MemoryKind.HOST, nbytes=lambda: 0)]

    def compute_block_sums(self, blocks: Sequence[int]) -> list[int]:
        return [0 for _ in blocks]

    def _check(self, right: bool, what: str) -> None:
        if not right:
            self.wrong.append(what)

    def _slot(self, request: Request, place: int) -> int:
        return request.block_ids[place // BLOCK] * BLOCK + place % BLOCK

    def _at(self, request: Request, place: int) -> int:
        return int(self.kv[0, 0, self._slot(request, place), 0, 0])

    def _put(self, request: Request, place: int, known: int) -> None:
        self.kv[:, :, self._slot(request, place)] = known

    def close(self) -> None:
        pass


class Adapter:
    """A loaded adapter of that number."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.digest = number, "adapter", b""


class Matcher:
    """A grammar that allows every token, and takes them in when the machine says so."""

    def __init__(self) -> None:
        self.busy, self.complete, self.late = False, False, False
        self.error: str | None = None
        self.field, self.mask, self.bytes = "f", b"", 0


class SlowGrammars:
    """Grammars, and the threads that take tokens in, as slow as the machine likes."""

    def __init__(self) -> None:
        self.masks = self
        self.compiling: dict[str, Matcher | GrammarError | None] = {}
        self.busy: list[Matcher] = []
        self.bytes = self.bytes_bound = 0

    def flush(self) -> None:
        pass

    def __len__(self) -> int:
        return len(self.compiling)

    def __iter__(self) -> Iterator[str]:
        return iter(self.compiling)

    def start_compilation(self, request_id: str, *_: Any) -> None:
        self.compiling[request_id] = None

    def cancel(self, request_id: str) -> bool:
        return self.compiling.pop(request_id, self) is not self

    def collect_finished(self, _wait_s: float = 0.0) -> list[tuple[str, Matcher | GrammarError]]:
        found = [(name, one) for name, one in self.compiling.items() if one is not None]
        for name, _ in found:
            del self.compiling[name]
        return found

    def advance(self, matcher: Matcher, _token: int) -> None:
        matcher.busy = True
        self.busy.append(matcher)

    def wait_for_masks(self, _timeout_s: float, _idle: bool = False) -> None:
        pass

    def give_up_if_overdue(self, matcher: Matcher) -> bool:
        return matcher.late

    def refuse_overdue(self, matcher: Matcher) -> GrammarError:
        return GrammarError(matcher.field, "it takes too long over a token")

    def close(self) -> None:
        self.compiling.clear()


class Guesses:
    """Drafts that are right for a while."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        found = []
        for request, most in wanted:
            tokens, right = list(request.token_ids), len(request.token_ids) % (DRAFTS + 1)
            for number in range(most):
                token = drawn(state(request, tokens))
                tokens.append(token if number < right else (token + 1) % 7)
            found.append(tokens[len(request.token_ids) :])
        return found


ASKED: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "length": st.integers(1, 12),
        "max_tokens": st.integers(1, 8),
        "priority": st.integers(-1, 1),
        "tenant": st.sampled_from("ab"),
        "salt": st.sampled_from(["", "", "s"]),
        "adapter": st.sampled_from([0, 0, 1, 2]),
        "grammar": st.sampled_from([False, False, True]),
        "image": st.sampled_from([None, None, b"x", b"y"]),
        "poison": st.integers(0, 9),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """The real engine but for the model, llguidance's threads and the times of copies."""

    encoder_type: Callable[[int], EncoderCache] = EncoderCache

    @initialize(drafts=st.booleans(), offload=st.booleans())
    def begin(self, drafts: bool, offload: bool) -> None:
        self.kv = torch.zeros(2, 1, BLOCKS * BLOCK, 1, 1, dtype=torch.int64)
        self.drafts, self.offload = drafts, offload
        self.asked: dict[str, Submit] = {}
        self.texts: dict[str, list[int]] = {}
        self.dropped: set[str] = set()
        self.number = 0
        self._make([])

    def _make(self, tables: list[BlockTable]) -> None:
        """Begin a worker over the same memory, with what its predecessor left."""
        pool = BlockPool(BLOCKS, BLOCK, [table.blocks for table in tables])
        self.copies = SlowCopies(self.kv, BLOCK, SLOTS)
        self.runner, self.grammars = Runner(self.kv), SlowGrammars()
        scheduler = Scheduler(
            pool, SEQS, BUDGET, LENGTH, self.encoder_type(ENCODER_TOKENS),
            Offload(pool, self.copies, SLOTS) if self.offload else None,
        )  # fmt: skip
        speculation = Speculation(Guesses(), DRAFTS, BUDGET) if self.drafts else None
        runner, grammars = self.runner, self.grammars
        self.engine = EngineCore(runner, scheduler, grammars, 1 << 20, speculation)  # type: ignore[arg-type]
        if tables:
            self.engine.inheritance = Inheritance(tables, pool)

    @rule(data=st.data(), count=st.integers(1, 4))
    def several(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self._submit(**data.draw(ASKED))

    def _submit(
        self, family: int, length: int, max_tokens: int, priority: int, tenant: str, salt: str,
        adapter: int, grammar: bool, image: bytes | None, poison: int,
    ) -> None:  # fmt: skip
        prompt = [family + place for place in range(length)]
        media = []
        if image is not None:
            prompt = prompt[:2] + [8] * NUM_IMAGE_TOKENS + prompt[2:]
            start = min(2, length)
            media = [
                Media("image", image, start, NUM_IMAGE_TOKENS, NUM_IMAGE_TOKENS, [1], data=b"")
            ]
        if poison == 9:
            prompt[0] = POISON
        sampling = Sampling(
            max_tokens, ignore_eos=True, grammar=Grammar("regex", ".*") if grammar else None
        )
        self._ask(
            Submit(
                "", prompt, sampling, priority=priority, tenant=tenant, cache_salt=salt,
                media=media, adapter=adapter,
            )
        )  # fmt: skip

    def _ask(self, like: Submit, **changes: Any) -> None:
        self.number += 1
        one = msgspec.structs.replace(like, request_id=str(self.number), **changes)
        self.asked[one.request_id] = one
        if self.engine.submit(one) is not None:
            self.dropped.add(one.request_id)

    def _half_seen(self) -> list[str]:
        """The running requests that have computed a part of their image."""
        return [
            request.request_id
            for request in self.engine.scheduler.running
            for media in request.media
            if media.start < request.computed < media.start + media.length
        ]

    @precondition(lambda self: self._half_seen())
    @rule(data=st.data())
    def more_urgent_ones_with_an_image_that_is_half_seen(self, data: st.DataObject) -> None:
        """They stop it, or another one of its tenant, and want the output that it gives back.

        They share no block with it, so they need all of the image.
        """
        seen = self.asked[data.draw(st.sampled_from(self._half_seen()))]
        for number in range(SEQS):
            self._ask(seen, priority=seen.priority - 1, cache_salt=f"twin {number}")
        self.steps(3)

    @precondition(lambda self: self.offload and any(self.texts.values()))
    @rule(data=st.data(), before=st.integers(0, 3), after=st.integers(0, 4), fails=st.booleans())
    def a_conversation_goes_on(
        self, data: st.DataObject, before: int, after: int, fails: bool
    ) -> None:
        """One client asks again, and another one asks on from the answer.

        What the second one fetches from the host the first one may compute meanwhile.
        """
        name = data.draw(st.sampled_from(sorted(name for name, text in self.texts.items() if text)))
        one = self.asked[name]
        self._ask(one)
        self.steps(before)
        self._ask(one, prompt_ids=[*one.prompt_ids, *self.texts[name]])
        self.steps(after)
        if fails and self.engine.has_work:
            self.runner.fails = True
            self.steps(1)
            self.runner.fails = False
            self.steps(2)

    def _restart(self, here: list[str]) -> None:
        """Let another worker go on, for the clients that are still ``here``."""
        self._take(self.engine.quiesce())
        for copy in self.copies.held:
            copy.end()
        layout = PoolLayout(b"", b"", "int64", (1, 1, 1), BLOCK, BLOCKS, 1)
        left = handover.decode_handover(export.export_tables(self.engine, layout)).tables
        self.dropped.update(set(self.engine.requests).difference(here))
        here = [name for name in here if name in self.engine.requests]
        self.engine.close()
        self._make(left)
        for name in here:
            one = msgspec.structs.replace(self.asked[name], output_ids=self.texts.get(name, []))
            if self.engine.submit(one) is not None:
                self.dropped.add(name)

    @precondition(lambda self: self.engine.inheritance)
    @rule()
    def nobody_else_comes(self) -> None:
        self.engine.release_unclaimed_tables()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        assert self.engine.abort(name)
        self.dropped.add(name)

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count if self.engine.has_work else 0):
            self._take(self.engine.step())

    @precondition(lambda self: self.engine.has_work)
    @rule(
        data=st.data(),
        what=st.sampled_from(["a step fails", "rest", "poll", "reset the prefix cache", "restart"]),
        steps=st.integers(0, 2),
    )
    def seldom(self, data: st.DataObject, what: str, steps: int) -> None:
        match what:
            case "a step fails":
                self.runner.fails = True
                self._take(self.engine.step())
                self.runner.fails = False
            case "rest":
                self._take(self.engine.quiesce())
            case "poll":
                self.engine.poll(is_idle=True)
            case "restart":
                names = st.sampled_from(list(self.engine.requests))
                self._restart(data.draw(st.lists(names, unique=True)))
            case _:
                self.engine.reset_prefix_cache()
        for _ in range(steps):
            if self.engine.has_work:
                self._take(self.engine.step())

    @precondition(lambda self: self.grammars.compiling)
    @rule(data=st.data(), right=st.integers(0, 4))
    def compile(self, data: st.DataObject, right: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.grammars.compiling)))
        self.grammars.compiling[name] = Matcher() if right else GrammarError("f", "wrong")

    @precondition(lambda self: self.grammars.busy)
    @rule(data=st.data(), ends=st.sampled_from(["well", "well", "well", "error", "late"]))
    def end_a_mask(self, data: st.DataObject, ends: str) -> None:
        number = data.draw(st.integers(0, len(self.grammars.busy) - 1))
        matcher = self.grammars.busy.pop(number)
        matcher.late, matcher.busy = ends == "late", ends == "late"
        matcher.error = "it grew too complex" if ends == "error" else None

    @precondition(lambda self: self.copies.held)
    @rule(data=st.data(), at_once=st.booleans())
    def end_a_copy(self, data: st.DataObject, at_once: bool) -> None:
        data.draw(st.sampled_from(self.copies.held)).end()
        self.copies.at_once = at_once

    def _take(self, output: StepOutput) -> None:
        for token in output.tokens:
            assert token.request_id not in self.dropped
            self.texts.setdefault(token.request_id, []).append(token.token_id)
        self.dropped.update(one.request_id for one in output.dropped)

    @invariant()
    def everything_adds_up(self) -> None:
        assert self.runner.wrong == []
        for one in RULES:
            assert one(self.engine, Ledger()) == [], one.__name__
        checks = {k: v for one in self.engine.list_owners() for k, v in one.checks.items()}
        for name in OWN_RULES & checks.keys():
            assert checks[name]() == [], name
        assert len(self.engine.scheduler.running) <= SEQS
        if not self.engine.has_work and self.engine.inheritance is None:
            assert audit.idle_holds_no_block(self.engine, Ledger()) == []

    @invariant()
    def texts_are_their_own(self) -> None:
        for name, text in self.texts.items():
            one = self.asked[name]
            tokens = list(one.prompt_ids)
            for token in text:
                assert token == drawn(state(one, tokens)), (name, text)
                tokens.append(token)
            assert len(text) <= one.sampling.max_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.release_unclaimed_tables()
        for _ in range(2_000):
            if not self.engine.has_work:
                break
            for name in self.grammars.compiling:
                self.grammars.compiling[name] = Matcher()
            for matcher in self.grammars.busy:
                matcher.busy = False
            self.grammars.busy.clear()
            for copy in self.copies.held:
                copy.end()
            self._take(self.engine.step())
        assert not self.engine.has_work, "requests starve"
        for name, one in self.asked.items():
            made = len(self.texts.get(name, []))
            whole = min(one.sampling.max_tokens, LENGTH - len(one.prompt_ids))
            assert made == whole or name in self.dropped, name
        self._take(self.engine.quiesce())
        self.everything_adds_up()
        assert audit.idle_holds_no_encoder_output(self.engine, Ledger()) == []


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ends when the machine says so: waiting for one is in vain."""
    monkeypatch.setattr(offloads, "RECLAIM_TIMEOUT_S", 0.0)
    monkeypatch.setattr("plimsoll_engine.core.engine_core.RESET_TRANSFER_TIMEOUT_S", 0.0)


def test_features_together() -> None:
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )
