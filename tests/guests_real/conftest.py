"""A real vLLM, captured once for all tests here: minutes. ``ci/test --guests`` installs it, and names its interpreter.

$AOTGAUDI_GUEST_WORK keeps the capture between runs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.environment import ROOT

FLAGS = (
    "--max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 512 --dtype bfloat16 --served-model-name m"
)
READY_SECONDS = 1200


@dataclass(frozen=True)
class RealGuest:
    """A vLLM, a model, and a capture of both."""

    python: Path
    model: Path
    work: Path
    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    start: tuple[str, ...] = ("-m", "vllm.entrypoints.openai.api_server", "--model")

    @property
    def bundle(self) -> Path:
        return self.work / "vllm.bundle"

    @property
    def path(self) -> list[str]:
        return [str(ROOT), *filter(None, [self.variables.get("PYTHONPATH")])]

    def words(self, port: int, *more: str, model: Path | None = None) -> list[str]:
        served = [str(self.python), *self.start, str(model or self.model)]
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return [*served, *FLAGS.split(), *self.flags, *address, *more]

    def build(self, *more: str, bundle: Path | None = None) -> subprocess.CompletedProcess[str]:
        options = [
            *more,
            "-o",
            str(bundle or self.bundle),
            "--root",
            str(self.work / "place"),
            "--store",
            str(self.work / "store"),
        ]
        return self.aotgaudi("build", "capture", *options, "--", *self.words(18900), timeout=3600)

    def run(
        self, *options: str, words: list[str], bundle: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.aotgaudi(*self.run_options(*options, bundle=bundle), "--", *words, timeout=READY_SECONDS)

    def run_options(self, *options: str, bundle: Path | None = None) -> list[str]:
        place = ["--root", str(self.work / "place"), "--listen", "127.0.0.1:0", "--require-warm"]
        return ["run", "--bundle", str(bundle or self.bundle), *place, *options]

    def aotgaudi(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "aotgaudi", *arguments],
            env=self.environment(self.work / "home"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        home.mkdir(exist_ok=True)
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return {**kept, **offline, "HOME": str(home), "OMP_NUM_THREADS": "2", **self.variables, **more}

    @contextmanager
    def running(
        self, home: Path, words: list[str], *, bundle: Path | None = None, **environ: str
    ) -> Iterator[Running]:
        """Runs from the capture until ready; ends it afterwards."""
        with (self.work / "run.log").open("w+b") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "aotgaudi", *self.run_options(bundle=bundle), "--", *words],
                env=self.environment(home, PYTHONPATH=os.pathsep.join(self.path), **environ),
                cwd=home,
                stdout=log,
                stderr=log,
            )
            running = Running(process, Path(log.name))
            try:
                running.wait_until_ready()
                yield running
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(120)


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            if self._is_ready():
                return
            time.sleep(0.2)
        pytest.fail(self.log.read_text(errors="replace")[-4000:])

    def _is_ready(self) -> bool:
        try:
            return bool(self.get("/ready"))
        except OSError:
            return False

    def get(self, path: str) -> str:
        found = re.search(r"http://127\.0\.0\.1:(\d+): /ready", self.log.read_text(errors="replace"))
        if found is None:
            raise ConnectionError("it does not listen yet")
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}{path}", timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> dict[str, float]:
        """Returns the values of a metric by its labels, those that are 0 left out."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines())
        values = {head: float(value) for head, _, value in lines if re.match(rf"{name}(\{{|$)", head)}
        return {head.removeprefix(name): value for head, value in values.items() if value}


def guest_python() -> Path:
    """The interpreter that has a vLLM; skips where none is named."""
    python = os.environ.get("AOTGAUDI_GUEST_PYTHON")
    if not python:
        pytest.skip("AOTGAUDI_GUEST_PYTHON names no interpreter: ci/test --guests")
    return Path(python).absolute()


@pytest.fixture(scope="session")
def real_guest(tmp_path_factory: pytest.TempPathFactory) -> RealGuest:
    python = guest_python()
    model = (
        Path(os.environ.get("AOTGAUDI_DEMO_DIR", ROOT / ".aotgaudi")).resolve() / "models" / "smollm2-135m"
    )
    if not (model / "config.json").exists():
        pytest.fail(f"no model in {model}: ci/demo imports it")
    kept = os.environ.get("AOTGAUDI_GUEST_WORK")
    work = Path(kept) if kept else tmp_path_factory.mktemp("guests")
    work.mkdir(parents=True, exist_ok=True)
    return RealGuest(python, model, work.resolve())


@pytest.fixture(scope="session")
def captured(real_guest: RealGuest) -> RealGuest:
    """The guest, once its capture is proved and sealed."""
    shutil.rmtree(real_guest.bundle, ignore_errors=True)
    done = real_guest.build()
    assert done.returncode == 0, done.stdout
    (real_guest.work / "build.log").write_text(done.stdout)
    return real_guest
