"""Let cluster-autoscaler remove a node although pods on it keep volumes on its disk.

By default, the autoscaler drains no node that has a pod with an ``emptyDir`` on disk. The volumes
that Plimsoll adds hold nothing that another pod needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

EVICTABLE_VOLUMES_ANNOTATION = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
"""Annotation of a pod: names of volumes that do not keep the pod on its node, with commas."""


def mark_evictable_volumes(
    annotations: Mapping[str, Any], volumes: Iterable[Mapping[str, Any]], own: Collection[str]
) -> dict[str, str]:
    """Return the annotation that names the volumes on disk that Plimsoll added to a pod.

    ``annotations`` are the pod's. ``own`` are the names of all volumes that Plimsoll may add; those
    that are not among ``volumes`` are removed. The author's names stay as they are written, because
    the autoscaler compares the text between commas.
    """
    present = {volume["name"]: volume for volume in volumes}
    listed = str(annotations.get(EVICTABLE_VOLUMES_ANNOTATION) or "")
    kept = [name for name in listed.split(",") if name in present or name not in own]
    added = [name for name, one in present.items() if name in own and _is_on_disk(one)]
    names = ",".join(dict.fromkeys([*kept, *added] if listed else added))
    return {EVICTABLE_VOLUMES_ANNOTATION: names}


def _is_on_disk(volume: Mapping[str, Any]) -> bool:
    source = volume.get("emptyDir")
    return source is not None and source.get("medium") != "Memory"
