"""The operator as a process of its own, with the rights that ``config/`` gives it and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.lab import binaries
from tests.lab.helm import CHART, RELEASE, Helm
from tests.lab.images import ROOT
from tests.lab.kube import Kube, eventually
from tests.lab.objects import Refused
from tests.lab.processes import die_with_parent
from tests.lab.warm import WarmProcess
from tests.ports import free_port

STOP_S = 20.0
SYSTEM = "plimsoll-system"


def operator_kubeconfig(kube: Kube, target: Path) -> Path:
    """A kubeconfig of the operator's service account with the ClusterRole of ``config/``, under the
    policy on that account."""
    system = Kube(kube.kubectl, kube.kubeconfig, SYSTEM)
    for path in ("config/namespace.yaml", "config/rbac.yaml"):
        system("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / path))
    system("apply", "-f", "-", stdin=account_policy())
    account = account_kubeconfig(system, "plimsoll-operator", target)
    # The API server takes up a policy that has changed within a second.
    there = Kube(kube.kubectl, account, SYSTEM)
    eventually(lambda: may_lead(there), "the policy that was applied is in force")
    return account


def may_lead(account: Kube) -> bool:
    """Whether the policy lets the account take the Lease of a test's operator. The one of
    ``config/``, which some tests apply, does not."""
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    try:
        account.create(lease | {"metadata": {"name": "operator"}}, dry_run=True)
    except Refused as error:
        if "account of the operator" in str(error):
            return False
        raise
    return True


def chart_kubeconfig(kube: Kube, target: Path, *namespaces: str) -> Path:
    """A kubeconfig of the account that the chart makes for an operator of these namespaces: Roles
    in each; a ClusterRole for all namespaces where none is named."""
    system = Kube(kube.kubectl, kube.kubeconfig, SYSTEM)
    system("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "config/namespace.yaml"))
    values = {"namespaces": [*namespaces], "rbac": {"aggregate": False}}
    parts = (f"--show-only=templates/{name}.yaml" for name in ("serviceaccount", "rbac"))
    helm = Helm(binaries.helm(4), system)
    version = f"--kube-version={binaries.VERSION}"
    text = helm("template", RELEASE, str(CHART), version, *parts, values=values)
    system.apply(*filter(None, yaml.safe_load_all(text)), force=True)
    return account_kubeconfig(system, RELEASE, target)


def account_kubeconfig(kube: Kube, account: str, target: Path) -> Path:
    """A kubeconfig of a service account of the namespace."""
    token = kube("create", "token", account, "--duration=1h").strip()
    config = yaml.safe_load(kube.kubeconfig.read_text())
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "operator"
    config["current-context"] = config["contexts"][0]["name"]
    target.write_text(yaml.safe_dump(config))
    os.chmod(target, 0o600)
    return target


def account_policy(url: str = "") -> str:
    """The policy on the operator's account, for an operator that runs beside the cluster.

    The API server reaches its webhook by an address, of any port unless ``url`` is given, and each
    test has a Lease of its own.
    """
    text = (ROOT / "config" / "operator-policy.yaml").read_text()
    begins = (".url == variables.webhookUrl", ".url.startsWith(variables.webhookUrl)")
    for here, lab in (
        ("\"'plimsoll-system/plimsoll-operator'\"", "request.namespace + '/operator'"),
        ("\"''\"", f"\"'{url or 'https://127.0.0.1:'}'\""),
        *(() if url else (begins,)),
    ):
        assert here in text
        text = text.replace(here, lab)
    return text


def _cold(arguments: Sequence[str], log: Path, code: Path | None = None) -> subprocess.Popen[bytes]:
    """``plimsoll-operator`` as a person starts it; with the packages in ``code`` where given."""
    environment = os.environ | ({"PYTHONPATH": str(code)} if code else {})
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "plimsoll_operator.main", *arguments],
            stderr=output,
            stdout=output,
            env=environment,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - the tests' threads hold no lock here
        )


class Operator:
    """``plimsoll-operator run`` on one namespace, on all of them where it is empty."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        *flags: str,
        ready: bool = True,
        warm: bool = False,
        code: Path | None = None,
    ) -> None:
        """``ready`` waits until it is; ``warm`` saves the imports, and its memory is shared.

        ``code`` has the packages of another release.
        """
        self.port = free_port()
        self.log = kubeconfig.parent / f"operator-{self.port}.log"
        self._given_up = False
        arguments = ["run", "--kubeconfig", str(kubeconfig)]
        arguments += ["--namespace", namespace] if namespace else []
        arguments += ["--http-port", str(self.port), "--scrape", "1", *flags]
        self._process: WarmProcess | subprocess.Popen[bytes]
        self._process = (
            WarmProcess(arguments, self.log) if warm else _cold(arguments, self.log, code)
        )
        if ready:
            try:
                eventually(self.ready, "the operator is ready", 90.0)
            except AssertionError as error:
                self.stop()
                raise AssertionError(f"{error}\n{self.log.read_text()[-4000:]}") from error

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> bool:
        """Whether it says that it is; AssertionError with its log where it has ended."""
        return self._answers("readyz")

    def healthy(self) -> bool:
        """As :meth:`ready`, for its liveness."""
        return self._answers("healthz")

    def _answers(self, path: str) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return self._read(path) is not None
        except OSError:
            return False

    def _read(self, path: str) -> str:
        url = f"http://127.0.0.1:{self.port}/{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        lines = self._read("metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(timeout=STOP_S)
        self._given_up = True

    def ended(self) -> int:
        """The exit status of an operator that ends by itself."""
        self._given_up = True
        return self._process.wait(timeout=STOP_S)

    def stop(self) -> int:
        """SIGTERM; returns the exit status, 0 for one that had to end before."""
        if self._given_up:
            return 0
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=STOP_S)
