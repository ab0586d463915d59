"""The steps of engine_image/Dockerfile, done without a container runtime: an overlay over this
machine's root stands for the base image, a mount namespace for the container.

The build stage runs as it is written, but for ``pip``, whose part uv does from its cache. The last
stage is read-only but for the volumes of a pod, and the engine runs in it as the image's user.
Needs root, for the mounts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "engine_image" / "Dockerfile"
UID = 10001
BUILD_TIMEOUT_S = 900.0
START_TIMEOUT_S = 300.0
VOLUMES = ("/var/cache/plimsoll", "/tmp", "/dev/shm", "/run/plimsoll")
"""What the operator's pods mount to be written."""


@dataclass
class Stage:
    """One ``FROM``: what is run, in which environment. Copies of the checkout are (from, to)."""

    runs: list[str] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    """Paths of the stage before."""
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)


def stages(text: str) -> list[Stage]:
    """Those of a Dockerfile; ValueError for an instruction that this test does not know."""
    found: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "" | "ARG":
                continue
            case "FROM":
                found.append(Stage())
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    found[-1].env[name] = value
            case "RUN":
                found[-1].runs.append(rest)
            case "COPY" if rest.startswith("--from="):
                _, source, target = rest.split()
                assert source == target
                found[-1].taken.append(source)
            case "COPY":
                *sources, target = rest.split()
                found[-1].copies += [(source, target) for source in sources]
            case "USER":
                found[-1].user = rest
            case "ENTRYPOINT":
                found[-1].entrypoint = json.loads(rest)
            case _:
                raise ValueError(f"{DOCKERFILE}: {line}")
    return found


class Container:
    """A root of its own over this machine's: small writes go to memory, ``/opt/plimsoll`` is
    ``venv``."""

    def __init__(self, folder: Path, venv: Path) -> None:
        self.folder, self.venv = folder, venv

    def command(self, mounts: str, inside: str, env: dict[str, str]) -> list[str]:
        """Runs ``inside`` with the mounts made before; both are Bash, ``$R`` is the new root."""
        setup = f"""
            mkdir -p {self.folder}/layer {self.folder}/root
            mount -t tmpfs tmpfs {self.folder}/layer
            mkdir {self.folder}/layer/up {self.folder}/layer/work
            mount -t overlay overlay {self.folder}/root -o \
              lowerdir=/,upperdir={self.folder}/layer/up,workdir={self.folder}/layer/work
            R={self.folder}/root
            mkdir -p $R/opt/plimsoll
            chmod a+x $R/root
            mount --rbind /proc $R/proc
            mount --rbind /dev $R/dev
            mount --bind {self.venv} $R/opt/plimsoll
            {mounts}
            cd /
        """
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        last = f"exec env -i {exports} chroot $R /bin/bash -ec {shlex.quote(inside)}"
        script = f"set -e\n{setup}\n{last}\n"
        return ["unshare", "--mount", "--propagation", "private", "bash", "-c", script]


def by_uv(line: str) -> str:
    """``line`` with this Python for the image's, and uv for pip."""
    uv = shutil.which("uv")
    assert uv is not None
    line = line.replace("python -m venv", f"{sys.base_prefix}/bin/python3 -m venv")
    return re.sub(r"(/opt/\w+)/bin/pip install", rf"{uv} pip install --python \1/bin/python", line)


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """The image, built by its Dockerfile's first stage."""
    if os.geteuid() != 0 or shutil.which("uv") is None:
        pytest.skip("needs root (mounts) and uv")
    folder = tmp_path_factory.mktemp("image")
    one = Container(folder, folder / "venv")
    one.venv.mkdir()
    build, last = stages(DOCKERFILE.read_text())
    assert last.taken == ["/opt/plimsoll"], "the last stage has the environment alone"
    copies = [
        f"mkdir -p $R{Path(to).parent} && cp -r {ROOT}/{source} $R{to}"
        for source, to in build.copies
    ]
    inherited = re.compile("PATH|HOME|SSL_CERT_.*|PIP_.*|.*_proxy", re.IGNORECASE)
    env = {name: value for name, value in os.environ.items() if inherited.fullmatch(name)}
    env |= build.env
    env |= {"UV_NO_CONFIG": "1", "UV_LINK_MODE": "copy"}
    runs = "\n".join(by_uv(line) for line in build.runs)
    mounts = "mkdir -p $R/src\n" + "\n".join(copies)
    try:
        done = subprocess.run(
            one.command(mounts, runs, env), text=True, capture_output=True, timeout=BUILD_TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        yield one
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_image_serves_from_a_read_only_root_as_its_user(
    container: Container, tiny: Path
) -> None:
    last = stages(DOCKERFILE.read_text())[-1]
    assert last.user == f"{UID}:{UID}"
    run = container.folder / "run"
    run.mkdir()
    (run / "admin-token").write_text("token-of-a-test")  # the supervisor's part
    for path in (run, run / "admin-token"):
        os.chown(path, UID, UID)
    volumes = "\n".join(
        f"mkdir -p $R{path} && mount -t tmpfs -o mode=0777 tmpfs $R{path}" for path in VOLUMES
    )
    mounts = f"""
        {chr(10).join(f"chroot $R {line}" for line in last.runs)}
        mkdir -p $R/model
        cp -r {tiny}/. $R/model
        chmod -R a+rX $R/model
        {volumes}
        mount --bind {run} $R/run/plimsoll
        mount -o remount,bind,ro $R/opt/plimsoll
        mount -o remount,ro $R
    """
    flags = (
        "serve --model /model --served-model-name tiny --run-dir /run/plimsoll --host 127.0.0.1"
        " --port 0 --admin-port 0 --device cpu --dtype float32"
    )
    inside = f"""
        for path in / /opt/plimsoll /etc /usr /model; do
          if touch $path/written 2>/dev/null; then echo "$path can be written"; exit 3; fi
        done
        exec setpriv --reuid {UID} --regid {UID} --clear-groups --no-new-privs \
          {" ".join(last.entrypoint)} {flags}
    """
    env = {
        name: value.replace("$PATH", "/usr/sbin:/usr/bin:/bin") for name, value in last.env.items()
    }
    log = container.folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            container.command(mounts, inside, env), stdout=output, stderr=output
        )
    try:
        file = run / "engine.json"
        until(file.exists, process, log)
        url = f"http://127.0.0.1:{json.loads(file.read_text())['port']}"
        until(lambda: status(f"{url}/ready") == 200, process, log)
        body = {"model": "tiny", "prompt": "A ship", "max_tokens": 5, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 5
        owner = Path(f"/proc/{process.pid}").stat().st_uid
        assert owner == UID
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
    assert "Read-only" not in log.read_text(), "something wanted to write beside the volumes"


def status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except OSError:
        return None


def test_the_dockerfile_has_two_stages_and_no_root() -> None:
    """What the long test builds, read; it needs no mounts."""
    build, last = stages(DOCKERFILE.read_text())
    assert any("--require-hashes -r /src/requirements.txt" in line for line in build.runs)
    assert ("requirements/engine.txt", "/src/requirements.txt") in build.copies
    assert all((ROOT / source).exists() for source, _ in build.copies)
    assert last.user.partition(":")[0] == str(UID)
    assert last.entrypoint == ["python", "-m", "plimsoll_engine"]
    assert last.copies == [], "the last stage holds nothing of the checkout but the environment"
