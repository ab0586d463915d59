"""What a failed reconcile means for the status: ``plimsoll_operator/controllers/writes.py``."""

from __future__ import annotations

import pytest

from plimsoll_operator.controllers.writes import (
    REPORT_AFTER_FAILURES,
    FailureCounter,
    NameConflictError,
)
from plimsoll_operator.kinds import InvalidSpecError, Key, Object
from plimsoll_operator.runtime.client import ApiError

KEY, OTHER = Key("ns", "qwen"), Key("ns", "llama")
PASSING = ApiError(429, "TooManyRequests", "too many requests")
LASTING = ApiError(422, "Invalid", "spec.replicas: Invalid value")


def test_an_invalid_spec_is_reported_and_raises_nothing() -> None:
    failure, error = FailureCounter().classify(KEY, InvalidSpecError("spec.model.uri: missing"))
    assert (failure.reason, failure.is_lasting, error) == ("InvalidSpec", True, None)
    assert failure.message == "spec.model.uri: missing"


def owned(uid: str, **owner: str) -> Object:
    reference = {"apiVersion": "plimsoll.dev/v1alpha1", "kind": "InferenceService", "name": "qwen"}
    references = [reference | owner | {"uid": uid, "controller": True}]
    meta = {"name": "qwen", "namespace": "ns", "ownerReferences": references}
    return {"kind": "Service", "metadata": meta}


def test_a_name_conflict_is_reported_and_tried_again() -> None:
    conflict = NameConflictError(owned("a"), owned("b", name="llama"))
    failure, error = FailureCounter().classify(KEY, conflict)
    assert (failure.reason, failure.is_lasting) == ("NameConflict", True)
    assert error is conflict


def test_an_object_of_a_deleted_service_of_the_same_name_is_waited_for() -> None:
    """Its garbage collection takes seconds: nobody has to do anything."""
    conflict, refusals = NameConflictError(owned("new"), owned("old")), FailureCounter()
    for _ in range(REPORT_AFTER_FAILURES - 1):
        with pytest.raises(NameConflictError):
            refusals.classify(KEY, conflict)
    failure, error = refusals.classify(KEY, conflict)
    assert (failure.reason, failure.is_lasting, error) == ("NameConflict", False, conflict)
    assert "wait until the garbage collector" in failure.message


def test_a_refusal_that_lasts_is_reported_at_once() -> None:
    assert LASTING.is_lasting
    failure, error = FailureCounter().classify(KEY, LASTING)
    assert (failure.reason, failure.is_lasting, error) == ("ApplyFailed", True, LASTING)


def test_a_refusal_that_may_pass_is_reported_only_when_it_comes_again() -> None:
    assert not PASSING.is_lasting
    refusals = FailureCounter()
    for _ in range(REPORT_AFTER_FAILURES - 1):
        with pytest.raises(ApiError):
            refusals.classify(KEY, PASSING)
    with pytest.raises(ApiError):
        refusals.classify(OTHER, PASSING)  # each object counts for itself
    failure, error = refusals.classify(KEY, PASSING)
    assert (failure.reason, failure.is_lasting, error) == ("ApplyFailed", False, PASSING)


def test_a_success_begins_the_count_anew() -> None:
    refusals = FailureCounter()
    for _ in range(2):
        for _ in range(REPORT_AFTER_FAILURES - 1):
            with pytest.raises(ApiError):
                refusals.classify(KEY, PASSING)
        refusals.forget(KEY)
