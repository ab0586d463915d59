"""Random workloads, and random ways to write them down."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

Object = dict[str, Any]

IMAGES = (
    "vllm/vllm-openai:v0.24.0", "lmsysorg/sglang:v0.5.5", "busybox", "r/vllm-console:1",
    "quay.io/x/vllm@sha256:00", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1", "r/ray-vllm:2", "python",
)  # fmt: skip
COMMANDS: tuple[list[str] | None, ...] = (
    None, ["vllm", "serve", "m"], ["sh", "-c", "pip install vllm && vllm serve m --port $PORT"],
    ["python3", "-m", "sglang.launch_server"], ["sleep", "infinity"], ["vllm", "bench"],
    ["bash", "-lc", "set -e\n# a comment\nvllm serve m \\\n  --port 9000 | tee log\n"],
    ["/start.sh"], ["bash", "/scripts/run.sh"], ["/scripts/run.sh", "m"],
)  # fmt: skip
ARGS = (
    "--port=8000", "--port", "$(PORT)", "n", "y", "22:30", "--model=org/m", "--host", "$(IP)",
    "0o17",
    "--headless", "--ssl-certfile=/c", "é 😀", "# no comment", "a: b", "'", '"', "", " x ", "-",
    "~",
)  # fmt: skip
ENV: tuple[Object, ...] = (
    {"name": "PORT", "value": "9000"}, {"name": "FLAG", "value": "n"},
    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    {"name": "PYTHONPATH", "value": "/x"}, {"name": "TEXT", "value": "a\n  b\n\n"},
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, [], {}, "x", "", 5, -1, 1.5, True, [None], {"a": None}, ["a", 1], [[]], [{}], {"name": 1},
    [{"name": "x"}, {"name": "x"}], "supervisor", "plimsoll-run", [{"name": "supervisor"}],
)  # fmt: skip


SCRIPTS: Object = {"name": "s", "configMap": {"name": "scripts"}}


def some(random: Random, values: Any, most: int = 3) -> list[Any]:
    """A few of ``values``, copied."""
    return [copy.deepcopy(random.choice(values)) for _ in range(random.randrange(most + 1))]


def container(random: Random, name: str) -> Object:
    made: Object = {"name": name, "image": random.choice(IMAGES)}
    if (command := random.choice(COMMANDS)) is not None:
        made["command"] = list(command)
    for field, values in (("args", ARGS), ("env", ENV)):
        if random.random() < 0.6:
            made[field] = some(random, values)
    if random.random() < 0.5:
        names = random.sample(["http", "prom", "gcs", "grpc"], 2)
        made["ports"] = [
            {"name": one, "containerPort": random.choice([8000, 9100])} for one in names
        ]
    if random.random() < 0.4:
        amounts = {"cpu": random.choice(["1", 2]), "memory": random.choice(["48Gi", "1Gi"])}
        made["resources"] = {"limits": amounts, "requests": dict(amounts)}
    if random.random() < 0.3:
        mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "s", "mountPath": "/scripts"}]
        made["volumeMounts"] = random.sample(mounts, random.choice([1, 2]))
    if random.random() < 0.3:
        made["securityContext"] = random.choice(
            [{}, {"runAsUser": 1000}, {"runAsNonRoot": True}, {"capabilities": {"drop": ["ALL"]}}]
        )
    if random.random() < 0.3:
        made["readinessProbe"] = {
            "httpGet": {"path": "/health", "port": random.choice([8000, "http"])}
        }
    return made


def pod(random: Random) -> Object:
    made: Object = {
        "containers": [container(random, one) for one in ("a", "b")[: random.choice([1, 1, 2])]]
    }
    for field, values in (
        ("shareProcessNamespace", [True, False, None]),
        ("initContainers", [[], None, [container(random, "init")], sidecars(random)]),
        ("volumes", [[], None, [{"name": "shm", "emptyDir": {"medium": "Memory"}}], [SCRIPTS]]),
        ("imagePullSecrets", [[{"name": "pull"}], []]),
        ("restartPolicy", ["Always", "Never"]),
        ("securityContext", [{}, {"runAsUser": 0}]),
    ):
        if random.random() < 0.3:
            made[field] = random.choice(values)
    return made


def sidecars(random: Random) -> list[Object]:
    """Init containers, some of which run as long as the pod."""
    return [
        container(random, name) | random.choice([{}, {"restartPolicy": "Always"}])
        for name in ("i", "j", "k")[: random.randrange(1, 4)]
    ]


def template(random: Random) -> Object:
    labels = random.choice([{"app": "x"}, {}, None])
    metadata = random.choice([{}, None, {"labels": labels}, {"annotations": {"a": "on"}}])
    return random.choice([{"spec": pod(random)}, {"metadata": metadata, "spec": pod(random)}])


def document(random: Random, name: str) -> Object:
    """An object of some kind, mostly a workload."""
    kind, version, spec = random.choice(
        [
            ("Deployment", "apps/v1", {"replicas": 1, "template": template(random)}),
            ("StatefulSet", "apps/v1", {"template": template(random)}),
            ("Job", "batch/v1", {"template": template(random)}),
            ("CronJob", "batch/v1", {"jobTemplate": {"spec": {"template": template(random)}}}),
            ("Pod", "v1", pod(random)),
            ("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1",
             {"leaderWorkerTemplate": {"restartPolicy": "None", "leaderTemplate": template(random),
                                       "workerTemplate": template(random)}}),
            ("RayCluster", "ray.io/v1", ray(random)),
            ("RayClusterFleet", "orchestration.aibrix.ai/v1alpha1",
             {"template": {"spec": ray(random)}}),
            ("StormService", "orchestration.aibrix.ai/v1alpha1",
             {"template": {"spec": {"roles": [{"name": "r", "template": template(random)}]}}}),
            ("ClusterServingRuntime", "serving.kserve.io/v1alpha1",
             {"supportedModelFormats": [{"name": "vLLM", "autoSelect": random.random() < 0.7}],
              "containers": [container(random, "kserve-container"), container(random, "b")]}),
            ("ConfigMap", "v1", None),
            ("InferenceService", "serving.kserve.io/v1beta1",
             {"predictor": {"model": {"modelFormat": {"name": "vLLM"},
                                      "args": some(random, ARGS)}}}),
            ("LLMInferenceService", "serving.kserve.io/v1alpha2",
             {"model": {"uri": "hf://o/m"}, "template": pod(random)}),
            ("Service", "v1", {"selector": {"app": "x"}}),
        ]
    )  # fmt: skip
    if kind == "ConfigMap":
        data = {"run.sh": random.choice(["vllm serve m\n", "#!/bin/sh\n/scripts/run.sh\n", "x"])}
        held = {"name": random.choice(["scripts", f"{name}-supervisor"])}
        return {"apiVersion": version, "kind": kind, "metadata": held, "data": data}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def ray(random: Random) -> Object:
    """What a RayCluster holds."""
    return {
        "enableInTreeAutoscaling": random.choice([True, False, None]),
        "autoscalerOptions": random.choice([{"version": "v2"}, {}, None]),
        "headGroupSpec": {"template": template(random)},
        "workerGroupSpecs": [{"template": template(random)}],
    }


def spoilt(random: Random, value: Any) -> Any:
    """``value`` with something else in one place of it."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        return {**value, key: spoilt(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        return [*value[:at], spoilt(random, value[at]), *value[at + 1 :]]
    return copy.deepcopy(random.choice(JUNK))


class Writer:
    """Writes a value as YAML, in one of the many ways."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.flow, self.aliases = random.choice([0.0, 0.1, 0.3]), random.random() < 0.3
        self.comments = random.choice([0.0, 0.2])
        self.step, self.dash = random.choice([2, 4]), random.choice([0, 2])
        self.anchors: dict[str, str] = {}

    def text(self, value: Any) -> str:
        """A document."""
        if self.random.random() < 0.1:
            return json.dumps(value, indent=self.random.choice([None, 2])) + "\n"
        return "".join(self.block(value, 0))

    def comment(self) -> str:
        random = self.random.random()
        return "  # of - it: 'x\t" if random < self.comments else "\t" if random > 0.98 else ""

    def between(self, indent: int) -> list[str]:
        return [" " * indent + "# a: b\n"] if self.random.random() < self.comments / 3 else []

    def block(self, value: Any, indent: int) -> list[str]:
        """Lines of a mapping or list."""
        lines: list[str] = []
        pad = " " * indent
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            lines += self.between(indent)
            lead = f"{pad}{self.scalar(key, key=True)}:" if isinstance(value, dict) else f"{pad}-"
            anchor = self.anchor(one)
            if anchor.startswith("*") or not self.opens(one):
                lines.append(f"{lead}{self.inline(one, anchor, indent)}{self.comment()}\n")
                continue
            mapping = isinstance(value, dict)
            below = indent + (self.dash if isinstance(one, list) and mapping else self.step)
            if not mapping and isinstance(one, dict) and not anchor and self.random.random() < 0.8:
                inner = self.block(one, indent + 2)
                while inner[0].lstrip().startswith("#"):
                    inner = inner[1:]
                lines += [f"{lead} {inner[0].lstrip()}", *inner[1:]]
                continue
            lines += [
                f"{lead}{' ' + anchor if anchor else ''}{self.comment()}\n",
                *self.block(one, below),
            ]
        return lines

    def opens(self, value: Any) -> bool:
        return isinstance(value, dict | list) and bool(value) and self.random.random() > self.flow

    def anchor(self, value: Any) -> str:
        if not self.aliases or not isinstance(value, dict | list) or not value:
            return ""
        shown = json.dumps(value)
        if shown in self.anchors:
            return f"*{self.anchors[shown]}"
        if self.random.random() < 0.3:
            # It is known to later values only.
            self.anchors[shown] = f"a{len(self.anchors)}"
            return f"&{self.anchors[shown]}"
        return ""

    def inline(self, value: Any, anchor: str, indent: int) -> str:
        if anchor.startswith("*"):
            return f" {anchor}"
        if value is None and self.random.random() < 0.5:
            return ""
        if (
            isinstance(value, str)
            and "\n" in value
            and value.strip()
            and self.random.random() < 0.7
        ):
            return self.literal(value, indent)
        return f" {anchor + ' ' if anchor else ''}{self.one_line(value)}"

    def literal(self, value: str, indent: int) -> str:
        ends = len(value) - len(value.rstrip("\n"))
        if value[0] in " \n":
            return f" {json.dumps(value, ensure_ascii=False)}"
        pad = " " * (indent + 2)
        body = "\n".join(pad + line if line else "" for line in value.rstrip("\n").split("\n"))
        return f" |{'-' if not ends else '+' if ends > 1 else ''}\n{body}" + "\n" * (ends - 1)

    def one_line(self, value: Any) -> str:
        if isinstance(value, dict):
            inner = [
                f"{self.scalar(key, key=True)}: {self.one_line(one)}" for key, one in value.items()
            ]
            return "{" + ", ".join(inner) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(self.one_line, value)) + "]"
        return self.scalar(value)

    def scalar(self, value: Any, key: bool = False) -> str:
        if not isinstance(value, str):
            return json.dumps(value)
        safe = value.replace("-", "").replace("/", "").isalnum() and value.isascii()
        if safe and value[0].isalpha() and len(value) > 4 and self.random.random() < 0.8:
            return value
        if "\n" not in value and self.random.random() < 0.5:
            return "'" + value.replace("'", "''") + "'"
        return json.dumps(value, ensure_ascii=False)


def file(random: Random, spoil: bool = False) -> str:
    """A file with some documents."""
    documents = [document(random, f"w{at}") for at in range(random.choice([1, 1, 1, 2, 4]))]
    if spoil:
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(len(documents))
            documents[at] = spoilt(random, documents[at])
    if random.random() < 0.1:
        documents = [{"apiVersion": "v1", "kind": "List", "items": documents}]
    texts = [Writer(random).text(one) if isinstance(one, dict) and one else json.dumps(one) + "\n"
             for one in documents]  # fmt: skip
    text = random.choice(["", "---\n", "# head\n"]) + "---\n".join(texts)
    if random.random() < 0.1:
        text = text.replace("\n", "\r\n")
    if random.random() < 0.2:
        text = text.rstrip("\r\n")
    return random.choice(["", "", "", "\ufeff"]) + text
