"""The admin protocol: the messages between a supervisor and an engine.

The engine is the server, and the supervisor is the client. The protocol is HTTP with JSON bodies on
the pod's loopback interface, under ``/admin/v1``, with a bearer token from a shared file. This
module defines the bodies.

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
contains only values that differ from the defaults, and the defaults never change. An engine rejects
a request with an unknown field or value (400).
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
"""Bytes or a count; the maximum, nine petabytes, exceeds any machine, and sums fit into 64 bits."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class Epoch(msgspec.Struct, frozen=True, order=True):
    """Period between two starts of an engine's worker, as ``BOOT_ID:NUMBER``.

    Each start of the engine process has a random ``boot_id``. ``number`` counts the workers that
    this process has started.
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
            raise ValueError(
                f"epoch {text!r} is not valid: use BOOT_ID:NUMBER, for example 3f9c21d0:4"
            )
        return cls(boot_id, value)


class EngineState(OpenEnum):
    """State of an engine; a warming, serving or restarting engine accepts new requests."""

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
    """Action that an engine supports; the supervisor skips all other actions."""

    TRIM = "trim"
    DRAIN = "drain"
    RESTART_WORKER = "restart_worker"
    RESTART_ENGINE = "restart_engine"
    CARRY = "carry"
    AUDIT = "audit"
    DIAGNOSTICS = "diagnostics"
    STANDBY = "standby"


STANDBY_PROCESS_NAME = "standby"
"""Value of :attr:`ProcessMemory.name` for a standby worker."""


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
    """Memory that one owner in the engine declares.

    ``bound`` is the largest size that it can ever have; null if unknown. ``process`` is the role of
    the process that holds the memory.
    """

    owner: str
    kind: MemoryKind
    bytes: Number
    bound: Number | None = None
    process: Role = Role.WORKER


class ProcessMemory(msgspec.Struct, omit_defaults=True):
    """Memory of one process of the engine, as the process reports it.

    Attributes:
        malloc_in_use: Bytes in use by glibc's ``mallinfo2`` (``uordblks`` plus ``hblkhd``).
        malloc_retained: Free bytes that malloc keeps (``fordblks``).
        python_objects: The size of the pymalloc blocks, which are not part of malloc's memory.
        py_blocks: The number of pymalloc blocks (``sys.getallocatedblocks()``).
        shared: Shared memory that the process has mapped and owns.
        full_collections: The number of garbage collections of the oldest generation since the
            warm-up.
        full_collected: The number of objects that these collections freed.
        name: An external engine's name for the process, such as ``EngineCore``; null if unknown.
            For a standby worker of Plimsoll's engine, it is :data:`STANDBY_PROCESS_NAME`.
        private: Memory that no other process shares; null if the process inherited no pages by
            fork.

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
    """Names that an external engine gives to its processes; null if unknown.

    Attributes:
        serves: The process that serves HTTP.
        steps: The process that schedules the steps.
        runs: The processes that run the model.

    """

    serves: str | None = None
    steps: str | None = None
    runs: str | None = None


class DeviceMemory(msgspec.Struct, omit_defaults=True):
    """Memory of an accelerator as the engine reports it.

    ``used`` and ``total`` cover the whole device, and ``torch_allocated`` and ``torch_reserved``
    only the worker's allocator.
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
        compiling: The part of ``waiting`` that only waits for the compilation of grammars; null if
            unknown.
        deferred: Requests that wait for something outside the engine, such as the KV blocks of a
            prefill engine.
        inflight: Requests that the frontend has accepted and not yet completed. The number may
            exceed ``running + waiting`` while the worker accepts no requests.
        distinct_prompts_total: Prompts that differ from all recent prompts.
        adapters_total: Number of times that an adapter was loaded.
        kv_usage_ratio: The used share of the KV cache, from 0 to 1. For several caches of unknown
            sizes, this is the share of the fullest cache.
        kv_usage_least_ratio: The share of the emptiest cache; null if there is only one cache.
        kv_lost_ratio: The share of blocks that belong to no pending request and no tracked
            transfer.
        offload_lost_ratio: The share of host blocks that no transfer pins and that cannot be
            reused.
        encoder_lost_ratio: The share of the encoder cache's budget that no running request holds,
            including memory outside the cache.
        kv_lease_s: The longest time in seconds for which blocks of a finished request wait for
            another engine to read them; null if no blocks wait.
        paused: Whether someone has paused the engine. An engine that completes steps may leave this
            null.

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
    """Status of the standby worker; ``error`` says why a requested standby worker is absent."""

    state: StandbyState
    error: str | None = None


class Status(msgspec.Struct, omit_defaults=True):
    """Complete status of an engine. The frontend returns it even while the worker hangs.

    Attributes:
        report_age_s: The age of the worker's values (ledger, memory, steps); null if no worker has
            reported in this epoch.
        injections: The faults that a test has enabled. A production engine has none.
        load_age_s: The age of ``load`` in seconds; null if the load is always current.
        probed: Whether all processes report their memory through a probe, and not only the worker.
        parts: The names of an external engine's processes.
        kv_handover: The result of the last planned restart, as in :class:`Operation`.
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
    """Result of an audit of all ledgers, which is stricter for an ``idle`` engine."""

    epoch: str
    idle: bool
    rules: list[str]
    findings: list[AuditFinding]


class Scope(StrEnum):
    """Part of the engine that a restart replaces."""

    WORKER = "worker"
    ENGINE = "engine"


class DrainMode(StrEnum):
    """Treatment of running requests: finish them, carry them over a restart, or abort them."""

    FINISH = "finish"
    CARRY = "carry"
    ABORT = "abort"


# An engine in another epoch than ``expected_epoch`` rejects the request (409).
class _Request(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
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
    """Restart the worker, or end the engine process so that its container restarts.

    Running requests continue in the next epoch if ``scope`` is ``worker`` and ``carry`` is true. If
    ``scope`` is ``engine``, they are aborted after ``deadline_s``. If ``keep_weights`` is false,
    the weights are loaded from the checkpoint again.
    """

    scope: Scope = Scope.WORKER
    keep_weights: bool = True
    carry: bool = True
    deadline_s: Seconds = 30.0


class ShutdownRequest(_Request, kw_only=True):
    """Drain for at most ``deadline_s``, free all memory, and exit with status 0."""

    deadline_s: Seconds = 30.0


class StandbyRequest(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Request a standby worker for the next ``lease_s`` seconds; 0 stops it at once.

    Another request renews this lease, which ends with the epoch. An engine without
    :attr:`Capability.STANDBY` rejects the request (409).
    """

    expected_epoch: str
    lease_s: Seconds


class OperationState(OpenEnum):
    """State of an operation; succeeded and failed are final."""

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

    Attributes:
        carried_requests: The number of requests that a restarted worker continues.
        carried_kv_requests: The number of these requests that keep their keys and values.
        carried_prefill_tokens: The number of tokens that the new worker computes again for carried
            requests without their keys and values. Tokens of unfinished prompts do not count.
        kv_handover: ``handed_over``, or the reason why the keys and values were lost.

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
    """Body of an error response.

    ``code`` is a word in CamelCase that never changes. ``message`` says what to do.
    """

    code: str
    message: str
    epoch: str | None = None
