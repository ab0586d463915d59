"""Start and shutdown of a worker's engine core.

``shutdown()`` is explicit, complete and idempotent: after success, after a start that failed at any
stage, and after a failed forward pass. Nothing relies on ``__del__``, on the garbage collector or
on the end of the process. On CUDA, torch's allocated bytes return exactly to the baseline, which is
measured once the context exists and its libraries have run.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from plimsoll_api.admin import MemoryKind, Role
from plimsoll_engine.core import sizes
from plimsoll_engine.core.engine_core import EngineCore
from plimsoll_engine.core.execute.forward import Forward
from plimsoll_engine.core.execute.loaded_adapters import LoadedAdapters
from plimsoll_engine.core.execute.runner import Runner
from plimsoll_engine.core.grammar.grammars import Grammars, Vocabulary
from plimsoll_engine.core.grammar.trial import TrialServer
from plimsoll_engine.core.handover import export, inheritance
from plimsoll_engine.core.handover.inheritance import Inheritance
from plimsoll_engine.core.schedule.scheduler import Scheduler
from plimsoll_engine.core.speculation import drafting
from plimsoll_engine.core.speculation.draft_model import DraftModel
from plimsoll_engine.core.warmup import load_kernels, load_sampling, warm_up
from plimsoll_engine.device.buffer import primary_context
from plimsoll_engine.distributed.group import SumShape
from plimsoll_engine.distributed.leader import Leader
from plimsoll_engine.distributed.link import Link
from plimsoll_engine.distributed.member import Member
from plimsoll_engine.errors import SettingsError
from plimsoll_engine.kvcache.block_pool import BlockPool
from plimsoll_engine.kvcache.offload import Offload
from plimsoll_engine.memory import media_owners
from plimsoll_engine.memory.ledger import Ledger
from plimsoll_engine.messages import rank_ipc
from plimsoll_engine.messages.handover import HandoverRefused, Layout, Outcome, Refusal, Table
from plimsoll_engine.messages.zygote_ipc import WorkerConfig
from plimsoll_engine.models import draft as draft_models
from plimsoll_engine.models import loader
from plimsoll_engine.models.decoder import Decoder
from plimsoll_engine.models.loader import OwnModel
from plimsoll_engine.models.model import Model
from plimsoll_engine.process.collector import FullCollections
from plimsoll_engine.process.rules import frozen
from plimsoll_engine.weights.mapping import WeightMapping

log = logging.getLogger(__name__)

GC_THRESHOLDS = (20_000, 50, 1_000)
"""Allocations before a young collection, and young collections before the older ones.

A full collection stops every stream, and no request needs one to be freed.
"""


class CoreLifecycle:
    """Owner of one engine core's memory, from start to shutdown.

    A start has two phases. :meth:`prepare` needs little device memory, so that it can run while a
    predecessor serves; :meth:`take_over` takes the KV pool. With a weight server, weights and KV
    pool belong to it and are only mapped here.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine_type: type[EngineCore] = EngineCore,
        vocabulary: Vocabulary | None = None,
        ranks: Leader | Link | None = None,
        trials: TrialServer | None = None,
        on_stage: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Create an empty lifecycle. ``on_stage`` receives the name of each stage as it begins."""
        self.config = config
        self._on_stage = on_stage
        self.member = Member(ranks)
        self.engine_type = engine_type
        self.vocabulary = vocabulary
        self.trials = trials
        self.ledger = Ledger()
        self.device: torch.device | None = None
        self.settings: sizes.EngineSizes | None = None
        self.engine: EngineCore | None = None
        self.device_baseline: int | None = None
        self.collections = FullCollections()
        self.stages_s: dict[str, float] = {}
        """Duration of each stage of the start, in seconds."""
        self.ended_s: dict[str, float] = {}
        """Duration of each stage of :meth:`shutdown`, in seconds."""
        self._model_config: Any = None
        self._kv_dtype: torch.dtype | None = None
        self._model: Model | None = None
        self._draft: Decoder | None = None
        self._mapping: WeightMapping | None = None
        self._pool: torch.Tensor | None = None
        """KV pool of the weight server, uint8 [bytes], once this process maps it."""
        self._claim = rank_ipc.PoolMade()
        """The weight server's reply to the claim of its KV pool."""
        self.refusal: Refusal | None = None
        """Reason why a handover was not accepted; None if it was."""
        self.fenced = False
        """Whether no process of the worker can write to the KV pool any more, after
        :meth:`shutdown`.
        """
        self._runner: Runner | None = None
        self._thresholds: tuple[int, int, int] | None = None

    def start(self) -> EngineCore:
        """Run both phases. Releases everything if a phase fails."""
        self.prepare()
        return self.take_over()

    def prepare(self) -> None:
        """Create context, process group, weights and kernels.

        Releases everything if it fails. A rank above 0 gets its kernels from the steps of rank 0. A
        second thread creates the context and maps the weights meanwhile; neither holds the GIL.
        """
        with self._all_or_nothing(), ThreadPoolExecutor(1, "device") as beside:
            folder = Path(self.config.model)
            draft = None if self.config.draft_model is None else Path(self.config.draft_model)
            with self._stage("model_config"):
                self.member.check(self.config)
                chosen = beside.submit(loader.choose_device, self.config.device, self.member.shard)
                context = beside.submit(lambda: make_context(chosen.result()))
                self._model_config = loader.load_config(folder)
                sizes.check_adapters(self.config, self._model_config)
                self.device = chosen.result()
                dtype = loader.choose_dtype(self.config.dtype, self._model_config, self.device)
                asked = self.config.kv_cache_dtype
                self._kv_dtype = sizes.cache_dtype(asked, dtype, self.device)
                # Early, so that the weight server loads while this process creates its context.
                shared = self._ask_for_weights(folder, dtype)
                mapped = None if shared is None else beside.submit(self._map_weights)
            with self._stage("context"):
                context.result()
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                torch.set_float32_matmul_precision("highest")
                self.device_baseline = device_baseline(self.device, dtype)
                if self.device.type == "cuda" and not self.member.follows:
                    # An error here is ignored: it occurs again when the kernels are needed.
                    words = loader.text_config(self._model_config).vocab_size
                    beside.submit(load_sampling, words, dtype, self.device)
            if not self.member.alone:
                with self._stage("ranks_met"):
                    self.member.meet()
                with self._stage("process_group"):
                    self.member.form(self.device, self._sums(dtype))
            with self._stage("weights"):
                if shared is not None and mapped is not None:
                    self._model = shared
                    own, drafts = draft_models.apart(mapped.result())
                    loader.bind(shared, own)
                    if draft is not None:
                        self._draft = draft_models.build(draft, dtype)
                        loader.bind(self._draft, drafts)
                else:
                    self._model = loader.load_model(
                        folder, self._model_config, dtype, self.device, self.member.shard
                    )
                    if draft is not None:
                        self._draft = draft_models.load(draft, dtype, self.device)
                if isinstance(self._model, Decoder):
                    self._model.group = self.member.group
            if self.member.follows:
                return
            if self.member.leader is not None:
                with self._stage("ranks_loaded"):
                    self.member.leader.loaded()
            with self._stage("kernels"):
                load_kernels(self._model, self.member.leader, self.kv_dtype)
                if self._draft is not None:
                    load_kernels(self._draft, kv_dtype=self.kv_dtype)

    def take_over(self, quick: bool = False, handover: bytes | None = None) -> EngineCore:
        """Create the KV pool and the engine core, and warm it up.

        Releases everything if it fails. ``quick`` skips the trial of the largest steps, which a
        predecessor with the same sizes has done, and captures all graphs while serving. It also
        accepts the predecessor's ``handover``; if that is refused, :attr:`refusal` says why.
        """
        with self._all_or_nothing():
            assert self._model is not None
            assert self.device is not None
            with self._stage("kv_pool"):
                adapters = self._adapters()
                free = self.member.least(self.device_free())
                if adapters is not None and free is not None:
                    free = max(0, free - adapters.bytes_bound)
                draft = None if self._draft is None else self._draft.kv
                self.settings = sizes.resolve(
                    self.config,
                    self._model.kv,
                    loader.positions(self._model_config),
                    self.kv_dtype,
                    self.device,
                    None if self._pool is None else self._pool.nbytes,
                    free,
                    draft,
                )
                self.map_pool(self.settings.kv_bytes(self._model.kv, self.kv_dtype, draft))
                own = self.settings.kv_bytes(self._model.kv, self.kv_dtype)
                self._runner = Runner(
                    self._model,
                    self.settings.num_blocks,
                    self.settings.block_size,
                    None if self._pool is None else self._pool[:own],
                    self.member.leader,
                    self.kv_dtype,
                )
                self._runner.adapters = adapters
                self._claim = self.claim_pool()
                tables = self._accepted(handover) if quick else []
                pool = BlockPool(
                    self.settings.num_blocks,
                    self.settings.block_size,
                    [table.blocks for table in tables],
                )
                scheduler = Scheduler(
                    pool,
                    self.settings.max_num_seqs,
                    self.settings.max_num_batched_tokens,
                    self.settings.max_model_len,
                    media_owners.encoder_cache(self._model, self.config, self.settings),
                )
                self.engine = self.engine_type(
                    self._runner,
                    scheduler,
                    Grammars(self.vocabulary, trials=self.trials),
                    self.config.media_cache_bytes,
                    drafting.of_settings(
                        self.config.speculative,
                        self.settings.max_num_seqs,
                        self._draft_model(pool, own),
                    ),
                )
                if handover is not None and self.refusal is None:
                    self.engine.inheritance = Inheritance(tables, pool)
                self._add_offload()
                self._register_owners()
            if not quick:
                with self._stage("warm_up"):
                    warm_up(self.engine)
            with self._stage("graphs"):
                blocks = self.engine.pool.blocks_for(self.settings.max_model_len)
                rows, limits = self.engine.max_rows, self.settings
                longest = min(limits.max_num_batched_tokens, limits.max_model_len)
                self._runner.capture_graphs(rows, blocks, quick, longest)
                if (drafts := self._drafts()) is not None:
                    drafts.capture_graphs(rows, blocks, quick, longest)
            with self._stage("freeze"):
                self.freeze()
                self.member.frozen()
            return self.engine

    def _sums(self, dtype: torch.dtype) -> SumShape:
        """Return the shape of the all-reduce of a step."""
        assert self.device is not None
        columns = loader.text_config(self._model_config).hidden_size
        return SumShape(sizes.most_rows(self.config, self.device), columns, dtype)

    def _map_weights(self) -> dict[str, torch.Tensor]:
        """Return the weight server's weights, and map its KV pool if it has one."""
        assert self._mapping is not None
        tensors = self._mapping.tensors()
        self.map_pool()
        return tensors

    def map_pool(self, nbytes: int = 0) -> torch.Tensor | None:
        """Return the weight server's memory for this rank's KV pool, uint8 [bytes].

        If it has none, it allocates ``nbytes``, unless that is 0. None if this process makes the
        pool.
        """
        if self._mapping is not None and self._pool is None:
            self._pool = self._mapping.pool(nbytes)
        return self._pool

    def claim_pool(self) -> rank_ipc.PoolMade:
        """Declare this process as a writer of the weight server's KV pool. Return the reply."""
        if self._mapping is None or self._pool is None:
            return rank_ipc.PoolMade()
        alone = self._mapping.claim_pool()
        return rank_ipc.PoolMade(self._mapping.identity, self._mapping.pool_identity, alone)

    def hand_over(self) -> bytes:
        """Return what a successor needs to continue with the KV blocks of running requests.

        The engine must be at rest, and only :meth:`shutdown` may follow. Raises
        :class:`HandoverRefused`.
        """
        assert self.engine is not None
        if self._pool is None:
            raise HandoverRefused(Outcome.NO_HOLDER, "the KV pool is this worker's own")
        return export.export_tables(self.engine, self._layout())

    def _accepted(self, handover: bytes | None) -> list[Table]:
        """Return the tables of ``handover``; empty if it is refused."""
        assert self._runner is not None
        assert self.settings is not None
        if handover is None:
            return []
        try:
            if self._pool is None:
                raise HandoverRefused(Outcome.NO_HOLDER, "the KV pool is this worker's own")
            if not all(claim.alone for claim in self._claims()):
                raise HandoverRefused(Outcome.UNFENCED, "another worker may write to the KV pool")
            return inheritance.validate_tables(
                handover, self._layout(), self._runner, self.settings.max_num_seqs
            )
        except HandoverRefused as error:
            self.refusal = Refusal(error.outcome, str(error))
        except (RuntimeError, OSError) as error:
            if self.member.lost:
                raise
            self.refusal = Refusal(Outcome.FAILED, f"{type(error).__name__}: {error}")
        log.warning("%s: %s", self.refusal.outcome, self.refusal.message)
        return []

    def _claims(self) -> list[rank_ipc.PoolMade]:
        assert self._runner is not None
        return [self._claim, *self._runner.pools]

    def _layout(self) -> Layout:
        assert self._model is not None
        assert self.settings is not None
        return Layout(
            b"".join(claim.weights for claim in self._claims()),
            b"".join(claim.memory for claim in self._claims()),
            str(self.kv_dtype),
            (self._model.kv.layers, self._model.kv.heads, self._model.kv.dim),
            self.settings.block_size,
            self.settings.num_blocks,
            self.member.shard.size,
        )

    def freeze(self) -> None:
        """End the start: exempt existing objects from garbage collection until :meth:`shutdown`."""
        self._thresholds = gc.get_threshold()
        frozen.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.collections.start()

    @property
    def model(self) -> Model:
        """Model of this rank, after :meth:`prepare`."""
        assert self._model is not None
        return self._model

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the KV pool, after :meth:`prepare`."""
        assert self._kv_dtype is not None
        return self._kv_dtype

    def device_free(self) -> int | None:
        """Return the free bytes of the device; None on a CPU."""
        if self.device is None or self.device.type != "cuda":
            return None
        return int(torch.cuda.mem_get_info(self.device)[0])

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.shutdown()
            # The traceback's frames reference what they were building.
            traceback.clear_frames(error.__traceback__)
            raise

    def _stage(self, name: str) -> AbstractContextManager[None]:
        self._on_stage(name)
        return _timed(self.stages_s, name)

    def _ending(self, name: str) -> AbstractContextManager[None]:
        return _timed(self.ended_s, name)

    def _ask_for_weights(self, folder: Path, dtype: torch.dtype) -> OwnModel | None:
        """Return a model without tensors, for the weights of the weight server.

        None if this process loads them: without a weight server, or if only transformers can build
        the model.
        """
        if not self.config.weights:
            return None
        model = loader.build(folder, self._model_config, dtype, self.member.shard)
        if model is not None:
            self._mapping = WeightMapping(self.config.weights, self.member.shard.rank)
        return model

    @property
    def mapped_host_bytes(self) -> int:
        """Bytes of the weight server's shared memory that are mapped here."""
        if self._mapping is None or self.device is None or self.device.type == "cuda":
            return 0
        return self._mapping.nbytes + self._mapping.pool_nbytes

    def _adapters(self) -> LoadedAdapters | None:
        """Return the adapter slots; None if adapters are disabled."""
        if not self.config.max_loras or not isinstance(self._model, Decoder):
            return None
        return LoadedAdapters(self._model, self.config.max_loras, self.config.max_lora_rank)

    def _draft_model(self, pool: BlockPool, begin: int) -> DraftModel | None:
        """Return the draft model, whose KV blocks begin at byte ``begin`` of the pool.

        None if unused.
        """
        if self._draft is None:
            return None
        assert self.settings is not None
        forward = Forward(
            self._draft,
            self.settings.num_blocks,
            self.settings.block_size,
            None if self._pool is None else self._pool[begin : begin + self._draft_kv_bytes],
            self.kv_dtype,
        )
        return DraftModel(
            forward,
            pool,
            self.settings.max_num_batched_tokens,
            loader.text_config(self._model_config).vocab_size,
            self._draft.spec.vocabulary,
        )

    @property
    def _draft_kv_bytes(self) -> int:
        assert self.settings is not None
        assert self._draft is not None
        return self.settings.kv_bytes(self._draft.kv, self.kv_dtype)

    def _drafts(self) -> Forward | None:
        """Return the forward pass of the draft model; None without one."""
        assert self.engine is not None
        if self.engine.speculation is None or self.engine.speculation.draft_model is None:
            return None
        return self.engine.speculation.draft_model.forward

    def _add_offload(self) -> None:
        assert self.engine is not None
        if not self.config.kv_offload_bytes:
            return
        runner = self.engine.runner
        assert runner.kv is not None
        try:
            offload = Offload.of_bytes(
                self.engine.pool, runner.kv, self.config.kv_offload_bytes, runner.kv_scales
            )
        except ValueError as error:
            raise SettingsError(f"--kv-offload-bytes: {error}") from None
        self.engine.scheduler.offload = offload
        copies = offload.copies
        self.ledger.register("kv_offload", MemoryKind.HOST, lambda: copies.nbytes, copies.nbytes)

    def _register_owners(self) -> None:
        assert self.engine is not None
        assert self.device is not None
        assert self._model is not None
        tensors = MemoryKind.DEVICE if self.device.type == "cuda" else MemoryKind.HOST
        runner, pool, size = self.engine.runner, self.engine.pool, self.member.shard.size
        if self._mapping is not None:
            weights, process = self._mapping.nbytes * size, Role.WEIGHT_SERVER
        else:
            tensors_of_rank = self._model.parameters_by_name().values()
            weights = sum(tensor.nbytes for tensor in tensors_of_rank) * size
            process = Role.WORKER
        draft = self._draft
        if draft is not None:
            drafted = sum(tensor.nbytes for tensor in draft.parameters_by_name().values())
            weights -= drafted if self._mapping is not None else 0
            self.ledger.register("draft_weights", tensors, lambda: drafted, drafted, process)
        self.ledger.register("weights", tensors, lambda: weights, weights, process)
        keeper = Role.WORKER if self._pool is None else Role.WEIGHT_SERVER
        self.ledger.register("kv_pool", tensors, lambda: runner.kv_bytes, runner.kv_bytes, keeper)
        drafts = self._drafts()
        if drafts is not None:
            bound = drafts.kv_bytes
            self.ledger.register("draft_kv_pool", tensors, lambda: drafts.kv_bytes, bound, keeper)
        if tensors is MemoryKind.DEVICE:
            member = self.member

            def graph_bytes() -> int:
                own = runner.graph_bytes + member.graph_bytes()
                return own + (0 if drafts is None else drafts.graph_bytes)

            self.ledger.register("cuda_graphs", tensors, graph_bytes, None)
            if size > 1:
                shared = member.nbytes * size
                self.ledger.register("rank_sums", tensors, lambda: member.nbytes * size, shared)
        self.ledger.register(
            "prefix_cache", MemoryKind.HOST, pool.index_bytes, pool.index_bytes_bound
        )
        if (adapters := runner.adapters) is not None:
            self.ledger.register(
                "lora_adapters", tensors, lambda: adapters.bytes, adapters.bytes_bound
            )
        grammars = self.engine.grammars
        self.ledger.register(
            "grammar_cache", MemoryKind.HOST, lambda: grammars.bytes, grammars.bytes_bound
        )
        self.ledger.register("requests", MemoryKind.HOST, self.engine.request_bytes, None)
        media_owners.register_owners(self.ledger, self.engine, self._model, tensors)

    def shutdown(self) -> None:
        """Release everything on every rank. Idempotent.

        On CUDA nothing is released once a rank is lost: only the end of this process ends the
        kernels that wait for it (NCCL 2.28.9 did not give up within 60 s on an H200). The frontend
        kills it.
        """
        with self._ending("owners"):
            self.ledger.clear()
            self.collections.stop()
            if self._thresholds is not None:
                gc.set_threshold(*self._thresholds)
                frozen.unfreeze()
                self._thresholds = None
        cuda = self.device is not None and self.device.type == "cuda"
        if self.member.lost:
            if cuda:
                return
            self.member.give_up()
        if cuda:
            with self._ending("device"), contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.device)  # a lost device cannot be waited for
        with self._ending("engine"):
            if self.engine is not None:
                self.engine.close()
                self.engine = None
            if self._runner is not None:
                self._runner.close()
                self._runner = None
        with self._ending("ranks"):
            self.member.leave()
        with self._ending("models"):
            if self._model is not None:
                self._model.close()
                self._model = None
            if self._draft is not None:
                self._draft.close()
                self._draft = None
        self._pool = None
        with self._ending("mappings"):
            if self._mapping is not None:
                self.fenced = self._mapping.end() and self.member.fenced
                self._mapping = None
        with self._ending("compiler"):
            if has_compiled():
                torch.compiler.reset()
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        if cuda:
            with self._ending("caches"):
                release_device_caches()

    def left(self) -> tuple[int | None, int | None]:
        """Return the bytes still allocated on the devices of all ranks, and their baselines.

        Call it after :meth:`shutdown`. None on a CPU, or if a rank did not report.
        """
        return self.member.left(self.device_allocated(), self.device_baseline)

    def device_allocated(self) -> int | None:
        """Return the bytes that torch and the process group have allocated on the device.

        None on a CPU.
        """
        if self.device is None or self.device.type != "cuda":
            return None
        return torch.cuda.memory_allocated(self.device) + self.member.nbytes


def has_compiled() -> bool:
    """Report whether torch.compile was used in this process.

    Resetting an unused compiler would import all of it, which takes 2 s of every restart.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters)


def make_context(device: torch.device) -> None:
    """Create the device's context and make ``device`` current in this thread."""
    if device.type == "cuda":
        with primary_context(device.index):
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)


def device_baseline(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the allocated bytes once the context exists and its libraries have run.

    None on a CPU. Measures for ``dtype``, because each dtype loads kernels of its own.
    """
    if device.type != "cuda":
        return None
    square = torch.ones(64, 64, dtype=dtype, device=device)
    torch.nn.functional.linear(square, square)
    torch.cuda.synchronize(device)
    del square
    release_device_caches()
    return torch.cuda.memory_allocated(device)


def release_device_caches() -> None:
    """Free torch's caches: cuBLAS workspaces, free segments and pinned memory."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


@contextlib.contextmanager
def _timed(stages_s: dict[str, float], name: str) -> Iterator[None]:
    """Record the duration of the block in ``stages_s``, unless it fails."""
    begun = time.monotonic()
    yield
    stages_s[name] = round(time.monotonic() - begun, 4)
