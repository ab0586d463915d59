"""What EndpointSlices say of pods (``clients/kube.py``)."""

from __future__ import annotations

import pytest

from plimsoll_sidecar.clients import kube
from plimsoll_sidecar.clients.kube import KubeError
from tests.unit.clients.api_server import ApiServer, endpoint


def test_endpoints_of_some_services_over_several_slices(api: ApiServer) -> None:
    api.add("a", [endpoint("a-0", ready=True, serving=False), endpoint("a-1", "10.0.0.2")])
    api.add("b", [endpoint("b-0", ready=False)])
    api.add("c", [endpoint("c-0")])
    api.add("a", [{"addresses": []}, {"addresses": ["10.0.0.9"], "targetRef": None}])
    api.slices.append(
        {"metadata": {"labels": {"kubernetes.io/service-name": "a"}}, "endpoints": None}
    )
    found = list(api.endpoint_slices.iterate_endpoints(["b", "a"]))
    assert [(one.service, one.pod, one.ready, one.address) for one in found] == [
        ("a", "a-0", False, "10.0.0.1"),
        ("a", "a-1", True, "10.0.0.2"),
        ("b", "b-0", False, "10.0.0.1"),
        ("a", "", True, ""),
        ("a", "", True, "10.0.0.9"),
    ]
    assert list(api.endpoint_slices.iterate_endpoints([])) == []


def test_the_services_of_a_pod(api: ApiServer) -> None:
    api.add("a", [endpoint("x"), endpoint("y")])
    api.add("b", [endpoint("y")])
    api.add("", [endpoint("y")])
    assert api.endpoint_slices.find_services("y") == {"a", "b"}
    assert api.endpoint_slices.find_services("z") == set()


def test_more_endpoints_than_a_service_has_are_refused(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "MAX_ENDPOINTS", 10)
    api.add("a", [endpoint(f"a-{number}") for number in range(11)])
    with pytest.raises(KubeError, match="more than 10 endpoints"):
        list(api.endpoint_slices.iterate_endpoints(["a"]))
