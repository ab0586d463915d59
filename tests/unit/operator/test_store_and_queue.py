"""The operator's memory of the cluster, and the order of its work.

Tests ``runtime/queue.py`` and ``runtime/cache.py``.
"""

from __future__ import annotations

import asyncio
import json
import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll_operator.kinds import KINDS_BY_NAME, SERVICE, Key, Ref, find_key
from plimsoll_operator.plans.service import parse_service
from plimsoll_operator.render import Images, render_objects
from plimsoll_operator.runtime.cache import MAX_OWNED_BYTES, Store
from plimsoll_operator.runtime.client import ApiError, TooLargeError, is_outage
from plimsoll_operator.runtime.queue import MAX_BACKOFF_S, WorkQueue, compute_backoff_s
from plimsoll_operator.runtime.watches import Watches

KEY = Key("ml", "qwen")


def pod(version: int, uid: str = "u", name: str = "p") -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {"plimsoll.dev/service": "qwen"},
        },
    }


@given(st.lists(st.integers(1, 99), min_size=1))
def test_the_newest_version_wins_whatever_the_order(versions: list[int]) -> None:
    store = Store()
    for version in versions:
        assert store.put(pod(version)) == KEY
    kept = store.get(KEY, Ref("Pod", "p"))
    assert kept is not None
    assert kept["metadata"]["resourceVersion"] == str(max(versions))


def test_a_late_deletion_does_not_forget_the_successor() -> None:
    store = Store()
    store.put(pod(5, "old"))
    store.put(pod(3, "new"))  # another object: its version says nothing
    store.remove(pod(6, "old"))
    assert store.list_children(KEY, {"Pod"}) == [pod(3, "new")]
    store.remove(pod(9, "new"))
    assert store.list_known_keys() == []


def test_what_is_given_out_is_not_what_is_kept() -> None:
    store = Store()
    store.put(pod(1))
    for _ in range(2):
        (found,) = store.list_children(KEY, {"Pod"})
        assert found == pod(1)
        found["metadata"]["labels"].clear()
    assert store.list_children(KEY, {"Role"}) == []
    assert (store.list_known_keys(), store.list_services()) == ([KEY], [])
    store.put(pod(0))
    assert store.changes["Pod"] == 1, "an older version changes nothing"


def test_a_service_and_its_children_fit_in_17_kib() -> None:
    """Some 30 KiB as text and 115 KiB as Python objects: 5,000 of them must fit in 250 MiB."""
    manifest = {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "s00001", "namespace": "ml", "uid": "u"},
        "spec": {"model": {"uri": "file:///m"}},
    }
    items = [manifest, *render_objects(parse_service(manifest), Images("engine:1", "supervisor:1"))]
    store = Store()
    for item in items:  # what Python makes once, such as interned keys, is not the store's
        Store().put(json.loads(json.dumps(item)))
    tracemalloc.start()
    for item in items:
        store.put(json.loads(json.dumps(item)))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 17 << 10, kept
    assert len(store.list_children(Key("ml", "s00001"), {item["kind"] for item in items})) == len(
        items
    )


def test_objects_find_their_service() -> None:
    meta = {"name": "x", "namespace": "ml"}
    owner = {"kind": "InferenceService", "name": "qwen"}
    assert find_key({"kind": "InferenceService", "metadata": meta | {"name": "qwen"}}) == KEY
    assert find_key({"kind": "Role", "metadata": meta | {"ownerReferences": [owner]}}) == KEY
    spec = {"workloadRef": {"kind": "InferenceService", "name": "qwen"}}
    assert find_key({"kind": "LeakIncident", "metadata": meta, "spec": spec}) == KEY
    assert find_key({"kind": "Role", "metadata": meta}) is None


def test_backoff_grows_to_a_bound_and_spreads() -> None:
    delays = [compute_backoff_s(failures, 0.0) for failures in range(1, 40)]
    assert delays == sorted(delays)
    assert compute_backoff_s(39, 0.999) <= MAX_BACKOFF_S
    assert compute_backoff_s(3, 0.0) < compute_backoff_s(3, 0.5)


@pytest.mark.parametrize(
    ("error", "longest_s"),
    [
        (ConnectionRefusedError("the API server is away"), 30.0),
        (TimeoutError(), 30.0),
        (ApiError(503, "ServiceUnavailable", "not all paths have been installed"), 30.0),
        (ApiError(422, "Invalid", "spec.replicas"), 120.0),
        (ApiError(500, "", "failed to create typed patch object: unknown field"), 120.0),
        (TooLargeError("more than 64 MiB"), 120.0),
        (ValueError("a fault of its own"), 120.0),
    ],
)
def test_only_an_outage_is_tried_again_within_half_a_minute(
    error: Exception, longest_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=1, is_outage=is_outage)
        queue._failures["a"] = 20

        async def handle(_: str) -> None:
            raise error

        queue.add("a")
        await _drive(queue, handle, lambda: queue.failed)

    asyncio.run(scenario())
    (text,) = [record.message for record in caplog.records if "retrying" in record.message]
    delay_s = float(text.rpartition("retrying in ")[2].removesuffix(" s"))
    assert longest_s / 2 <= delay_s <= longest_s


async def _drive(queue: WorkQueue[str], handle: Any, until: Any) -> None:
    task = asyncio.create_task(queue.run(handle))
    async with asyncio.timeout(5):
        while not until():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_key_runs_once_at_a_time_and_again_when_added_meanwhile() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=4)
        running, most, seen = 0, 0, []

        async def handle(key: str) -> None:
            nonlocal running, most
            seen.append(key)
            if key != "a":
                return
            running += 1
            most = max(most, running)
            if len(seen) == 1:
                for _ in range(5):
                    queue.add(key)
            if len(seen) == 2:
                queue.add("after any third turn")
            await asyncio.sleep(0.02)
            running -= 1

        for _ in range(3):
            queue.add("a")
        await _drive(queue, handle, lambda: queue.handled == 3)
        assert seen == ["a", "a", "after any third turn"]
        assert most == 1

    asyncio.run(scenario())


def test_a_failure_comes_again_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=1)
        seen: list[str] = []

        async def handle(key: str) -> None:
            seen.append(key)
            if key == "bad" and seen.count("bad") == 1:
                raise RuntimeError("once")

        queue.add("bad")
        queue.add("good")
        await _drive(queue, handle, lambda: seen.count("bad") == 2)
        assert seen == ["bad", "good", "bad"]
        assert queue.failed == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("recheck_s", "expected_s"), [(15.0, (15, 15)), (3600.0, (60, 120))])
def test_a_failed_reconcile_comes_again_by_its_recheck_or_its_backoff(
    recheck_s: float, expected_s: tuple[float, float]
) -> None:
    """The earlier of both counts, and a recheck that fails too does not reset the backoff."""

    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=1)
        queue._failures["a"] = 20

        async def handle(key: str) -> None:
            queue.add_later(key, recheck_s)
            raise RuntimeError("refused")

        for failures in (21, 22):
            queue.add("a")
            await _drive(queue, handle, lambda: queue.failed == failures - 20)  # noqa: B023
            delay_s = queue._timers["a"].when() - asyncio.get_running_loop().time()
            assert expected_s[0] - 5.0 <= delay_s <= expected_s[1]
            assert queue._failures["a"] == failures

    asyncio.run(scenario())


def test_the_earlier_of_two_times_counts_in_either_order() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(workers=1)
        loop = asyncio.get_running_loop()
        for delays_s in ((30.0, 90.0), (90.0, 30.0)):
            key = str(delays_s)
            for delay_s in delays_s:
                queue.add_later(key, delay_s)
            assert queue._timers[key].when() - loop.time() == pytest.approx(30.0, abs=1.0)
        queue.add_later("soon", 3600.0)
        queue.add_later("soon", 0.01)
        seen: list[str] = []

        async def handle(key: str) -> None:
            seen.append(key)

        # ``run`` starts with the scheduled keys, so the timers fire before it.
        await asyncio.sleep(0.05)
        assert len(queue) == 1
        await _drive(queue, handle, lambda: queue.handled == 3)
        assert seen.count("soon") == 1

    asyncio.run(scenario())


def test_a_thousand_reconciles_that_wait_for_nothing_let_others_have_their_turn() -> None:
    async def scenario() -> None:
        queue: WorkQueue[int] = WorkQueue(workers=4)
        handled = turns = 0

        async def handle(_: int) -> None:
            nonlocal handled
            handled += 1

        async def probe() -> None:
            nonlocal turns
            while handled < 1000:
                turns += 1
                await asyncio.sleep(0)

        for key in range(1000):
            queue.add(key)
        work = asyncio.create_task(queue.run(handle))
        await probe()
        work.cancel()
        assert turns >= 1000 / 4

    asyncio.run(scenario())


def test_a_list_does_not_undo_what_came_while_it_was_read() -> None:
    store = Store()
    store.put(pod(2, "old", "changed"))
    store.put(pod(2, "stale", "stale"))
    store.begin_listing()
    listed = store.compress_listed(
        [pod(2, "old", "changed"), pod(3, "deleted", "deleted"), pod(3, "told", "told")], {KEY}
    )
    store.put(pod(9, "old", "changed"))
    store.put(pod(8, "new", "new"))
    store.put(pod(4, "deleted", "deleted"))
    store.remove(pod(5, "deleted", "deleted"))
    behind = store.replace("Pod", listed, version="6")
    found = {
        item["metadata"]["name"]: item["metadata"]["resourceVersion"]
        for item in store.list_children(KEY, {"Pod"})
    }
    assert found == {"changed": "9", "new": "8", "told": "3"}
    assert behind == 2, "one was not known, one is gone"
    store.begin_listing()
    assert (
        store.replace("Pod", store.compress_listed(store.list_children(KEY, {"Pod"})), version="9")
        == 0
    )


def test_a_list_of_what_is_known_takes_no_more_memory() -> None:
    """All lists of a cluster are held at once until the events that were under way have come."""
    store = Store()
    for number in range(50):
        store.put(pod(2, f"uid-{number}", f"pod-{number}"))
    listed = store.compress_listed(store.list_children(KEY, {"Pod"}))
    known = store.compress_listed(store.list_children(KEY, {"Pod"}))
    assert len(listed) == 50
    assert all(one.compressed is other.compressed for one, other in zip(listed, known, strict=True))
    (changed,) = store.compress_listed([pod(3, "uid-7", "pod-7")])
    assert (
        changed.compressed is not next(one for one in listed if one.ref == changed.ref).compressed
    )


def test_an_event_of_what_is_known_asks_for_no_reconcile() -> None:
    """Else each own write, and each list of a watch that begins anew, would be reconciled again."""
    store = Store()

    def asked(event: str | None, version: int) -> bool:
        queue = WorkQueue[Key](1)
        Watches(store, queue).handle_event(KINDS_BY_NAME["Pod"], event, pod(version))
        return len(queue) == 1

    store.put(pod(2))
    assert not asked("MODIFIED", 2)
    assert not asked(None, 2)
    assert asked("MODIFIED", 3)
    assert asked("DELETED", 3)
    assert store.list_known_keys() == []


def test_a_queue_that_begins_again_forgets_nothing() -> None:
    """What was being handled when it failed, and what was due to come again, come again."""

    async def run() -> list[str]:
        handled: list[str] = []
        broken = True

        def done(*_: Any) -> None:
            if broken:
                raise OverflowError("a counter")

        queue: WorkQueue[str] = WorkQueue(2, done)
        slow = asyncio.Event()

        async def handle(key: str) -> None:
            if broken and key == "slow":
                await slow.wait()
            handled.append(key)

        queue.add("slow")
        queue.add("quick")
        queue.add_later("later", 3600)
        with pytest.raises(ExceptionGroup):
            await queue.run(handle)
        broken = False
        await _drive(queue, handle, lambda: {"slow", "later"} <= set(handled))
        return handled

    assert "slow" in asyncio.run(run())


def service(name: str = "qwen") -> dict[str, Any]:
    meta = {"name": name, "namespace": "ml", "uid": name, "resourceVersion": "1"}
    return {"kind": "InferenceService", "metadata": meta, "spec": {}}


def labelled(number: int, service: str = "qwen", kind: str = "ConfigMap") -> dict[str, Any]:
    """An object that anybody may create: with our labels."""
    made = pod(number, uid=f"u{number}", name=f"x{number}")
    made["metadata"]["labels"]["plimsoll.dev/service"] = service
    return made | {"kind": kind}


def test_objects_with_our_labels_and_an_unknown_owner_take_no_room() -> None:
    store, queue = Store(), WorkQueue[Key](1)
    watches = Watches(store, queue)
    kind = KINDS_BY_NAME["ConfigMap"]
    for number in range(1000):
        watches.handle_event(kind, "ADDED", labelled(number, service=f"nobody-{number}"))
        assert not store.compress_listed([labelled(number, service=f"nobody-{number}")])
    assert store.list_known_keys() == []
    assert len(queue) == 0


def test_what_a_known_owner_has_is_kept_and_bounded() -> None:
    store = Store()
    watches = Watches(store, WorkQueue[Key](1))

    async def play() -> None:
        watches.handle_event(KINDS_BY_NAME["InferenceService"], "ADDED", service())
        noise = random.Random(1)
        for number in range(300):
            item = labelled(number)
            item["data"] = {"a": noise.randbytes(1 << 16).hex()}
            watches.handle_event(KINDS_BY_NAME["ConfigMap"], "ADDED", item)
        kept = len(store.list_children(KEY, {"ConfigMap"}))
        assert MAX_OWNED_BYTES / (1 << 17) < kept < 300
        changed = labelled(0) | {"data": {}}
        changed["metadata"]["resourceVersion"] = "99"
        watches.handle_event(KINDS_BY_NAME["ConfigMap"], "MODIFIED", changed)
        found = store.get(KEY, Ref("ConfigMap", "x0"))
        assert found is not None
        assert found["data"] == {}, "what is known follows"
        for number in range(300):
            watches.handle_event(KINDS_BY_NAME["ConfigMap"], "DELETED", labelled(number))
        watches.handle_event(KINDS_BY_NAME["ConfigMap"], "ADDED", labelled(301))
        assert len(store.list_children(KEY, {"ConfigMap"})) == 1, "there is room again"

    asyncio.run(play())


def test_what_came_before_its_owner_does_not_make_a_watch_stale() -> None:
    """All events arrive: objects created before their owner must not restart the operator."""

    async def play() -> None:
        store = Store()
        watches = Watches(store, WorkQueue(1))
        store.begin_listing()
        watches.handle_event(KINDS_BY_NAME["ConfigMap"], "ADDED", labelled(1))
        watches.handle_event(SERVICE, "ADDED", service())
        store.begin_listing()
        assert store.replace("ConfigMap", store.compress_listed([labelled(1)]), "9") == 0
        store.begin_listing()
        both = [labelled(1), labelled(2)]
        assert store.replace("ConfigMap", store.compress_listed(both), "9") == 1, (
            "no event told of this one"
        )

    asyncio.run(play())


def test_what_a_list_had_before_its_owner_was_not_missed_either() -> None:
    store = Store()
    for _ in range(3):
        store.begin_listing()
        assert store.replace("ConfigMap", store.compress_listed([labelled(1)]), "9") == 0
    store.put(service())
    store.begin_listing()
    assert store.replace("ConfigMap", store.compress_listed([labelled(1)]), "9") == 0
    assert store.list_children(KEY, {"ConfigMap"})


def test_what_has_another_owner_by_now_was_not_missed() -> None:
    async def play() -> None:
        store, other = Store(), service()
        other["metadata"] |= {"name": "other", "uid": "o"}
        watches = Watches(store, WorkQueue(1))
        moved = labelled(1, service="other")
        moved["metadata"]["resourceVersion"] = "2"
        for kind, item in (
            (SERVICE, service()), (SERVICE, other), (KINDS_BY_NAME["ConfigMap"], labelled(1)),
            (KINDS_BY_NAME["ConfigMap"], moved),
        ):  # fmt: skip
            watches.handle_event(kind, "MODIFIED", dict(item))
        store.begin_listing()
        assert store.replace("ConfigMap", store.compress_listed([moved]), "9") == 0
        assert not store.list_children(KEY, {"ConfigMap"})
        assert store.list_children(Key("ml", "other"), {"ConfigMap"})
        store.begin_listing()
        assert store.replace("ConfigMap", store.compress_listed([]), "9") == 1, (
            "no event told of its end"
        )

    asyncio.run(play())


def test_a_list_knows_the_owners_that_it_listed_before() -> None:
    store = Store()
    assert not store.compress_listed([labelled(1)])
    assert len(store.compress_listed([labelled(1)], {KEY})) == 1
    incident = {"kind": "LeakIncident", "metadata": {"name": "i", "namespace": "ml"}}
    incident["spec"] = {"workloadRef": {"kind": "InferenceService", "name": "gone"}}
    assert len(store.compress_listed([incident])) == 1, "an incident outlives its service"
