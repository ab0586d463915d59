"""Parse the supervisor's options, create its parts, and handle signals."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from plimsoll_api import logs
from plimsoll_api.learned import LEARNED_FILE
from plimsoll_api.listening import ALL_ADDRESSES
from plimsoll_api.names import ENGINE_CONTAINER, METRICS_PORT, PROBE_PORT, TOKEN_FILE
from plimsoll_api.pod_devices import (
    CLAIMED_DEVICES_FILE,
    DEVICE_HEALTH_FILE,
    make_container_key,
)
from plimsoll_api.supervisor_config import SupervisorConfig
from plimsoll_sidecar import manual
from plimsoll_sidecar.act.actuator import Actuator
from plimsoll_sidecar.act.adapters.engine_adapter import create_adapter
from plimsoll_sidecar.act.lease_counts import make_replica_key, read_pod_uid
from plimsoll_sidecar.act.partner import create_partners
from plimsoll_sidecar.act.pod_services import ServiceExit, create_pod_services
from plimsoll_sidecar.act.slots import (
    GROUP_LEASE_DURATION_S,
    LEASE_DURATION_S,
    LeaseSlots,
    Slots,
)
from plimsoll_sidecar.ask_server import AskServer
from plimsoll_sidecar.clients.kube import SERVICE_ACCOUNT_FOLDER, EndpointSlices, KubeClient
from plimsoll_sidecar.config import ConfigError, ConfigFile
from plimsoll_sidecar.detect.detector import Detector
from plimsoll_sidecar.page import render_page
from plimsoll_sidecar.record.diagnostics import DiagnosticsWriter
from plimsoll_sidecar.record.metrics import Metrics
from plimsoll_sidecar.record.publisher import Publisher
from plimsoll_sidecar.record.server import AllowedHosts, StateServer
from plimsoll_sidecar.signals.device_memory import AmdExporter, Dcgm, PodContainer
from plimsoll_sidecar.signals.other_pods import (
    GroupLeader,
    GroupMembers,
    GroupPages,
    LearnedFile,
    PodDevicesFile,
    make_leader_matcher,
    make_worker_matcher,
)
from plimsoll_sidecar.signals.process_table import ProcessId
from plimsoll_sidecar.signals.sampler import Sampler
from plimsoll_sidecar.signals.shared_memory import OrphanedMemory
from plimsoll_sidecar.supervisor import Supervisor

log = logging.getLogger(__name__)


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the supervisor's options, which the launcher passes on."""
    parse = argparse.ArgumentParser(prog="python -m plimsoll_sidecar.main", description=__doc__)
    parse.add_argument("--config", type=Path, required=True, help="supervisor.json")
    parse.add_argument(
        "--run-dir",
        type=Path,
        required=True,
        help="directory that the supervisor and the engine share",
    )
    parse.add_argument(
        "--state-dir",
        type=Path,
        required=True,
        help="directory for the journal and the diagnostics",
    )
    parse.add_argument(
        "--metrics-port",
        type=int,
        default=METRICS_PORT,
        help="TCP port on which the supervisor serves /metrics and /state",
    )
    parse.add_argument(
        "--probe-port",
        type=int,
        default=PROBE_PORT,
        help="TCP port on which the launcher answers probes",
    )
    parse.add_argument(
        "--host", default=ALL_ADDRESSES, help="address on which the metrics server listens"
    )
    return parse


def create_detector(config: SupervisorConfig) -> Detector:
    """Return a new detector for ``config``."""
    return Detector(config.memory, config.supervision.stall.timeout_s, config.sample_interval_s)


def build_supervisor(
    arguments: argparse.Namespace,
    kube: KubeClient | None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Supervisor, Metrics]:
    """Create the supervisor and its metrics. Raises ConfigError and OSError.

    ``kube`` is None in local mode. ``clock`` returns seconds since an arbitrary time.
    """
    config = ConfigFile(arguments.config)
    current, state_dir, run_dir = config.current, arguments.state_dir, arguments.run_dir
    state_dir.mkdir(parents=True, exist_ok=True)
    pod = os.environ.get("POD_NAME") or current.service.name
    namespace, pod_uid = current.service.namespace, read_pod_uid(SERVICE_ACCOUNT_FOLDER / "token")
    container = current.engine.container or ENGINE_CONTAINER
    publisher: Publisher | None = None
    group: GroupMembers | None = None
    service_exit = ServiceExit() if os.environ.get("POD_NAME") else None
    slots, partners = Slots(), None
    is_group_serving: Callable[[], bool] | None = None
    if kube is not None and current.service.uid:
        publisher = Publisher(kube, current.service, pod, container)
        leases: LeaseSlots | None = None
        if current.slots:
            uid = make_replica_key(current.service.group, pod_uid)
            duration_s = GROUP_LEASE_DURATION_S if current.service.group else LEASE_DURATION_S
            slots = leases = LeaseSlots(
                kube, namespace, current.slots, pod, replica_key=uid, lease_duration_s=duration_s
            )
            partners = create_partners(current, leases, EndpointSlices(kube, namespace))
        member, workload = current.service.group, current.service.workload
        kind = workload.kind if workload is not None else ""
        service_exit = create_pod_services(kube, current.service, pod, leases)
        if member is not None and member.subdomain:
            others = (
                make_leader_matcher(kind, pod) if member.worker else make_worker_matcher(kind, pod)
            )
            pages = GroupPages(EndpointSlices(kube, namespace), member.subdomain, others)
            if member.worker:
                is_group_serving = GroupLeader(pages).is_serving
            else:
                group = GroupMembers(pages)
    engine = create_adapter(current.engine, run_dir / TOKEN_FILE, is_group_serving)

    def create_actuator(get_main_process: Callable[[], ProcessId | None]) -> Actuator:
        diagnostics = DiagnosticsWriter(engine, state_dir, run_dir, get_main_process)
        return Actuator(
            engine,
            slots,
            service_exit,
            diagnostics.save,
            state_dir,
            current.supervision.restart_budget,
            get_main_process,
            partners,
        )

    mine = PodContainer.from_environment(current.engine.container)
    source = Sampler(
        engine,
        clock,
        dcgm=Dcgm.from_environment(mine),
        amd=AmdExporter.from_environment(mine),
        orphaned=OrphanedMemory.create_for_this_pod(),
        read_metrics_signal=engine.read_metrics_signal,
        list_claimed_devices=PodDevicesFile(
            arguments.config.with_name(CLAIMED_DEVICES_FILE), make_container_key(pod_uid, container)
        ).read,
    )
    metrics = Metrics(lambda: source.cgroup)
    learned = LearnedFile(arguments.config.with_name(LEARNED_FILE))
    device_health = PodDevicesFile(arguments.config.with_name(DEVICE_HEALTH_FILE), pod_uid)
    supervisor = Supervisor(
        config, source, create_detector, create_actuator, publisher, metrics, state_dir, pod, group,
        learned, device_health, run_dir,
    )  # fmt: skip
    return supervisor, metrics


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor until it receives SIGTERM or SIGINT, or the launcher ends.

    The exit status is 0, or 2 if a file or a port cannot be used.
    """
    arguments = create_parser().parse_args(argv)
    logs.configure_logging()
    try:
        supervisor, metrics = build_supervisor(arguments, KubeClient.create_in_cluster())
        server = StateServer(
            arguments.host,
            arguments.metrics_port,
            metrics.render,
            lambda: supervisor.display.state,
            lambda live: render_page(
                supervisor.display.state, supervisor.display.history.read_points(), live
            ),
            AllowedHosts.create_for_pod(
                os.environ.get("POD_NAME", ""),
                supervisor.service.name,
                supervisor.service.namespace,
            ),
        )
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: ending.set())
    launcher = os.getppid()

    def wait_for_stop(seconds: float) -> bool:
        # If the launcher has ended, nothing else stops this process.
        return ending.wait(seconds) or os.getppid() != launcher

    server.start()
    ask_server = AskServer(
        arguments.state_dir,
        lambda words: manual.run_command(words, supervisor.explain_missing_signals()),
    )
    ask_server.start()
    supervisor.run(wait_for_stop)
    ask_server.stop()
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
