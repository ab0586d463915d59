"""Check a ``podTemplate`` against the restricted Pod Security Standard and Plimsoll's own limits.

Anyone who may create an InferenceService sets its pod template. The admission policy in
``config/pod-template-policy.yaml`` may not be installed, so this module checks the complete
template again before it is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll_api.inferenceservice import InferenceService
from plimsoll_operator.render import names
from plimsoll_operator.render.engine import API_KEYS_VOLUME


class PodSecurityError(ValueError):
    """Raised if a template violates the standard or the limits; the message names each field."""


ALLOWED_VOLUME_TYPES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)

ALLOWED_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)
"""Sysctls that the standard considers safe."""

ALLOWED_SELINUX_TYPES = frozenset(
    {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
)
ALLOWED_PROFILE_TYPES = frozenset({"RuntimeDefault", "Localhost"})
ALLOWED_CAPABILITY = "NET_BIND_SERVICE"

ALLOWED_CONTAINERS_BY_VOLUME = {
    "run": {names.ENGINE, names.SUPERVISOR},
    "token": {names.SUPERVISOR},
    "config": {names.SUPERVISOR},
    API_KEYS_VOLUME: {names.ENGINE},
}
"""Containers that may mount a volume of the operator, by volume. ``run`` contains the admin
token, and ``token`` the ServiceAccount's."""

HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
IDENTITY_FIELDS = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")


def check_pod_template(
    service: InferenceService, template: dict[str, Any], rendered: dict[str, Any]
) -> None:
    """Check ``template``; raise :class:`PodSecurityError` if it violates the restricted standard.

    It must have the same ServiceAccount and the same volumes with tokens as ``rendered``, the
    template without the user's changes.
    """
    problems = list(_iterate_problems(service, template, rendered))
    if problems:
        raise PodSecurityError(
            f"{'; '.join(problems[:8])}. An administrator can exempt the namespace with"
            " podTemplate.unrestrictedNamespaces in the chart"
        )


def _iterate_problems(
    service: InferenceService, template: dict[str, Any], rendered: dict[str, Any]
) -> Iterator[str]:
    spec, own, at = template["spec"], rendered["spec"], "spec.podTemplate.spec"
    for field in HOST_FIELDS:
        if spec.get(field):
            yield f"{at}.{field} must not be true"
    for field in (*IDENTITY_FIELDS, "shareProcessNamespace"):
        if spec.get(field) != own.get(field):
            yield f"{at}.{field} must not be changed, because the operator sets it"
    if spec.get("ephemeralContainers"):
        yield f"{at}.ephemeralContainers must not be set"
    annotations = template.get("metadata", {}).get("annotations") or {}
    for key in annotations:
        if key.startswith("container.apparmor.security.beta.kubernetes.io/"):
            where = f"spec.podTemplate.metadata.annotations[{key}]"
            yield f"{where} must not be set: use appArmorProfile in a securityContext"
    context = spec.get("securityContext") or {}
    yield from _iterate_context_problems(context, {}, f"{at}.securityContext")
    for one in context.get("sysctls") or ():
        if one.get("name") not in ALLOWED_SYSCTLS:
            yield f"{at}.securityContext.sysctls: sysctl {one.get('name')} is not allowed"
    for kind in ("initContainers", "containers"):
        for one in spec.get(kind) or ():
            yield from _iterate_container_problems(one, context, f"{at}.{kind}[{one.get('name')}]")
    secrets = _list_secrets(service)
    kept = {one["name"]: one for one in own["volumes"]}
    for one in spec.get("volumes") or ():
        yield from _iterate_volume_problems(one, kept, secrets, f"{at}.volumes[{one.get('name')}]")
    for kind in ("initContainers", "containers"):
        ours = {one["name"]: one for one in own[kind]}
        for one in spec.get(kind) or ():
            where = f"{at}.{kind}[{one.get('name')}]"
            yield from _iterate_credential_problems(
                one, ours.get(one.get("name"), {}), secrets, where
            )


def _iterate_container_problems(
    container: dict[str, Any], pod: dict[str, Any], path: str
) -> Iterator[str]:
    context, where = container.get("securityContext") or {}, f"{path}.securityContext"
    yield from _iterate_context_problems(context, pod, where)
    if context.get("privileged"):
        yield f"{where}.privileged must not be true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{where}.allowPrivilegeEscalation must be false"
    if context.get("procMount") not in (None, "Default"):
        yield f"{where}.procMount must be Default"
    capabilities = context.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{where}.capabilities.drop must contain ALL"
    if set(capabilities.get("add") or ()) - {ALLOWED_CAPABILITY}:
        yield f"{where}.capabilities.add may only contain {ALLOWED_CAPABILITY}"
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"{path}.ports: hostPort must not be set"
    lifecycle = container.get("lifecycle") or {}
    hooks = [container.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")]
    for hook in (*hooks, lifecycle.get("preStop"), lifecycle.get("postStart")):
        if any((hook or {}).get(kind, {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield f"{path}: the host of a probe or hook must not be set"


# ``pod`` is the pod's security context, from which a container's ``context`` inherits; it is
# empty if ``context`` is the pod's own.
def _iterate_context_problems(
    context: dict[str, Any], pod: dict[str, Any], path: str
) -> Iterator[str]:
    effective = pod | {key: value for key, value in context.items() if value is not None}
    if effective.get("runAsNonRoot") is not True:
        yield f"{path}.runAsNonRoot must be true"
    if effective.get("runAsUser") == 0:
        yield f"{path}.runAsUser must not be 0"
    if (effective.get("seccompProfile") or {}).get("type") not in ALLOWED_PROFILE_TYPES:
        yield f"{path}.seccompProfile.type must be RuntimeDefault or Localhost"
    app_armor = (effective.get("appArmorProfile") or {}).get("type", "RuntimeDefault")
    if app_armor not in ALLOWED_PROFILE_TYPES:
        yield f"{path}.appArmorProfile.type must be RuntimeDefault or Localhost"
    labels = effective.get("seLinuxOptions") or {}
    if labels.keys() - {"level", "type"} or labels.get("type", "") not in ALLOWED_SELINUX_TYPES:
        yield (
            f"{path}.seLinuxOptions may only set level and type, and type must be a type for"
            " containers"
        )
    if (effective.get("windowsOptions") or {}).get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess must not be true"


def _iterate_volume_problems(
    volume: dict[str, Any], rendered_volumes: dict[str, Any], secrets: set[str], path: str
) -> Iterator[str]:
    if volume.get("name") in rendered_volumes and volume == rendered_volumes[volume["name"]]:
        return
    if volume.get("name") in ALLOWED_CONTAINERS_BY_VOLUME:
        yield f"{path} must not be changed, because the operator manages this volume"
    kinds = {key for key, value in volume.items() if key != "name" and value is not None}
    if kinds - ALLOWED_VOLUME_TYPES:
        yield f"{path}: the volume type must be one of {', '.join(sorted(ALLOWED_VOLUME_TYPES))}"
    sources = (volume.get("projected") or {}).get("sources") or ()
    if any(source.get("serviceAccountToken") for source in sources):
        yield f"{path}.projected: serviceAccountToken must not be set"
    named = {(volume.get("secret") or {}).get("secretName")}
    named |= {(source.get("secret") or {}).get("name") for source in sources}
    for secret in sorted(secrets & named):
        yield f"{path}: Secret {secret} is reserved for another container: remove the volume"


def _iterate_credential_problems(
    container: dict[str, Any], rendered: dict[str, Any], secrets: set[str], path: str
) -> Iterator[str]:
    """Yield mounts and environment variables that show a container another's credentials."""
    for mount in container.get("volumeMounts") or ():
        allowed = ALLOWED_CONTAINERS_BY_VOLUME.get(mount.get("name", ""))
        if allowed is not None and container.get("name") not in allowed:
            owners = " and ".join(sorted(allowed))
            yield f"{path}.volumeMounts: only {owners} may mount {mount['name']}"
    for key in ("env", "envFrom"):
        known = rendered.get(key) or ()
        for variable in container.get(key) or ():
            source = (variable.get("valueFrom") or {}).get("secretKeyRef") or variable.get(
                "secretRef"
            )
            if variable not in known and (source or {}).get("name") in secrets:
                name = source["name"]
                yield (
                    f"{path}.{key}: Secret {name} is reserved for another container: remove the"
                    " variable"
                )


# Each of these Secrets is for only one container.
def _list_secrets(service: InferenceService) -> set[str]:
    source, engine = service.spec.model, service.spec.engine
    refs = (engine.api_key_secret_ref, source.token_secret_ref, source.credentials_secret_ref)
    return {ref.name for ref in refs if ref is not None}
