"""Alerts and Grafana's board: every metric and label that they name is exported, and the board is one that Grafana reads.

What is checked of the board's structure is what Grafana's import relies on: ids, a grid of 24 columns without overlap, data
sources that are variables, targets with ids. Prometheus' own tools check the rules in tests/services.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from aotgaudi.phases import Phase
from aotgaudi.server.app import create_app
from aotgaudi.server.service import Service
from aotgaudi.wrap.http import METRICS
from tests.boards import ALERTS, BOARD, board, expressions, panels, rules, selected, unexplained
from tests.unit.server.conftest import backend, engine, make_service
from tests.unit.server.test_entry_metrics import SNAPSHOT

__all__ = ["backend", "engine", "make_service"]

ALERTED = {
    *("AotgaudiLiveCompile", "AotgaudiRefusing", "AotgaudiNotReady", "AotgaudiPreempting"),
    "AotgaudiBlocksExhausted",
}


@pytest.fixture
def exported(make_service: Callable[..., Service], engine) -> dict[str, set[str]]:
    """Every sample's name with its labels, of a server that has worked, and of a supervisor."""
    stats = replace(engine.stats(), counters=SNAPSHOT)
    engine.stats = lambda: stats
    service = make_service()
    service.metrics.tell_start(1.0, [Phase("verify", 0.1, 0.2)])
    client = TestClient(create_app(service))
    client.post("/v1/completions", json={"prompt": "hi"})
    found: dict[str, set[str]] = {name: set(family.labels) for name, family in METRICS.items()}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, set()) | sample.labels.keys()
    return found


def test_every_metric_and_label_that_is_named_is_exported(exported: dict[str, set[str]]) -> None:
    wrong = {where: found for where, text in expressions() if (found := unexplained(text, exported))}

    assert wrong == {}


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(aotgaudi_nothing_total[5m])", ["aotgaudi_nothing_total"]),
        ('aotgaudi_guard{layers="hook"}', ["aotgaudi_guard{layers}"]),
        ("sum by (bucket) (rate(aotgaudi_step_tokens_total[5m]))", ["aotgaudi_step_tokens_total{bucket}"]),
        ('sum by (job, instance) (aotgaudi_guard{layer!="hook", instance=~"a=b"})', []),
        ("aotgaudi_ready == 0 and on (job, instance) aotgaudi_other > 1", ["aotgaudi_other"]),
    ],
)
def test_what_is_not_exported_is_seen(
    exported: dict[str, set[str]], expression: str, wrong: list[str]
) -> None:
    assert unexplained(expression, exported) == wrong


def test_every_expression_names_a_metric() -> None:
    assert [where for where, text in expressions() if not list(selected(text))] == []


def test_what_must_be_alerted_is() -> None:
    names = [rule["alert"] for rule in rules()]

    assert set(names) >= ALERTED
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_ids_are_numbers_of_their_own() -> None:
    ids = [panel["id"] for panel in board()["panels"]]

    assert len(set(ids)) == len(ids)
    assert all(isinstance(number, int) and number > 0 for number in ids)


def test_panels_lie_in_24_columns_and_not_over_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        own = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        )
        assert not own & cells, panel["title"]
        cells |= own


def test_panels_ask_a_data_source_that_the_user_chooses() -> None:
    variables = {one["name"]: one for one in board()["templating"]["list"]}

    assert variables["DS_PROMETHEUS"]["type"] == "datasource"
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def test_every_panel_has_a_title_a_description_and_a_unit() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert board()["schemaVersion"] >= 36, "of Grafana 9 and later"
    assert board().keys() >= {"title", "uid", "panels", "templating", "time", "annotations"}


def test_nothing_of_this_place_is_in_them() -> None:
    for path in (ALERTS, BOARD):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"localhost|127\.0\.0\.1|https?://", text)
