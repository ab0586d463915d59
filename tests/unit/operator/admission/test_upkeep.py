"""The webhook's Secret and its trust: made again when gone, and never served before it is trusted.

Tests ``admission/upkeep.py`` against an API server that keeps both objects.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from plimsoll_operator.admission.certificate import (
    CA_CERTIFICATE_LIFETIME,
    SERVER_CERTIFICATE_LIFETIME,
    Certificate,
    create_ca_certificate,
    create_server_certificate,
)
from plimsoll_operator.admission.review import PolicyCache
from plimsoll_operator.admission.upkeep import (
    BUNDLE_OVERLAP,
    SECRET_KEYS,
    WebhookReconciler,
    is_bundle_trusted,
)
from plimsoll_operator.config import Config, Intervals, WebhookSettings
from plimsoll_operator.kinds import Kind, Object
from plimsoll_operator.runtime.client import Api, ApiError

DAY = datetime.timedelta(days=1)
POLICY = {
    "apiVersion": "plimsoll.dev/v1alpha1",
    "kind": "SupervisionPolicy",
    "metadata": {
        "name": "p",
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    },
    "spec": {"selector": {"matchLabels": {"app": "a"}}},
}


class Server:
    """Holds the Secret and the configuration; refuses writes while ``refuses``."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {"MutatingWebhookConfiguration": {"metadata": {}}}
        self.refuses = False
        self.now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        self.seconds = 0.0

    async def get(self, kind: Kind, *_: object) -> Object | None:
        return self.objects.get(kind.kind)

    async def apply(self, kind: Kind, item: Object) -> Object:
        if self.refuses:
            raise ApiError(403, "Forbidden", "no right to create secrets")
        self.objects[kind.kind] = item
        return item

    def put(self, held: Certificate, lacks: str = "") -> None:
        texts = zip(SECRET_KEYS, (held.certificate, held.key, held.bundle), strict=True)
        data = {key: base64.b64encode(text).decode() for key, text in texts if key != lacks}
        self.objects["Secret"] = {"data": data}

    def held(self) -> Certificate:
        data = self.objects["Secret"]["data"]
        return Certificate(*(base64.b64decode(data[key]) for key in SECRET_KEYS))

    def trusts(self, held: Certificate) -> bool:
        found = self.objects["MutatingWebhookConfiguration"]
        return bool(found.get("webhooks")) and is_bundle_trusted(found, held.bundle)


class Tally:
    def __init__(self) -> None:
        self.expiries: list[float] = []

    def count_admitted(self, result: str, count: int = 1) -> None:
        raise AssertionError

    def set_certificate_expiry(self, secret: str, expires_s: float) -> None:
        assert secret == "sys/hook"
        self.expiries.append(expires_s)

    def add_webhook_health(self, secret: str, problem: Callable[[], str | None]) -> None:
        raise AssertionError


class Replica:
    """One replica's upkeep; ``leads`` may change."""

    def __init__(
        self, server: Server, folder: Path, leads: bool, is_secret_external: bool = False,
        policies: PolicyCache | None = None,
    ) -> None:  # fmt: skip
        self.server, self.leads, self.tally = server, leads, Tally()
        folder.mkdir(exist_ok=True)
        if policies is None:
            policies = PolicyCache()
            policies.update(POLICY, deleted=False)
        self.known = True
        self.upkeep = WebhookReconciler(
            cast(Api, server),
            policies,
            WebhookSettings("sys", "hook", is_secret_external=is_secret_external),
            Config(intervals=Intervals(webhook_check=30.0)),
            lambda: self.leads,
            folder,
            self.tally,
            lambda: self.known,
            lambda: server.now,
        )

    def turn(self) -> None:
        asyncio.run(self.upkeep.check())

    @property
    def serves(self) -> bytes:
        """The bundle that trusts what it serves with."""
        assert self.upkeep._current is not None
        return self.upkeep._current.bundle


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr("plimsoll_operator.admission.upkeep.time.monotonic", lambda: made.seconds)
    return made


def pass_(server: Server, by: datetime.timedelta) -> None:
    server.now += by
    server.seconds += by.total_seconds()


def test_the_leader_makes_the_secret_and_each_replica_signs_its_own(
    server: Server, tmp_path: Path
) -> None:
    leader = Replica(server, tmp_path / "a", True)
    standby = Replica(server, tmp_path / "b", False)
    standby.turn()
    assert "does not exist" in str(standby.upkeep.find_problem())
    assert standby.upkeep.is_waiting_for_leader(), "so it must be ready, or an old leader stays"
    assert not leader.upkeep.is_waiting_for_leader()
    leader.turn()
    standby.turn()
    assert not standby.upkeep.is_waiting_for_leader()
    assert leader.upkeep.find_problem() is None
    assert standby.upkeep.find_problem() is None
    held = server.held()
    assert server.trusts(held)
    assert leader.serves == standby.serves == held.certificate
    assert leader.upkeep.keyfile.read_bytes() != standby.upkeep.keyfile.read_bytes()
    assert held.key not in (leader.upkeep.keyfile.read_bytes(), standby.upkeep.keyfile.read_bytes())
    assert leader.tally.expiries == [(server.now + SERVER_CERTIFICATE_LIFETIME).timestamp()]


def test_nothing_is_configured_before_all_policies_are_known(
    server: Server, tmp_path: Path
) -> None:
    """A new leader would take away the webhooks of the policies that it does not know yet."""
    leader = Replica(server, tmp_path / "a", True)
    leader.known = False
    leader.turn()
    assert server.objects["MutatingWebhookConfiguration"] == {"metadata": {}}
    assert not leader.upkeep.is_current()
    leader.known = True
    leader.turn()
    assert server.trusts(server.held())
    assert leader.upkeep.is_current()


@pytest.mark.parametrize("restarted", [False, True])
def test_a_secret_that_is_gone_is_made_again(
    server: Server, tmp_path: Path, restarted: bool
) -> None:
    leader = Replica(server, tmp_path / "a", True)
    leader.turn()
    before = server.held()
    del server.objects["Secret"]
    if restarted:
        leader = Replica(server, tmp_path / "b", True)
    pass_(server, datetime.timedelta(seconds=31))
    leader.turn()
    assert server.held().certificate != before.certificate
    assert server.trusts(server.held())
    assert leader.upkeep.find_problem() is None
    assert leader.serves == (server.held().bundle if restarted else before.bundle)


def test_what_cannot_be_written_is_said_and_keeps_it_from_being_ready(
    server: Server, tmp_path: Path
) -> None:
    leader = Replica(server, tmp_path / "a", True)
    server.refuses = True
    with pytest.raises(ApiError):
        leader.turn()
    found = str(leader.upkeep.find_problem())
    assert "cannot write Secret sys/hook" in found
    assert "no right to create secrets" in found


@pytest.mark.parametrize("lacks", SECRET_KEYS)
def test_a_provided_secret_that_lacks_a_key_is_named(
    server: Server, tmp_path: Path, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    signer = create_ca_certificate(server.now)
    server.put(create_server_certificate("hook.sys.svc", signer, server.now), lacks)
    leader = Replica(server, tmp_path / "a", True, is_secret_external=True)
    with caplog.at_level(logging.ERROR):
        leader.turn()
        leader.turn()
    assert f"Secret sys/hook has no {lacks}" in str(leader.upkeep.find_problem())
    assert len(caplog.records) == 1, "once, and not every two seconds"
    assert not leader.upkeep.serving.is_set()

    server.put(create_server_certificate("hook.sys.svc", signer, server.now))
    leader.turn()
    assert leader.upkeep.find_problem() is None


def test_a_new_leaf_changes_nothing_that_the_api_server_trusts(
    server: Server, tmp_path: Path
) -> None:
    leader = Replica(server, tmp_path / "a", True)
    leader.turn()
    configured = server.objects["MutatingWebhookConfiguration"]
    first = leader.upkeep.certfile.read_bytes()
    pass_(server, SERVER_CERTIFICATE_LIFETIME / 2)
    leader.turn()
    assert leader.upkeep.certfile.read_bytes() == first
    pass_(server, SERVER_CERTIFICATE_LIFETIME / 4)
    leader.turn()
    assert leader.upkeep.certfile.read_bytes() != first
    assert server.objects["MutatingWebhookConfiguration"] is configured


def test_a_new_authority_is_trusted_before_anybody_serves_with_it(
    server: Server, tmp_path: Path
) -> None:
    leader = Replica(server, tmp_path / "a", True)
    standby = Replica(server, tmp_path / "b", False)
    leader.turn()
    standby.turn()
    first = server.held()
    pass_(server, CA_CERTIFICATE_LIFETIME * 0.7)
    standby.turn()
    assert standby.serves == first.bundle
    leader.turn()
    second = server.held()
    assert second.certificate != first.certificate
    for seconds in (1, 31, 31):
        for one in (standby, leader):
            one.turn()
            assert server.trusts(replace(first, bundle=one.serves)), "what is served is trusted"
        pass_(server, datetime.timedelta(seconds=seconds))
    standby.turn()
    leader.turn()
    assert leader.serves == standby.serves == second.bundle
    assert server.trusts(first), "others may be late"
    pass_(server, BUNDLE_OVERLAP)
    leader.turn()
    assert not server.trusts(first)
    assert server.trusts(second)


def test_a_standby_waits_for_the_leader_to_configure_what_the_secret_holds(
    server: Server, tmp_path: Path
) -> None:
    Replica(server, tmp_path / "a", True).turn()
    standby = Replica(server, tmp_path / "b", False)
    standby.turn()
    first = standby.serves
    server.put(create_ca_certificate(server.now))
    for _ in range(4):
        pass_(server, datetime.timedelta(seconds=31))
        standby.turn()
    assert standby.serves == first
    assert "does not trust the webhook's certificate yet" in str(standby.upkeep.find_problem())


@pytest.mark.parametrize("wrong", [b"?", None])
def test_a_secret_that_holds_no_authority_is_replaced(
    server: Server, tmp_path: Path, wrong: bytes | None
) -> None:
    signer = create_ca_certificate(server.now)
    server.put(
        replace(signer, key=wrong) if wrong else create_server_certificate("h", signer, server.now)
    )
    leader = Replica(server, tmp_path / "a", True)
    leader.turn()
    assert leader.upkeep.find_problem() is None
    assert server.held().certificate != signer.certificate


def test_a_certificate_that_expired_is_not_ready_and_one_without_policies_is(
    server: Server, tmp_path: Path
) -> None:
    past = server.now - 2 * DAY
    server.put(create_server_certificate("hook.sys.svc", create_ca_certificate(past), past, DAY))
    leader = Replica(server, tmp_path / "a", True, is_secret_external=True)
    leader.turn()
    assert "certificate has expired" in str(leader.upkeep.find_problem())

    empty = Replica(server, tmp_path / "b", True, policies=PolicyCache())
    empty.turn()
    assert empty.upkeep.find_problem() is None
