"""Prometheus itself: it reads the alerts, scrapes a real server, and answers every expression of alerts and board."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.boards import ALERTS, expressions, selected
from tests.e2e.conftest import workplace
from tests.e2e.harness import Server, Workplace
from tests.ports import free_port
from tests.services.conftest import command, need

__all__ = ["workplace"]

_SECONDS = 60.0
_CONFIG = """\
# A scrape may take as long as the interval. One that takes longer is a gap, in which nothing is answered and alerts begin.
global: {{scrape_interval: 5s, scrape_timeout: 5s, evaluation_interval: 1s}}
rule_files: [alerts.yml]
scrape_configs:
  - job_name: aotgaudi
    static_configs: [{{targets: ["{target}"]}}]
"""


def test_the_rules_are_rules() -> None:
    assert "SUCCESS" in command("promtool", "check", "rules", ALERTS)


def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    need("promtool")
    shutil.copy(ALERTS, tmp_path / "alerts.yml")
    shutil.copy(Path(__file__).parent / "data" / "alerts.test.yml", tmp_path)

    assert "SUCCESS" in command("promtool", "test", "rules", tmp_path / "alerts.test.yml")


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus on the loopback address."""

    port: int

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def value(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])

    def is_up(self) -> bool:
        try:
            targets = self.ask("targets")["activeTargets"]
        except OSError:
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)


@contextmanager
def scraping(folder: Path, server: Server) -> Iterator[Prometheus]:
    binary, port = need("prometheus"), free_port()
    shutil.copy(ALERTS, folder / "alerts.yml")
    (folder / "prometheus.yml").write_text(_CONFIG.format(target=server.base_url.removeprefix("http://")))
    command("promtool", "check", "config", folder / "prometheus.yml")
    words = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([binary, *words], stdout=log, stderr=log)
    try:
        prometheus = Prometheus(port)
        until(prometheus.is_up, folder / "prometheus.log")
        yield prometheus
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def until(check: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not check():
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def scraped(
    workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Prometheus]]:
    """A server that has answered requests, and a Prometheus that has scraped it since, several times."""
    need("prometheus")
    with workplace.serve() as server:
        server.complete("seven wizards", max_tokens=8)
        server.complete("seven wizards", max_tokens=8)
        with scraping(tmp_path_factory.mktemp("prometheus"), server) as prometheus:
            server.complete("a jar of potion", max_tokens=8)
            tokens = server.metric("aotgaudi_generation_tokens_total")
            name = "aotgaudi_generation_tokens_total"
            until(
                lambda: [float(row["value"][1]) for row in prometheus.value(name)] == [tokens],
                tmp_path_factory.getbasetemp() / "prometheus0" / "prometheus.log",
            )
            yield server, prometheus


def filled(expression: str) -> str:
    return expression.replace("$instance", ".*").replace("$__rate_interval", "1m")


def test_every_expression_is_answered(scraped: tuple[Server, Prometheus]) -> None:
    for where, expression in expressions():
        assert isinstance(scraped[1].value(filled(expression)), list), where


def test_every_metric_that_the_board_names_has_been_scraped(scraped: tuple[Server, Prometheus]) -> None:
    _, prometheus = scraped
    names = {name for _, text in expressions() for name, _ in selected(text) if "_guest_" not in name}

    missing = {name for name in names if not prometheus.value(f"count({name})")}

    assert missing == set()


def test_vllms_names_keep_their_colon(scraped: tuple[Server, Prometheus]) -> None:
    server, prometheus = scraped

    (row,) = prometheus.value("vllm:time_to_first_token_seconds_count")
    assert row["metric"]["model_name"] == server.model_name
    assert float(row["value"][1]) == 3


def test_a_server_that_is_well_fires_nothing(scraped: tuple[Server, Prometheus]) -> None:
    rules = [rule for group in scraped[1].ask("rules")["groups"] for rule in group["rules"]]

    assert len(rules) > 10
    assert [(rule["name"], rule["state"]) for rule in rules if rule["state"] != "inactive"] == []
    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
