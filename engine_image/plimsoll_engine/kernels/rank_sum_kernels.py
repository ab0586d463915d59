"""Sums over the ranks, with the addition to the residual stream and the norm behind it.

Each rank writes its part into the other ranks' buffers, says so there, and reads only its own. The
parts are added in float32 in the order of the ranks, so that all get the same bits.

``header`` is the own buffer (:mod:`plimsoll_engine.kernels.rank_sum_layout`), whose int64
:data:`STATE` counts: its upper half the sums, its lower half the programs of the current one that
have begun. So a captured graph may be replayed any number of times. The number of a sum is 32 bits
wide and comes back after 2^32 sums: what was written then would be taken for new only where nothing
was written since, in a half that every other sum writes.

A program waits for the same program of another rank, so no rank may begin them in another order,
which the hardware does not do. After ``WAIT_NS`` the other rank counts as lost, and the kernel ends
with an error. With 0 it waits forever, as Triton's interpreter must.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from plimsoll_engine.kernels import rank_sum_layout
from plimsoll_engine.kernels.overlap import after_last, let_next

STATE = tl.constexpr(rank_sum_layout.STATE)
UPPER = tl.constexpr(-(1 << 32))
LOWER = tl.constexpr((1 << 32) - 1)


@triton.jit
def _buffer(header, rank, dtype: tl.constexpr):
    """Return where the buffer of ``rank`` is mapped here."""
    return tl.multiple_of(tl.load(header + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _others(header, rank, RANKS: tl.constexpr, dtype: tl.constexpr):
    """Return the buffers of the other ranks, the next rank's first: not all write to one at once.

    Addresses never change, so that this may come before what the kernel ahead has written.
    """
    found = ()
    for step in tl.static_range(1, RANKS):
        there = _buffer(header, (rank + step) % RANKS, dtype)
        found = found + (there,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _own(header, dtype: tl.constexpr):
    return tl.multiple_of(header.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _begin(header):
    """Return the number of this sum in the upper half of an int64, and which half it takes.

    Called once by each program.
    """
    begun = tl.atomic_add(header + STATE, 1, sem="relaxed", scope="gpu")
    number = (begun & UPPER) + (1 << 32)
    if (begun & LOWER) == tl.num_programs(0) - 1:
        # All programs have the number: the next sum may have the next one.
        tl.store(header + STATE, number)
    return number, (number >> 32) & 1


@triton.jit
def _now(WAIT_NS: tl.constexpr):
    if WAIT_NS > 0:
        return globaltimer()
    return tl.cast(0, tl.int64)


@triton.jit
def _bounded(begun, WAIT_NS: tl.constexpr):
    if WAIT_NS > 0:  # noqa: SIM102 - a kernel that waits forever must not contain the timer
        if globaltimer() - begun > WAIT_NS:
            tl.inline_asm_elementwise(
                "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _wait(signal, number, WAIT_NS: tl.constexpr):
    """Wait until ``signal`` says that what this sum needs was written; all threads may read it."""
    begun = _now(WAIT_NS)
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") != number:
        _bounded(begun, WAIT_NS)
    tl.debug_barrier()


@triton.jit
def _signal(there, place, number):
    """Say in another rank's buffer that all that this program has written there is written."""
    tl.debug_barrier()
    tl.atomic_xchg(there + place, number, sem="release", scope="sys")


@triton.jit
def _add_norm(total, before, residual, scale, out, at, inside, columns, eps):
    """Return the norm of ``before`` plus ``total``, which ``residual`` becomes; also stored."""
    total += before.to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps)[:, None]
    result = (value * inverse * scale).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    return result


@triton.jit(do_not_specialize=["rank"])
def sum_words(
    x, residual, weight, out, header, rank, columns, eps,
    WORDS: tl.constexpr, WORD_ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum rows of 16-bit elements, one a program, with the fewest steps: each word tells its sum.

    A word of 64 bits is written and read as one: two elements, and the number of the sum. Twice the
    bytes, but no signal of their own, which would wait until they are written.
    """
    half = columns // 2
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < half
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale_2 = tl.load(weight + half + column, mask=inside, other=0.0).to(tl.float32)
    others = _others(header, rank, RANKS, tl.int64)
    let_next(OVERLAP)
    after_last(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    own_2 = tl.load(x + at + half, mask=inside, other=0.0)
    number, turn = _begin(header)
    bits = own.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    bits_2 = own_2.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    word = number | (bits_2 << 16) | bits
    place = WORDS // 8 + turn * (RANKS * WORD_ROWS) * half + row * half + column
    for step in tl.static_range(0, RANKS - 1):
        tl.store(others[step] + place + rank * WORD_ROWS * half, word, mask=inside)
    before = tl.load(residual + at, mask=inside, other=0.0)
    before_2 = tl.load(residual + at + half, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    total_2 = tl.zeros([BLOCK], tl.float32)
    begun = _now(WAIT_NS)
    for source in tl.static_range(0, RANKS):
        if source == rank:
            total += own.to(tl.float32)
            total_2 += own_2.to(tl.float32)
        else:
            here = header + place + source * WORD_ROWS * half
            found = tl.load(here, mask=inside, other=0, volatile=True)
            while (
                tl.min((((found & UPPER) == number) | (column >= half)).to(tl.int32), axis=0) == 0
            ):
                found = tl.load(here, mask=inside, other=0, volatile=True)
                _bounded(begun, WAIT_NS)
            part = (found & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            part_2 = ((found >> 16) & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
            total += part.to(tl.float32)
            total_2 += part_2.to(tl.float32)
    total += before.to(tl.float32)
    total_2 += before_2.to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    rounded_2 = total_2.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    tl.store(residual + at + half, rounded_2, mask=inside)
    value, value_2 = rounded.to(tl.float32), rounded_2.to(tl.float32)
    squares = tl.sum(value * value + value_2 * value_2, axis=0)
    inverse = tl.rsqrt(squares / columns + eps)
    tl.store(out + at, (value * inverse * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + half, (value_2 * inverse * scale_2).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rank", "rows"])
def sum_whole(
    x, residual, weight, out, header, rank, rows, columns, eps,
    ARRIVED: tl.constexpr, PARTS: tl.constexpr, MAX_ROWS: tl.constexpr, PART_ROWS: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT_NS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum ``ROWS`` rows a program: every rank sends its part to all others and adds up all rows."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    others = _others(header, rank, RANKS, x.dtype.element_ty)
    signalled = _others(header, rank, RANKS, tl.int32)
    let_next(OVERLAP)
    after_last(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    number, turn = _begin(header)
    short = (number >> 32).to(tl.int32)
    size = PARTS // (x.dtype.element_ty.primitive_bitwidth // 8)
    for step in tl.static_range(0, RANKS - 1):
        # This rank is source RANKS - 2 - step of the one that is step + 1 ranks further.
        first = (turn * (RANKS - 1) + RANKS - 2 - step) * PART_ROWS
        tl.store(others[step] + size + first * columns + at, own, mask=inside)
    before = tl.load(residual + at, mask=inside, other=0.0)
    for step in tl.static_range(0, RANKS - 1):
        place = ARRIVED // 4 + (turn * RANKS + rank) * MAX_ROWS + block
        _signal(signalled[step], place, short)
    signals = _own(header, tl.int32) + ARRIVED // 4 + turn * RANKS * MAX_ROWS + block
    parts = _own(header, x.dtype.element_ty) + size
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for source in tl.static_range(0, RANKS):
        if source == rank:
            total += own.to(tl.float32)
        else:
            _wait(signals + source * MAX_ROWS, short, WAIT_NS)
            first = (turn * (RANKS - 1) + (source - rank - 1 + RANKS) % RANKS) * PART_ROWS
            total += tl.load(parts + first * columns + at, mask=inside, other=0.0).to(tl.float32)
    _add_norm(total, before, residual, scale, out, at, inside, columns, eps)


@triton.jit(do_not_specialize=["rank", "rows"])
def sum_shared(
    x, residual, weight, out, header, rank, rows, columns, eps,
    ARRIVED: tl.constexpr, FINISHED: tl.constexpr, PARTS: tl.constexpr, RESULTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, PART_ROWS: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WAIT_NS: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum ``ROWS`` rows a program, every block on one rank, which sends the result to all others.

    ``out`` are the results in the own buffer. Of ``residual`` a rank keeps the rows of its blocks
    alone, and the same rows in every sum of as many rows.
    """
    block = tl.program_id(0)
    owner = block % RANKS
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    others = _others(header, rank, RANKS, x.dtype.element_ty)
    signalled = _others(header, rank, RANKS, tl.int32)
    there = _buffer(header, owner, x.dtype.element_ty)
    there_signalled = _buffer(header, owner, tl.int32)
    let_next(OVERLAP)
    after_last(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    number, turn = _begin(header)
    short = (number >> 32).to(tl.int32)
    itemsize: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    # The rows of one owner lie together.
    packed = ((block // RANKS) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64) * columns + column
    done = FINISHED // 4 + turn * MAX_ROWS + block
    if owner != rank:
        first = (turn * (RANKS - 1) + (rank - owner - 1 + RANKS) % RANKS) * PART_ROWS
        tl.store(there + PARTS // itemsize + first * columns + packed, own, mask=inside)
        place = ARRIVED // 4 + (turn * RANKS + rank) * MAX_ROWS + block
        _signal(there_signalled, place, short)
        _wait(_own(header, tl.int32) + done, short, WAIT_NS)
    else:
        signals = _own(header, tl.int32) + ARRIVED // 4 + turn * RANKS * MAX_ROWS + block
        parts = _own(header, x.dtype.element_ty) + PARTS // itemsize
        before = tl.load(residual + at, mask=inside, other=0.0)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for source in tl.static_range(0, RANKS):
            if source == rank:
                total += own.to(tl.float32)
            else:
                _wait(signals + source * MAX_ROWS, short, WAIT_NS)
                first = (turn * (RANKS - 1) + (source - rank - 1 + RANKS) % RANKS) * PART_ROWS
                part = tl.load(parts + first * columns + packed, mask=inside, other=0.0)
                total += part.to(tl.float32)
        result = _add_norm(total, before, residual, scale, out, at, inside, columns, eps)
        for step in tl.static_range(0, RANKS - 1):
            tl.store(others[step] + RESULTS // itemsize + at, result, mask=inside)
        for step in tl.static_range(0, RANKS - 1):
            _signal(signalled[step], done, short)


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["index"])
def kept_rows(
    residual, index, out, columns, rank, RANKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Copy the rows ``index`` that :func:`sum_shared` left on this rank; the others are zeros."""
    column = tl.arange(0, BLOCK)
    let_next(OVERLAP)
    after_last(OVERLAP)
    row = tl.load(index + tl.program_id(0)).to(tl.int64)
    own = (row // ROWS) % RANKS == rank
    found = tl.load(residual + row * columns + column, mask=own & (column < columns), other=0.0)
    place = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(out + place, found, mask=column < columns)
