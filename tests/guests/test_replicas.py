"""Data parallelism, several API servers and TLS, with a fake server: captured, proved, run and watched in every process."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.certificates import Certificate, make_certificate
from tests.guests.conftest import ENVIRON, Captured, build
from tests.guests.fake import Fake
from tests.guests.running import Running, Runs, left_in, wait
from tests.ports import free_port

RANKS = ("-dp", "2")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def replicated(captured: Captured, certificate: Certificate) -> Captured:
    """A capture of two ranks behind two API servers with TLS, beside the plain one of the same model."""
    fake = replace(captured.fake, port=free_port(), flags=(*RANKS, *certificate.flags))
    found = replace(captured, bundle=captured.bundle.with_name("dp.bundle"), fake=fake)
    build(found, "--exercise", "smoke")
    return found


@pytest.fixture
def runs(replicated: Captured, tmp_path: Path) -> Runs:
    return Runs(replicated.bundle, tmp_path, ENVIRON)


@pytest.fixture
def fake(replicated: Captured) -> Fake:
    return replace(replicated.fake, port=free_port())


def complete(running: Running, rank: int, **body: object) -> int:
    """Asks a rank over TLS, as any client might that trusts whatever answers."""
    request = urllib.request.Request(
        f"https://127.0.0.1:{running.fake.port}/v1/completions",
        json.dumps({"model": "m", "prompt": "x", **body}).encode(),
        {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)},
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, context=context, timeout=60) as response:
        return int(response.status)


def test_each_rank_is_captured_warmed_up_and_watched(
    runs: Runs, captured: Captured, replicated: Captured, fake: Fake
) -> None:
    expected = json.loads((replicated.bundle / "receipt.json").read_bytes())["expected"]
    assert expected["roles"] == {"APIServer": 3, "EngineCore": 2, "Worker": 2, "DPCoordinator": 1}
    start = json.loads((replicated.bundle / "receipt.json").read_bytes())["start"]
    assert (
        start["requests"]
        == 2 * json.loads((captured.bundle / "receipt.json").read_bytes())["start"]["requests"]
    )
    assert expected["loads"] == {"aot:rank_0_0/model": 1, "aot:rank_0_1/model": 1}

    with runs.started(fake) as running:
        running.wait_ready()
        names = [one["name"].split(" ", 2)[::2] for one in running.report()["processes"]]
        asked = Counter(line for line in running.log.splitlines() if " computes aotgaudi-" in line)

        assert (running.metric("aotgaudi_guest_warm"), running.report()["verdict"]) == (1, "Warm")
        assert running.metric('aotgaudi_witness_processes{state="present"}') == 8
        assert ["Worker", "(VllmWorker-0, data-parallel rank 1)"] in names
        assert ["EngineCore", "(data-parallel rank 0)"] in names
        assert {line.partition(" computes ")[0] for line in asked} == {"fake: rank 0", "fake: rank 1"}
        assert len(asked) % 2 == 0
        assert [complete(running, rank) for rank in (0, 1)] == [200, 200]
        assert running.end() == 0, running.log
    assert not left_in(replicated.root)


FAULTS = {
    "eager#1": "aot:rank_0_1/model was not loaded, in the build it was loaded once",
    "compile-at-start#1": "(VllmWorker-0, data-parallel rank 1): a compiler was run",
    "skip-plugin#1": "an agent in 1 of 2 Worker processes",
    "skip-api-plugins#1": "an agent in 1 of 3 APIServer processes",
    "no-coordinator": "an agent in 1 of 1 DPCoordinator processes",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_or_one_server_that_is_not_warm_is_named(runs: Runs, fake: Fake, fault: str) -> None:
    status, sentence = runs.refusal(fake.but(fault))

    assert (status, FAULTS[fault] in sentence) == (3, True), sentence


def test_a_rank_that_compiles_after_ready_is_named(runs: Runs, fake: Fake, tmp_path: Path) -> None:
    switch = tmp_path / "now"

    with runs.started(fake.but(f"compile-live@{switch}#1")) as running:
        running.wait_ready()
        switch.touch()
        assert complete(running, 0) == 200
        assert running.metric("aotgaudi_guest_warm") == 1
        assert complete(running, 1) == 200
        wait(lambda: running.metric("aotgaudi_guest_warm") == 0)

        wait(lambda: running.report()["reasons"], "the report, which is of the last turn")

        assert "live: process: data-parallel rank 1: a compiler was run" in running.log
        assert "after ready: data-parallel rank 1: " in " ".join(running.report()["reasons"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("-dp", "3"), "world.api_servers is 3, the capture was built for 2"),
        (
            (*RANKS, "--api-server-count", "1"),
            "world.api_servers is 1, the capture was built for 2",
        ),
    ],
)
def test_another_number_of_processes_is_another_launch(
    runs: Runs, fake: Fake, flags: tuple[str, ...], text: str
) -> None:
    status, sentence = runs.refusal(replace(fake, flags=flags))

    assert (status, text in sentence) == (3, True), sentence


def test_a_server_is_warm_with_tls_and_without_from_one_capture(
    captured: Captured, certificate: Certificate, tmp_path: Path
) -> None:
    plain = Runs(captured.bundle, tmp_path, ENVIRON)

    with plain.started(replace(captured.fake, port=free_port(), flags=certificate.flags)) as running:
        running.wait_ready()
        assert complete(running, 0) == 200


def test_another_servers_certificate_is_refused(
    captured: Captured, certificate: Certificate, tmp_path: Path
) -> None:
    other = make_certificate(tmp_path, "other")
    fake = replace(captured.fake, port=free_port(), flags=certificate.flags)
    answers_otherwise = fake.but(f"other-certificate@{other.certfile}")

    status, sentence = Runs(captured.bundle, tmp_path, ENVIRON).refusal(answers_otherwise)

    assert (status, "another server answers at 127.0.0.1:" in sentence) == (3, True), sentence
    assert str(certificate.certfile) in sentence


def test_a_certificate_that_cannot_be_read_is_refused_before_anything_starts(
    captured: Captured, certificate: Certificate, tmp_path: Path
) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (certificate.keyfile, "it holds no certificate")):
        fake = replace(captured.fake, port=free_port(), flags=("--ssl-certfile", str(path)))

        status, sentence = Runs(captured.bundle, tmp_path, ENVIRON).refusal(fake)

        assert (status, f"--ssl-certfile: {path} cannot be read: {why}" in sentence) == (2, True), sentence
