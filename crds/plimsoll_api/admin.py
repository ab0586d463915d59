"""The admin protocol: what a supervisor and an engine say to each other.

HTTP with JSON bodies on the pod's loopback, under ``/admin/v1``, with a bearer token from a
mounted file. This module holds the bodies only; the engine serves them and the supervisor's
adapter sends them.

==========================  =======================================================
``GET  /status``            :class:`Status`
``GET  /audit``             :class:`Audit`
``GET  /diagnostics/KIND``  text; KIND is one of :class:`Diagnostic`
``GET  /operations/ID``     :class:`Operation`
``POST /trim``              :class:`TrimRequest`    -> 202 :class:`Operation`
``POST /drain``             :class:`DrainRequest`   -> 202 :class:`Operation`
``POST /resume``            :class:`ResumeRequest`  -> 200 :class:`Status`
``POST /restart``           :class:`RestartRequest` -> 202 :class:`Operation`
``POST /shutdown``          :class:`ShutdownRequest`-> 202 :class:`Operation`
``POST /standby``           :class:`StandbyRequest` -> 200 :class:`Status`
==========================  =======================================================

Every failure answers with an :class:`ErrorBody`: 400 for a body that cannot be read, 401 for a
missing or wrong token, 404 for an unknown operation, 409 for a call that was decided on another
epoch or that meets another operation under way.

A key that is absent or null is unknown, never zero. Sizes are bytes, times are seconds.

The two may have different versions. An answer may have fields, states and capabilities that the
supervisor does not know (:mod:`plimsoll_api.open_enum`), and lack every field that has a default. A
request names only what differs from the defaults, which never change; an engine refuses a request
with a field or word that it does not know (400), for it cannot do what was asked.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.units import whole_number

ADMIN_PREFIX = "/admin/v1"

OperationId = Annotated[
    str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Bytes or a count: nine petabytes are more than any machine has, and sums stay within 64 bits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Epoch(msgspec.Struct, frozen=True, order=True):
    """The time between two (re)starts of an engine's worker.

    ``boot_id`` is random for each start of the engine process; ``number`` grows by one with each
    worker it starts. On the wire and in Kubernetes objects an epoch is ``BOOT_ID:NUMBER``.
    """

    boot_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.boot_id}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Parse ``BOOT_ID:NUMBER``; raise ValueError for anything else."""
        boot_id, separator, number = text.rpartition(":")
        value = whole_number(number)
        if not separator or not boot_id or value is None:
            raise ValueError(f"epoch {text!r}: expected BOOT_ID:NUMBER, for example 3f9c21d0:4")
        return cls(boot_id, value)


class EngineState(OpenEnum):
    """Where an engine stands. New requests are taken in while warming, serving and restarting."""

    STARTING = "starting"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Capability(OpenEnum):
    """What an engine can do; the remediation ladder skips the rungs it cannot."""

    TRIM = "trim"
    DRAIN = "drain"
    RESTART_WORKER = "restart_worker"
    RESTART_ENGINE = "restart_engine"
    CARRY = "carry"
    AUDIT = "audit"
    DIAGNOSTICS = "diagnostics"
    STANDBY = "standby"


STANDBY = "standby"
"""The name of the process that is prepared to take a worker's place."""


class Role(OpenEnum):
    """What a process of the engine is for."""

    FRONTEND = "frontend"
    ZYGOTE = "zygote"
    WORKER = "worker"
    WEIGHT_SERVER = "weight_server"
    OTHER = "other"


class MemoryKind(OpenEnum):
    """Which memory a ledger entry or a budget speaks of."""

    HOST = "host"
    DEVICE = "device"


class Diagnostic(StrEnum):
    """What can be asked of ``/diagnostics``."""

    STACKS = "stacks"
    GC = "gc"
    TRACEMALLOC = "tracemalloc"
    TORCH = "torch"


class LedgerEntry(msgspec.Struct, omit_defaults=True):
    """One owner of memory and what it says it holds.

    ``bound`` is the most it will ever hold; null where the owner cannot say.
    ``process`` is the role of the process that holds it.
    """

    owner: str
    kind: MemoryKind
    bytes: Number
    bound: Number | None = None
    process: Role = Role.WORKER


class ProcessMemory(msgspec.Struct, omit_defaults=True):
    """One process of the engine, by its own account.

    ``malloc_in_use`` and ``malloc_retained`` are glibc's ``mallinfo2`` (in use: ``uordblks`` and
    ``hblkhd``; retained: ``fordblks``). ``py_blocks`` is ``sys.getallocatedblocks()``, a count.
    ``python_objects`` is the size of those blocks in bytes, which live in pymalloc's own arenas
    and so outside malloc. ``shared`` is shared memory mapped by the process and owned by it.
    ``full_collections`` counts collections of the oldest generation since the process was warm,
    ``full_collected`` the objects that they found: in steady state none. ``name`` is what an engine
    that is not ours calls such a process, such as ``EngineCore``; null where that is not known. Our
    engine calls a worker that waits for its turn :data:`STANDBY`. ``private`` is the memory that no
    other process has as well; null where the pages that it was forked with do not matter.
    """

    role: Role
    pid: Number
    malloc_in_use: Number | None = None
    malloc_retained: Number | None = None
    python_objects: Number | None = None
    py_blocks: Number | None = None
    shared: Number | None = None
    full_collections: Number | None = None
    full_collected: Number | None = None
    name: str | None = None
    private: Number | None = None

    @property
    def label(self) -> str:
        """For people: the engine's own name for it, or its role."""
        return self.name or self.role.value


class Parts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Roles of an external engine's processes: which answers, which steps, which runs the model.

    Each field has the name that the engine gives the process; None where that is unknown.
    """

    serves: str | None = None
    steps: str | None = None
    runs: str | None = None


class DeviceMemory(msgspec.Struct, omit_defaults=True):
    """One accelerator as the engine sees it.

    ``used`` and ``total`` come from ``cudaMemGetInfo`` and speak of the whole device;
    ``torch_allocated`` and ``torch_reserved`` of the worker's allocator alone.
    """

    index: Number
    uuid: str | None = None
    used: Number | None = None
    total: Number | None = None
    torch_allocated: Number | None = None
    torch_reserved: Number | None = None


class Load(msgspec.Struct, omit_defaults=True):
    """Gauges and counters of work. Counters start at zero with each epoch.

    ``inflight`` counts requests that the frontend accepted and has not yet answered; it may be
    above ``running + waiting`` while the worker does not take them in. ``compiling`` counts those
    of the waiting ones that wait for the compilation of their grammar alone, for which no step is
    made; null where that is not known. ``kv_usage_ratio`` is the share of the key-value cache that
    is in use, from 0 to 1. Of several caches whose sizes are unknown it is the largest share, and
    ``kv_usage_least_ratio`` the smallest; null where they are one. ``kv_lost_ratio`` is the
    share that is held by no request that somebody waits for and by no transfer that is looked
    after. ``offload_lost_ratio`` is the share of the host's blocks that is pinned by no such
    transfer, so that nothing can take its place, and ``encoder_lost_ratio`` the share of the
    encoder cache's budget that is held by no request that runs, with what lies outside of it.
    ``distinct_prompts_total`` counts prompts that were not seen lately, ``adapters_total`` loads of
    adapters. ``paused`` is true while
    somebody keeps the engine from making steps; an engine that makes some need not say.
    """

    running: Number | None = None
    waiting: Number | None = None
    compiling: Number | None = None
    inflight: Number | None = None
    requests_total: Number | None = None
    aborted_total: Number | None = None
    errors_total: Number | None = None
    images_total: Number | None = None
    audios_total: Number | None = None
    distinct_prompts_total: Number | None = None
    adapters_total: Number | None = None
    prompt_tokens_total: Number | None = None
    generation_tokens_total: Number | None = None
    steps_total: Number | None = None
    preemptions_total: Number | None = None
    kv_usage_ratio: float | None = None
    kv_usage_least_ratio: float | None = None
    kv_lost_ratio: float | None = None
    offload_lost_ratio: float | None = None
    encoder_lost_ratio: float | None = None
    paused: bool | None = None


class StandbyState(OpenEnum):
    """How far the standby worker is."""

    ABSENT = "absent"
    PREPARING = "preparing"
    PREPARED = "prepared"


class StandbyStatus(msgspec.Struct, omit_defaults=True):
    """The standby worker. ``error`` says why there is none although one is wanted."""

    state: StandbyState
    error: str | None = None


class Status(msgspec.Struct, omit_defaults=True):
    """An engine's whole account of itself. Answered by the frontend, also while a worker hangs.

    ``report_age_s`` is the age of the worker's part (ledger, its process memory, steps); null
    where no worker has reported in this epoch. ``injections`` names the faults that were
    switched on for a test, so that nobody takes a laboratory for a production service.
    ``load_age_s`` is the age of ``load`` where it was read at intervals; null where it is of now.
    ``probed`` says that every process that carries a probe accounts for itself, and not the worker
    alone. ``parts`` is set for engines that are not ours. ``kv_handover`` is that of the last
    planned restart (:class:`Operation`). ``standby`` is null for an engine that never has one.
    """

    state: EngineState
    epoch: str
    version: str
    model: str
    uptime_s: float
    load: Load
    processes: list[ProcessMemory] = []
    devices: list[DeviceMemory] = []
    ledger: list[LedgerEntry] = []
    capabilities: list[Capability] = []
    injections: list[str] = []
    probed: bool = False
    parts: Parts | None = None
    worker_starts: int = 0
    report_age_s: float | None = None
    load_age_s: float | None = None
    restart_requested_by: str | None = None
    operation: str | None = None
    kv_handover: str | None = None
    standby: StandbyStatus | None = None


class AuditFinding(msgspec.Struct):
    """Two ledgers that disagree, or an owner outside its bound."""

    rule: str
    detail: str


class Audit(msgspec.Struct):
    """The outcome of holding every ledger against every other. ``idle`` says how strict it was."""

    epoch: str
    idle: bool
    rules: list[str]
    findings: list[AuditFinding]


class Scope(StrEnum):
    """How much of the engine a restart renews."""

    WORKER = "worker"
    ENGINE = "engine"


class DrainMode(StrEnum):
    """What becomes of running requests: they finish, are carried over a restart, or are aborted."""

    FINISH = "finish"
    CARRY = "carry"
    ABORT = "abort"


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """``expected_epoch`` is the fence: an engine in another epoch refuses the call (409)."""

    operation_id: OperationId
    expected_epoch: str


class TrimRequest(_Request, kw_only=True):
    """Give back what can be given back without disturbing a request."""


class DrainRequest(_Request, kw_only=True):
    """Take no new requests; see the running ones to their end before ``deadline_s``."""

    mode: DrainMode = DrainMode.FINISH
    deadline_s: Seconds = 30.0


class ResumeRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Serve again after a drain."""

    expected_epoch: str


class RestartRequest(_Request, kw_only=True):
    """Renew the worker in place, or end the engine process so that its container restarts.

    With ``scope: engine`` running requests end before ``deadline_s`` or are aborted; with
    ``scope: worker`` and ``carry`` they go on in the next epoch. Without ``keep_weights`` the
    weights are dropped as well and loaded from the checkpoint again.
    """

    scope: Scope = Scope.WORKER
    keep_weights: bool = True
    carry: bool = True
    deadline_s: Seconds = 30.0


class ShutdownRequest(_Request, kw_only=True):
    """Drain until ``deadline_s``, give everything back, exit with status 0."""

    deadline_s: Seconds = 30.0


class StandbyRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Keep a worker prepared for the next restart, for ``lease_s`` seconds from now on.

    Again renews the lease; with 0 the worker is given back at once. The lease ends with the epoch.
    An engine without :attr:`Capability.STANDBY` refuses it (409).
    """

    expected_epoch: str
    lease_s: Seconds


class OperationState(OpenEnum):
    """How far an operation is. The last two are final."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class OperationStep(msgspec.Struct, omit_defaults=True):
    """One step of an operation and what it gave back, where that was measured."""

    name: str
    duration_s: float
    before_bytes: int | None = None
    after_bytes: int | None = None
    detail: str | None = None


class Operation(msgspec.Struct, omit_defaults=True):
    """A long call. The same ``operation_id`` again returns the same operation.

    Of a restart of the worker: ``carried_requests`` went on in the new worker, and
    ``carried_kv_requests`` of them with the keys and values of the old one. Of the rest
    ``carried_prefill_tokens`` are computed again; prompts that were unfinished do not count.
    ``kv_handover`` says what became of the keys and values: ``handed_over``, or why not.
    """

    id: str
    kind: str
    state: OperationState
    epoch_before: str
    started_at: float
    epoch_after: str | None = None
    finished_at: float | None = None
    steps: list[OperationStep] = []
    carried_requests: int | None = None
    carried_kv_requests: Number | None = None
    carried_prefill_tokens: Number | None = None
    kv_handover: str | None = None
    error: str | None = None


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """Every failure. ``code`` is CamelCase and stable; ``message`` says what to do."""

    code: str
    message: str
    epoch: str | None = None
