"""Find the pods that policies select.

A watch of full pods would receive every change in the cluster. The operator therefore watches only
the metadata of pods, in each namespace with a policy. It reads changed pods in full and caches a
summary of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.selected_pods import (
    SelectedPod,
    SupervisionState,
    compute_next_stuck_s,
    find_matching_policies,
    parse_policies,
    summarize_pod,
)
from plimsoll_operator.kinds import POD, POLICY, Key, Object
from plimsoll_operator.render.containers import Images
from plimsoll_operator.runtime.cache import Store
from plimsoll_operator.runtime.client import Api
from plimsoll_operator.runtime.reflector import Reflector
from plimsoll_operator.scraper import find_address

MAX_SINGLE_READS = 8
"""Maximum number of pods to read one by one; if more have changed, all are listed."""
PODS_PER_PAGE = 50
"""Number of pods in a page of a list; a pod may have 1.5 MiB."""

PolicyGenerations = tuple[tuple[str, str, int], ...]


class _CachedPod(NamedTuple):
    version: str
    pod: SelectedPod
    address: str | None
    read_at: str

    def is_stale(self, version: str, now: str) -> bool:
        due = compute_next_stuck_s([self.pod], self.read_at)
        return _is_older(self.version, version) or (
            due is not None and compute_seconds_between(self.read_at, now) >= due
        )


@dataclass
class _NamespacePods:
    generations: PolicyGenerations
    policies: list[SupervisionPolicy]
    present: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    """Resource version and selecting policies of each selected pod."""
    summaries: dict[Key, dict[str, _CachedPod]] = field(default_factory=dict)
    listed: bool = False


class PolicyPods:
    """Watches of the selected pods; ``on_change`` is called with each policy whose pods changed."""

    # ``timeout_s`` limits the wait for the first list. Changes within ``settle_s`` are reported
    # once.
    def __init__(
        self, api: Api, store: Store, images: Images, on_change: Callable[[Key], None],
        timeout_s: float, settle_s: float, clock: Callable[[], str],
    ) -> None:  # fmt: skip
        self._api, self._store, self._images, self._on_change = api, store, images, on_change
        self._timeout_s, self._settle_s, self._clock = timeout_s, settle_s, clock
        self._namespaces: dict[str, _NamespacePods] = {}
        self._watches: dict[str, tuple[Reflector, asyncio.Task[None]]] = {}
        self._due: dict[Key, asyncio.TimerHandle] = {}

    def sync(self, key: Key) -> None:
        """Watch the pods that the current policies of the key's namespace may select.

        If these policies have changed, reconcile all of them.
        """
        namespace = key.namespace
        items = [
            one for one in self._store.list_kind(POLICY.kind)
            if one["metadata"].get("namespace") == namespace
        ]  # fmt: skip
        generations = tuple(sorted(map(_get_generation, items)))
        namespace_pods = self._namespaces.get(namespace)
        if namespace_pods and namespace_pods.generations == generations:
            if (task := self._watches[namespace][1]).done():
                self._start_watch(namespace, namespace_pods)
                task.result()  # raises the task's exception, which is a bug
            return
        if namespace in self._watches:
            self._watches.pop(namespace)[1].cancel()
        policies = parse_policies(items)
        if not policies:
            self._namespaces.pop(namespace, None)
            return
        fresh = self._namespaces[namespace] = _NamespacePods(generations, policies)
        self._start_watch(namespace, fresh)
        for one in policies:
            if one.metadata.name != key.name:
                self._on_change(Key(namespace, one.metadata.name, POLICY.kind))

    async def read(
        self, key: Key, policy: SupervisionPolicy
    ) -> tuple[tuple[SelectedPod, ...], dict[str, str]]:
        """Return the selected pods, and the addresses of supervised pods by pod name.

        Raises ApiError, OSError or TimeoutError if a request to the API server fails.
        """
        namespace_pods, (reflector, _) = (
            self._namespaces[key.namespace],
            self._watches[key.namespace],
        )
        async with asyncio.timeout(self._timeout_s):
            await reflector.tried.wait()
        if not namespace_pods.listed and reflector.error:
            raise reflector.error
        summaries = namespace_pods.summaries.setdefault(key, {})
        present = {
            name: version
            for name, (version, names) in namespace_pods.present.items()
            if key.name in names
        }
        for name in summaries.keys() - present.keys():
            del summaries[name]
        now = self._clock()
        stale = [
            name for name, version in present.items()
            if name not in summaries or summaries[name].is_stale(version, now)
        ]  # fmt: skip
        kind = replace(POD, selector=policy.spec.selector.to_query(), page=PODS_PER_PAGE)
        for one in [""] if len(stale) > MAX_SINGLE_READS else stale:
            summaries.pop(one, None)
            async for page, _ in self._api.list_pages(kind, key.namespace, one):
                for pod in page:
                    self._cache_pod(namespace_pods, summaries, policy, pod)
                    await asyncio.sleep(0)  # let the webhook run, which shares this loop
        pods = [summaries[name] for name in sorted(present) if name in summaries]
        addresses = {
            one.pod.name: one.address for one in pods
            if one.address and one.pod.state is SupervisionState.SUPERVISED
        }  # fmt: skip
        return tuple(one.pod for one in pods), addresses

    def _cache_pod(
        self,
        namespace_pods: _NamespacePods,
        summaries: dict[str, _CachedPod],
        policy: SupervisionPolicy,
        pod: Object,
    ) -> None:
        meta = pod["metadata"]
        names = _list_selecting_policies(namespace_pods.policies, pod)
        if policy.metadata.name in names:
            summary = summarize_pod(pod, policy, names, self._images, now := self._clock())
            summaries[meta["name"]] = _CachedPod(
                meta["resourceVersion"], summary, find_address(pod), now
            )

    def _start_watch(self, namespace: str, namespace_pods: _NamespacePods) -> None:
        def on_list(items: list[Object]) -> None:
            namespace_pods.present = {
                one["metadata"]["name"]: (one["metadata"]["resourceVersion"], names)
                for one in items
                if (names := _list_selecting_policies(namespace_pods.policies, one))
            }
            namespace_pods.listed = True
            self._notify_later(namespace, (one.metadata.name for one in namespace_pods.policies))

        def on_change(item: Object, deleted: bool) -> None:
            meta = item["metadata"]
            names = [] if deleted else _list_selecting_policies(namespace_pods.policies, item)
            _, before = namespace_pods.present.pop(meta["name"], ("", []))
            if names:
                namespace_pods.present[meta["name"]] = (meta["resourceVersion"], names)
            self._notify_later(namespace, {*names, *before})

        reflector = Reflector(self._api, POD, namespace, on_list, on_change)
        self._watches[namespace] = (reflector, asyncio.create_task(reflector.run()))

    def _notify_later(self, namespace: str, policies: Iterable[str]) -> None:
        for name in policies:
            key = Key(namespace, name, POLICY.kind)
            if key not in self._due:
                later = asyncio.get_running_loop().call_later
                self._due[key] = later(self._settle_s, self._notify, key)

    def _notify(self, key: Key) -> None:
        del self._due[key]
        self._on_change(key)


def _list_selecting_policies(policies: Iterable[SupervisionPolicy], pod: Object) -> list[str]:
    """Return the names of the policies that select the pod, oldest first."""
    labels = pod["metadata"].get("labels") or {}
    return [one.metadata.name for one in find_matching_policies(policies, labels)]


def _get_generation(item: Object) -> tuple[str, str, int]:
    meta = item["metadata"]
    deleted = str(meta.get("deletionTimestamp") or "")
    return meta["name"] + deleted, meta.get("uid", ""), meta.get("generation", 0)


# Resource versions are compared as numbers.
def _is_older(version: str, other_version: str) -> bool:
    if not (version.isdigit() and other_version.isdigit()):
        return version != other_version
    return int(version) < int(other_version)
