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
from plimsoll_operator.config import Config, parse
from plimsoll_operator.controller import Controller
from plimsoll_operator.health import Health
from plimsoll_operator.scrape import Scraper
from plimsoll_operator.store import Key, Store
from plimsoll_operator.workqueue import WorkQueue

log = logging.getLogger(__name__)


async def run(config: Config, stop: asyncio.Event) -> None:
    """Works until ``stop``. ApiError, OSError or TimeoutError where the API server cannot be
    listed at the start; an ExceptionGroup where a part died later."""
    api = await Api.connect(config.kubeconfig, config.request_timeout_s)
    store = Store()
    queue: WorkQueue[Key] = WorkQueue(config.workers)
    scraper = Scraper(store, queue.add)
    controller = Controller(api, store, scraper, config)
    watches = watch.Watches(store, queue)
    health = Health(api, store, queue, watches, scraper)
    server = None
    try:
        # Everything is known before anything is decided: a restart writes nothing.
        for key in await controller.sync():
            queue.add(key)
        server = await health.serve(config.http_port)
        log.info("watching %s", ", ".join(config.namespaces) or "all namespaces")
        await _until(
            stop,
            queue.run(controller.handle),
            scraper.run(config.scrape_s),
            health.canary(config),
            _resync(controller, queue, config.resync_s),
            _watch(watches, config, stop),
        )
    finally:
        if server:
            await server.cleanup()
        await api.close()


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


async def _resync(controller: Controller, queue: WorkQueue[Key], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            for key in await controller.sync():
                queue.add(key)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning("resync: %s; again in %.0f s", error or repr(error), every_s)


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
        hint = "; are the CRDs applied? (kubectl apply -k config)" if error.status == 404 else ""
        log.error("cannot start: %s%s", error, hint)
        return 1
    except (OSError, TimeoutError) as error:
        log.error("cannot start: %s", error or repr(error))
        return 1
    except ExceptionGroup as error:
        log.critical("a part of the operator failed", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
