"""Respond to AdmissionReviews from cached policies, without requests to the API server.

Every response allows the pod, because a pod without a supervisor is better than no pod.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from plimsoll_api.decoding import MAX_DEPTH, is_nested_deeper
from plimsoll_api.names import SERVICE_LABEL
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.selected_pods import find_matching_policies, parse_policies
from plimsoll_operator.injection.checks import find_supervisor
from plimsoll_operator.injection.policy import find_group_name, format_images, inject_pod
from plimsoll_operator.kinds import Object
from plimsoll_operator.plans.injection import find_skip_reason, parse_injection
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.names import FIELD_MANAGER, MANAGED_BY_LABEL


class _CachedPolicy(NamedTuple):
    """Policy from the watch; ``parsed`` is empty if it is invalid or being deleted."""

    user_fields: tuple[object, ...]
    age: tuple[str, str]
    parsed: list[SupervisionPolicy]
    status: Object


class PolicyCache:
    """Policies that this replica has received through its watch."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, _CachedPolicy]] = {}
        self._ordered: dict[str, list[SupervisionPolicy]] = {}

    def update(self, item: Object, deleted: bool) -> None:
        """Store a policy, or remove it if ``deleted``."""
        meta = item["metadata"]
        namespace, name = meta["namespace"], meta["name"]
        cached = self._known.setdefault(namespace, {})
        before = cached.pop(name, None)
        # Users write these parts; only the operator writes the status.
        parts = ("uid", "generation", "deletionTimestamp", "annotations", "creationTimestamp")
        user_fields = tuple(meta.get(part) for part in parts)
        unchanged = before is not None and before.user_fields == user_fields and not deleted
        if not deleted:
            age = (str(meta.get("creationTimestamp") or "~"), name)
            parsed = before.parsed if unchanged and before else parse_policies([item])
            cached[name] = _CachedPolicy(user_fields, age, parsed, item.get("status") or {})
        if not unchanged:
            ages = sorted(cached.values(), key=lambda entry: entry.age)
            self._ordered[namespace] = [policy for entry in ages for policy in entry.parsed]

    def list_all(self) -> list[SupervisionPolicy]:
        """Return all valid policies by namespace, oldest first."""
        return [policy for _, policies in sorted(self._ordered.items()) for policy in policies]

    def find(self, namespace: str, labels: Mapping[str, str]) -> SupervisionPolicy | None:
        """Return the oldest policy that selects a pod with ``labels``; None if there is none."""
        matching = find_matching_policies(self._ordered.get(namespace, ()), labels)
        return matching[0] if matching else None

    def get_status(self, policy: SupervisionPolicy) -> Object:
        """Return the last known status of ``policy``."""
        cached = self._known.get(policy.metadata.namespace, {}).get(policy.metadata.name)
        return cached.status if cached else {}


log = logging.getLogger(__name__)

REVIEW_RESULTS = ("injected", "held", "refused", "unselected", "failed")
STATUS_COUNT_DELAY_S = 30.0
"""Seconds after which the policy's status counts an injected pod that has not started yet."""
MAX_WARNING_CHARS = 240
"""Maximum length of a warning; the API server truncates longer ones."""


class Reviewer:
    """Builder of admission responses.

    Until a pod has run with the current images, at most ``limit`` replicas of a policy get a
    supervisor. ``count`` is called with each result, one of :data:`REVIEW_RESULTS`.
    """

    def __init__(
        self,
        policies: PolicyCache,
        images: Images,
        count: Callable[[str], None] = lambda _: None,
        limit: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policies, self._images, self._count = policies, images, count
        self._limit, self._clock = limit, clock
        self._recent_starts: dict[tuple[str, str], dict[str, float]] = {}
        self._lock = threading.Lock()

    def respond_to_body(self, body: bytes) -> bytes:
        """Return the JSON response to an AdmissionReview. Raises ValueError if it is not JSON."""
        if is_nested_deeper(body, MAX_DEPTH):  # beyond this depth, a thread's stack would overflow
            raise ValueError(f"the AdmissionReview is nested more than {MAX_DEPTH} levels deep")
        return json.dumps(self.respond(json.loads(body))).encode()

    def respond(self, review: Any) -> Object:
        """Return the response to an AdmissionReview; after an error, it allows the pod."""
        request = review.get("request") if isinstance(review, dict) else None
        uid = request.get("uid", "") if isinstance(request, dict) else ""
        response: Object = {"uid": uid if isinstance(uid, str) else "", "allowed": True}
        try:
            assert isinstance(request, dict), "the AdmissionReview contains no request"
            result = self._decide(request, response)
        except Exception:
            log.exception(
                "failed to process an AdmissionReview; the pod is created without a supervisor"
            )
            response = {"uid": response["uid"], "allowed": True}
            result = "failed"
        self._count(result)
        return {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": response,
        }

    def _decide(self, request: Object, response: Object) -> str:
        pod = request["object"]
        if request["operation"] != "CREATE" or request["kind"]["kind"] != "Pod":
            return "unselected"
        labels = pod["metadata"].get("labels") or {}
        policy = self._policies.find(request["namespace"], labels)
        if policy is None or (
            labels.get(SERVICE_LABEL) and labels.get(MANAGED_BY_LABEL) == FIELD_MANAGER
        ):
            return "unselected"
        admitted = inject_pod(pod, policy, self._images)
        name = f"SupervisionPolicy {policy.metadata.name}"
        is_new = admitted.refusal is None and find_supervisor(pod["spec"]) is None
        with self._lock:
            skip_reason = self._find_hold_reason(request, policy) if is_new else ""
        if skip_reason:
            response["warnings"] = [
                f"{name}: this pod gets no supervisor: {skip_reason}"[:MAX_WARNING_CHARS]
            ]
            return "held"
        operations = make_json_patch(pod, admitted.pod)
        if operations:
            text = json.dumps(operations, separators=(",", ":")).encode()
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(text).decode()
        if admitted.refusal is None:
            return "injected"
        response["warnings"] = [
            f"{name}: this pod gets no supervisor: {admitted.refusal}"[:MAX_WARNING_CHARS]
        ]
        return "refused"

    def _find_hold_reason(self, request: Object, policy: SupervisionPolicy) -> str:
        """Return why the pod gets no supervisor for now. Otherwise, record its replica."""
        images, now = format_images(policy, self._images), self._clock()
        key = (policy.metadata.uid, images)
        recent_starts = {
            name: at
            for name, at in self._recent_starts.pop(key, {}).items()
            if now - at < STATUS_COUNT_DELAY_S
        }
        if recent_starts:
            self._recent_starts[key] = recent_starts
        replica = find_group_name(request["object"]["metadata"]) or str(request["uid"])
        if replica in recent_starts:
            return ""
        state = parse_injection(self._policies.get_status(policy))
        skip_reason = find_skip_reason(policy, state, images, len(recent_starts), self._limit)
        if (
            not skip_reason
            and not (state is not None and state.proven)
            and not request.get("dryRun")
        ):
            self._recent_starts[key] = recent_starts | {replica: now}
        return skip_reason


def make_json_patch(original: Object, changed: Object) -> list[Object]:
    """Return the JSON patch that turns ``original`` into ``changed``."""
    operations: list[Object] = []
    for part in ("metadata", "spec"):
        old, new = original[part], changed[part]
        operations += [
            {"op": "add", "path": f"/{part}/{key}", "value": value}
            for key, value in new.items()
            if key not in old or old[key] != value
        ]
        operations += [{"op": "remove", "path": f"/{part}/{key}"} for key in old if key not in new]
    return operations
