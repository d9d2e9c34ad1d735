"""What users copy from ci/templates, as images: every instruction of the Dockerfile is carried out, and the result serves.

No image is pulled: the base is this machine's root file system under an overlay, with an environment that has what
[serve] brings and no aotgaudi. It takes root, mount namespaces and overlayfs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.container import drop_privileges
from tests.e2e.harness import Workplace, bind, copy_bundle
from tests.environment import ROOT, make_bare_environment
from tests.ports import free_port
from tests.unit.test_templates import Stage, dockerfile, documents

pytestmark = pytest.mark.slow

_OVERLAY = """
set -euo pipefail
mount --make-rprivate / && mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
for name in proc dev sys; do mount --rbind /$name /mnt/root/$name; done
"""


@dataclass
class Image:
    """The script that makes an image under /mnt/root, and what the image says of the process to start."""

    python: Path
    contexts: dict[str, Path]
    script: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    user: tuple[str, ...] = ()
    pip: Mapping[str, str] = field(
        default_factory=lambda: {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}
    )
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def build(self, stage: Stage) -> None:
        """Carries out a stage's instructions, each of which must be known."""
        steps: dict[str, Callable[[str], None]] = {
            "ARG": lambda rest: self.arguments.update([rest.split("=", 1)]),
            "ENV": lambda rest: self.environment.update(word.split("=", 1) for word in shlex.split(rest)),
            "USER": self._set_user,
            "COPY": self._copy,
            "RUN": lambda rest: self.run(json.loads(rest) if rest.startswith("[") else ["sh", "-ec", rest]),
            "EXPOSE": lambda rest: None,
            "ENTRYPOINT": lambda rest: setattr(self, "entry", json.loads(rest)),
            "CMD": lambda rest: setattr(self, "command", json.loads(rest)),
        }
        for instruction, rest in stage.lines:
            steps[instruction](rest)

    def run(self, command: Sequence[str]) -> None:
        self.script.append(shlex.join(self.inside(command)))

    def inside(self, command: Sequence[str]) -> list[str]:
        """What runs `command` in the image, as its user, with its variables and nothing else."""
        variables = {"PATH": f"{self.python.parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        everything = {**variables, **self.pip, **self.arguments, **self.environment}
        settings = [f"{name}={value}" for name, value in everything.items()]
        return ["chroot", "/mnt/root", *self.user, "env", "-i", *settings, *command]

    def copy(self, source: Path, target: str) -> None:
        """Puts a directory there, owned by root and read-only to others."""
        place = f"/mnt/root{target}"
        self.script.append(f"mkdir -p {place} && cp -r --no-preserve=ownership {source}/. {place}")

    def _copy(self, rest: str) -> None:
        words = [word for word in rest.split() if word != "--link"]
        context = next((word.partition("=")[2] for word in words if word.startswith("--from=")), "")
        source, target = (word for word in words if not word.startswith("--"))
        for name, value in self.arguments.items():
            source = source.replace(f"${{{name}}}", value)
        self.copy(self.contexts[context] / source.lstrip("/"), target)

    def _set_user(self, rest: str) -> None:
        uid, gid = map(int, rest.split(":"))
        self.user = drop_privileges(uid, gid)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory(prefix="aotgaudi-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def image(place: Path, workplace: Workplace) -> Image:
    """The base: an interpreter with pip. The context has a wheel; the context `bundle` an image's root file system."""
    drop_privileges()
    probe = subprocess.run(["unshare", "-m", "bash", "-c", _OVERLAY], capture_output=True, check=False)
    if probe.returncode or find_spec("hatchling") is None:
        pytest.skip("needs overlayfs, and hatchling to build a wheel with")
    build_wheel(place / "context" / "dist")
    copy_bundle(workplace.bundle, place / "bundle" / "opt" / "aotgaudi" / "bundle")
    return Image(
        python=make_bare_environment(place / "python", "serve", "pip"),
        contexts={"": place / "context", "bundle": place / "bundle"},
    )


def build_wheel(folder: Path) -> None:
    folder.mkdir(parents=True)
    code = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=ROOT, check=True, capture_output=True)


def answer_of(image: Image, command: Sequence[str], folder: Path, *, api_key: str = "") -> str:
    """Builds the image, starts `command` in it, and returns what it completes. Port 8000 is another's, maybe."""
    port = free_port()
    started = shlex.join(image.inside([*command, f"--port={port}"]))
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "-m", "bash", "-c", "\n".join([_OVERLAY, *image.script, f"exec {started}"])],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_ready(process, port, log)
        body = {"prompt": "the quick", "max_tokens": 4, "temperature": 0}
        url = f"http://127.0.0.1:{port}/v1/completions"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if api_key:
            assert httpx.post(url, json=body, timeout=60).status_code == 401
        response = httpx.post(url, json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])
    finally:
        process.terminate()
        exit_code = process.wait(60)
        assert exit_code == 0, log.read_text()


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_the_dockerfile_verifies_its_bundle_and_serves_it_as_nobody(
    image: Image, workplace: Workplace, place: Path
) -> None:
    _, server, model = dockerfile()
    image.build(server)
    image.build(model)
    image.copy(workplace.model, "/model")

    assert answer_of(image, [*image.entry, *image.command], place)
    assert "re-hashed" in (place / "log").read_text()


def test_the_deployment_mounts_a_signed_bundle_into_the_server_without_one(
    image: Image, workplace: Workplace, place: Path
) -> None:
    _, server, _ = dockerfile()
    deployment = next(
        document for document in documents("kubernetes.yaml") if document["kind"] == "Deployment"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    volumes = {name: place / name for name in ("bundle", "key", "api-keys")} | {"model": workplace.model}
    for name in ("key", "api-keys"):
        (place / name).mkdir()
    (place / "api-keys" / "keys").write_text("a-secret\n")
    aotgaudi = partial(workplace.run, timeout_seconds=60)
    assert aotgaudi("key", "generate", place / "bundle.key").returncode == 0
    shutil.move(place / "bundle.key.pub", place / "key")
    bundle = place / "bundle" / "opt" / "aotgaudi" / "bundle"
    bind(bundle, workplace.model)
    assert aotgaudi("sign", bundle, "--sign-key", place / "bundle.key").returncode == 0
    image.build(server)
    for mount in container["volumeMounts"]:
        image.copy(volumes[mount["name"]] / mount.get("subPath", ""), mount["mountPath"])

    assert answer_of(image, [*container["command"], *container["args"]], place, api_key="a-secret")


@pytest.mark.nightly
def test_the_torch_that_the_dockerfile_installs_serves_what_the_pipelines_build(
    image: Image, workplace: Workplace, place: Path
) -> None:
    """Both by pip, as their steps say: the bundle in an environment of the pipeline's, from the same sources of torch."""
    _, server, model = dockerfile()
    (pipeline,) = documents("gitlab-ci.yml")
    found = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "HOME", "SSL_"))}
    pip = {**found, "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    index = pipeline["variables"]["TORCH_INDEX"] if answers(pipeline["variables"]["TORCH_INDEX"]) else ""
    venv.create(place / "builder", with_pip=True)
    variables = {
        "PATH": f"{place}/builder/bin:{os.environ['PATH']}",
        "AOTGAUDI": str(ROOT),
        "EXTRAS": "[build]",
    }
    build = f"aotgaudi build {workplace.spec} -o b --store store --lower {workplace.store}"
    script = "\n".join(["set -eu", *pipeline["default"]["before_script"], build])
    subprocess.run(
        ["sh", "-c", script],
        cwd=place,
        env={**pip, **variables, "TORCH_INDEX": index},
        check=True,
        timeout=1800,
    )
    venv.create(place / "bare", with_pip=True)
    image.python, image.pip = place / "bare" / "bin" / "python", pip
    image.contexts["bundle"] = place / "sealed"
    copy_bundle(place / "b", place / "sealed" / "opt" / "aotgaudi" / "bundle")
    lines = (
        ("ARG", f"TORCH_INDEX={index}") if "TORCH_INDEX=" in row[1][:12] else row for row in server.lines
    )
    image.build(replace(server, lines=tuple(lines)))
    image.build(model)
    image.copy(workplace.model, "/model")

    assert answer_of(image, [*image.entry, *image.command], place)


def answers(index: str) -> bool:
    """Whether an index of packages can be reached from here."""
    try:
        return httpx.head(f"{index}/torch/", timeout=10, follow_redirects=True).status_code < 400
    except httpx.HTTPError:
        return False
