"""``plimsoll-operator run``: wires the parts and runs them until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import kopf

from plimsoll_operator import logs, watch
from plimsoll_operator.api import Api, ApiError
from plimsoll_operator.breaker import Breaker
from plimsoll_operator.config import Config, parse
from plimsoll_operator.controller import Controller
from plimsoll_operator.health import Health
from plimsoll_operator.leader import Election, LeadershipLost
from plimsoll_operator.metrics import Metrics, Parts
from plimsoll_operator.ratelimit import RateLimit
from plimsoll_operator.scrape import Scraper
from plimsoll_operator.store import Key, Store
from plimsoll_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)

SUSPICIOUS_S = 60.0
INTERRUPTED_S = 5.0
"""Watches that begin anew do so together: a list of our own waits until none did for this long."""
MOST_BEGINNINGS = 20
"""A watch that begins anew all the time does not put it off for ever."""
VOTING_TIMEOUT_S = 5.0


async def run(config: Config, stop: asyncio.Event) -> None:
    """Works until ``stop``. ApiError, OSError or TimeoutError where the API server cannot be
    listed at the start; an ExceptionGroup where a part died later."""
    limit = RateLimit(config.qps, config.burst)
    api = await Api.connect(config.kubeconfig, config.request_timeout_s, limit)
    metrics = Metrics()
    store = Store()
    queue: WorkQueue[Key] = WorkQueue(config.workers, metrics.reconciled)
    scraper = Scraper(store, queue.add)
    watches = watch.Watches(store, queue)
    controller = Controller(api, store, scraper, config, queue.add_later)
    health = Health(api, watches, metrics)
    election = voting = None
    if config.lease:
        # Of its own, so that a flood of work cannot hold back a renewal.
        voting = await Api.connect(config.kubeconfig, VOTING_TIMEOUT_S, RateLimit(5.0, 10))
        election = Election(voting, *config.lease, config.identity)
    breaker = Breaker(api, store, config.max_disruptions)
    age, suspects = health.canary_age_s, controller.suspects
    parts = Parts(api, store, queue, watches, scraper, breaker, suspects, age, voting)
    metrics.registry.register(parts)
    server = await health.serve(config.http_port)
    try:
        if not await _first(stop, health.definitions()):
            return
        if election:
            health.ready = True  # to stand by is what it is there for
            if not await _first(stop, election.acquire(), health.canary(config)):
                return
        metrics.leading.set(1)
        # Everything is known before anything is decided: a restart writes nothing.
        for key in await controller.sync():
            queue.add(key)
        health.ready = True
        log.info("watching %s", ", ".join(config.namespaces) or "all namespaces")
        await _until(
            stop,
            queue.run(controller.handle),
            scraper.run(config.scrape_s),
            breaker.run(),
            health.canary(config),
            _resync(controller, watches, queue, config.resync_s),
            *([election.keep()] if election else []),
            _watch(watches, config, stop),
        )
    finally:
        if election:
            await election.release()
        await server.cleanup()
        for connection in filter(None, (api, voting)):
            await connection.close()


async def _first(stop: asyncio.Event, wanted: Coroutine[Any, Any, None], *beside: Any) -> bool:
    """Whether ``wanted`` came to its end before ``stop``; ``beside`` runs meanwhile."""
    tasks = [asyncio.create_task(part) for part in (stop.wait(), wanted, *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[1].done():
            tasks[1].result()
        return tasks[1].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(watches: watch.Watches, config: Config, stop: asyncio.Event) -> None:
    """kopf takes the signals for itself and ends at them: the rest follows it.

    At its end it waits 5 s for every task that is younger than itself, so it comes last.
    """
    await asyncio.sleep(0)
    await kopf.operator(
        registry=watches.registry(config.kubeconfig),
        settings=watch.settings(),
        namespaces=config.namespaces,
        clusterwide=not config.namespaces,
        standalone=True,
    )
    stop.set()


async def _resync(
    controller: Controller, watches: watch.Watches, queue: WorkQueue[Key], every_s: float
) -> None:
    """Lists everything again and again; sooner after a list that showed what no event had told.

    A list that kopf began a watch with, at the start or after an interruption, calls for one of our
    own soon: kopf tells of no object that is not in its list any more, and the watch is not to
    blame for that.
    """
    while True:
        usual = min(every_s, SUSPICIOUS_S) if watches.deaf(1) else every_s
        interrupted = await _within(usual, watches.listing.wait())
        if interrupted:
            await _quiet(watches.listing)
        try:
            behind = (lambda *_: None) if interrupted else watches.listed
            for key in await controller.sync(behind):
                queue.add(key)
        except (ApiError, OSError, TimeoutError) as error:
            if interrupted:
                watches.listing.set()
            log.warning("resync: %s", error or repr(error))


async def _quiet(listing: asyncio.Event) -> None:
    """Returns with ``listing`` cleared, once it was not set for :data:`INTERRUPTED_S`."""
    for _ in range(MOST_BEGINNINGS):
        listing.clear()
        await asyncio.sleep(INTERRUPTED_S)
        if not listing.is_set():
            return
    listing.clear()


async def _within(seconds: float, wanted: Coroutine[Any, Any, Any]) -> bool:
    """Whether ``wanted`` came to its end in time."""
    try:
        await asyncio.wait_for(wanted, seconds)
    except TimeoutError:
        return False
    return True


async def _until(stop: asyncio.Event, *parts: Coroutine[Any, Any, None]) -> None:
    """Runs ``parts`` until ``stop``; one that ends before ends all, with an error."""
    async with asyncio.TaskGroup() as group:
        stopped = asyncio.create_task(stop.wait())
        tasks = [group.create_task(part) for part in parts]
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopped, *tasks):
            task.cancel()
        if not stop.is_set():
            for task in done:
                task.result()
            raise RuntimeError("a part of the operator ended by itself")


async def _serve(config: Config) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await run(config, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 after a signal, 1 where the cluster could not be used."""
    config = parse(arguments)
    logs.configure(os.environ.get("PLIMSOLL_LOG_LEVEL", "INFO").upper())
    if config.kubeconfig:
        os.environ["KUBECONFIG"] = config.kubeconfig  # where kopf looks
    try:
        asyncio.run(_serve(config))
    except ApiError as error:
        log.error("cannot start: %s", error)
        return 1
    except (OSError, TimeoutError) as error:
        log.error("cannot start: %s", error or repr(error))
        return 1
    except ExceptionGroup as error:
        lost = error.subgroup(LeadershipLost)
        if lost:
            log.error("another operator may work now: %s", lost.exceptions[0])
        else:
            log.critical("a part of the operator failed", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
