"""Audit of the whole engine: the rules of the worker and of the frontend."""

from __future__ import annotations

import secrets

from plimsoll_api.admin import Audit, AuditFinding
from plimsoll_engine.caches.sender import MediaCacheSender
from plimsoll_engine.frontend.async_engine import AsyncEngine, NoAnswerError
from plimsoll_engine.messages import worker_ipc
from plimsoll_engine.process.rules import find_method_caches, freeze_counter

AUDIT_TIMEOUT_S = 5.0

LEDGER_BOUNDS_RULE = "frontend_ledger_within_bounds"
REQUEST_LOG_CAPACITY_RULE = "request_log_within_capacity"
IDLE_OUTBOX_RULE = "idle_outbox_empty"
IDLE_WORKER_RULE = "idle_frontend_means_idle_worker"
WORKER_ANSWERS_RULE = "worker_answers"
RECEIVER_CACHE_RULE = "receiver_cache_holds_what_was_sent"
PROCESSOR_CACHE_RULE = "processor_cache_adds_up"
FROZEN_RULE = "frontend_freezes_nothing_again"
ADAPTERS_RULE = "adapters_count_their_requests"
METHOD_CACHES_RULE = "frontend_methods_cache_no_instances"
RULES = [
    LEDGER_BOUNDS_RULE, REQUEST_LOG_CAPACITY_RULE, IDLE_OUTBOX_RULE, IDLE_WORKER_RULE,
    RECEIVER_CACHE_RULE, PROCESSOR_CACHE_RULE, FROZEN_RULE, METHOD_CACHES_RULE, ADAPTERS_RULE,
    WORKER_ANSWERS_RULE,
]  # fmt: skip


async def run_audit(engine: AsyncEngine) -> Audit:
    """Check all rules of the frontend and the worker, and return the findings.

    The engine is idle if it had no request before and after the check.
    """
    before = len(engine.requests)
    media_sender = engine.workers.media_sender
    changes = None if media_sender is None else media_sender.changes
    try:
        query_id = f"audit-{secrets.token_hex(8)}"
        # The query follows every abort on the same socket, so the worker of an idle frontend has
        # ended its requests before it answers.
        worker = await engine.query_worker(
            worker_ipc.AuditQuery(query_id), query_id, worker_ipc.AuditReport, AUDIT_TIMEOUT_S
        )
    except NoAnswerError as error:
        findings = [AuditFinding(WORKER_ANSWERS_RULE, str(error)), *_audit_frontend(engine)]
        return Audit(str(engine.epochs.current), False, RULES, findings)
    idle = before == 0 and len(engine.requests) == 0
    findings = [*worker.findings, *_audit_frontend(engine)]
    # Compare only if no media was sent meanwhile: otherwise one side may be ahead of the other.
    if (
        media_sender is not None
        and media_sender is engine.workers.media_sender
        and media_sender.changes == changes
    ):
        findings += compare_receiver_cache(media_sender, set(worker.receiver_keys))
    if idle and not worker.idle:
        findings.append(
            AuditFinding(IDLE_WORKER_RULE, "the worker runs requests, but the frontend has none")
        )
    if idle and engine.workers.num_unsent_messages:
        findings.append(
            AuditFinding(
                IDLE_OUTBOX_RULE,
                f"{engine.workers.num_unsent_messages} messages to the worker have not been sent",
            )
        )
    return Audit(
        str(engine.epochs.current), idle and worker.idle, [*worker.rules, *RULES], findings
    )


def compare_receiver_cache(
    media_sender: MediaCacheSender, receiver_keys: set[bytes]
) -> list[AuditFinding]:
    """Return a finding for each difference between the receiver cache and the sent media."""
    details = media_sender.find_problems()
    if lacking := len(media_sender.list_keys() - receiver_keys):
        details.append(f"the worker lacks {lacking} media that the frontend sent")
    if unknown := len(receiver_keys - media_sender.list_keys()):
        details.append(f"the worker has {unknown} media that the frontend did not send")
    return [AuditFinding(RECEIVER_CACHE_RULE, detail) for detail in details]


def _audit_frontend(engine: AsyncEngine) -> list[AuditFinding]:
    findings = [
        AuditFinding(
            LEDGER_BOUNDS_RULE, f"{e.owner} holds {e.bytes} bytes, but its bound is {e.bound} bytes"
        )
        for e in engine.ledger.list_entries()
        if e.bound is not None and e.bytes > e.bound
    ]
    count, capacity = len(engine.requests), engine.requests.capacity
    if count > capacity:
        findings.append(
            AuditFinding(
                REQUEST_LOG_CAPACITY_RULE,
                f"the request log has {count} requests, but its capacity is {capacity}",
            )
        )
    findings += [
        AuditFinding(PROCESSOR_CACHE_RULE, problem)
        for problem in engine.media.cache.find_problems()
    ]
    used = engine.requests.list_adapters()
    findings += [
        AuditFinding(ADAPTERS_RULE, problem) for problem in engine.adapters.find_problems(used)
    ]
    findings += [AuditFinding(FROZEN_RULE, problem) for problem in freeze_counter.find_problems()]
    findings += [AuditFinding(METHOD_CACHES_RULE, problem) for problem in find_method_caches()]
    return findings
