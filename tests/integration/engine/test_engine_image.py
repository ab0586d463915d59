"""The engine image that users get, built from the Dockerfile and run without a container runtime:
its root is read-only but for the volumes of a pod, and the engine runs in it as the image's user.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import build
from tests.lab.errors import MissingError

UID = 10001
START_TIMEOUT_S = 300.0
VOLUMES = ("/var/cache/plimsoll", "/tmp", "/dev/shm", "/run/plimsoll")
"""What the operator's pods mount to be written."""
ENV = {
    "PATH": "/opt/plimsoll/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/var/cache/plimsoll",
    "HF_HOME": "/var/cache/plimsoll/huggingface",
    "TRITON_CACHE_DIR": "/var/cache/plimsoll/triton",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    try:
        with build.mounted("engine") as path:
            yield path
    except MissingError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def test_the_dockerfile_installs_by_hash_and_runs_as_its_user() -> None:
    """What the long tests build, read."""
    text = (build.ROOT / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.M | re.S))
    for target in ("operator", "supervisor", "engine"):
        packages = stages[f"{target}-packages"]
        locks = re.findall(r"pip .*install --require-hashes -r /src/(\S+)", packages)
        assert len(locks) == 1
        assert (build.ROOT / locks[0]).exists()
        last = stages[target]
        assert f"USER {UID}:{UID}" in last
        copied = re.findall(r"^COPY (.*)$", last, re.M)
        assert copied == [f"--from={target}-packages /opt/plimsoll /opt/plimsoll"]
    sources = re.findall(r"^COPY (?!--from)(\S.*) \S+$", text, re.M)
    named = {source for line in sources for source in line.split()}
    assert all((build.ROOT / source).exists() for source in named)
    roots = {source.split("/")[0] for source in build.SOURCES}
    assert {name.split("/")[0] for name in named} < roots


def inside(root: Path, script: str, mounts: str = "") -> list[str]:
    """Runs Bash in the image's root as its user, with nothing to write to but the volumes."""
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in ENV.items())
    volumes = "\n".join(
        f"mkdir -p $R{path} && mount -t tmpfs -o mode=1777 tmpfs $R{path}" for path in VOLUMES
    )
    outer = f"""
        set -e
        R={root}
        mount --bind $R $R
        mount -t proc proc $R/proc
        mount --rbind /dev $R/dev
        {volumes}
        {mounts}
        mount -o remount,bind,ro $R
        cd /
        exec env -i {exports} chroot --userspec={UID}:{UID} $R /bin/bash -ec {shlex.quote(script)}
    """
    return ["unshare", "--mount", "--propagation", "private", "bash", "-c", outer]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_triton_compiles_its_driver_in_the_image(root: Path) -> None:
    """As it does at the first use of a GPU, here against a libcuda that has the names alone."""
    script = """
        cat > /tmp/stub.py <<'PYTHON'
import pathlib, re
import triton.backends.nvidia as backend
folder = pathlib.Path(backend.__path__[0])
names = sorted(set(re.findall(r"\\b(cu[A-Z]\\w+)\\s*\\(", (folder / "driver.c").read_text())))
print("".join(f"int {name}(void) {{ return 0; }}\\n" for name in names))
PYTHON
        mkdir /tmp/driver
        python /tmp/stub.py > /tmp/driver/stub.c
        gcc -shared -fPIC -o /tmp/driver/libcuda.so.1 /tmp/driver/stub.c
        export TRITON_LIBCUDA_PATH=/tmp/driver LD_LIBRARY_PATH=/tmp/driver
        python - <<'PYTHON'
from triton.backends.nvidia import driver
utils = driver.CudaUtils()
print("compiled", utils.load_binary is not None)
PYTHON
        ls /var/cache/plimsoll/triton/*/cuda_utils*.so
    """
    done = subprocess.run(inside(root, script), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "compiled True" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_image_serves_from_a_read_only_root_as_its_user(
    root: Path, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (run / "admin-token").write_text("token-of-a-test")  # the supervisor's part
    for path in (run, *run.iterdir(), model, *model.iterdir()):
        os.chown(path, UID, UID)
    mounts = f"""
        mount --bind {run} $R/run/plimsoll
        mkdir $R/tmp/model
        mount --bind {model} $R/tmp/model
    """
    flags = (
        "serve --model /tmp/model --served-model-name tiny --run-dir /run/plimsoll"
        " --host 127.0.0.1 --port 0 --admin-port 0 --device cpu --dtype float32"
    )
    script = f"""
        for path in / /opt/plimsoll /etc /usr; do
          if touch $path/written 2>/dev/null; then echo "$path can be written"; exit 3; fi
        done
        exec python -m plimsoll_engine {flags}
    """
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(inside(root, script, mounts), stdout=output, stderr=output)
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
        assert Path(f"/proc/{process.pid}").stat().st_uid == UID
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)
    assert "Read-only" not in log.read_text(), "something wanted to write beside the volumes"


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.1)


def status(url: str) -> int | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except OSError:
        return None
