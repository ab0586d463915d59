"""A worker's keys and values over a planned restart, in one process: two engines over one memory.

Tests ``core/handover/export.py``, ``core/handover/inheritance.py``, ``messages/handover.py``,
``core/handover/audit.py`` and ``kvcache/block_sums.py``.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll_engine.core.engine_core import EngineCore, StepOutput
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, Vocabulary
from plimsoll_engine.core.handover import audit, export, inheritance
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.block_sums import combine_block_sums, compute_block_sums
from plimsoll_engine.memory.audit import run_audit as engine_audit
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.memory.lost import count_lost_blocks
from plimsoll_engine.messages import handover as messages
from plimsoll_engine.messages.handover import (
    BlockTable,
    Handover,
    HandoverOutcome,
    HandoverRefusedError,
    PoolLayout,
)
from plimsoll_engine.messages.worker_ipc import Grammar, Sampling, Submit

BLOCKS, BLOCK, SEQS, BUDGET, LENGTH = 64, 4, 8, 16, 256
PROMPT = [5, 9, 2, 7, 7, 3, 1, 8, 4, 6, 2]
SAMPLINGS = {
    "greedy": Sampling(max_tokens=12, ignore_eos=True),
    "seeded": Sampling(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True),
    "filtered": Sampling(max_tokens=12, temperature=1.0, top_k=9, top_p=0.8, seed=4),
    "penalties": Sampling(
        max_tokens=12, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3
    ),
    "logprobs": Sampling(max_tokens=12, logprobs=2, min_tokens=12),
    "long": Sampling(max_tokens=3, ignore_eos=True),
}


@dataclasses.dataclass
class Worker:
    """An engine over ``memory``, and what it said."""

    engine: EngineCore
    layout: PoolLayout
    said: dict[str, list[tuple[int, Any]]] = dataclasses.field(default_factory=dict)
    computed: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tokens that it computed, by request."""

    def take(self, output: StepOutput) -> None:
        assert not output.dropped, output.dropped
        for token in output.tokens:
            self.said.setdefault(token.request_id, []).append((token.token_id, token.logprobs))

    def step(self) -> None:
        self.take(self.engine.step())
        assert findings(self.engine) == []

    def finish(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still at work")


def findings(engine: EngineCore) -> list[Any]:
    return [
        f for f in engine_audit(engine, Ledger())[2] if f.rule != "kv_pool_has_its_owners_alone"
    ]


def submits() -> list[Submit]:
    """Two have the same prompt, and one a prompt of several steps."""
    found = [
        Submit(name, PROMPT + ([] if name == "seeded" else [number]), sampling, cache_salt="s")
        for number, (name, sampling) in enumerate(SAMPLINGS.items())
        if name != "long"
    ]
    found.append(Submit("twin", list(PROMPT), SAMPLINGS["seeded"], cache_salt="s"))
    found.append(Submit("long", [k % 40 for k in range(60)], SAMPLINGS["long"]))
    return found


Make = Callable[..., Worker]


@pytest.fixture
def make(tiny_model: Any) -> Iterator[Make]:
    """Workers of one memory, or of their own where it is None."""
    made: list[Worker] = []

    def worker(
        memory: torch.Tensor | None = None,
        data: bytes | None = None,
        changes: dict[str, Any] | None = None,
    ) -> Worker:
        runner = Runner(tiny_model, BLOCKS, BLOCK, memory)
        kv = tiny_model.kv
        layout = PoolLayout(
            b"weights", b"memory", "torch.float32", (kv.layers, kv.heads, kv.dim), BLOCK, BLOCKS, 1
        )
        layout = msgspec.structs.replace(layout, **(changes or {}))
        tables = []
        if data is not None:
            tables = inheritance.validate_tables(data, layout, runner, SEQS)
        pool = BlockPool(BLOCKS, BLOCK, [table.blocks for table in tables])
        engine = EngineCore(runner, Scheduler(pool, SEQS, BUDGET, LENGTH))
        if data is not None:
            engine.inheritance = Inheritance(tables, pool)
        found = Worker(engine, layout)
        launch = runner.launch

        def counted(chunks: Any) -> Any:
            for chunk in chunks:
                found.computed[chunk.request.request_id] += chunk.count
            return launch(chunks)

        runner.launch = counted  # type: ignore[method-assign]
        made.append(found)
        return found

    yield worker
    for one in made:
        one.engine.close()


def memory_of(model: Any) -> torch.Tensor:
    nbytes = BLOCKS * BLOCK * model.kv.compute_bytes_per_token(torch.float32)
    return torch.zeros(nbytes, dtype=torch.uint8)


def stopped(make: Make, memory: torch.Tensor, steps: int) -> tuple[Worker, bytes]:
    """A worker that was stopped after ``steps``, and what it hands over."""
    old = make(memory)
    for submit in submits():
        assert old.engine.submit(submit) is None
    for _ in range(steps):
        old.step()
    old.take(old.engine.quiesce())
    return old, export.export_tables(old.engine, old.layout)


def resubmit(new: Worker, old: Worker) -> None:
    for submit in submits():
        output = [token for token, _ in old.said.get(submit.request_id, [])]
        if submit.request_id in old.engine.requests:
            submit.output_ids = output
            assert new.engine.submit(submit) is None
            assert findings(new.engine) == []
            assert count_lost_blocks(new.engine) == 0


@pytest.fixture(scope="module")
def whole(tiny_model: Any) -> dict[str, list[tuple[int, Any]]]:
    """What an uninterrupted worker says."""
    runner = Runner(tiny_model, BLOCKS, BLOCK)
    pool = BlockPool(BLOCKS, BLOCK)
    engine = EngineCore(runner, Scheduler(pool, SEQS, BUDGET, LENGTH))
    worker = Worker(engine, PoolLayout(b"", b"", "", (0, 0, 0), BLOCK, BLOCKS, 1))
    for submit in submits():
        assert engine.submit(submit) is None
    while engine.has_work:
        worker.take(engine.step())
    engine.close()
    return worker.said


@pytest.mark.parametrize("steps", [1, 2, 4, 7, 9, 11])
def test_the_successor_goes_on_without_prefill(
    make: Make, tiny_model: Any, whole: Any, steps: int
) -> None:
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, steps)
    lost = old.engine.pool.allocate(7)  # a leak: blocks that no request has
    assert lost is not None
    data = export.export_tables(old.engine, old.layout)
    ran = {r.request_id: (r.computed, len(r.token_ids)) for r in old.engine.scheduler.running}
    assert ran

    new = make(memory, data)
    resubmit(new, old)
    settled = new.engine.release_unclaimed_tables()
    assert settled is not None
    assert sorted(settled.adopted) == sorted(ran)
    assert settled.refused == {}
    held = {block for r in new.engine.requests.values() for block in r.block_ids}
    assert new.engine.pool.num_used == len(held), "what was lost is free again"
    assert findings(new.engine) == []
    new.finish()
    for name, tokens in whole.items():
        assert old.said.get(name, []) + new.said.get(name, []) == tokens, name
    for name, (computed, length) in ran.items():
        # What the old one had computed is not computed again: only what was still to do.
        left = len(whole[name]) - len(old.said.get(name, [])) - 1
        assert new.computed[name] == length - computed + left, name
    assert new.engine.pool.num_used == 0


def test_a_prompt_whose_log_probabilities_are_not_told_is_computed_again(
    make: Make, tiny_model: Any
) -> None:
    """Its rows are what they are made of. A prompt that was told is not asked about again."""
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 2)
    new = make(memory, data)
    for submit in submits():
        submit.output_ids = [token for token, _ in old.said.get(submit.request_id, [])]
        wants = submit.request_id in ("long", "greedy")
        if wants:
            submit.sampling = msgspec.structs.replace(submit.sampling, prompt_logprobs=2)
        assert new.engine.submit(submit) is None
    settled = new.engine.release_unclaimed_tables()
    assert settled is not None
    assert settled.refused.keys() <= {"long", "greedy"}
    assert "greedy" in settled.refused
    assert settled.adopted
    new.finish()
    assert new.computed["greedy"] >= len(PROMPT) + 1


def test_shared_blocks_stay_shared_and_prefixes_stay_known(make: Make, tiny_model: Any) -> None:
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 5)
    requests = old.engine.requests
    assert requests["twin"].block_ids[0] == requests["seeded"].block_ids[0]
    new = make(memory, data)
    resubmit(new, old)
    assert new.engine.pool.count_references()[requests["twin"].block_ids[0]] >= 2
    new.engine.release_unclaimed_tables()
    assert new.engine.submit(Submit("late", PROMPT, Sampling(max_tokens=1), cache_salt="s")) is None
    while "late" in new.engine.requests:
        new.step()
    assert new.computed["late"] == len(PROMPT) - len(PROMPT) // BLOCK * BLOCK


def test_tables_without_their_request_are_freed(make: Make, tiny_model: Any) -> None:
    memory = memory_of(tiny_model)
    _, data = stopped(make, memory, 5)
    new = make(memory, data)
    assert new.engine.pool.num_used
    assert count_lost_blocks(new.engine) == 0
    new.engine.release_unclaimed_tables()
    assert new.engine.pool.num_used == 0
    assert new.engine.pool.num_free == BLOCKS


def test_tables_wait_from_the_moment_at_which_the_worker_listens(
    make: Make, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine short of CPU time minutes may pass before, and between two messages."""
    now = 100.0
    monkeypatch.setattr("plimsoll_engine.core.handover.inheritance.time.monotonic", lambda: now)
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 5)
    new = make(memory, data)
    now += inheritance.CLAIM_TIMEOUT_S + 1
    new.engine.poll(is_idle=True)
    now += inheritance.CLAIM_TIMEOUT_S - 1
    new.engine.poll(is_idle=True)
    come, *late = [one for one in submits() if one.request_id in old.said]
    come.output_ids = [token for token, _ in old.said[come.request_id]]
    assert new.engine.submit(come) is None
    now += 2
    new.engine.poll(is_idle=True)
    assert new.engine.pool.num_used == len(new.engine.requests[come.request_id].block_ids)
    told = new.engine.release_unclaimed_tables()
    assert told is not None
    assert told.adopted == [come.request_id]
    assert {one.request_id for one in late} <= set(told.refused)
    assert new.engine.release_unclaimed_tables() is None


def test_a_request_with_other_tokens_is_computed_again(
    make: Make, tiny_model: Any, whole: Any
) -> None:
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 6)
    new = make(memory, data)
    assert new.engine.submit(Submit("greedy", [1] * 30, SAMPLINGS["greedy"])) is None
    assert new.engine.submit(Submit("seeded", PROMPT[:3], SAMPLINGS["seeded"])) is None
    # The same tokens under another salt may not have them either.
    wrong = msgspec.structs.replace(submits()[2], cache_salt="other")
    wrong.output_ids = [token for token, _ in old.said[wrong.request_id]]
    assert new.engine.submit(wrong) is None
    settled = new.engine.release_unclaimed_tables()
    assert settled is not None
    assert settled.adopted == []
    assert len(settled.refused) == 3
    assert new.engine.pool.num_used == 0
    new.finish()
    assert len(new.said["greedy"]) == 12
    assert old.said["filtered"] + new.said["filtered"] == whole["filtered"]


def test_a_written_block_is_noticed(make: Make, tiny_model: Any) -> None:
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 6)
    used = sorted(old.engine.pool.count_references())
    kv = old.engine.runner.kv
    assert kv is not None
    kv[1, -1, used[-1] * BLOCK + BLOCK - 1, -1, -1] += 1.0
    with pytest.raises(
        HandoverRefusedError, match=rf"1 of \d+ KV blocks .* block {used[-1]}$"
    ) as refused:
        make(memory, data)
    assert refused.value.outcome is HandoverOutcome.BAD_CONTENTS


def test_a_block_that_is_not_handed_over_may_change(make: Make, tiny_model: Any) -> None:
    memory = memory_of(tiny_model)
    old, data = stopped(make, memory, 6)
    free = next(b for b in range(BLOCKS) if b not in old.engine.pool.count_references())
    assert old.engine.runner.kv is not None
    old.engine.runner.kv[:, :, free * BLOCK : (free + 1) * BLOCK] = 3.0
    make(memory, data)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"weights": b"others"}, HandoverOutcome.OTHER_MODEL),
        ({"dtype": "torch.bfloat16"}, HandoverOutcome.OTHER_MODEL),
        ({"shape": (1, 2, 3)}, HandoverOutcome.OTHER_MODEL),
        ({"memory": b"another"}, HandoverOutcome.OTHER_POOL),
        ({"num_blocks": BLOCKS + 1}, HandoverOutcome.OTHER_POOL),
        ({"block_size": 2 * BLOCK}, HandoverOutcome.OTHER_POOL),
        ({"ranks": 2}, HandoverOutcome.OTHER_POOL),
    ],
)
def test_another_model_or_pool_is_refused(
    make: Make, tiny_model: Any, changes: dict[str, Any], outcome: HandoverOutcome
) -> None:
    memory = memory_of(tiny_model)
    _, data = stopped(make, memory, 3)
    with pytest.raises(HandoverRefusedError, match=next(iter(changes))) as refused:
        make(memory, data, changes)
    assert refused.value.outcome is outcome


def with_grammar(worker: Worker, vocabulary: Vocabulary) -> Worker:
    worker.engine.grammars = GrammarCompiler(vocabulary)
    return worker


def digits(output_ids: list[int]) -> Submit:
    grammar = Grammar("regex", "[0-9]{40}")
    sampling = Sampling(max_tokens=24, temperature=1.0, seed=5, grammar=grammar, ignore_eos=True)
    return Submit("digits", PROMPT, sampling, output_ids)


def test_a_grammar_goes_on_where_it_was(make: Make, tiny_model: Any, tiny_checkpoint: Path) -> None:
    """While its grammar is compiled again, the request keeps its blocks; where they are short, it
    loses them and is computed again."""
    vocabulary = Vocabulary.load(tiny_checkpoint)
    assert vocabulary is not None
    alone = with_grammar(make(), vocabulary)
    assert alone.engine.submit(digits([])) is None
    alone.finish()
    whole = alone.said["digits"]

    memory = memory_of(tiny_model)
    old = with_grammar(make(memory), vocabulary)
    assert old.engine.submit(digits([])) is None
    while len(old.said.get("digits", [])) < 8:
        assert old.engine.has_work
        old.step()
    old.take(old.engine.quiesce())
    data = export.export_tables(old.engine, old.layout)
    made = [token for token, _ in old.said["digits"]]
    for short in (False, True):
        new = with_grammar(make(memory.clone(), data), vocabulary)
        pool = new.engine.pool
        assert new.engine.submit(digits(list(made))) is None
        assert new.engine.release_unclaimed_tables() is not None
        assert pool.num_used == pool.count_blocks(len(PROMPT) + len(made) - 1)
        assert findings(new.engine) == []
        assert count_lost_blocks(new.engine) == 0
        if short:
            taken = pool.allocate(pool.num_available)
            assert taken is not None
            assert new.engine.submit(Submit("other", [1, 2, 3], Sampling(max_tokens=1))) is None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(new.engine.grammars, "collect_finished", lambda _wait_s=0.0: [])
                new.take(new.engine.step())
            assert new.engine.requests["digits"].block_ids == []
            pool.release(taken)
        new.finish()
        assert old.said["digits"] + new.said["digits"] == whole
        left = len(whole) - len(made)
        assert new.computed["digits"] > left if short else new.computed["digits"] == left
        assert pool.num_used == 0


def sealed(tables: list[BlockTable], layout: PoolLayout) -> Handover:
    held = sum(len(table.blocks) for table in tables)
    used = len({block for table in tables for block in table.blocks})
    return Handover(layout, tables, used, held)


LAYOUT = PoolLayout(b"w", b"m", "torch.float32", (2, 2, 8), BLOCK, BLOCKS, 1)


@st.composite
def handovers(draw: st.DrawFn) -> Handover:
    """Tables of requests that begin alike in pairs, as a sound worker writes them."""
    free = draw(st.permutations(range(BLOCKS)))
    sums = st.integers(-(1 << 63), (1 << 63) - 1)
    tables: list[BlockTable] = []
    for number in range(draw(st.integers(0, 4))):
        computed = draw(st.integers(1, 6 * BLOCK))
        full = computed // BLOCK
        keys = [bytes([number, place] * 8) for place in range(full)]
        blocks = [free.pop() for _ in range(-(-computed // BLOCK))]
        totals = [draw(sums) for _ in blocks]
        alike = draw(st.booleans())
        if alike and tables:
            other = tables[-1]
            common = draw(st.integers(0, min(full, len(other.hashes))))
            keys[:common] = other.hashes[:common]
            blocks[:common] = other.blocks[:common]
            totals[:common] = other.sums[:common]
        tail = bytes(16) if computed % BLOCK else b""
        tables.append(BlockTable(f"r{number}", computed, blocks, keys, tail, totals, 1.5, 3))
    return sealed(tables, LAYOUT)


@given(handovers())
def test_a_sound_handover_arrives_and_passes(handover: Handover) -> None:
    found = messages.decode_handover(messages.encode_handover(handover))
    assert found == handover
    audit.check_handover(found, LAYOUT, SEQS)


@given(handovers(), st.data())
def test_a_pool_is_rebuilt_from_the_tables_alone(handover: Handover, data: st.DataObject) -> None:
    tables = [table.blocks for table in handover.tables]
    pool = BlockPool(BLOCKS, BLOCK, tables)
    named = Counter(block for table in tables for block in table)
    assert pool.count_references() == named
    assert (pool.num_used, pool.num_references) == (len(named), named.total())
    assert pool.find_problems() == []
    assert pool.num_free == BLOCKS - len(named)
    rest = pool.allocate(pool.num_free)
    assert rest is not None
    assert named.keys().isdisjoint(rest)
    pool.release(rest)
    for table in data.draw(st.permutations(tables)):
        pool.release(table)
        assert pool.find_problems() == []
    assert (pool.num_used, pool.num_references, pool.num_free) == (0, 0, BLOCKS)


@given(handovers(), st.data())
def test_no_changed_byte_is_accepted(handover: Handover, data: st.DataObject) -> None:
    message = bytearray(messages.encode_handover(handover))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(HandoverRefusedError) as refused:
        messages.decode_handover(bytes(message))
    assert refused.value.outcome is HandoverOutcome.DAMAGED


@given(handovers(), st.data())
def test_no_cut_or_longer_message_is_accepted(handover: Handover, data: st.DataObject) -> None:
    message = messages.encode_handover(handover)
    cut = data.draw(st.integers(0, len(message) - 1))
    for wrong in (message[:cut], message + b"\x00", b""):
        with pytest.raises(HandoverRefusedError) as refused:
            messages.decode_handover(wrong)
        assert refused.value.outcome is HandoverOutcome.DAMAGED


@given(st.binary(max_size=200))
def test_no_other_bytes_are_accepted(data: bytes) -> None:
    for wrong in (data, messages.HANDOVER_MAGIC + data):
        with pytest.raises(HandoverRefusedError):
            messages.decode_handover(wrong)


def test_another_version_and_a_body_that_is_none_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handover = sealed([], LAYOUT)
    with monkeypatch.context() as patch:
        patch.setattr(messages, "HANDOVER_VERSION", 2)
        newer = messages.encode_handover(handover)
    with pytest.raises(
        HandoverRefusedError, match="has version 2, but only version 1 is supported"
    ) as refused:
        messages.decode_handover(newer)
    assert refused.value.outcome is HandoverOutcome.OTHER_VERSION
    body = b"\x93\x01\x02\x03"
    head = messages._HEADER.pack(messages.HANDOVER_MAGIC, 1, messages._compute_digest(1, body))
    with pytest.raises(HandoverRefusedError) as refused:
        messages.decode_handover(head + body)
    assert refused.value.outcome is HandoverOutcome.DAMAGED


def test_a_message_that_is_too_large_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_HANDOVER_BYTES", 100)
    with pytest.raises(HandoverRefusedError, match="but the maximum is 100") as refused:
        messages.encode_handover(sealed([], msgspec.structs.replace(LAYOUT, weights=bytes(200))))
    assert refused.value.outcome is HandoverOutcome.TOO_LARGE


def changed(handover: Handover, data: st.DataObject) -> Handover:
    """One field of one table is another, and the counts are those of the new tables."""
    tables = list(handover.tables)
    at = data.draw(st.integers(0, len(tables) - 1))
    table = tables[at]
    place = data.draw(st.integers(0, len(table.blocks) - 1))
    other_block = data.draw(st.integers(0, BLOCKS + 2).filter(lambda b: b != table.blocks[place]))
    kind = data.draw(
        st.sampled_from(
            ["block", "computed", "hashes", "tail", "sums", "short", "id", "again", "shared"]
        )
    )
    replace = msgspec.structs.replace
    match kind:
        case "block":
            blocks = [*table.blocks]
            blocks[place] = other_block
            tables[at] = replace(table, blocks=blocks)
        case "computed":
            step = data.draw(st.sampled_from([-BLOCK, -1, 1, BLOCK, 1 << 40]))
            tables[at] = replace(table, computed=max(0, table.computed + step))
        case "hashes":
            tables[at] = replace(table, hashes=[*table.hashes, b"x"])
        case "tail":
            tables[at] = replace(table, tail=table.tail[:-1] if table.tail else b"x")
        case "sums":
            tables[at] = replace(table, sums=table.sums[:-1])
        case "short":
            tables[at] = replace(table, blocks=table.blocks[:-1], sums=table.sums[:-1])
        case "id":
            tables.append(table)
        case "again":
            tables[at] = replace(table, blocks=[table.blocks[place]] * len(table.blocks))
        case "shared":
            # A block that is not full in the table of another request as well.
            tables.append(replace(table, request_id="new", computed=1, blocks=[table.blocks[-1]],
                                  hashes=[], tail=bytes(16), sums=[table.sums[-1]]))  # fmt: skip
    return sealed(tables, LAYOUT)


@settings(max_examples=300)
@given(handovers().filter(lambda h: h.tables), st.data())
def test_changed_tables_are_refused_or_name_other_contents(
    handover: Handover, data: st.DataObject
) -> None:
    """A change that could be true in another pool is found by the contents and by the tokens."""
    other = changed(handover, data)
    if other.tables == handover.tables:
        return
    found = messages.decode_handover(messages.encode_handover(other))
    if any(True for _ in audit.find_problems(found, SEQS)):
        with pytest.raises(HandoverRefusedError) as refused:
            audit.check_handover(found, LAYOUT, SEQS)
        assert refused.value.outcome is HandoverOutcome.BAD_TABLES
        return
    before = {t.request_id: t for t in handover.tables}
    # What passes names another block, whose sum is that of the first; or a number of tokens of
    # which the tokens' hash is not.
    (table,) = [table for table in other.tables if table != before.get(table.request_id)]
    known = before[table.request_id]
    assert (table.sums, table.hashes, table.tail) == (known.sums, known.hashes, known.tail)
    assert (table.blocks != known.blocks) != (table.computed != known.computed)


def test_more_requests_than_places_are_refused() -> None:
    table = BlockTable("", 1, [0], [], bytes(16), [0])
    tables = [
        msgspec.structs.replace(table, request_id=str(number), blocks=[number])
        for number in range(SEQS + 1)
    ]
    with pytest.raises(HandoverRefusedError, match=f"{SEQS + 1} requests, but at most"):
        audit.check_handover(sealed(tables, LAYOUT), LAYOUT, SEQS)


def test_a_block_with_two_contents_names_the_request() -> None:
    tables = [BlockTable(name, 1, [0], [], bytes(16), [0]) for name in ("a", "b")]
    with pytest.raises(HandoverRefusedError, match=r"contents for block 0; one of them is b$"):
        audit.check_handover(sealed(tables, LAYOUT), LAYOUT, SEQS)


def test_counts_that_disagree_are_refused() -> None:
    table = BlockTable("a", 1, [0], [], bytes(16), [0])
    for used, held in ((1, 2), (2, 1)):
        with pytest.raises(HandoverRefusedError, match="counted"):
            audit.check_handover(Handover(LAYOUT, [table], used, held), LAYOUT, SEQS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    block=st.integers(0, 7),
    place=st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    dim=st.sampled_from([3, 4]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_sum_of_a_block_is_of_each_element(
    block: int, place: tuple[int, int, int, int], dim: int, dtype: torch.dtype
) -> None:
    """Whether eight bytes fit into a row of a block or not."""
    kv = torch.randn(2, 3, 8 * 3, 3, dim).to(dtype)
    before = compute_block_sums(kv, 3, range(8))
    side, layer, token, head = place
    element = kv[side, layer, block * 3 + token, head, dim - 1 : dim]
    element.view(torch.uint8)[0] ^= 1
    after = compute_block_sums(kv, 3, range(8))
    assert [b for b in range(8) if before[b] != after[b]] == [block]
    assert compute_block_sums(kv, 3, [block, 2]) == [after[block], after[2]]


def test_sums_of_many_blocks_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = torch.randn(2, 3, 8 * 4, 2, 8)
    whole = compute_block_sums(kv, 4, range(8))
    monkeypatch.setattr("plimsoll_engine.kvcache.block_sums.MAX_GATHERED_BYTES", 1)
    assert compute_block_sums(kv, 4, range(8)) == whole
    swapped = kv.clone()
    swapped[0, 0, :4], swapped[1, 2, :4] = kv[1, 2, :4], kv[0, 0, :4]
    assert compute_block_sums(swapped, 4, [0]) != whole[:1]


def test_sums_of_ranks_are_added_in_64_bits() -> None:
    assert combine_block_sums([[1, -1], [2, (1 << 63) - 1]]) == [7, (1 << 63) - 4]
    assert combine_block_sums([[5], [6]]) != combine_block_sums([[6], [5]])
