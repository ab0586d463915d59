"""Restart counts in a Lease's annotations: bounded, and never taken for zero.

Tests ``act/lease_counts.py``.
"""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_api.names import REPLICA_RESTARTS_ANNOTATION, SERVICE_RESTARTS_ANNOTATION
from plimsoll_api.supervisor_config import GroupMember
from plimsoll_sidecar.act import lease_counts
from plimsoll_sidecar.act.lease_counts import (
    MAX_REPLICAS_PER_LEASE,
    MAX_RESTARTS_PER_REPLICA,
    UnreadableCountError,
)
from plimsoll_sidecar.govern.restart_budget import NO_RESTARTS, ReplicaRestarts

NOW, WINDOW_S = 1_700_000_000.0, 3600.0


def lease(**annotations: str) -> dict[str, Any]:
    names = {"service": SERVICE_RESTARTS_ANNOTATION, "replicas": REPLICA_RESTARTS_ANNOTATION}
    return {
        "metadata": {
            "name": "leaky-slot-0",
            "annotations": {names[name]: text for name, text in annotations.items()},
        }
    }


def test_a_replica_finds_its_own_count_again() -> None:
    one = lease()
    kept = ReplicaRestarts((NOW - 20.125, NOW - 10.5), exhausted=True)
    lease_counts.store_replica_restarts(one, "uid-1", kept, WINDOW_S, NOW)
    lease_counts.store_replica_restarts(one, "uid-2", ReplicaRestarts((NOW,)), WINDOW_S, NOW)
    assert lease_counts.read_replica_restarts(one, "uid-1") == kept
    assert lease_counts.read_replica_restarts(one, "uid-3") == NO_RESTARTS, (
        "another pod begins at zero"
    )
    lease_counts.store_replica_restarts(one, "uid-1", NO_RESTARTS, WINDOW_S, NOW)
    assert lease_counts.read_replica_restarts(one, "uid-1") == NO_RESTARTS
    assert lease_counts.read_replica_restarts(one, "uid-2").at == (NOW,)


def test_counts_are_bounded() -> None:
    one = lease()
    restarts = ReplicaRestarts(tuple(NOW - 3000 + index / 7 for index in range(500)))
    for number in range(3 * MAX_REPLICAS_PER_LEASE):
        lease_counts.store_replica_restarts(one, f"{number:036d}", restarts, WINDOW_S, NOW)
    assert len(one["metadata"]["annotations"][REPLICA_RESTARTS_ANNOTATION]) < 96 << 10
    newest = lease_counts.read_replica_restarts(one, f"{3 * MAX_REPLICAS_PER_LEASE - 1:036d}")
    assert newest.at == restarts.at[-MAX_RESTARTS_PER_REPLICA:]
    for number in range(lease_counts.MAX_SERVICE_RESTARTS + 10):
        lease_counts.add_service_restart(one, f"pod-{number:08x}", WINDOW_S, NOW)
    assert (
        len(lease_counts.read_service_restarts(one, WINDOW_S, NOW))
        == lease_counts.MAX_SERVICE_RESTARTS
    )


def test_replicas_that_count_no_more_are_forgotten() -> None:
    one = lease()
    lease_counts.store_replica_restarts(one, "old", ReplicaRestarts((NOW,)), WINDOW_S, NOW)
    lease_counts.store_replica_restarts(
        one, "stopped", ReplicaRestarts((NOW,), True), WINDOW_S, NOW
    )
    later = NOW + WINDOW_S + lease_counts.MAX_CLOCK_SKEW_S + 1
    lease_counts.store_replica_restarts(one, "new", ReplicaRestarts((later,)), WINDOW_S, later)
    assert lease_counts.read_replica_restarts(one, "old") == NO_RESTARTS
    assert lease_counts.read_replica_restarts(one, "stopped").exhausted


def test_a_reset_takes_the_replicas_part_of_the_service() -> None:
    one = lease()
    for incident in ("leaky-0-00000001", "leaky-0-00000002", "leaky-01-00000003"):
        lease_counts.add_service_restart(one, incident, WINDOW_S, NOW)
    lease_counts.store_replica_restarts(one, "uid-0", ReplicaRestarts((NOW,), True), WINDOW_S, NOW)
    assert lease_counts.clear_replica_restarts(one, "uid-0", "leaky-0") == 2
    left = [restart.incident for restart in lease_counts.read_service_restarts(one, WINDOW_S, NOW)]
    assert left == ["leaky-01-00000003"]
    assert lease_counts.read_replica_restarts(one, "uid-0") == NO_RESTARTS
    assert lease_counts.clear_service_restarts(one) == 1
    assert one["metadata"]["annotations"] == {}


@given(st.text(max_size=200) | st.from_regex(r'\{"uid-1":.{0,40}\}', fullmatch=True))
def test_a_forged_count_is_unreadable_or_a_count(text: str) -> None:
    one = lease(service=text, replicas=text)
    for read in (
        lambda: lease_counts.read_replica_restarts(one, "uid-1"),
        lambda: lease_counts.read_service_restarts(one, WINDOW_S, NOW),
    ):
        with contextlib.suppress(UnreadableCountError):
            read()
    lease_counts.clear_replica_restarts(one, "uid-1", "leaky-0")
    lease_counts.clear_service_restarts(one)
    assert lease_counts.read_replica_restarts(one, "uid-1") == NO_RESTARTS
    assert lease_counts.read_service_restarts(one, WINDOW_S, NOW) == []


def test_a_count_that_is_too_long_is_not_read() -> None:
    one = lease(replicas="{" + " " * lease_counts.MAX_ANNOTATION_BYTES + "}")
    with pytest.raises(UnreadableCountError, match=r"128 KiB.*plimsoll resume POD --service"):
        lease_counts.read_replica_restarts(one, "uid-1")


@pytest.mark.parametrize(
    ("group", "kept"), [(None, False), (GroupMember(""), False), (GroupMember("4a"), True)]
)
def test_new_pods_of_a_group_find_the_groups_count(group: GroupMember | None, kept: bool) -> None:
    """A restart of the group recreates its leader, which is another pod."""
    one = lease()
    before, after = (lease_counts.make_replica_key(group, uid) for uid in ("uid-1", "uid-2"))
    lease_counts.store_replica_restarts(one, before, ReplicaRestarts((NOW,)), WINDOW_S, NOW)
    assert bool(lease_counts.read_replica_restarts(one, after).at) is kept
    assert lease_counts.read_replica_restarts(one, "group 5b") == NO_RESTARTS
