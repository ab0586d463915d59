"""Run warm-up requests before the engine serves.

:func:`load_kernels` runs on a small KV pool, because another worker may still use the real pool.
:func:`warm_up` then uses the real pool, so that all buffers exist when the baseline is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plimsoll_engine.core.engine_core import Counters, EngineCore
from plimsoll_engine.core.execute import sampling
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.request import Request
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation.drafting import DraftCounts
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.errors import WarmUpError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.messages.worker_ipc import Media, Sampling, Submit
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.model import MediaModel, Model

# In blocks, and in tokens: 64 MiB for an 8B model.
SMALL_POOL_BLOCKS, SMALL_POOL_BLOCK_SIZE = 32, 16
SMALL_DECODE_ROWS = 4


def load_kernels(
    model: Model, leader: Leader | None = None, kv_dtype: torch.dtype | None = None
) -> None:
    """Load the kernels of ``model`` by running it on a small KV pool, on every rank.

    Only the first few layers run, because collectives are slow while another worker serves on the
    same devices. ``kv_dtype`` is the pool's dtype; None means the model's. Raises WarmUpError.
    """
    if isinstance(model, Decoder):
        model = model.truncate(model.num_representative_layers)
    runner = Runner(model, SMALL_POOL_BLOCKS, SMALL_POOL_BLOCK_SIZE, None, leader, kv_dtype)
    tokens = SMALL_POOL_BLOCKS * SMALL_POOL_BLOCK_SIZE
    pool = BlockPool(SMALL_POOL_BLOCKS, SMALL_POOL_BLOCK_SIZE)
    cache = None
    if isinstance(model, MediaModel):
        cache = EncoderCache(model.make_dummy_media().tokens, model.is_encoder_decoder)
    engine = EngineCore(runner, Scheduler(pool, SMALL_DECODE_ROWS, tokens // 2, tokens // 2, cache))
    try:
        warm_up(engine)
    finally:
        engine.close()


def load_sampling_kernels(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    """Load the sampling kernels by sampling a few rows. May be called in any thread."""
    rows = sampling.plan_sampling(
        [sampling.SamplingRow(Sampling(1, temperature=1.0), 0)] * SMALL_DECODE_ROWS
    )
    with torch.inference_mode():
        sampling.sample(
            torch.zeros(SMALL_DECODE_ROWS, vocabulary, dtype=dtype, device=device), rows
        )


def warm_up(engine: EngineCore) -> None:
    """Run warm-up requests on ``engine``, then reset its counters. Raises WarmUpError."""
    scheduler = engine.scheduler
    longest = min(
        scheduler.max_num_batched_tokens,
        scheduler.max_model_len - 2,
        engine.pool.num_blocks * engine.pool.block_size - 2,
    )
    width = min(scheduler.max_num_seqs, engine.pool.num_blocks)
    media = engine.runner.create_example_media()
    _run_requests(engine, [max(1, longest)], 0.0, media)
    needed = media if engine.runner.needs_media else []
    _run_requests(engine, [1] * width, 1.0, needed)
    if (speculation := engine.speculation) is not None:
        proposer, speculation.proposer = speculation.proposer, _ZeroProposer()
        _run_requests(engine, [1] * width, 1.0, needed, 2 + speculation.max_drafts)
        speculation.proposer = proposer
        if speculation.draft_model is not None:
            _run_requests(engine, [max(1, longest - 1)], 0.0, media, 3)
            _run_requests(engine, [1] * width, 1.0, needed, 2 + speculation.max_drafts)
        speculation.counters = DraftCounts()
    engine.pool.reset_prefix_cache()
    engine.counters = Counters()
    scheduler.preemptions_total = 0
    scheduler.prefix_query_tokens_total = scheduler.prefix_hit_tokens_total = 0


class _ZeroProposer:
    # All drafts are token 0, and as many as allowed, so that a step is full.
    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [[0] * limit for _, limit in draft_limits]


def _run_requests(
    engine: EngineCore,
    lengths: list[int],
    temperature: float,
    media: list[Media],
    max_tokens: int = 2,
) -> None:
    sampling_params = Sampling(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    for number, length in enumerate(lengths):
        fitting = [item for item in media if item.length < length]
        engine.submit(
            Submit(f"warm-up-{number}", [number % 7] * length, sampling_params, media=fitting)
        )
    while engine.has_work:
        output = engine.step()
        if output.dropped:
            raise WarmUpError(f"a warm-up request failed: {output.dropped[0].message}")
