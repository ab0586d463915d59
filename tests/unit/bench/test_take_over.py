"""Two leaders are counted from an audit log: by whose write of the Lease was answered last."""

from __future__ import annotations

import json
from typing import Any

from bench.take_over import ACCOUNT, CREDENTIAL, LEASE, two_leaders, writes_of


def line(second: int, who: str, what: str = "configmaps", code: int = 200, **more: Any) -> str:
    event = {
        "stage": "ResponseComplete",
        "user": {"username": ACCOUNT, "extra": {CREDENTIAL: [who]}},
        "objectRef": {"resource": what, "name": LEASE if what == "leases" else "x"},
        "responseStatus": {"code": code},
        "stageTimestamp": f"2026-01-01T00:00:{second:02}.000000Z",
    }
    return json.dumps(event | more)


def counted(*lines: str) -> tuple[int, int]:
    wrong, count = two_leaders(writes_of(lines))
    return sum(one.done for one in wrong), count


def test_only_who_has_the_lease_may_write() -> None:
    story = [
        line(1, "a", "leases"),
        line(2, "a"),
        line(3, "b", "leases", 409),
        line(4, "a"),
        line(5, "a", "leases"),
        line(20, "b", "leases"),
        line(21, "b"),
    ]
    assert counted(*story) == (0, 3)
    assert counted(*story, line(22, "a")) == (1, 4), "the one before came back"
    assert counted(*story, line(22, "a", code=504)) == (0, 4), "the API server gave it up"
    tried = line(21, "c", "leases", requestURI="/apis/x/leases?dryRun=All")
    assert counted(*story, tried, line(22, "b")) == (0, 4), "a try takes no Lease"
    assert counted(*story, line(0, "a")) == (1, 4), "nobody had it yet"
    assert counted(*story, line(19, "b")) == (1, 4), "too early"
    assert counted(*reversed(story)) == (0, 3), "lines of a log are not in order"
    others = line(22, "a", user={"username": "system:admin"})
    assert counted(*story, others, line(23, "a", stage="Panic")) == (0, 3)
