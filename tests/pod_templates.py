"""Pod templates that the restricted standard allows and refuses."""

from __future__ import annotations

from typing import Any

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
CREDENTIALS = {
    "model": {"uri": "s3://bucket/m", "credentialsSecretRef": {"name": "bucket-keys"}},
    "engine": {"apiKeySecretRef": {"name": "api-keys-secret", "key": "token"}},
}
"""The spec besides the template, of which Secrets are somebody's own."""

Spec = dict[str, Any]


def engine(**fields: Any) -> Spec:
    return {"containers": [{"name": "engine", **fields}]}


def proxy(**fields: Any) -> Spec:
    return {"containers": [{"name": "proxy", "image": "p", "securityContext": SAFE, **fields}]}


def context(**fields: Any) -> Spec:
    return engine(securityContext=fields)


def volume(**source: Any) -> Spec:
    return {"volumes": [{"name": "mine", **source}]}


REFUSED: list[tuple[Spec, str]] = [
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    ({"serviceAccountName": "default"}, "serviceAccountName"),
    ({"serviceAccountName": None}, "serviceAccountName"),
    ({"serviceAccount": "other-supervisor"}, "serviceAccount"),
    ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
    ({"shareProcessNamespace": False}, "shareProcessNamespace"),
    ({"ephemeralContainers": [{"name": "debug", "image": "x"}]}, "ephemeralContainers"),
    ({"securityContext": None}, "spec.securityContext"),
    ({"securityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
    ({"securityContext": {"runAsNonRoot": None}}, "runAsNonRoot"),
    ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "seccompProfile"),
    ({"securityContext": {"seccompProfile": None}}, "seccompProfile"),
    ({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}, "appArmorProfile"),
    ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, "sysctls"),
    ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "seLinuxOptions"),
    ({"securityContext": {"seLinuxOptions": {"user": "system_u"}}}, "seLinuxOptions"),
    (context(seLinuxOptions={"role": "r", "type": "container_t"}), "seLinuxOptions"),
    ({"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "1"},
                                      {"name": "net.core.somaxconn", "value": "1"}]}}, "sysctls"),
    ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, "windowsOptions"),
    (context(privileged=True), "privileged"),
    (context(runAsUser=0), "runAsUser"),
    (context(runAsNonRoot=False), "runAsNonRoot"),
    (context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation"),
    (context(allowPrivilegeEscalation=None), "allowPrivilegeEscalation"),
    (context(capabilities={"add": ["SYS_ADMIN"]}), "capabilities"),
    (context(capabilities={"drop": []}), "capabilities"),
    (context(capabilities=None), "capabilities"),
    (context(procMount="Unmasked"), "procMount"),
    (context(seccompProfile={"type": "Unconfined"}), "seccompProfile"),
    (engine(securityContext=None), "securityContext"),
    (engine(ports=[{"containerPort": 8000, "hostPort": 80}]), "hostPort"),
    (engine(livenessProbe={"httpGet": {"host": "169.254.169.254"}}), "host"),
    (engine(lifecycle={"postStart": {"httpGet": {"host": "h", "port": 1}}}), "host"),
    ({"initContainers": [{"name": "supervisor", "securityContext": {"privileged": True}}]},
     "initContainers[supervisor].securityContext.privileged"),
    ({"containers": [{"name": "supervisor", "securityContext": {"privileged": True}}]},
     "[supervisor].securityContext.privileged"),
    ({"initContainers": [{"name": "setup", "image": "x"}]},
     "initContainers[setup].securityContext"),
    ({"containers": [{"name": "proxy", "image": "p"}]},
     "containers[proxy].securityContext"),
    (volume(hostPath={"path": "/"}), "volumes[mine]"),
    (volume(nfs={"server": "s", "path": "/"}), "volumes[mine]"),
    ({"volumes": [{"name": "tmp", "emptyDir": None, "hostPath": {"path": "/"}}]}, "volumes[tmp]"),
    ({"volumes": [{"name": "token", "emptyDir": {}}]}, "volumes[token]"),
    ({"volumes": [{"name": "run", "emptyDir": {"medium": ""}}]}, "volumes[run]"),
    (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}),
     "serviceAccountToken"),
    (volume(secret={"secretName": "api-keys-secret"}), "Secret"),
    (volume(projected={"sources": [{"secret": {"name": "bucket-keys"}}]}), "Secret"),
    (proxy(volumeMounts=[{"name": "run", "mountPath": "/r"}]), "proxy].volumeMounts"),
    (proxy(volumeMounts=[{"name": "token", "mountPath": "/t"}]), "proxy].volumeMounts"),
    (proxy(volumeMounts=[{"name": "api-keys", "mountPath": "/k"}]), "proxy].volumeMounts"),
    (engine(volumeMounts=[{"name": "token", "mountPath": "/t"}]), "engine].volumeMounts"),
    (proxy(env=[{"name": "K", "valueFrom":
                   {"secretKeyRef": {"name": "api-keys-secret", "key": "token"}}}]), "Secret"),
    (proxy(envFrom=[{"secretRef": {"name": "bucket-keys"}}]), "Secret"),
]  # fmt: skip

NO_DOWNLOAD = {"model": {"uri": "file:///m"}}
"""The spec of a service whose pods download nothing: it has no container of that name."""

REFUSED_WITHOUT_DOWNLOAD: list[tuple[Spec, str]] = [
    ({kind: [{"name": "model-download", "image": "x"} | fields]},
     f"{kind}[model-download].securityContext")
    for kind in ("initContainers", "containers")
    for fields in (
        {},
        {"securityContext": {"capabilities": {"drop": ["ALL"]}}},
        {"securityContext": {"allowPrivilegeEscalation": False}},
    )
]  # fmt: skip

ALLOWED: list[Spec] = [
    {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "1"}]}},
    {"securityContext": {"seLinuxOptions": {"type": "container_t", "level": "s0"}}},
    {"securityContext": {"windowsOptions": {"hostProcess": False}}},
    context(seLinuxOptions={"level": "s0:c1,c2"}),
    {"initContainers": [{"name": "model-download", "env": [{"name": "A", "value": "b"}]}]},
    {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]},
    {"priorityClassName": "high", "runtimeClassName": "nvidia", "hostNetwork": False},
    {"securityContext": {"runAsUser": 2000, "fsGroup": 2000}},
    {"securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "p.json"}}},
    engine(env=[{"name": "A", "value": "b"}], resources={"limits": {"nvidia.com/gpu": "1"}}),
    context(readOnlyRootFilesystem=False, capabilities={"add": ["NET_BIND_SERVICE"]}),
    proxy(ports=[{"containerPort": 9000}], volumeMounts=[{"name": "mine", "mountPath": "/m"}])
    | volume(configMap={"name": "c"}),
    {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]},
    volume(secret={"secretName": "tls"}),
    volume(ephemeral={"volumeClaimTemplate": {"spec": {}}}),
    {"initContainers": [{"name": "supervisor", "env": [{"name": "TZ", "value": "UTC"}]}]},
]
