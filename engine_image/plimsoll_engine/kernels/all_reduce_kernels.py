"""Triton kernels of the all-reduce, fused with the addition to the residual and the next norm.

Each rank writes its part into the other ranks' buffers, sets a signal there, and reads only its own
buffer. All ranks must start their programs in the same order, as the hardware does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from plimsoll_engine.kernels import collective_buffer
from plimsoll_engine.kernels.overlap import allow_next_kernel, wait_for_previous_kernel

# The counter's upper half counts sums, and its lower half counts programs of the current sum that
# have started. A captured graph can therefore be replayed any number of times. The number of a sum
# wraps around safely, because every second sum overwrites the numbers in a buffer half.
COUNTER_INDEX = tl.constexpr(collective_buffer.COUNTER_INDEX)
UPPER_32_BITS = tl.constexpr(-(1 << 32))
LOWER_32_BITS = tl.constexpr((1 << 32) - 1)


@triton.jit
def get_buffer(header, rank, dtype: tl.constexpr):
    """Return a pointer to the buffer of ``rank``, as mapped into this process."""
    return tl.multiple_of(tl.load(header + rank).to(tl.pointer_type(dtype)), 16)


@triton.jit
def get_peer_buffers(header, rank, RANKS: tl.constexpr, dtype: tl.constexpr):
    """Return pointers to the other ranks' buffers, from the next rank on to spread the writes."""
    # Addresses never change, so kernels may read them before they wait for the previous kernel.
    buffers = ()
    for step in tl.static_range(1, RANKS):
        buffer = get_buffer(header, (rank + step) % RANKS, dtype)
        buffers = buffers + (buffer,)  # type: ignore[assignment]  # noqa: RUF005
    return buffers


@triton.jit
def get_own_buffer(header, dtype: tl.constexpr):
    """Return a pointer to this rank's buffer."""
    return tl.multiple_of(header.to(tl.pointer_type(dtype)), 16)


@triton.jit
def begin_sum(header):
    """Return the number of this sum, in the upper half of an int64, and its buffer half.

    Each program must call this once.
    """
    started = tl.atomic_add(header + COUNTER_INDEX, 1, sem="relaxed", scope="gpu")
    number = (started & UPPER_32_BITS) + (1 << 32)
    if (started & LOWER_32_BITS) == tl.num_programs(0) - 1:
        # All programs have read the number, so the counter can advance to the next sum.
        tl.store(header + COUNTER_INDEX, number)
    return number, (number >> 32) & 1


@triton.jit
def _read_start_ns(TIMEOUT_NS: tl.constexpr):
    if TIMEOUT_NS > 0:
        return globaltimer()
    return tl.cast(0, tl.int64)


@triton.jit
def _trap_on_timeout(started, TIMEOUT_NS: tl.constexpr):
    if TIMEOUT_NS > 0:  # noqa: SIM102 - a kernel that waits forever must not contain the timer
        if globaltimer() - started > TIMEOUT_NS:
            tl.inline_asm_elementwise(
                "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _have_all_arrived(signals, number, mask):
    values = tl.atomic_add(signals, 0, mask=mask, sem="acquire", scope="sys")
    return tl.min(((values == number) | ~mask).to(tl.int32), axis=0)


@triton.jit
def wait_for_signals(signals, number, mask, TIMEOUT_NS: tl.constexpr):
    """Wait until all ``signals`` [n] that ``mask`` selects equal ``number``.

    Afterwards, all threads may read the data that the signals announce.
    """
    started = _read_start_ns(TIMEOUT_NS)
    arrived = _have_all_arrived(signals, number, mask)
    while arrived == 0:
        _trap_on_timeout(started, TIMEOUT_NS)
        arrived = _have_all_arrived(signals, number, mask)
    tl.debug_barrier()


@triton.jit
def _have_all_arrived_without_acquire(signals, number, mask):
    # Unlike _have_all_arrived, this supports any n.
    values = tl.load(signals, mask=mask, other=0, volatile=True)
    return tl.min(((values == number) | ~mask).to(tl.int32), axis=0)


@triton.jit
def _wait_without_acquire(signals, number, mask, TIMEOUT_NS: tl.constexpr):
    # Without acquire: only later kernels read the data.
    started = _read_start_ns(TIMEOUT_NS)
    arrived = _have_all_arrived_without_acquire(signals, number, mask)
    while arrived == 0:
        _trap_on_timeout(started, TIMEOUT_NS)
        arrived = _have_all_arrived_without_acquire(signals, number, mask)


@triton.jit
def set_signals(signals, number, mask):
    """Set the ``signals`` [n] that ``mask`` selects to ``number``, after this program's writes.

    Each call waits for the writes, so set all signals in one call.
    """
    tl.debug_barrier()
    tl.atomic_xchg(signals, number, mask=mask, sem="release", scope="sys")


@triton.jit
def load_buffers(header, RANKS: tl.constexpr, PAD: tl.constexpr):
    """Return the ranks and int32 pointers to their buffers, both padded to [PAD]."""
    ranks = tl.arange(0, PAD)
    addresses = tl.load(header + ranks, mask=ranks < RANKS, other=0)
    return ranks, addresses.to(tl.pointer_type(tl.int32))


@triton.jit
def _add_norm(total, before, residual, scale, out, at, inside, columns, eps):
    total += before.to(tl.float32)
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / columns + eps)[:, None]
    result = (value * inverse * scale).to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    return result


@triton.jit
def _load_words(pointers, stride, rank, RANKS: tl.constexpr, inside):
    # This rank's words are zeros. All loads are issued together, because each round trip takes
    # time.
    loaded = ()
    for source in tl.static_range(0, RANKS):
        mask = inside & (source != rank)
        words = tl.load(pointers + source * stride, mask=mask, other=0, volatile=True)
        loaded = loaded + (words,)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@triton.jit
def _is_missing(words, rank, RANKS: tl.constexpr, inside, number):
    all_valid = ~inside
    for source in tl.static_range(0, RANKS):
        valid = ((words[source] & UPPER_32_BITS) == number) | (source == rank) | ~inside
        all_valid = valid if source == 0 else all_valid & valid
    return 1 - tl.min(all_valid.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["rank"])
def sum_words(
    x, residual, weight, out, header, rank, columns, eps,
    WORDS: tl.constexpr, WORD_ROWS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    TIMEOUT_NS: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum one row of 16-bit elements per program, sent in words."""
    # A word has 64 bits and is written atomically. It contains two elements and the number of the
    # sum, so no signal has to wait for the writes.
    half = columns // 2
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < half
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scale_2 = tl.load(weight + half + column, mask=inside, other=0.0).to(tl.float32)
    others = get_peer_buffers(header, rank, RANKS, tl.int64)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    own_2 = tl.load(x + at + half, mask=inside, other=0.0)
    number, turn = begin_sum(header)
    bits = own.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    bits_2 = own_2.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    word = number | (bits_2 << 16) | bits
    apart = WORD_ROWS * half
    place = WORDS // 8 + turn * RANKS * apart + row * half + column
    for step in tl.static_range(0, RANKS - 1):
        tl.store(others[step] + place + rank * apart, word, mask=inside)
    before = tl.load(residual + at, mask=inside, other=0.0)
    before_2 = tl.load(residual + at + half, mask=inside, other=0.0)
    started = _read_start_ns(TIMEOUT_NS)
    words = _load_words(header + place, apart, rank, RANKS, inside)
    while _is_missing(words, rank, RANKS, inside, number) != 0:
        _trap_on_timeout(started, TIMEOUT_NS)
        words = _load_words(header + place, apart, rank, RANKS, inside)
    total = tl.zeros([BLOCK], tl.float32)
    total_2 = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(0, RANKS):
        part = (words[source] & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        part_2 = ((words[source] >> 16) & 0xFFFF).to(tl.int16).to(x.dtype.element_ty, bitcast=True)
        total += tl.where(source == rank, own, part).to(tl.float32)
        total_2 += tl.where(source == rank, own_2, part_2).to(tl.float32)
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


@triton.jit
def _sum_parts(
    own, parts, at, inside, rank, columns, PART_ROWS: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    # This rank's part is selected without a branch, so that all loads are issued before a result is
    # used.
    total = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(0, RANKS):
        first = (source - rank - 1 + RANKS) % RANKS * PART_ROWS
        part = tl.load(parts + first * columns + at, mask=inside & (source != rank), other=0.0)
        total += tl.where(source == rank, own, part).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank", "rows"])
def sum_whole(
    x, residual, weight, out, header, rank, rows, columns, eps,
    ARRIVED: tl.constexpr, PARTS: tl.constexpr, MAX_ROWS: tl.constexpr, PART_ROWS: tl.constexpr,
    RANKS: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    TIMEOUT_NS: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum ``ROWS`` rows per program. Every rank sums all rows."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    others = get_peer_buffers(header, rank, RANKS, x.dtype.element_ty)
    ranks, signalled = load_buffers(header, RANKS, PAD)
    mask = (ranks < RANKS) & (ranks != rank)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    number, turn = begin_sum(header)
    short = (number >> 32).to(tl.int32)
    size = PARTS // (x.dtype.element_ty.primitive_bitwidth // 8)
    half = turn * (RANKS - 1) * PART_ROWS
    for step in tl.static_range(0, RANKS - 1):
        # For the rank that is step + 1 ahead, this rank is source number RANKS - 2 - step.
        first = half + (RANKS - 2 - step) * PART_ROWS
        tl.store(others[step] + size + first * columns + at, own, mask=inside)
    before = tl.load(residual + at, mask=inside, other=0.0)
    signals = ARRIVED // 4 + turn * RANKS * MAX_ROWS + block
    set_signals(signalled + signals + rank * MAX_ROWS, short, mask)
    own_signals = get_own_buffer(header, tl.int32) + signals + ranks * MAX_ROWS
    wait_for_signals(own_signals, short, mask, TIMEOUT_NS)
    parts = get_own_buffer(header, x.dtype.element_ty) + size + half * columns
    total = _sum_parts(own, parts, at, inside, rank, columns, PART_ROWS, RANKS)
    _add_norm(total, before, residual, scale, out, at, inside, columns, eps)


@triton.jit(do_not_specialize=["rank", "rows", "blocks"])
def sum_shared(
    x, residual, weight, out, header, rank, rows, columns, eps, blocks,
    ARRIVED: tl.constexpr, FINISHED: tl.constexpr, PARTS: tl.constexpr, RESULTS: tl.constexpr,
    MAX_ROWS: tl.constexpr, PART_ROWS: tl.constexpr, RANKS: tl.constexpr, PAD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PER_WAIT: tl.constexpr,
    TIMEOUT_NS: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Sum ``ROWS`` rows per program. Each block is summed by one rank, which shares the result."""
    # ``out`` is the result area of this rank's buffer. The first ``blocks`` programs send and sum.
    # Each later program waits for the results of ``BLOCKS_PER_WAIT`` blocks. A rank updates only
    # the rows of its own blocks in ``residual``. Sums of equally many rows have the same blocks.
    block = tl.program_id(0)
    owner = block % RANKS
    row = block * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    others = get_peer_buffers(header, rank, RANKS, x.dtype.element_ty)
    ranks, signalled = load_buffers(header, RANKS, PAD)
    owner_buffer = get_buffer(header, owner, x.dtype.element_ty)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    at = row.to(tl.int64) * columns + column
    own = tl.load(x + at, mask=inside, other=0.0)
    number, turn = begin_sum(header)
    short = (number >> 32).to(tl.int32)
    itemsize: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    # Parts for one owner are contiguous.
    packed = ((block // RANKS) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64) * columns + column
    half = turn * (RANKS - 1) * PART_ROWS
    arrived = ARRIVED // 4 + turn * RANKS * MAX_ROWS + block
    done = FINISHED // 4 + turn * MAX_ROWS
    if block >= blocks:
        awaited = (block - blocks) * BLOCKS_PER_WAIT + tl.arange(0, BLOCKS_PER_WAIT)
        foreign = (awaited < blocks) & (awaited % RANKS != rank)
        _wait_without_acquire(
            get_own_buffer(header, tl.int32) + done + awaited, short, foreign, TIMEOUT_NS
        )
    elif owner != rank:
        first = half + (rank - owner - 1 + RANKS) % RANKS * PART_ROWS
        tl.store(owner_buffer + PARTS // itemsize + first * columns + packed, own, mask=inside)
        set_signals(signalled + arrived + rank * MAX_ROWS, short, ranks == owner)
    else:
        before = tl.load(residual + at, mask=inside, other=0.0)
        mask = (ranks < RANKS) & (ranks != rank)
        own_signals = get_own_buffer(header, tl.int32) + arrived + ranks * MAX_ROWS
        wait_for_signals(own_signals, short, mask, TIMEOUT_NS)
        parts = get_own_buffer(header, x.dtype.element_ty) + PARTS // itemsize + half * columns
        total = _sum_parts(own, parts, packed, inside, rank, columns, PART_ROWS, RANKS)
        result = _add_norm(total, before, residual, scale, out, at, inside, columns, eps)
        for step in tl.static_range(0, RANKS - 1):
            tl.store(others[step] + RESULTS // itemsize + at, result, mask=inside)
        set_signals(signalled + done + block, short, mask)


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["index"])
def copy_own_rows(
    residual, index, out, columns, rank, RANKS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Copy the rows at ``index`` of ``residual`` to ``out``, with zeros for other ranks' rows."""
    column = tl.arange(0, BLOCK)
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    row = tl.load(index + tl.program_id(0)).to(tl.int64)
    own = (row // ROWS) % RANKS == rank
    values = tl.load(residual + row * columns + column, mask=own & (column < columns), other=0.0)
    offset = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(out + offset, values, mask=column < columns)
