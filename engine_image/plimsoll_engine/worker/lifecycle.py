"""Start and shut down a worker's engine core.

``shut_down()`` releases everything, also after a failed start or a failed step. It does not rely on
``__del__``, the garbage collector or the end of the process.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from plimsoll_engine.core import sizes
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.grammar.grammars import GrammarCompiler, Vocabulary
from plimsoll_engine.core.grammar.trial import TrialServer
from plimsoll_engine.core.handover import export, inheritance
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.encoder_cache import EncoderCache
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation import drafting
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.warmup import load_kernels, load_sampling_kernels, warm_up
from plimsoll_engine.distributed.group import AllReduceShape
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.distributed.link import LeaderConnection
from plimsoll_engine.distributed.member import Member
from plimsoll_engine.errors import SettingsError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.handover import (
    BlockTable,
    HandoverOutcome,
    HandoverRefusal,
    HandoverRefusedError,
    PoolLayout,
)
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.model import MediaModel, Model
from plimsoll_engine.process.owners import WorkerPart
from plimsoll_engine.worker.parts import (
    DeviceContext,
    GarbageCollectorSettings,
    Weights,
    create_context,
    limit_hardware_queues,
)

log = logging.getLogger(__name__)


class CoreLifecycle:
    """Owner of an engine core's memory, from start to shutdown.

    A start has two phases. :meth:`prepare` needs little device memory, so it can run while another
    worker serves. :meth:`take_over` needs the memory of the KV pool.
    """

    def __init__(
        self,
        config: WorkerConfig,
        vocabulary: Vocabulary | None = None,
        ranks: Leader | LeaderConnection | None = None,
        trials: TrialServer | None = None,
        on_stage: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.config = config
        self.vocabulary = vocabulary
        self.trials = trials
        self._on_stage = on_stage
        self.device = DeviceContext()
        self.member = Member(ranks)
        self.weights = Weights(config, self.member)
        self.heap = GarbageCollectorSettings()
        self.engine: EngineCore | None = None
        # In opening order. shut_down() closes them in reverse order.
        self._parts: list[WorkerPart] = [self.device, self.weights, self.member]
        self.ledger = Ledger(self._parts)
        self.settings: sizes.EngineSizes | None = None
        self.stages_s: dict[str, float] = {}
        self.close_stages_s: dict[str, float] = {}
        self._model_config: Any = None
        self._kv_dtype: torch.dtype | None = None
        self._claim = rank_ipc.PoolReply()
        self.refusal: HandoverRefusal | None = None

    def start(self) -> EngineCore:
        """Run both phases of the start, or release everything if one fails."""
        self.prepare()
        return self.take_over()

    def prepare(self) -> None:
        """Create the context, the process group, the weights and the kernels.

        On failure, release everything.
        """
        with self._release_on_error(), ThreadPoolExecutor(1, "device") as executor:
            with self._time_stage("model_config"):
                self.member.check_settings(self.config)
                if not self.member.is_single_process:
                    limit_hardware_queues()
                device_future = executor.submit(
                    loader.choose_device, self.config.device, self.member.shard
                )
                context = executor.submit(lambda: create_context(device_future.result()))
                self._model_config = loader.load_config(Path(self.config.model))
                sizes.check_adapter_support(self.config, self._model_config)
                device = self.device.device = device_future.result()
                dtype = loader.choose_dtype(self.config.dtype, self._model_config, device)
                self._kv_dtype = sizes.choose_cache_dtype(self.config.kv_cache_dtype, dtype, device)
                # Early, so that the weight server loads while this process creates its context.
                self.weights.request_weights(self._model_config, dtype)
                mapped = (
                    executor.submit(self.weights.map_weights) if self.weights.is_mapped else None
                )
            with self._time_stage("context"):
                context.result()
                self.device.open(dtype)
                if self.device.is_cuda and not self.member.is_follower:
                    # An error here is ignored: it occurs again when the kernels are needed.
                    vocabulary_size = loader.get_text_config(self._model_config).vocab_size
                    executor.submit(load_sampling_kernels, vocabulary_size, dtype, device)
            if not self.member.is_single_process:
                with self._time_stage("ranks_met"):
                    self.member.join_group()
                with self._time_stage("process_group"):
                    columns = loader.get_text_config(self._model_config).hidden_size
                    rows = sizes.compute_max_step_rows(self.config, device)
                    self.member.form_group(device, AllReduceShape(rows, columns, dtype))
            with self._time_stage("weights"):
                model = self.weights.open(
                    None if mapped is None else mapped.result(), self._model_config, dtype, device
                )
            if self.member.is_follower:  # it loads its kernels in the steps of rank 0
                return
            if self.member.leader is not None:
                with self._time_stage("ranks_loaded"):
                    self.member.leader.wait_until_loaded()
            with self._time_stage("kernels"):
                load_kernels(model, self.member.leader, self.kv_dtype)
                if self.weights.draft is not None:
                    load_kernels(self.weights.draft, kv_dtype=self.kv_dtype)

    def take_over(self, skip_warm_up: bool = False, handover: bytes | None = None) -> EngineCore:
        """Create and warm up the engine core with its KV pool, and return it.

        If ``skip_warm_up``, graphs are captured while the worker serves. If ``handover`` is
        refused, :attr:`refusal` gives the reason. On failure, release everything.
        """
        with self._release_on_error():
            with self._time_stage("kv_pool"):
                runner, draft = self._open_pools()
                self._claim = self.weights.claim_pool()
                tables = self._accept_handover(handover, runner) if skip_warm_up else []
                engine = self.engine = self._open_engine(runner, draft, tables)
                if handover is not None and self.refusal is None:
                    engine.inheritance = Inheritance(tables, engine.pool)
            if not skip_warm_up:
                with self._time_stage("warm_up"):
                    warm_up(engine)
            with self._time_stage("graphs"):
                limits = engine.scheduler
                blocks = engine.pool.count_blocks(limits.max_model_len)
                longest = min(limits.max_num_batched_tokens, limits.max_model_len)
                for forward in (runner, draft):
                    if forward is not None:
                        forward.capture_graphs(
                            engine.max_decode_rows, blocks, skip_warm_up, longest
                        )
            with self._time_stage("freeze"):
                self.freeze()
                self.member.report_started()
            return engine

    def _open_pools(self) -> tuple[Runner, Forward | None]:
        """Return the target model and the draft model; the draft model may be None."""
        device, model, draft = self.model.device, self.model, self.weights.draft
        adapters = None
        if self.config.max_loras and isinstance(model, Decoder):
            adapters = LoadedAdapters(model, self.config.max_loras, self.config.max_lora_rank)
        free = self.member.find_min_free_bytes(self.device.measure_free_bytes())
        if adapters is not None and free is not None:
            free = max(0, free - adapters.bytes_bound)
        pool = self.weights.pool
        settings = self.settings = sizes.resolve_sizes(
            self.config,
            model.kv,
            loader.get_max_context_length(self._model_config),
            self.kv_dtype,
            device,
            None if pool is None else pool.nbytes,
            free,
            None if draft is None else draft.kv,
        )
        target_bytes = settings.compute_kv_bytes(model.kv, self.kv_dtype)
        draft_bytes = 0 if draft is None else settings.compute_kv_bytes(draft.kv, self.kv_dtype)
        pool = self.weights.map_pool(target_bytes + draft_bytes)
        count, size = settings.num_blocks, settings.block_size
        runner = Runner(
            model, count, size, None if pool is None else pool[:target_bytes], self.member.leader,
            self.kv_dtype,
        )  # fmt: skip
        self._parts.append(runner)
        runner.adapters = adapters
        if draft is None:
            return runner, None
        memory = None if pool is None else pool[target_bytes : target_bytes + draft_bytes]
        forward = Forward(draft, count, size, memory, self.kv_dtype)
        self._parts.append(forward)
        return runner, forward

    def _open_engine(
        self, runner: Runner, draft: Forward | None, tables: list[BlockTable]
    ) -> EngineCore:
        settings, config = self._sizes, self.config
        pool = BlockPool(
            settings.num_blocks, settings.block_size, [table.blocks for table in tables]
        )
        encoder = None
        if isinstance(self.model, MediaModel):
            is_encoder_decoder = self.model.is_encoder_decoder
            budget = sizes.choose_encoder_budget(
                config.encoder_cache_tokens,
                settings,
                self.model.make_dummy_media().tokens,
                is_encoder_decoder,
            )
            encoder = EncoderCache(budget, is_encoder_decoder)
        scheduler = Scheduler(
            pool,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_model_len,
            encoder,
        )
        draft_model = None
        if draft is not None and self.weights.draft is not None:
            draft_model = DraftModel(
                draft,
                pool,
                settings.max_num_batched_tokens,
                loader.get_text_config(self._model_config).vocab_size,
                self.weights.draft.spec.vocabulary,
            )
        engine = EngineCore(
            runner,
            scheduler,
            GrammarCompiler(self.vocabulary, trials=self.trials),
            config.media_cache_bytes,
            drafting.create_speculation(config.speculative, settings.max_num_seqs, draft_model),
        )
        del self._parts[-1 if draft is None else -2 :]  # the engine closes the pools
        self._parts.append(engine)
        if config.kv_offload_bytes:
            assert runner.kv is not None
            try:
                scheduler.offload = Offload.create(
                    pool, runner.kv, config.kv_offload_bytes, runner.kv_scales
                )
            except ValueError as error:
                raise SettingsError(str(error)) from None
        return engine

    def hand_over(self) -> bytes:
        """Return the message that lets the next worker use the KV blocks of running requests.

        Call this between steps, and only :meth:`shut_down` afterwards. Raises HandoverRefusedError.
        """
        assert self.engine is not None
        if self.weights.pool is None:
            raise HandoverRefusedError(
                HandoverOutcome.NO_HOLDER,
                "this process owns the KV pool, so the pool ends with it",
            )
        return export.export_tables(self.engine, self._get_layout(self.engine.runner))

    def _accept_handover(self, handover: bytes | None, runner: Runner) -> list[BlockTable]:
        if handover is None:
            return []
        try:
            if self.weights.pool is None:
                raise HandoverRefusedError(
                    HandoverOutcome.NO_HOLDER,
                    "this worker's KV pool is new and does not contain the blocks of the handover",
                )
            if not all(claim.is_sole_writer for claim in [self._claim, *runner.pools]):
                raise HandoverRefusedError(
                    HandoverOutcome.UNFENCED, "another worker may write to the KV pool"
                )
            return inheritance.validate_tables(
                handover, self._get_layout(runner), runner, self._sizes.max_num_seqs
            )
        except HandoverRefusedError as error:
            self.refusal = HandoverRefusal(error.outcome, str(error))
        except (RuntimeError, OSError) as error:
            if self.member.lost:
                raise
            self.refusal = HandoverRefusal(
                HandoverOutcome.FAILED, f"{type(error).__name__}: {error}"
            )
        log.warning("%s: %s", self.refusal.outcome, self.refusal.message)
        return []

    def _get_layout(self, runner: Runner) -> PoolLayout:
        claims = [self._claim, *runner.pools]
        return PoolLayout(
            b"".join(claim.weights for claim in claims),
            b"".join(claim.memory for claim in claims),
            str(self.kv_dtype),
            (self.model.kv.layers, self.model.kv.heads, self.model.kv.dim),
            self._sizes.block_size,
            self._sizes.num_blocks,
            self.member.shard.size,
        )

    def freeze(self) -> None:
        """Exclude existing objects from garbage collection until shutdown."""
        self._parts.append(self.heap)
        self.heap.open()

    @property
    def model(self) -> Model:
        """Model, available after :meth:`prepare`."""
        assert self.weights.model is not None
        return self.weights.model

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the KV pool, available after :meth:`prepare`."""
        assert self._kv_dtype is not None
        return self._kv_dtype

    @property
    def _sizes(self) -> sizes.EngineSizes:
        assert self.settings is not None
        return self.settings

    @property
    def mapped_host_bytes(self) -> int:
        """Shared memory of the weight server that this process maps, in bytes."""
        return 0 if self.device.is_cuda else self.weights.mapped_bytes

    @contextlib.contextmanager
    def _release_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.shut_down()
            # the frames of the traceback refer to what they were building
            traceback.clear_frames(error.__traceback__)
            raise

    def _time_stage(self, name: str) -> AbstractContextManager[None]:
        self._on_stage(name)
        return _record_duration(self.stages_s, name)

    def shut_down(self) -> None:
        """Release everything on every rank. Idempotent."""
        if self.member.lost:
            if self.device.is_cuda:
                # Kernels still wait for the lost rank (more than 60 s with NCCL 2.28.9 on an H200).
                # The frontend kills this process.
                self.heap.close()
                return
            self.member.abort_collectives()
        if self.device.is_cuda:
            with (
                _record_duration(self.close_stages_s, "synchronize"),
                contextlib.suppress(RuntimeError),
            ):
                torch.cuda.synchronize(self.device.device)  # do not wait for a lost device
        self.engine = None
        while self._parts:
            part = self._parts.pop()
            with _record_duration(self.close_stages_s, part.name):
                part.close()

    def get_allocated_after_shutdown(self) -> tuple[int | None, int | None]:
        """Return the allocated device bytes and their baseline, each summed over all ranks.

        A sum is None on a CPU, or if a rank sent no report.
        """
        return self.member.get_allocated_after_shutdown(
            self.measure_allocated_device_bytes(), self.device.baseline
        )

    def measure_allocated_device_bytes(self) -> int | None:
        """Return the device bytes allocated by torch and the process group; None on a CPU."""
        allocated = self.device.read_allocated_bytes()
        return None if allocated is None else allocated + self.member.nbytes


@contextlib.contextmanager
def _record_duration(stages_s: dict[str, float], name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    stages_s[name] = round(time.monotonic() - start, 4)
