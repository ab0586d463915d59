"""Run the operator until SIGTERM or SIGINT (``plimsoll-operator run``)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import kopf

from plimsoll_api import logs
from plimsoll_operator import handlers as handlers  # registers the handlers
from plimsoll_operator.config import Config, parse_config
from plimsoll_operator.controllers.circuit_breaker import CircuitBreaker
from plimsoll_operator.controllers.inference_service import InferenceServiceController
from plimsoll_operator.controllers.supervision_policy import PolicyController
from plimsoll_operator.health import HealthServer
from plimsoll_operator.kinds import POLICY, Key
from plimsoll_operator.metrics import Metrics, OperatorCollector
from plimsoll_operator.page import FleetPage
from plimsoll_operator.runtime.background import BackgroundTasks
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError, is_outage
from plimsoll_operator.runtime.election import Election, LeadershipLostError
from plimsoll_operator.runtime.queue import RateLimit, WorkQueue
from plimsoll_operator.runtime.resync import Resync
from plimsoll_operator.runtime.watches import (
    GroupWatch,
    PolicyWatch,
    Watches,
    login_in_pod,
    login_with_kubeconfig,
    make_settings,
    registry,
)
from plimsoll_operator.scraper import Scraper

if TYPE_CHECKING:
    from plimsoll_operator.admission.server import AdmissionWebhook

log = logging.getLogger(__name__)

RECURSION_LIMIT = 12_000
"""Python's recursion limit; the API server accepts JSON with 10,000 levels in an open schema
such as ``podTemplate``."""
EXIT_TIMEOUT_S = 5.0
"""Seconds within which the operator exits after it has lost its Lease, even if a task hangs."""
MISSING_ADMISSION_POLICIES_MESSAGE = (
    "the admission policies of Plimsoll are not installed, so a supervised pod can write any"
    " number of LeakIncidents for other pods of its namespace, and their restart slots: set"
    " admissionPolicy.enabled to true in the chart, or apply config/admission-policy.yaml"
)


async def run(config: Config, stop: asyncio.Event) -> None:
    """Run the operator until ``stop`` is set.

    Raises ApiError, OSError or TimeoutError if the API server cannot be listed at startup,
    LeadershipLostError if the Lease is lost, and an ExceptionGroup if a part failed permanently.
    """
    if config.without_admission_policies:
        log.warning(MISSING_ADMISSION_POLICIES_MESSAGE)
    limit = RateLimit(config.qps, config.burst)
    api = await Api.connect(config.kubeconfig, config.request_timeout_s, limit)
    metrics = Metrics()
    store = Store()
    queue: WorkQueue[Key] = WorkQueue(config.workers, metrics.record_reconcile, is_outage)
    scraper = Scraper(store, queue.add, publish_s=config.intervals.publish)
    watches = Watches(store, queue)
    policy_watch = PolicyWatch(api, store, watches, config.namespaces)
    resync = Resync(api, store, watches, queue.add, config.namespaces, config.intervals)
    groups = GroupWatch(api, watches, config.namespaces, resync.groups)
    controller = InferenceServiceController(
        api, store, scraper, config, resync.served, queue.add_later
    )
    admission: AdmissionWebhook | None = None
    policies = PolicyController(
        api, store, scraper, config, queue.add, queue.add_later,
        is_webhook_ready=lambda: admission is not None and admission.is_current(),
    )  # fmt: skip

    async def handle(key: Key) -> None:
        await (policies if key.kind == POLICY.kind else controller).handle(key)

    health = HealthServer(api, watches, metrics, config)
    election = voting = None
    if config.lease:
        # Use a separate client, so that other requests cannot delay renewals.
        timeout_s = config.intervals.renew / 2
        voting = await Api.connect(config.kubeconfig, timeout_s, RateLimit(5.0, 10), max_tries=1)
        election = Election(voting, *config.lease, config.identity, intervals=config.intervals)
        api.get_remaining_s = election.get_remaining_s
    breaker = CircuitBreaker(api, store, config.max_disruptions, intervals=config.intervals)
    background = BackgroundTasks()
    age, suspects = (
        health.measure_canary_age_s,
        (
            controller.suspects,
            policies.suspects,
            policies.pods,
            policies.stopped,
            (controller.verdicts, policies.verdicts),
            (controller.evictions.refusals, policies.evictions.refusals),
        ),
    )
    failures = background.failures
    parts = OperatorCollector(
        api, store, queue, watches, scraper, breaker, *suspects, age, voting, failures
    )
    metrics.registry.register(parts)
    leading = asyncio.Event()
    page = FleetPage(
        store, lambda: breaker.last, config.max_disruptions, leading.is_set, config.namespaces
    )
    server = await health.serve(config.http_port, page if config.fleet_page else None)
    keep = background.run_forever
    canary = partial(keep, "canary", health.run_canary)
    watching: asyncio.Task[None] | None = None
    try:
        if not await _run_before_stop(stop, health.wait_for_definitions()):
            return
        watching = asyncio.create_task(keep("policies", policy_watch.run, is_required=False))
        if config.webhook:
            # Import it only now: cryptography needs 9 MiB, and most operators have no webhook.
            from plimsoll_operator.admission.server import AdmissionWebhook

            admission = AdmissionWebhook(
                api, config, config.webhook, leading.is_set, metrics, policy_watch
            )
            health.webhook = admission.find_unready_reason
            _freeze_heap()
            admission.start(background)
        if election:
            health.ready = True  # a standby is ready
            if not await _run_before_stop(stop, election.acquire(), canary()):
                return
        leading.set()
        metrics.leading.set(1)
        # Reconcile only with a complete cache: otherwise a restart would write all objects again.
        renewal = [partial(_keep_lease, election)] if election else []
        if not await _run_before_stop(
            stop, resync.list_all(), canary(), *(one() for one in renewal)
        ):
            return
        _freeze_heap()
        health.ready = True
        log.info("watching %s", ", ".join(config.namespaces) or "all namespaces")
        await _run_until(
            stop,
            keep("reconcile", partial(queue.run, handle)),
            keep("scrape", partial(scraper.run, config.scrape_s), is_required=False),
            keep("breaker", breaker.run, is_required=False),
            canary(),
            keep("resync", partial(resync.run, config.resync_s)),
            keep("groups", groups.run, is_required=False),
            *(one() for one in renewal),
            _run_kopf(watches, config, stop),
        )
    finally:
        if admission:
            await admission.stop()
        if watching:
            watching.cancel()
        if election:
            await election.release()
        await server.cleanup()
        for connection in filter(None, (api, voting)):
            await connection.close()


# A full garbage collection blocks the event loop, and with it the webhook, for 50 ms or more.
def _freeze_heap() -> None:
    gc.collect()
    gc.freeze()


async def _run_before_stop(
    stop: asyncio.Event, main: Coroutine[Any, Any, None], *background: Any
) -> bool:
    """Run ``main`` and ``background`` until ``main`` completes; return False after ``stop``."""
    tasks = [asyncio.create_task(part) for part in (stop.wait(), main, *background)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks[1:]:
            if task.done():
                task.result()
        return tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# If the Lease is lost, the process exits.
async def _keep_lease(election: Election) -> None:
    try:
        await election.keep_renewing()
    except LeadershipLostError as error:
        log.error(
            "leadership lost; exiting, because another operator may have taken over: %s", error
        )
        asyncio.get_running_loop().call_later(EXIT_TIMEOUT_S, os._exit, 1)
        raise


# On exit, kopf waits 5 s for tasks that started after it, so start it last.
async def _run_kopf(watches: Watches, config: Config, stop: asyncio.Event) -> None:
    await asyncio.sleep(0)
    # Without it, kopf looks up the user's name, which a user that the platform assigned lacks.
    os.environ.setdefault("POD_ID", config.identity)
    kopf.on.login(registry=registry)(login_with_kubeconfig if config.kubeconfig else login_in_pod)
    await kopf.operator(
        registry=registry,
        settings=make_settings(),
        memo=watches,
        namespaces=config.namespaces,
        clusterwide=not config.namespaces,
        standalone=True,
    )
    stop.set()


async def _run_until(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Run ``parts`` until ``stop`` is set; cancel all and raise an error if any ends earlier."""
    async with asyncio.TaskGroup() as group:
        stopped = asyncio.create_task(stop.wait())
        tasks = [group.create_task(part) for part in parts]
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, *tasks):
            task.cancel()
        if not stop.is_set():
            for task in done:
                task.result()
            raise RuntimeError("a background task of the operator ended without a stop signal")


async def _run_until_signal(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await run(config, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator. Return 0 after a signal, or 1 after an error."""
    config = parse_config(arguments)
    sys.setrecursionlimit(RECURSION_LIMIT)
    libraries = dict.fromkeys(("kopf", "aiohttp", "asyncio"), "WARNING")
    logs.configure_logging(os.environ.get("PLIMSOLL_LOG_LEVEL", "INFO").upper(), libraries)
    if config.kubeconfig:
        os.environ["KUBECONFIG"] = config.kubeconfig  # kopf reads it
    try:
        asyncio.run(_run_until_signal(config))
    except ApiError as error:
        log.error("failed to start the operator: %s", error)
        return 1
    except (OSError, TimeoutError) as error:
        log.error("failed to start the operator: %s", str(error) or repr(error))
        return 1
    except LeadershipLostError:
        return 1
    except ExceptionGroup as error:
        if not error.subgroup(LeadershipLostError):
            log.critical("a background task of the operator failed", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
