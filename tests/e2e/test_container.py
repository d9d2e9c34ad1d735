"""A strict server in a container that may write nowhere and does not know its user."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.container import contained
from tests.e2e.harness import Server, Workplace, copy_bundle
from tests.guests.fake import Fake, make_model
from tests.parallel import nightly
from tests.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def mounted(workplace: Workplace) -> Iterator[Path]:
    """The bundle and the model where everybody may read them, owned by root."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-container-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        copy_bundle(workplace.bundle, folder / "bundle")
        shutil.copytree(workplace.model, folder / "model")
        for path in (folder / "model", *(folder / "model").rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def test_serving_with_an_arbitrary_uid_no_home_and_nothing_writable(
    workplace: Workplace, mounted: Path
) -> None:
    options = ["--bundle", mounted / "bundle", "--model", mounted / "model", "--port", "0", "--require-warm"]
    command = [sys.executable, "-m", "aotgaudi", "serve", *map(str, options)]

    with Server(contained(command, {"OMP_NUM_THREADS": "1"}), {}, workplace.folder) as server:
        assert server.complete("the quick", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert server.metric("aotgaudi_compilations_total") == 0


AOTGAUDI = f"{shlex.quote(sys.executable)} -m aotgaudi"


@pytest.mark.parametrize("mode", [0o2777, *nightly(0o777)], ids=oct)
def test_building_on_a_volume_and_serving_from_it(workplace: Workplace, mounted: Path, mode: int) -> None:
    volume, store = mounted / "volume", mounted / "lower"
    volume.mkdir()
    shutil.copytree(
        workplace.store, store, ignore=shutil.ignore_patterns("toolcache", "logs", "tmp", "locks")
    )
    for path in (store, *store.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.copy(workplace.spec, mounted / "spec.toml")
    (mounted / "spec.toml").chmod(0o644)
    script = (
        f"cp {mounted}/spec.toml {volume}/x.toml; cp -r {mounted}/model {volume}; cd {volume}; set -e; "
        f"{AOTGAUDI} cache stats; {AOTGAUDI} build plan x.toml; {AOTGAUDI} explain x.toml; "
        f"{AOTGAUDI} build x.toml -o x.bundle --store {volume}/store --lower {store} -j 1; "
        f"exec {AOTGAUDI} serve --bundle x.bundle --model model --port 0 --require-warm --drain-delay 0"
    )
    command = contained(["bash", "-c", script], {"OMP_NUM_THREADS": "1", "HOME": "/"}, {volume: mode})

    with Server(command, {}, workplace.folder) as server:
        assert server.complete("the quick", max_tokens=4)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("mode", "root"),
    [
        (0o777, "r"),
        (0o2777, "r/below"),
        pytest.param(0o2777, "r", marks=pytest.mark.nightly),
        pytest.param(0o777, "r/below", marks=pytest.mark.nightly),
    ],
)
def test_capturing_a_server_on_a_volume_and_running_it_from_there(
    mounted: Path, mode: int, root: str
) -> None:
    volume, place = mounted / "v", mounted / "r"
    for path in (volume, place):
        path.mkdir()
    model = make_model(mounted / "fake")
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    guest, port = Fake(model, free_port()), free_port()
    words = shlex.join(guest.words)
    script = (
        f"set -e; {AOTGAUDI} build capture -o {volume}/b --store {volume}/s --root {mounted / root}"
        f" --exercise smoke -- {words}; "
        f"exec {AOTGAUDI} run --bundle {volume}/b --require-warm --listen 127.0.0.1:{port} -- {words}"
    )
    environment = {"HOME": "/", "AOTGAUDI_FAKE_GUEST": "1", "AOTGAUDI_WITNESS_INTERVAL": "0.05"}
    command = contained(["bash", "-c", script], environment, {volume: mode, place: mode})
    log = mounted / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={"PATH": os.defpath})

    try:
        deadline = time.monotonic() + 200
        while not _is_ready(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        document = httpx.post(
            f"http://127.0.0.1:{guest.port}/v1/completions", json={"model": "m", "prompt": "x"}, timeout=60
        )
        assert document.status_code == 200
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
