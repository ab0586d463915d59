"""Define the metrics of the operator itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plimsoll_api.inferenceservice_status import Leaks
from plimsoll_operator.controllers.circuit_breaker import CircuitBreaker
from plimsoll_operator.fleet.selected_pods import SupervisionState
from plimsoll_operator.kinds import POLICY, Key, Object
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api, ApiError
from plimsoll_operator.runtime.queue import WorkQueue
from plimsoll_operator.runtime.watches import Watches
from plimsoll_operator.scraper import Scraper

METRIC_PREFIX = "plimsoll_operator_"
STATUS_REASONS = {
    "AlreadyExists", "BadRequest", "Conflict", "Expired", "Forbidden", "Gone", "InternalError",
    "Invalid", "MethodNotAllowed", "NotAcceptable", "NotFound", "RequestEntityTooLarge",
    "ServerTimeout", "ServiceUnavailable", "StoreReadError", "Timeout", "TooManyRequests",
    "Unauthorized", "Unknown", "UnsupportedMediaType",
}  # fmt: skip
"""The reasons of the API server itself (metav1.StatusReason)."""
DURATION_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of one operator, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latency = Histogram(
            f"{METRIC_PREFIX}reconcile_seconds",
            "Duration of a reconcile.",
            registry=self.registry,
            buckets=DURATION_BUCKETS_S,
        )
        self.waiting = Histogram(
            f"{METRIC_PREFIX}queue_wait_seconds",
            "Time that a service waited in the queue.",
            registry=self.registry,
            buckets=DURATION_BUCKETS_S,
        )
        self.errors = Counter(
            f"{METRIC_PREFIX}reconcile_errors",
            "Reconciles that failed, by the API server's reason, the HTTP status of an admission "
            "webhook's own reason, or the kind of error.",
            ("reason",),
            registry=self.registry,
        )
        self.leading = Gauge(
            f"{METRIC_PREFIX}leader",
            "1 while this operator is the leader, 0 in standby.",
            registry=self.registry,
        )

        self._admissions = Counter(
            f"{METRIC_PREFIX}admissions",
            "Pods that the webhook reviewed, by result: injected, unselected, or no supervisor, "
            "because the injection waits or has stopped (held), for the reason in the pod's "
            "annotation (refused), or because of an error (failed).",
            ("result",),
            registry=self.registry,
        )

        self._ready = Gauge(
            f"{METRIC_PREFIX}webhook_ready",
            "Whether this operator's webhook can answer the API server: 1 or 0, with the reason in "
            "/readyz. Absent without a webhook.",
            ("secret",),
            registry=self.registry,
        )

        self._certificate = Gauge(
            f"{METRIC_PREFIX}webhook_certificate_expiry_timestamp_seconds",
            "Time at which the webhook's certificate expires, by Secret. Absent without a "
            "certificate.",
            ("secret",),
            registry=self.registry,
        )

    def add_webhook_health(self, secret: str, find_problem: Callable[[], str | None]) -> None:
        """Add the metric of the webhook's health; ``find_problem`` returns None if healthy."""
        self._ready.labels(secret).set_function(lambda: float(find_problem() is None))

    def count_admitted(self, result: str, count: int = 1) -> None:
        """Add ``count`` to the number of admission reviews with this result.

        A ``count`` of 0 only creates the series, so that the first review is an increase.
        """
        self._admissions.labels(result).inc(count)

    def set_certificate_expiry(self, secret: str, expires_at_s: float) -> None:
        """Set the time at which the certificate in ``secret`` expires, in Unix seconds."""
        self._certificate.labels(secret).set(expires_at_s)

    def record_reconcile(self, waited_s: float, took_s: float, error: Exception | None) -> None:
        """Record a reconcile; ``error`` is None if it succeeded."""
        self.waiting.observe(waited_s)
        self.latency.observe(took_s)
        if error is not None:
            self.errors.labels(get_error_reason(error)).inc()

    def render_page(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


def get_error_reason(error: Exception) -> str:
    """Return the API server's reason for an error, or the error's class, for a label.

    An admission webhook may give any text as the reason. Then the label is the HTTP status.
    """
    if not isinstance(error, ApiError):
        return type(error).__name__
    return error.reason if error.reason in STATUS_REASONS else str(error.status)


class OperatorCollector(Collector):
    """Collector of metrics whose values are stored in other parts of the operator."""

    def __init__(
        self,
        api: Api,
        store: Store,
        queue: WorkQueue[Key],
        watches: Watches,
        scraper: Scraper,
        breaker: CircuitBreaker,
        suspects: Collection[Key],
        suspect_workloads: Mapping[Key, Collection[str]],
        policy_pods: Mapping[Key, Mapping[SupervisionState, int]],
        stopped: Mapping[Key, bool],
        verdicts: Sequence[Mapping[Key, Sequence[tuple[str, Object]]]],
        refused_evictions: Sequence[Mapping[Key, int]],
        canary_age_s: Callable[[], float],
        election_api: Api | None,
        failures: Mapping[str, int],
    ) -> None:
        self._failures = failures
        self._voting, self._breaker = election_api, breaker
        self._api, self._store, self._queue = api, store, queue
        self._watches, self._scraper = watches, scraper
        self._suspects, self._canary_age_s = suspects, canary_age_s
        self._suspect_workloads, self._policy_pods = suspect_workloads, policy_pods
        self._stopped, self._verdicts = stopped, verdicts
        self._refused_evictions = refused_evictions

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics with their current values."""
        yield _make_gauge(
            "watch_age_seconds", "Time since the last watch event.", self._watches.age_s
        )
        ages = GaugeMetricFamily(
            f"{METRIC_PREFIX}watch_kind_age_seconds",
            "Time since the last event of a watch, by kind.",
            labels=("kind",),
        )
        for kind, age in sorted(self._watches.compute_ages_s().items()):
            ages.add_metric((kind,), age)
        yield ages
        missed = CounterMetricFamily(
            f"{METRIC_PREFIX}watch_missed",
            "Changes that a full list found, but no watch reported.",
            labels=("kind",),
        )
        for kind, count in sorted(self._watches.missed.items()):
            missed.add_metric((kind,), count)
        yield missed
        yield _make_gauge(
            "canary_age_seconds", "Time since the canary read last succeeded.", self._canary_age_s()
        )
        yield _make_gauge("queue_length", "Services that wait in the queue.", len(self._queue))
        known = len(self._store.list_services())
        yield _make_gauge("services", "InferenceServices in the cache of the operator.", known)
        slots = self._breaker.last
        yield _make_gauge("slots_held", "Restart slots that supervisors hold.", slots.held)
        text = "Restart slots that the circuit breaker keeps closed."
        yield _make_gauge("slots_closed", text, len(slots.close))
        suspect_revisions = GaugeMetricFamily(
            f"{METRIC_PREFIX}suspect_revisions",
            "InferenceServices, and workloads of SupervisionPolicies, with a revision that leaks in"
            " most replicas.",
            labels=("inferenceservice", "supervisionpolicy", "workload"),
        )
        for key in sorted(self._suspects):
            suspect_revisions.add_metric((str(key), "", ""), 1.0)
        for key, workloads in sorted(self._suspect_workloads.items()):
            for workload in sorted(workloads):
                suspect_revisions.add_metric(("", f"{key.namespace}/{key.name}", workload), 1.0)
        yield suspect_revisions
        yield from self._collect_verdicts()
        selected = GaugeMetricFamily(
            f"{METRIC_PREFIX}policy_pods",
            "Pods that a SupervisionPolicy selects, by state: `Supervised`, `Waiting` until they"
            " are recreated, or `Refused`.",
            labels=("supervisionpolicy", "state"),
        )
        for key, states in sorted(self._policy_pods.items()):
            for state, count in states.items():
                selected.add_metric((f"{key.namespace}/{key.name}", state.value), count)
        yield selected
        drained = GaugeMetricFamily(
            f"{METRIC_PREFIX}drained_pods",
            "Pods that a person keeps out of service with `plimsoll drain`, by InferenceService or"
            " SupervisionPolicy.",
            labels=("inferenceservice", "supervisionpolicy"),
        )
        for key, count in sorted(self._scraper.count_drained_pods().items()):
            drained.add_metric(_make_owner_labels(key), count)
        yield drained
        refused = CounterMetricFamily(
            f"{METRIC_PREFIX}refused_evictions",
            "Evictions of pods that the API server refused, for example because of a"
            " PodDisruptionBudget. The operator tries again every 15 seconds.",
            labels=("inferenceservice", "supervisionpolicy"),
        )
        for key, count in sorted(one for part in self._refused_evictions for one in part.items()):
            refused.add_metric(_make_owner_labels(key), count)
        yield refused
        stopped = GaugeMetricFamily(
            f"{METRIC_PREFIX}injection_stopped",
            "1 while new pods of a SupervisionPolicy get no supervisor, because pods with a"
            " supervisor do not start.",
            labels=("supervisionpolicy",),
        )
        for key, is_stopped in sorted(self._stopped.items()):
            stopped.add_metric((f"{key.namespace}/{key.name}",), float(is_stopped))
        yield stopped
        yield _make_counter("reconciles", "Reconciles, including failed ones.", self._queue.handled)
        yield _make_counter("reconcile_failures", "Reconciles that failed.", self._queue.failed)
        yield _make_counter("watch_events", "Events from all watches.", self._watches.events)
        yield _make_counter(
            "scrape_failures", "Scrapes of supervisors that failed.", self._scraper.failures
        )
        text = "Requests to the API server, except those of watches and of the election."
        yield _make_counter("requests", text, self._api.requests)
        lease_requests = self._voting.requests if self._voting else 0
        yield _make_counter("lease_requests", "Requests for the leader's lease.", lease_requests)
        yield _make_counter(
            "throttled_requests",
            "Requests that the API server throttled (429).",
            self._api.refusals,
        )
        waited = self._api.limit.waited_s
        yield _make_counter(
            "throttled_seconds",
            "Time that requests waited for the operator's own rate limit.",
            waited,
        )
        failures = CounterMetricFamily(
            f"{METRIC_PREFIX}part_failures",
            "Failures of a background task, which restarts after a delay.",
            labels=("part",),
        )
        for part, count in sorted(self._failures.items()):
            failures.add_metric((part,), count)
        yield failures
        writes = CounterMetricFamily(
            f"{METRIC_PREFIX}writes", "Writes to the API server.", labels=("verb", "kind")
        )
        for (verb, kind), count in sorted(self._api.writes.items()):
            writes.add_metric((verb, kind), count)
        yield writes

    def _collect_verdicts(self) -> Iterable[Metric]:
        labels = ("inferenceservice", "supervisionpolicy", "workload", "revision")
        verdict = GaugeMetricFamily(
            f"{METRIC_PREFIX}revision_verdict",
            "Verdict on whether a revision leaks: 1 for the current verdict (`Yes`, `No` or"
            " `Unknown`), 0 for the others.",
            labels=(*labels, "leaks"),
        )
        wait = GaugeMetricFamily(
            f"{METRIC_PREFIX}revision_verdict_wait_seconds",
            "Remaining observation time until the verdict on a revision. Absent if time alone does"
            " not decide it.",
            labels=labels,
        )
        for key, found in sorted(item for part in self._verdicts for item in part.items()):
            for workload, entry in found:
                values = (*_make_owner_labels(key), workload, entry["revision"])
                for leaks in Leaks:
                    verdict.add_metric((*values, leaks.value), float(entry["leaks"] == leaks))
                if "minutesLeft" in entry:
                    wait.add_metric(values, entry["minutesLeft"] * 60.0)
        yield verdict
        yield wait


# The values of the two labels for the owner: only that of its kind is not empty.
def _make_owner_labels(key: Key) -> tuple[str, str]:
    name = f"{key.namespace}/{key.name}"
    return ("", name) if key.kind == POLICY.kind else (name, "")


def _make_gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{METRIC_PREFIX}{name}", text, value=value)


def _make_counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{METRIC_PREFIX}{name}", text, value=value)
