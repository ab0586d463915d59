"""The admin protocol: the messages between a supervisor and an engine.

It uses HTTP with JSON bodies on the pod's loopback interface, under ``/admin/v1``, with a bearer
token from a mounted file. This module defines the bodies. The engine is the server, and the
supervisor's adapter is the client.

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

The body of every error response is an :class:`ErrorBody`. The status is 400 for a malformed body,
401 for a missing or wrong token, and 404 for an unknown operation. It is 409 for a call that names
another epoch, or while another operation is in progress.

A key that is absent or null is unknown, never zero. Sizes are in bytes, times in seconds.

Engine and supervisor may have different versions. A response may have unknown fields, states and
capabilities (:mod:`plimsoll_api.open_enum`), and may omit every field that has a default. A request
contains only values that differ from the defaults, which never change. An engine rejects a request
with an unknown field or value (400), because it cannot do what was requested.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from plimsoll_api.open_enum import OpenEnum
from plimsoll_api.units import parse_whole_number

ADMIN_PREFIX = "/admin/v1"

OperationId = Annotated[
    str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
]
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Bytes or a count. The maximum, nine petabytes, exceeds any machine, and sums fit into 64 bits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Epoch(msgspec.Struct, frozen=True, order=True):
    """Period between two starts of an engine's worker.

    ``boot_id`` is random for each start of the engine process. ``number`` increases with each
    worker that it starts. The text form is ``BOOT_ID:NUMBER``.
    """

    boot_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.boot_id}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Parse ``BOOT_ID:NUMBER``. Raises ValueError for any other text."""
        boot_id, separator, number = text.rpartition(":")
        value = parse_whole_number(number)
        if not separator or not boot_id or value is None:
            raise ValueError(f"epoch {text!r}: expected BOOT_ID:NUMBER, for example 3f9c21d0:4")
        return cls(boot_id, value)


class EngineState(OpenEnum):
    """State of an engine. It accepts new requests while warming, serving and restarting."""

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
    """Capability of an engine. The supervisor skips actions that the engine does not support."""

    TRIM = "trim"
    DRAIN = "drain"
    RESTART_WORKER = "restart_worker"
    RESTART_ENGINE = "restart_engine"
    CARRY = "carry"
    AUDIT = "audit"
    DIAGNOSTICS = "diagnostics"
    STANDBY = "standby"


STANDBY_PROCESS_NAME = "standby"
"""Name by which Plimsoll's engine reports the memory of a standby worker's process."""


class Role(OpenEnum):
    """Role of one of the engine's processes."""

    FRONTEND = "frontend"
    ZYGOTE = "zygote"
    WORKER = "worker"
    WEIGHT_SERVER = "weight_server"
    OTHER = "other"


class MemoryKind(OpenEnum):
    """Kind of memory: host or device."""

    HOST = "host"
    DEVICE = "device"


class Diagnostic(StrEnum):
    """Kind of diagnostics."""

    STACKS = "stacks"
    GC = "gc"
    TRACEMALLOC = "tracemalloc"
    TORCH = "torch"


class LedgerEntry(msgspec.Struct, omit_defaults=True):
    """Memory of one owner in the engine.

    ``bound`` is the largest size that the memory can ever have; null if unknown. ``process`` is the
    role of the process that holds the memory.
    """

    owner: str
    kind: MemoryKind
    bytes: Number
    bound: Number | None = None
    process: Role = Role.WORKER


class ProcessMemory(msgspec.Struct, omit_defaults=True):
    """Memory of one process of the engine, as the process reports it.

    ``malloc_in_use`` and ``malloc_retained`` come from glibc's ``mallinfo2`` (in use: ``uordblks``
    plus ``hblkhd``; retained: ``fordblks``). ``py_blocks`` is the number of pymalloc blocks
    (``sys.getallocatedblocks()``). ``python_objects`` is the size of these blocks in bytes, which
    is not part of malloc's memory. ``shared`` is shared memory that the process mapped and owns.
    ``full_collections`` is the number of garbage collections of the oldest generation since the
    warm-up, and ``full_collected`` is the number of objects that they freed. ``name`` is an
    external engine's name for the process, such as ``EngineCore``; null if unknown. Plimsoll's
    engine names a standby worker :data:`STANDBY_PROCESS_NAME`. ``private`` is memory that the
    process shares with no other process; null if the process inherited no pages by fork.
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
        """Display name of the process: the engine's own name, or the role."""
        return self.name or self.role.value


class ProcessNames(msgspec.Struct, frozen=True, omit_defaults=True):
    """Names of an external engine's processes; None if unknown.

    ``serves`` is the name of the frontend, ``steps`` of the scheduler, and ``runs`` of the workers.
    """

    serves: str | None = None
    steps: str | None = None
    runs: str | None = None


class DeviceMemory(msgspec.Struct, omit_defaults=True):
    """Memory of an accelerator as the engine reports it.

    ``used`` and ``total`` come from ``cudaMemGetInfo`` and cover the whole device.
    ``torch_allocated`` and ``torch_reserved`` cover only the worker's allocator.
    """

    index: Number
    uuid: str | None = None
    used: Number | None = None
    total: Number | None = None
    torch_allocated: Number | None = None
    torch_reserved: Number | None = None


class Load(msgspec.Struct, omit_defaults=True):
    """Gauges and counters of an engine's load. Counters start at zero in each epoch.

    Attributes:
        compiling: Waiting requests that only wait for the compilation of their grammar; null if
            unknown.
        deferred: Requests that wait for something outside the engine, such as the KV blocks of a
            prefill engine.
        inflight: Requests that the frontend has accepted and not yet completed. The number may
            exceed ``running + waiting`` while the worker accepts no requests.
        distinct_prompts_total: Prompts that did not occur recently.
        adapters_total: Number of times that an adapter was loaded.
        kv_usage_ratio: The used share of the KV cache, from 0 to 1. With several caches of unknown
            size, this is the largest share.
        kv_usage_least_ratio: The smallest share of several caches; null for one cache.
        kv_lost_ratio: The share of blocks that belong to no pending request and no tracked
            transfer.
        offload_lost_ratio: The share of host blocks that no transfer pins and that cannot be
            reused.
        encoder_lost_ratio: The share of the encoder cache's budget that no running request holds,
            including memory outside the cache.
        kv_lease_s: The longest time in seconds for which blocks of a finished request wait for
            another engine to read them; null if no blocks wait.
        paused: Whether someone has paused the engine. An engine that completes steps may omit this
            field.

    """

    running: Number | None = None
    waiting: Number | None = None
    compiling: Number | None = None
    deferred: Number | None = None
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
    kv_lease_s: float | None = None
    paused: bool | None = None


class StandbyState(OpenEnum):
    """State of the standby worker."""

    ABSENT = "absent"
    PREPARING = "preparing"
    PREPARED = "prepared"


class StandbyStatus(msgspec.Struct, omit_defaults=True):
    """Status of the standby worker. ``error`` says why a requested standby is absent."""

    state: StandbyState
    error: str | None = None


class Status(msgspec.Struct, omit_defaults=True):
    """Complete status of an engine. The frontend returns it even while the worker hangs.

    Attributes:
        report_age_s: The age of the worker's values (ledger, memory, steps); null if no worker has
            reported in this epoch.
        injections: The faults that a test has enabled. A production engine has none.
        load_age_s: The age of ``load`` if the load is polled; null if the load is current.
        probed: Whether every process with a probe, not only the worker, reports its memory.
        parts: The names of an external engine's processes.
        kv_handover: The result of the last planned restart (:class:`Operation`).
        standby: The standby worker; null if the engine supports none.

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
    parts: ProcessNames | None = None
    worker_starts: int = 0
    report_age_s: float | None = None
    load_age_s: float | None = None
    restart_requested_by: str | None = None
    operation: str | None = None
    kv_handover: str | None = None
    standby: StandbyStatus | None = None


class AuditFinding(msgspec.Struct):
    """Problem that an audit found: two ledgers differ, or an owner exceeds its bound."""

    rule: str
    detail: str


class Audit(msgspec.Struct):
    """Result of an audit of all ledgers. If the engine is ``idle``, the audit is stricter."""

    epoch: str
    idle: bool
    rules: list[str]
    findings: list[AuditFinding]


class Scope(StrEnum):
    """Part of the engine that a restart replaces."""

    WORKER = "worker"
    ENGINE = "engine"


class DrainMode(StrEnum):
    """Treatment of running requests: finish them, carry them over the restart, or abort them."""

    FINISH = "finish"
    CARRY = "carry"
    ABORT = "abort"


class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base class of requests.

    An engine rejects a request if its epoch is not ``expected_epoch`` (409).
    """

    operation_id: OperationId
    expected_epoch: str


class TrimRequest(_Request, kw_only=True):
    """Free memory without affecting requests."""


class DrainRequest(_Request, kw_only=True):
    """Accept no new requests, and finish the running ones within ``deadline_s``."""

    mode: DrainMode = DrainMode.FINISH
    deadline_s: Seconds = 30.0


class ResumeRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Accept requests again after a drain."""

    expected_epoch: str


class RestartRequest(_Request, kw_only=True):
    """Restart the worker in place, or end the engine process so that its container restarts.

    With ``scope: engine``, running requests are aborted after ``deadline_s``. With ``scope:
    worker`` and ``carry``, they continue in the next epoch. Without ``keep_weights``, the weights
    are loaded from the checkpoint again.
    """

    scope: Scope = Scope.WORKER
    keep_weights: bool = True
    carry: bool = True
    deadline_s: Seconds = 30.0


class ShutdownRequest(_Request, kw_only=True):
    """Drain for at most ``deadline_s``, free all memory, and exit with status 0."""

    deadline_s: Seconds = 30.0


class StandbyRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Request a standby worker for the next ``lease_s`` seconds.

    Another request renews this lease, and ``lease_s: 0`` stops the standby at once. The lease ends
    with the epoch. An engine without :attr:`Capability.STANDBY` rejects the request (409).
    """

    expected_epoch: str
    lease_s: Seconds


class OperationState(OpenEnum):
    """State of an operation. Succeeded and failed are final."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class OperationStep(msgspec.Struct, omit_defaults=True):
    """Step of an operation, with the memory before and after it if it was measured."""

    name: str
    duration_s: float
    before_bytes: int | None = None
    after_bytes: int | None = None
    detail: str | None = None


class Operation(msgspec.Struct, omit_defaults=True):
    """Long-running call. A request with a known ``operation_id`` returns the existing operation.

    After a restart of the worker, ``carried_requests`` requests continue in the new worker. For
    ``carried_kv_requests`` of them, the new worker reuses the old worker's keys and values. For the
    other requests, it recomputes ``carried_prefill_tokens`` tokens, not counting unfinished
    prompts. ``kv_handover`` is ``handed_over``, or the reason why the keys and values were lost.
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
    """Body of an error response. ``code`` is stable, in CamelCase; ``message`` says what to do."""

    code: str
    message: str
    epoch: str | None = None
