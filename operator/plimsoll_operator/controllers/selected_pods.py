"""Find the pods that policies select, and those that they supervise since they selected them.

A watch of full pods would receive every change in the cluster. The operator therefore watches only
the metadata of pods, in each namespace with a policy. It reads changed pods in full and caches a
summary of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from plimsoll_api.names import POLICY_LABEL
from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.fleet.pods import compute_seconds_between
from plimsoll_operator.fleet.selected_pods import (
    SUPERVISED_STATES,
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


class _PresentPod(NamedTuple):
    """Resource version of a pod, and the names of the policies that it belongs to.

    ``selecting`` are the policies that select it, oldest first. ``labelled`` is the policy in its
    label if that does not select it; otherwise empty.
    """

    version: str
    selecting: list[str]
    labelled: str

    @property
    def policies(self) -> set[str]:
        """Names of all policies that the pod belongs to."""
        return {*self.selecting, self.labelled} - {""}


class _CachedPod(NamedTuple):
    """Summary of a pod; None if it is labelled as supervised, but is not."""

    version: str
    pod: SelectedPod | None
    address: str | None
    read_at: str

    def is_stale(self, version: str, now: str) -> bool:
        due = compute_next_stuck_s([self.pod] if self.pod else [], self.read_at)
        return _is_older(self.version, version) or (
            due is not None and compute_seconds_between(self.read_at, now) >= due
        )


@dataclass
class _NamespacePods:
    generations: PolicyGenerations
    policies: list[SupervisionPolicy]
    present: dict[str, _PresentPod] = field(default_factory=dict)
    """Pods that belong to a policy, by name."""
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
        """Watch the pods that may belong to the current policies of the key's namespace.

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
        """Return the policy's pods, and the addresses of supervised pods by pod name.

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
            name: one for name, one in namespace_pods.present.items() if key.name in one.policies
        }
        for name in summaries.keys() - present.keys():
            del summaries[name]
        now = self._clock()
        stale = [
            name for name, one in present.items()
            if name not in summaries or summaries[name].is_stale(one.version, now)
        ]  # fmt: skip
        reads = [("", name) for name in stale]
        if len(stale) > MAX_SINGLE_READS:
            selected = {key.name in present[name].selecting for name in stale}
            reads = [
                (policy.spec.selector.to_query() if one else f"{POLICY_LABEL}={key.name}", "")
                for one in sorted(selected)
            ]
        for selector, name in reads:
            summaries.pop(name, None)
            kind = replace(POD, selector=selector, page=PODS_PER_PAGE)
            async for page, _ in self._api.list_pages(kind, key.namespace, name):
                for pod in page:
                    self._cache_pod(namespace_pods, summaries, policy, pod)
                    await asyncio.sleep(0)  # let the webhook run, which shares this loop
        cached = [summaries[name] for name in sorted(present) if name in summaries]
        pods = tuple(one.pod for one in cached if one.pod)
        addresses = {
            one.pod.name: one.address for one in cached
            if one.pod and one.address and one.pod.state is SupervisionState.SUPERVISED
        }  # fmt: skip
        return pods, addresses

    def _cache_pod(
        self,
        namespace_pods: _NamespacePods,
        summaries: dict[str, _CachedPod],
        policy: SupervisionPolicy,
        pod: Object,
    ) -> None:
        meta, name = pod["metadata"], policy.metadata.name
        present = _make_present_pod(namespace_pods.policies, pod)
        if name not in present.policies:
            return
        is_selected, now = name in present.selecting, self._clock()
        selecting = present.selecting if is_selected else []
        summary = summarize_pod(pod, policy, selecting, self._images, now)
        kept = summary if is_selected or summary.state in SUPERVISED_STATES else None
        summaries[meta["name"]] = _CachedPod(present.version, kept, find_address(pod), now)

    def _start_watch(self, namespace: str, namespace_pods: _NamespacePods) -> None:
        def on_list(items: list[Object]) -> None:
            namespace_pods.present = {
                one["metadata"]["name"]: present
                for one in items
                if (present := _make_present_pod(namespace_pods.policies, one)).policies
            }
            namespace_pods.listed = True
            self._notify_later(namespace, (one.metadata.name for one in namespace_pods.policies))

        def on_change(item: Object, deleted: bool) -> None:
            name = item["metadata"]["name"]
            before = namespace_pods.present.pop(name, None)
            changed = before.policies if before else set()
            present = _make_present_pod(namespace_pods.policies, item)
            if present.policies and not deleted:
                namespace_pods.present[name] = present
                changed |= present.policies
            self._notify_later(namespace, changed)

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


def _make_present_pod(policies: Sequence[SupervisionPolicy], pod: Object) -> _PresentPod:
    meta = pod["metadata"]
    labels = meta.get("labels") or {}
    selecting = [one.metadata.name for one in find_matching_policies(policies, labels)]
    label = labels.get(POLICY_LABEL, "")
    is_other = label not in selecting and any(one.metadata.name == label for one in policies)
    return _PresentPod(meta["resourceVersion"], selecting, label if is_other else "")


def _get_generation(item: Object) -> tuple[str, str, int]:
    meta = item["metadata"]
    deleted = str(meta.get("deletionTimestamp") or "")
    return meta["name"] + deleted, meta.get("uid", ""), meta.get("generation", 0)


# Resource versions are compared as numbers.
def _is_older(version: str, other_version: str) -> bool:
    if not (version.isdigit() and other_version.isdigit()):
        return version != other_version
    return int(version) < int(other_version)
