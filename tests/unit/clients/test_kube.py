"""The client of the Kubernetes API against a server that answers what it likes."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from plimsoll_sidecar.clients import kube
from plimsoll_sidecar.clients.kube import (
    ConflictError,
    ForbiddenError,
    KubeClient,
    KubeError,
    NotFoundError,
    TooLargeError,
    TooManyRequestsError,
    UnexpectedResponseError,
)
from tests.unit.clients.api_server import PATH, ApiServer, endpoint
from tests.unit.clients.raw_server import serve
from tests.unit.clients.test_http import HEAD, dripping


@pytest.mark.parametrize(
    ("status", "kind", "transient"),
    [
        (403, ForbiddenError, False),
        (404, NotFoundError, False),
        (409, ConflictError, False),
        (429, TooManyRequestsError, True),
        (422, KubeError, False),
        (503, KubeError, True),
    ],
)
def test_a_refusal_has_the_type_of_its_reason(
    api: ApiServer, status: int, kind: type[KubeError], transient: bool
) -> None:
    api.answer = status, {}, b'{"kind":"Status","message":"because"}'
    with pytest.raises(KubeError, match=f"GET {PATH}/x failed: because") as caught:
        api.kube.get(f"{PATH}/x")
    assert (type(caught.value), caught.value.status) == (kind, status)
    assert caught.value.is_transient == transient


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"<html>", b"7", b'{"metadata": null}', b'{"metadata": "x"}', b"[" * 9999],
)
def test_a_success_that_is_no_object_is_an_error(api: ApiServer, body: bytes) -> None:
    """A proxy between the API server and us answers so; it is no empty object."""
    api.answer = 200, {}, body
    for call in (api.kube.get, lambda path: api.kube.put(path, {"metadata": {}})):
        with pytest.raises(UnexpectedResponseError, match="not a Kubernetes object") as caught:
            call(PATH)
        assert caught.value.is_transient
    with pytest.raises(UnexpectedResponseError, match="not a list"):
        list(api.endpoint_slices.iterate_endpoints(["a"]))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("86400", 600.0), ("9" * 400, 600.0), ("\xb2", None), ("-1", None), ("", None)],
)
def test_the_wait_that_a_server_asks_for_is_bounded(
    api: ApiServer, header: str, seconds: float | None
) -> None:
    api.answer = 429, {"Retry-After": header}, b"x"
    with pytest.raises(TooManyRequestsError, match="HTTP 429") as caught:
        api.kube.get(PATH)
    assert caught.value.retry_after_s == seconds


def test_a_long_message_is_cut(api: ApiServer) -> None:
    api.answer = 403, {}, b'{"message":"' + b"m" * 100_000 + b'"}'
    with pytest.raises(ForbiddenError) as caught:
        api.kube.get(PATH)
    assert len(str(caught.value)) < 1000


class Named(msgspec.Struct):
    metadata: dict[str, Any]


def test_a_collection_is_read_by_pages(api: ApiServer) -> None:
    for number in range(150):
        api.add(f"s-{number}", [])
    assert len(list(api.kube.list_items(PATH, Named))) == 150
    assert [query["limit"] for query in api.queries] == ["64"] * 3


def test_objects_too_large_for_a_page_are_asked_for_in_smaller_ones(api: ApiServer) -> None:
    for number in range(20):
        api.add(f"s-{number}", [endpoint("p" * 250) for _ in range(2500)])
    assert len(list(api.kube.list_items(PATH, Named))) == 20
    assert [query["limit"] for query in api.queries[:2]] == ["64", "16"]
    api.slices = api.slices[:1]
    api.slices[0]["endpoints"] *= 10
    with pytest.raises(TooLargeError):
        list(api.kube.list_items(PATH, Named))


def test_a_server_that_never_comes_to_the_last_page_is_left(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "MAX_PAGES", 5)
    api.answer = 200, {}, b'{"metadata": {"continue": "on"}, "items": [{"metadata": {}}]}'
    with pytest.raises(KubeError, match="more than 5 pages"):
        list(api.kube.list_items(PATH, Named))


def test_pages_that_come_slowly_are_left(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "LIST_TIMEOUT_S", 0.0)
    api.answer = 200, {}, b'{"metadata": {"continue": "on"}, "items": [{"metadata": {}}]}'
    with pytest.raises(KubeError, match="reading all pages took longer than") as caught:
        list(api.kube.list_items(PATH, Named))
    assert caught.value.is_transient


def test_a_server_that_sends_a_byte_now_and_then_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "REQUEST_TIMEOUT_S", 0.5)
    with serve(dripping(HEAD + b"X: ")) as url:
        begin = time.monotonic()
        with pytest.raises(KubeError, match="was not complete within the timeout") as caught:
            KubeClient(url).get(PATH)
        assert time.monotonic() - begin < 4.0
    assert (caught.value.status, caught.value.is_transient) == (0, True)
