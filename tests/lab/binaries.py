"""Where the control plane's programs come from: existing ones, or one Go build, kept in a cache.

As with controller-runtime's envtest, ``KUBEBUILDER_ASSETS`` names a folder of existing binaries;
it is used when it holds every component that is needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError, MissingError

MODULE = Path(__file__).parent / "kubelab"
VERSION = "v1.34.4"
"""What all tests run on; go.mod and go.sum pin it."""
VERSIONS = (VERSION, "v1.35.4", "v1.36.3", "v1.37.2")
"""The newest patch of each minor version that Plimsoll supports, as far as Go's proxy has it."""
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "kube-proxy")
BUILD_TIMEOUT_S = 1800
LWS = Path(__file__).parent / "lws"
LWS_MODULE = "sigs.k8s.io/lws"
PERSES = "github.com/perses/perses@v0.50.3"
"""The newest release whose source has the schemas of plugins: later ones need their archives."""
ARGO_ROLLOUTS = "github.com/argoproj/argo-rollouts@v1.9.0"
FLAGGER = "github.com/fluxcd/flagger@v1.41.0"
GATEWAY = "sigs.k8s.io/gateway-api@v1.5.0"
INFERENCE = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0"
DRA_DRIVER = "sigs.k8s.io/dra-example-driver@v0.2.1"
CONTAINERD = "github.com/containerd/containerd@v1.7.29"
"""Gives containers the devices of a DRA driver, as the containerd 1.6 of Debian 12 does not."""
COREDNS = "github.com/coredns/coredns@v1.14.7"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
DEFINITIONS = {
    ARGO_ROLLOUTS: "manifests/crds/*-crd.yaml",
    FLAGGER: "artifacts/flagger/crd.yaml",
    GATEWAY: "config/crd/standard/gateway.networking.k8s.io_*routes.yaml",
    INFERENCE: "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    KEDA: "config/crd/bases/keda.sh_scaledobjects.yaml",
}
"""Releases of other controllers, each with the files of its resource definitions."""
HELM = {3: "helm.sh/helm/v3/cmd/helm@v3.21.4", 4: "helm.sh/helm/v4/cmd/helm@v4.3.1"}


@dataclass(frozen=True)
class Binaries:
    """All from one place: a kubelet must not be newer than its API server.

    ``pause`` waits and reaps: the first process of a pod's, and of the node's, namespaces.
    """

    assets: Path | None = None
    kubelab: Path | None = None
    pause: Path | None = None

    def command(self, name: str) -> list[str]:
        """The argv prefix of a component."""
        if self.assets is not None:
            return [str(self.assets / name)]
        return [str(self.kubelab), name]


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "plimsoll-lab"


def find(node: bool) -> Binaries:
    """The binaries of a control plane, and of a node too. Builds what is absent, once.

    Raises :class:`MissingError` where neither binaries nor Go are there.
    """
    pause = _build("pause", "./pause") if node else None
    named = os.environ.get("KUBEBUILDER_ASSETS")
    wanted = (*CONTROL_PLANE, *(NODE if node else ()))
    if named and all((Path(named) / name).exists() for name in wanted):
        return Binaries(assets=Path(named), pause=pause)
    return Binaries(kubelab=_build("kubelab", "."), pause=pause)


def kubelab(build: bool = True) -> Path:
    """The one binary that also checks objects against resource definitions.

    MissingError where it cannot be built, or is not yet there and ``build`` is False.
    """
    if not build and not _target("kubelab").exists():
        raise MissingError("kubelab is not built yet: make lab builds it")
    return _build("kubelab", ".")


def helm(major: int) -> str:
    """Path of Helm 3 or 4; built once, in about 2 minutes. MissingError where it cannot be."""
    target = cache_dir() / f"helm{major}" / "helm"
    if target.exists():
        return str(target)
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"no Helm {major}: install Go, or put helm at {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            done = subprocess.run(
                [go, "install", HELM[major]],
                env={**os.environ, "CGO_ENABLED": "0", "GOBIN": str(target.parent)},
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
            )
            if done.returncode:
                raise MissingError(f"go install {HELM[major]}: {done.stderr[-1000:]}")
    return str(target)


def module(version: str) -> Path:
    """The source of a Go module, PATH@VERSION. MissingError where it cannot be downloaded."""
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"no {version}: install Go")
    arguments = ("mod", "download", "-json", version)
    return Path(json.loads(_go(go, Path("/"), *arguments, failure=MissingError))["Dir"])


def leader_worker_set() -> tuple[Path, Path]:
    """The controller of LeaderWorkerSets and the folder of its manifests.

    Built once, in about 3 minutes. MissingError where it cannot be.
    """
    sources = (LWS / "go.mod").read_bytes() + (LWS / "go.sum").read_bytes()
    folder = cache_dir() / f"lws-{hashlib.sha256(sources).hexdigest()[:12]}"
    manager, manifests = folder / "manager", folder / "config"
    if manager.exists():
        return manager, manifests
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"no controller of LeaderWorkerSets: install Go, or put it at {manager}")
    folder.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not manager.exists():
            _go(go, LWS, "mod", "download", LWS_MODULE, failure=MissingError)
            module = Path(_go(go, LWS, "list", "-m", "-f", "{{.Dir}}", LWS_MODULE).strip())
            shutil.rmtree(manifests, ignore_errors=True)
            for part in ("crd/bases", "webhook"):
                # The module cache is read-only, and so would be its copies.
                for file in (module / "config" / part).glob("*.yaml"):
                    to = manifests / part / file.name
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_bytes(file.read_bytes())
            stage = folder / f"manager.{os.getpid()}"
            _go(go, LWS, "build", "-ldflags", "-s -w", "-o", str(stage), f"{LWS_MODULE}/cmd")
            stage.rename(manager)
    return manager, manifests


def perses() -> tuple[Path, Path]:
    """Perses' command line and the folder of its schemas.

    Built once, in some minutes. MissingError where it cannot be.
    """
    folder = cache_dir() / PERSES.rpartition("/")[2]
    percli, schemas = folder / "percli", folder / "cue" / "schemas"
    if percli.exists():
        return percli, schemas
    go = shutil.which("go")
    if go is None:
        raise MissingError(
            f"no percli: install Go, or put it at {percli} and its schemas beside it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not percli.exists():
            with tempfile.TemporaryDirectory() as name:
                module = _copied(go, PERSES, Path(name))
                for part in ("cue", "cue.mod"):
                    shutil.copytree(module / part, folder / part, dirs_exist_ok=True)
                stage = folder / f"percli.{os.getpid()}"
                _go(go, module, "build", "-ldflags", "-s -w", "-o", str(stage), "./cmd/percli")
            stage.rename(percli)
    return percli, schemas


def programs(
    release: str, packages: Mapping[str, str], own: Path | None = None, tags: str = ""
) -> Path:
    """A folder with programs of a Go module's ``release``, PATH@VERSION, by their names.

    ``packages`` has the folder of each within the module. ``own`` is a folder of ours with the
    sources of one more program: a package of the module for its build, so that it uses the
    release's dependencies. Built once. MissingError where it cannot be.
    """
    path, _, version = release.partition("@")
    sources = sorted(own.glob("*.go")) if own else []
    digest = hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:12]
    folder = cache_dir() / f"{path.rpartition('/')[2]}-{version}-{digest}"
    if all((folder / name).exists() for name in packages):
        return folder
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"no {release}: install Go, or put {', '.join(packages)} into {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock, tempfile.TemporaryDirectory() as name:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = _copied(go, release, Path(name))
        if own is not None:
            shutil.copytree(own, module / "cmd" / own.name)
        for program, package in packages.items():
            if not (folder / program).exists():
                stage = folder / f"{program}.{os.getpid()}"
                # A module's zip has no vendored packages, but the list of them.
                flags = ("-mod=readonly", f"-tags={tags}", "-ldflags=-s -w", "-o", str(stage))
                _go(go, module, "build", *flags, f"./{package}")
                stage.rename(folder / program)
    return folder


def _copied(go: str, release: str, folder: Path) -> Path:
    """A module's source as a copy in ``folder``: the module cache is read-only, and the go.sum of
    a release is in its source alone."""
    found = json.loads(_go(go, MODULE, "mod", "download", "-json", release, failure=MissingError))
    module = Path(shutil.copytree(found["Dir"], folder / "module", copy_function=shutil.copyfile))
    for each in (module, *module.rglob("*/")):
        each.chmod(0o755)
    return module


def _go(go: str, module: Path, *arguments: str, failure: type[LabError] = LabError) -> str:
    """Run ``go`` in ``module`` without cgo; raise ``failure`` with the end of its output."""
    done = subprocess.run(
        [go, *arguments],
        cwd=module,
        env={**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    if done.returncode:
        raise failure(f"go {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def _target(name: str) -> Path:
    sources = sorted(p for p in MODULE.rglob("*") if p.suffix in (".go", ".mod", ".sum"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:12]
    return cache_dir() / f"{VERSION}-{digest}" / name


def _build(name: str, package: str) -> Path:
    target = _target(name)
    if target.exists():
        return target
    go = shutil.which("go")
    if go is None:
        raise MissingError(
            f"no {name}: install Go >= 1.26 (it is built once, in about 7 minutes), or name a "
            f"folder with {', '.join(CONTROL_PLANE)} in KUBEBUILDER_ASSETS"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be building the same
        if not target.exists():
            _go_build(go, MODULE, package, target, VERSION)
    return target


def _go_build(go: str, module: Path, package: str, target: Path, version: str) -> None:
    stage = target.with_suffix(f".{os.getpid()}")
    component = "k8s.io/component-base/version"
    major, minor = version.removeprefix("v").split(".")[:2]
    # Without the version, the API server says v0.0.0-master and charts refuse it.
    flags = f"-s -w -X {component}.gitVersion={version} -X {component}.gitMajor={major}"
    flags += f" -X {component}.gitMinor={minor} -X {component}.gitTreeState=clean"
    _go(go, module, "build", "-o", str(stage), "-ldflags", flags, package)
    stage.rename(target)


def assets(version: str) -> Path:
    """A folder for ``KUBEBUILDER_ASSETS`` with the components of another version.

    Built once, in about 7 minutes, with the dependencies of that release. MissingError where it
    cannot be.
    """
    folder = cache_dir() / version
    if (folder / "kube-apiserver").exists():
        return folder
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"no Kubernetes {version}: install Go >= 1.26")
    folder.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kubelab").exists():
            with tempfile.TemporaryDirectory() as module:
                _module(go, Path(module), version)
                _go_build(go, Path(module), ".", folder / "kubelab", version)
    for name in (*NODE, *CONTROL_PLANE):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {folder / "kubelab"} {name} "$@"\n')
        script.chmod(0o755)
    return folder


def _module(go: str, folder: Path, version: str) -> None:
    """Write kubelab's module for another version: the release's go.mod, whose staging folders are
    modules of their own."""
    for source in MODULE.glob("*.go"):
        shutil.copy(source, folder)
    release = f"k8s.io/kubernetes@{version}"
    found = json.loads(_go(go, MODULE, "mod", "download", "-json", release, failure=MissingError))
    text = Path(found["GoMod"]).read_text()
    staged = version.replace("v1.", "v0.", 1)
    text = re.sub(r"(?m)^module .*$", "module kubelab", text)
    text = re.sub(r"(?m)^godebug .*$", "", text)
    text = re.sub(r"(?m)^(\s*(\S+) => )\./staging/\S+$", rf"\1\2 {staged}", text)
    (folder / "go.mod").write_text(f"{text}\nrequire {release.replace('@', ' ')}\n")
    shutil.copy(Path(found["Dir"]) / "go.sum", folder)
    _go(go, folder, "mod", "tidy", failure=MissingError)
