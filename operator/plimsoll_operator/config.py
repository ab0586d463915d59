"""Parse the operator's settings from flags. Environment variables set some of their defaults."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version

from pydantic import ValidationError

from plimsoll_api.listening import ALL_ADDRESSES
from plimsoll_api.resources import Resources
from plimsoll_api.serving import DOWNLOAD_RESOURCES, SUPERVISOR_RESOURCES
from plimsoll_operator.render import Images

DEFAULT_IMAGES = Images(
    engine=f"plimsoll-engine:{version('plimsoll')}",
    supervisor=f"plimsoll-supervisor:{version('plimsoll')}",
)


@dataclass(frozen=True)
class WebhookSettings:
    """Settings of the admission webhook, whose objects all have the same name.

    The API server calls ``url``, if set, instead of the Service. ``is_secret_external`` is True if
    another program manages the Secret.
    """

    namespace: str
    name: str
    port: int = 9443
    url: str | None = None
    is_secret_external: bool = False


@dataclass(frozen=True)
class Intervals:
    """Intervals and timeouts of the operator's loops in seconds (``--clock NAME=SECONDS``)."""

    policy_pods: float = 1.0
    """Time over which changes of a policy's pods are batched into one reconcile."""
    orphans: float = 604800.0
    """Time for which the incidents of a deleted service or policy are kept: a week."""
    rollout_settle: float = 10.0
    """Delay between a change of a policy and the restart of its workloads."""
    rollout_again: float = 60.0
    """Interval between checks whether a workload can be restarted."""
    publish: float = 60.0
    """Minimum time between two updates of the same value in a status."""
    event: float = 5.0
    """Time after a list within which a watch must deliver the changes in the list."""
    suspicious: float = 60.0
    """Interval between full lists after a watch has missed events."""
    quiet: float = 5.0
    """Minimum time between the last restart of a watch and a list."""
    canary: float = 20.0
    """Interval between reads that check whether the API server responds."""
    definitions: float = 2.0
    """Interval between checks for missing CustomResourceDefinitions."""
    breaker: float = 1.0
    """Interval between decisions of the circuit breaker."""
    slot_expiry: float = 90.0
    """Time without a change of the Lease after which the slot's holder counts as dead."""
    slot_hold: float = 3600.0
    """Time after which a held slot no longer counts towards the limit."""
    slot_turn: float = 30.0
    """Time for which a free slot is offered to one service before it is offered to the next."""
    evict_again: float = 15.0
    """Interval between attempts to evict a pod while a PodDisruptionBudget blocks its eviction."""
    creating_again: float = 30.0
    """Interval between reads of a pod's Events while its containers do not exist yet."""
    incident_age: float = 600.0
    """Minimum age of an incident before it is deleted, which limits how much a pod writes to
    etcd."""
    webhook_policies: float = 2.0
    """Interval between checks for changed policies."""
    webhook_current: float = 10.0
    """Time for which the webhook's configuration counts as current after a check."""
    webhook_check: float = 30.0
    """Interval between reads of the webhook's Secret and configuration."""
    lease: float = 15.0
    """Duration of the leader's Lease (client-go's ``LeaseDuration``), which must exceed
    ``renew``."""
    renew: float = 10.0
    """Time without a renewal after which the leader exits (client-go's ``RenewDeadline``)."""
    retry: float = 2.0
    """Interval between attempts to acquire or renew the Lease (client-go's ``RetryPeriod``)."""

    def find_problem(self) -> str | None:
        """Return an error message about the invalid intervals; None if all are valid."""
        for one in fields(self):
            value = getattr(self, one.name)
            if not (math.isfinite(value) and value > 0):
                return f"{_to_flag_name(one.name)}={value:g} is not a positive number of seconds"
        if not self.lease > self.renew > self.retry:
            return "--clock: lease must be longer than renew, and renew must be longer than retry"
        return None


def _to_flag_name(field: str) -> str:
    return field.replace("_", "-")


DEFAULT_INTERVALS = Intervals()


@dataclass(frozen=True)
class Config:
    """Settings of the operator; times are in seconds.

    An empty ``namespaces`` means all. ``lease`` is the namespace and name of the leader's Lease;
    None disables leader election. In ``unrestricted_namespaces``, a ``podTemplate`` may violate the
    restricted Pod Security Standard.
    """

    kubeconfig: str | None = None
    namespaces: tuple[str, ...] = ()
    images: Images = DEFAULT_IMAGES
    http_port: int = 8080
    fleet_page: bool = False
    workers: int = 8
    qps: float = 50.0
    burst: int = 100
    lease: tuple[str, str] | None = None
    identity: str = ""
    max_disruptions: int = 10
    max_waiting_pods: int = 2
    resync_s: float = 600.0
    scrape_s: float = 15.0
    request_timeout_s: float = 30.0
    kept_incidents: int = 50
    unrestricted_namespaces: frozenset[str] = frozenset()
    webhook: WebhookSettings | None = None
    without_admission_policies: bool = False
    intervals: Intervals = DEFAULT_INTERVALS


def parse_config(
    arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Parse command-line arguments. On an error, argparse exits the process."""
    env = os.environ if environ is None else environ
    parser = _create_parser(env)
    flags = parser.parse_args(arguments)
    named = flags.namespace or [n for n in env.get("PLIMSOLL_NAMESPACES", "").split(",") if n]
    return Config(
        kubeconfig=flags.kubeconfig,
        namespaces=() if flags.all_namespaces else tuple(sorted(set(named))),
        images=Images(
            flags.engine_image or DEFAULT_IMAGES.engine,
            flags.supervisor_image or DEFAULT_IMAGES.supervisor,
            flags.probe_image or None,
            tuple(flags.supervisor_pull_secret),
            _parse_resources(
                parser, "--supervisor-resources", flags.supervisor_resources, SUPERVISOR_RESOURCES
            ),
            _parse_resources(
                parser, "--download-resources", flags.download_resources, DOWNLOAD_RESOURCES
            ),
            # Pods have the IP family of the API server's Service: the cluster's primary one.
            ALL_ADDRESSES if ":" in env.get("KUBERNETES_SERVICE_HOST", "") else "0.0.0.0",
        ),
        http_port=flags.http_port,
        fleet_page=flags.fleet_page,
        workers=flags.workers,
        qps=flags.qps,
        max_disruptions=flags.max_disruptions,
        max_waiting_pods=flags.max_waiting_pods,
        burst=flags.burst,
        kept_incidents=flags.kept_incidents,
        lease=_parse_namespaced_name(parser, "--leader-election", flags.leader_election),
        identity=f"{env.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        resync_s=flags.resync,
        scrape_s=flags.scrape,
        unrestricted_namespaces=frozenset(flags.unrestricted_namespace),
        webhook=_parse_webhook(parser, flags),
        without_admission_policies=flags.without_admission_policies,
        intervals=_parse_intervals(parser, flags.clock),
    )


def _create_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plimsoll-operator", description="Run InferenceServices on a Kubernetes cluster."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="watch and reconcile until the process receives a signal")
    add = run.add_argument
    add("--kubeconfig", metavar="FILE", help="default: the pod's service account, then $KUBECONFIG")
    scope = run.add_mutually_exclusive_group()
    scope.add_argument(
        "--namespace",
        action="append",
        metavar="NAME",
        help="watch this namespace; repeatable (or set PLIMSOLL_NAMESPACES, separated by commas)",
    )
    scope.add_argument(
        "--all-namespaces", action="store_true", help="watch all namespaces (the default)"
    )
    add("--engine-image", default=env.get("PLIMSOLL_ENGINE_IMAGE"), metavar="IMAGE")
    add("--supervisor-image", default=env.get("PLIMSOLL_SUPERVISOR_IMAGE"), metavar="IMAGE")
    add(
        "--probe-image",
        default=env.get("PLIMSOLL_PROBE_IMAGE"),
        metavar="IMAGE",
        help="image that contains the code of spec.probe; default: the supervisor's image",
    )
    add(
        "--supervisor-pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="Secret with credentials for the supervisor's image, in the namespace of each pod; "
        "repeatable",
    )
    add(
        "--supervisor-resources",
        metavar="JSON",
        help=(
            "default resource limits and requests of supervisors, in the format of a container's"
            " resources"
        ),
    )
    add(
        "--download-resources",
        metavar="JSON",
        help=(
            "default resource limits and requests of model downloads, in the format of a"
            " container's resources"
        ),
    )
    add("--http-port", type=int, default=env.get("PLIMSOLL_HTTP_PORT", "8080"), metavar="PORT")
    add(
        "--fleet-page",
        action="store_true",
        help=(
            "serve a read-only page of all services, policies and incidents at / on the HTTP port,"
            " to everyone who can reach the port"
        ),
    )
    add(
        "--workers",
        type=_parse_positive_integer,
        default=8,
        metavar="N",
        help="maximum number of services that are reconciled at the same time",
    )
    add(
        "--qps",
        type=_parse_positive_integer,
        default=Config.qps,
        metavar="N",
        help="maximum average number of requests per second to the API server",
    )
    add(
        "--burst",
        type=_parse_positive_integer,
        default=Config.burst,
        metavar="N",
        help="maximum number of requests to the API server in a burst",
    )
    add(
        "--max-disruptions",
        type=_parse_positive_integer,
        default=Config.max_disruptions,
        metavar="N",
        help="maximum number of replicas in the cluster that may restart at the same time",
    )
    add(
        "--max-waiting-pods",
        type=_parse_positive_integer,
        default=2,
        metavar="N",
        help=(
            "maximum number of a policy's replicas that may start with a supervisor image before"
            " any pod has run with it; if that many pods cannot start, the injection stops"
        ),
    )
    add(
        "--kept-incidents",
        type=_parse_positive_integer,
        default=Config.kept_incidents,
        metavar="N",
        help="number of ended LeakIncidents to keep for each service and policy",
    )
    add(
        "--leader-election",
        default=env.get("PLIMSOLL_LEADER_ELECTION"),
        metavar="NAMESPACE/NAME",
        help="Lease for leader election; omit it if only one operator runs",
    )
    add(
        "--unrestricted-namespace",
        action="append",
        default=[],
        metavar="NAME",
        help=(
            "namespace whose podTemplates may violate the Pod Security Standard 'restricted';"
            " repeatable"
        ),
    )
    add(
        "--without-admission-policies",
        action="store_true",
        help="warn at startup that no admission policy limits what supervised pods may write",
    )
    add(
        "--webhook",
        metavar="NAMESPACE/NAME",
        help="inject supervisors into the pods of SupervisionPolicies, with the webhook's existing "
        "Service, Secret and MutatingWebhookConfiguration of this name",
    )
    add("--webhook-port", type=_parse_positive_integer, default=9443, metavar="PORT")
    add(
        "--webhook-url",
        metavar="URL",
        help="https URL of the webhook, for an API server that cannot reach the Service",
    )
    add(
        "--webhook-certificate-provided",
        action="store_true",
        help="the webhook's Secret is written by another program, such as cert-manager",
    )
    add(
        "--resync",
        type=_parse_positive_integer,
        default=600,
        metavar="S",
        help="seconds between full lists of all objects",
    )
    add(
        "--scrape",
        type=_parse_positive_integer,
        default=15,
        metavar="S",
        help="seconds between scrapes of the supervisors' metrics",
    )
    names = ", ".join(f"{_to_flag_name(one.name)} ({one.default:g})" for one in fields(Intervals))
    add(
        "--clock",
        action="append",
        default=[],
        metavar="NAME=S",
        help=f"set the interval of a task in seconds; repeatable. Names and defaults: {names}",
    )
    return parser


def _parse_intervals(parser: argparse.ArgumentParser, texts: Sequence[str]) -> Intervals:
    names = {_to_flag_name(one.name): one.name for one in fields(Intervals)}
    seconds: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in names:
            parser.error(f"--clock: {name!r} is not an interval: use one of {', '.join(names)}")
        try:
            seconds[names[name]] = float(value)
        except ValueError:
            parser.error(f"--clock: {text!r} is not NAME=SECONDS")
    intervals = Intervals(**seconds)
    if problem := intervals.find_problem():
        parser.error(f"--clock: {problem}")
    return intervals


def _parse_resources(
    parser: argparse.ArgumentParser, flag: str, text: str | None, default: Resources
) -> Resources:
    if not text:
        return default
    try:
        # As in a container's resources, an amount may be a number such as 0.5.
        return Resources.model_validate(json.loads(text, parse_float=str))
    except ValidationError as error:
        details = error.errors()[0]
        path = ".".join(map(str, details["loc"]))
        parser.error(f"{flag}: {path}: {details['msg']}" if path else f"{flag}: {details['msg']}")
    except ValueError as error:
        parser.error(f"{flag}: Invalid JSON: {error}")


def _parse_webhook(
    parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> WebhookSettings | None:
    namespaced_name = _parse_namespaced_name(parser, "--webhook", flags.webhook)
    if namespaced_name is None:
        return None
    if flags.webhook_url is not None and not flags.webhook_url.startswith("https://"):
        parser.error(f"--webhook-url: {flags.webhook_url!r} must begin with https://")
    return WebhookSettings(
        *namespaced_name, flags.webhook_port, flags.webhook_url, flags.webhook_certificate_provided
    )


def _parse_namespaced_name(
    parser: argparse.ArgumentParser, flag: str, text: str | None
) -> tuple[str, str] | None:
    if not text:
        return None
    namespace, _, name = text.partition("/")
    if not (namespace and name) or "/" in name:
        parser.error(f"{flag}: {text!r} is not NAMESPACE/NAME")
    return namespace, name


def _parse_positive_integer(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
