"""Pods at random, most of them valid for an API server, and policies that select them all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from plimsoll_api.supervision_policy import SupervisionPolicy
from plimsoll_operator.render.eviction import EVICTABLE_VOLUMES_ANNOTATION

Object = dict[str, Any]
SELECTED = {"fuzz": "yes"}

IMAGES = (
    "vllm/vllm-openai:v0.24.0", "lmsysorg/sglang:v0.5.0", "nginx:1.29", "registry.local:5000/vllm",
    "busybox@sha256:" + "0" * 64,
)  # fmt: skip
NAMES = (
    "engine", "a", "b-2", "kserve-container", "metrics", "proxy", "supervisor", "plimsoll-probe",
)  # fmt: skip
ARGS = (
    "serve", "org/model", "--port=9000", "--port", "80", "--port=9464", "--model", "$(MODEL)", "é",
    "--ssl-certfile=/x", "'unclosed", "a && b", "--served-model-name=$(NAME)", "--port=70000", "",
)  # fmt: skip
ENV = ("A", "PYTHONPATH", "PLIMSOLL_CONTAINER", "PLIMSOLL_PROBE_DIR", "MODEL", "POD_NAME")
VOLUMES = ("data", "shm", "v-3", "plimsoll-run", "plimsoll-probe", "plimsoll-token")
SOURCES: tuple[Object, ...] = ({"emptyDir": {}}, {"configMap": {"name": "x"}})
MOUNTS = ("/data", "/dev/shm", "/opt/plimsoll-probe", "/models")
QUANTITIES = ("64Mi", "1Gi", "1e9", "3000000k", "16Gi", "0.5", "100m")


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Object]:
    """An object of which each field may be absent."""
    return st.fixed_dictionaries({}, optional=fields)


def distinct(names: tuple[str, ...], most: int, least: int = 0) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=least, max_size=most, unique=True)


@st.composite
def env(draw: st.DrawFn) -> list[Object]:
    made: list[Object] = []
    for name in draw(distinct(ENV, 3)):
        if draw(st.integers(0, 4)):
            made.append({"name": name, "value": draw(st.sampled_from(("", "1", "/x:/y", "$(A)")))})
        else:
            source = {"configMapKeyRef": {"name": "paths", "key": "python", "optional": True}}
            made.append({"name": name, "valueFrom": source})
    return made


ports = st.lists(
    st.fixed_dictionaries(
        {"containerPort": st.sampled_from((80, 8000, 8080, 9464, 9465, 30_000, 65_535))},
        optional={
            "name": st.sampled_from(("http", "metrics", "probe", "metrics-9464")),
            "protocol": st.sampled_from(("TCP", "UDP")),
        },
    ),
    max_size=3,
    unique_by=(lambda one: one.get("name", id(one)), lambda one: one["containerPort"]),
)
security = optional(
    runAsUser=st.sampled_from((0, 1000, 10_001)),
    runAsNonRoot=st.booleans(),
    allowPrivilegeEscalation=st.booleans(),
    readOnlyRootFilesystem=st.booleans(),
    capabilities=optional(
        add=st.just(["SYS_NICE"]), drop=st.sampled_from((["ALL"], ["NET_RAW"], []))
    ),
)


@st.composite
def container(draw: st.DrawFn, name: str, volumes: list[str], stays: bool = False) -> Object:
    made: Object = {"name": name, "image": draw(st.sampled_from(IMAGES))}
    made |= draw(
        optional(
            command=st.just(["vllm"]),
            args=st.lists(st.sampled_from(ARGS), max_size=5),
            env=env(),
            ports=ports,
            securityContext=security,
            imagePullPolicy=st.sampled_from(("Always", "Never")),
            terminationMessagePolicy=st.just("File"),
            resources=optional(
                limits=optional(
                    memory=st.sampled_from(QUANTITIES),
                    **{"nvidia.com/gpu.shared": st.just("1")},
                )
            ),
        )
    )
    limits = made.get("resources", {}).get("limits", {})
    if "nvidia.com/gpu.shared" in limits:
        made["resources"]["requests"] = {"nvidia.com/gpu.shared": "1"}
    mounted = draw(distinct(MOUNTS, 2)) if volumes else []
    if mounted:
        made["volumeMounts"] = [
            {"name": draw(st.sampled_from(volumes)), "mountPath": path} for path in mounted
        ]
    if stays:
        made["restartPolicy"] = "Always"
    return made


@st.composite
def pods(draw: st.DrawFn) -> Object:
    """A Pod that every policy of :func:`policies` selects."""
    volumes = draw(distinct(VOLUMES, 3)) if draw(st.booleans()) else []
    names = draw(distinct(NAMES[: draw(st.sampled_from((2, 6, 6, 8)))], 4, 1))
    at = draw(st.integers(1, len(names)))
    spec: Object = {"containers": [draw(container(name, volumes)) for name in names[:at]]}
    inits = [draw(container(name, volumes, draw(st.booleans()))) for name in names[at:]]
    if inits:
        spec["initContainers"] = inits
    if volumes:
        spec["volumes"] = [
            {
                "name": name,
                **draw(st.sampled_from(SOURCES)),
            }
            for name in volumes
        ]
    spec |= draw(
        optional(
            shareProcessNamespace=st.booleans(),
            hostNetwork=st.booleans(),
            restartPolicy=st.sampled_from(("Always", "Never", "OnFailure")),
            securityContext=optional(
                runAsUser=st.sampled_from((0, 1000)), runAsNonRoot=st.booleans()
            ),
            automountServiceAccountToken=st.booleans(),
            serviceAccountName=st.just("default"),
            terminationGracePeriodSeconds=st.integers(0, 600),
            nodeSelector=st.just({"pool": "gpu"}),
            tolerations=st.just([{"operator": "Exists"}]),
        )
    )
    rare = draw(st.integers(0, 29))
    if rare == 0:
        spec["hostPID"] = True
        spec.pop("shareProcessNamespace", None)
    elif rare == 1:
        spec["resources"] = {"limits": {"memory": "32Gi"}}
    elif rare == 2:
        spec["os"] = {"name": "linux"}
    labels = (
        SELECTED
        | draw(
            optional(
                app=st.just("x"),
                **{
                    "plimsoll.dev/policy": st.sampled_from(("fuzz", "other")),
                    "leaderworkerset.sigs.k8s.io/worker-index": st.sampled_from(("0", "1")),
                    "leaderworkerset.sigs.k8s.io/group-index": st.sampled_from(("0", "x" * 63)),
                    "leaderworkerset.sigs.k8s.io/group-key": st.sampled_from(("4a", "x" * 63)),
                    "llm-d.ai/role": st.sampled_from(("prefill", "both", "encode")),
                    "plimsoll.dev/role": st.sampled_from(("Decode", "x")),
                },
            )
        )
        if draw(st.integers(0, 3)) == 0
        else dict(SELECTED)
    )
    metadata: Object = {"name": "fuzz", "namespace": "default", "labels": labels}
    metadata |= draw(
        optional(
            annotations=st.sampled_from(
                (
                    {"a": "b"},
                    {"plimsoll.dev/not-supervised": "x"},
                    {"plimsoll.dev/allow-group-restarts": "true"},
                )
            )
        )
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@st.composite
def policies(draw: st.DrawFn) -> SupervisionPolicy:
    engine = draw(
        optional(
            type=st.sampled_from(("auto", "vllm", "custom")),
            port=st.sampled_from((8000, 18_000)),
            container=st.sampled_from(("engine", "a")),
        )
    )
    budgets = draw(st.sampled_from(({}, {"host": {"growthBudget": "1Gi"}})))
    return policy(engine=engine, memory=budgets, probe={"enabled": draw(st.booleans())})


def policy(name: str = "fuzz", **spec: Any) -> SupervisionPolicy:
    """A policy that selects the pods of :func:`pods`."""
    return SupervisionPolicy.model_validate(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "SupervisionPolicy",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"selector": {"matchLabels": SELECTED}} | spec,
        }
    )


OWN_LABELS = ("plimsoll.dev/policy", "plimsoll.dev/role")


def without_supervisor(pod: Object) -> Object:
    """``pod`` without anything that a supervisor brings, and without empty lists."""
    meta, spec = dict(pod["metadata"]), dict(pod["spec"])
    meta["labels"] = {k: v for k, v in meta["labels"].items() if k not in OWN_LABELS}
    notes = meta.pop("annotations", None) or {}
    own = ("plimsoll.dev/not-supervised", "plimsoll.dev/injected-images", "plimsoll.dev/engine")
    notes = {k: v for k, v in notes.items() if k not in own}
    listed = notes.pop(EVICTABLE_VOLUMES_ANNOTATION, "").split(",")
    if theirs := [one for one in listed if one and not one.startswith("plimsoll-")]:
        notes[EVICTABLE_VOLUMES_ANNOTATION] = ",".join(theirs)
    if notes:
        meta["annotations"] = notes
    ours = {"supervisor", "plimsoll-probe"}
    inits = [one for one in spec.get("initContainers", ()) if one["name"] not in ours]
    spec["initContainers"] = [_plain(one) for one in inits]
    spec["containers"] = [_plain(one) for one in spec["containers"]]
    spec["volumes"] = [
        one for one in spec.get("volumes", ()) if not one["name"].startswith("plimsoll-")
    ]
    spec.pop("shareProcessNamespace", None)
    return {**pod, "metadata": meta, "spec": {k: v for k, v in spec.items() if v != []}}


def _plain(container: Object) -> Object:
    made = dict(container)
    made["env"] = []
    for one in container.get("env", ()):
        value = one.get("value", "")
        if one["name"] == "PYTHONPATH" and "/opt/plimsoll-probe" in value:
            kept = value.removesuffix("/opt/plimsoll-probe").removesuffix(":")
            if kept:
                made["env"].append({"name": "PYTHONPATH", "value": kept})
            continue
        if one["name"] in ("PLIMSOLL_CONTAINER", "PLIMSOLL_PROBE_DIR"):
            continue
        if one["name"] == "PYTHONPATH" and not one.get("value", "x"):
            continue
        made["env"].append(one)
    made["volumeMounts"] = [
        one
        for one in container.get("volumeMounts", ())
        if not one["name"].startswith("plimsoll-probe")
    ]
    return {key: value for key, value in made.items() if value != []}
