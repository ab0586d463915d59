"""A service whose podTemplate is nested 10,000 levels deep costs only its own author.

Tests ``main.py``, ``plans/service.py``, ``runtime/cache.py`` and ``admission/review.py``.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from plimsoll_operator.admission.review import PolicyCache, Reviewer
from plimsoll_operator.config import DEFAULT_IMAGES
from plimsoll_operator.kinds import InvalidSpecError
from plimsoll_operator.plans.service import parse_service

OPERATOR = """
import json, sys
from plimsoll_operator.kinds import Ref
from plimsoll_operator.main import main
from plimsoll_operator.runtime.cache import Store
assert main(["run", "--kubeconfig", "/nonexistent"]) == 1
deep = '{"a":' * 9_990 + "1" + "}" * 9_990
item = json.loads('{"kind": "InferenceService", "spec": {"podTemplate": ' + deep + '}}')
store = Store()
key = store.put(item | {"metadata": {"namespace": "ml", "name": "deep"}})
kept = store.get(key, Ref(key.kind, key.name))
assert json.dumps(kept["spec"]["podTemplate"], separators=(",", ":")) == deep
"""


def test_the_operator_reads_whatever_the_api_server_keeps() -> None:
    done = subprocess.run([sys.executable, "-c", OPERATOR], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def nested(depth: int) -> Any:
    value: Any = {}
    for n in range(depth):
        value = {"a": value} if n % 2 else [value]
    return value


@pytest.mark.parametrize(("depth", "fits"), [(0, True), (20, True), (64, True), (65, False)])
def test_the_service_is_invalid_by_name(depth: int, fits: bool) -> None:
    manifest = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "a", "namespace": "ml"},
        "spec": {"model": {"uri": "file:///m"}, "podTemplate": nested(depth)},
    }
    if fits:
        assert parse_service(manifest).spec.pod_template == nested(depth)
        return
    with pytest.raises(
        InvalidSpecError, match=r"spec\.podTemplate is nested more than 64 levels deep"
    ):
        parse_service(manifest)


def test_a_review_is_refused_before_a_thread_recurses() -> None:
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        Reviewer(PolicyCache(), DEFAULT_IMAGES).respond_to_body(b"[" * 500 + b"]" * 500)
