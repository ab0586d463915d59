"""Answers an AdmissionReview. Every answer allows the pod: supervision is never worth a pod."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from typing import Any

from plimsoll_api.names import SERVICE_LABEL
from plimsoll_operator.admission.policies import Policies
from plimsoll_operator.injection.policy import admit
from plimsoll_operator.kinds import Object
from plimsoll_operator.render.containers import Images
from plimsoll_operator.render.names import MANAGED_BY, MANAGER

log = logging.getLogger(__name__)

RESULTS = ("injected", "refused", "unselected", "failed")
MAX_WARNING = 240
"""The API server cuts longer warnings off where there are many."""


class Reviewer:
    """Answers by the policies that are known. ``count`` is told the result of each review."""

    def __init__(
        self, policies: Policies, images: Images, count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._policies, self._images, self._count = policies, images, count

    def answer_bytes(self, body: bytes) -> bytes:
        """As :meth:`answer`, from JSON to JSON. ValueError where ``body`` is none."""
        try:
            review = json.loads(body)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return json.dumps(self.answer(review)).encode()

    def answer(self, review: Any) -> Object:
        """Answer an AdmissionReview; if anything goes wrong, the pod is created unchanged."""
        request = review.get("request") if isinstance(review, dict) else None
        uid = request.get("uid", "") if isinstance(request, dict) else ""
        response: Object = {"uid": uid if isinstance(uid, str) else "", "allowed": True}
        try:
            assert isinstance(request, dict), "the AdmissionReview has no request"
            result = self._decide(request, response)
        except Exception:
            log.exception("admission failed: the pod is created without a supervisor")
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
        policy = self._policies.of(request["namespace"], labels)
        if policy is None or (labels.get(SERVICE_LABEL) and labels.get(MANAGED_BY) == MANAGER):
            return "unselected"
        admitted = admit(pod, policy, self._images)
        operations = patch(pod, admitted.pod)
        if operations:
            text = json.dumps(operations, separators=(",", ":")).encode()
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(text).decode()
        if admitted.refusal is None:
            return "injected"
        said = f"SupervisionPolicy {policy.metadata.name}: not supervised: {admitted.refusal}"
        response["warnings"] = [said[:MAX_WARNING]]
        return "refused"


def patch(before: Object, after: Object) -> list[Object]:
    """Make the JSON patch between two versions of a pod, by whole fields of metadata and spec."""
    operations: list[Object] = []
    for part in ("metadata", "spec"):
        old, new = before[part], after[part]
        operations += [
            {"op": "add", "path": f"/{part}/{key}", "value": value}
            for key, value in new.items()
            if key not in old or old[key] != value
        ]
        operations += [{"op": "remove", "path": f"/{part}/{key}"} for key in old if key not in new]
    return operations
