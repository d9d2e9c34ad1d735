"""What ci/templates has for Prometheus and Grafana, and which metrics and labels its expressions name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.environment import ROOT

ALERTS = ROOT / "ci" / "templates" / "alerts.yml"
BOARD = ROOT / "ci" / "templates" / "grafana-dashboard.json"

_SELECTOR = re.compile(r"\b((?:aotgaudi_|vllm:)\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
FROM_PROMETHEUS = {"instance", "job", "le"}
"""Labels that a scrape adds, and that of histograms' buckets."""


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """The panels that show something: rows are headings."""
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each expression stands, and the expression."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]


def selected(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that an expression names, with the labels that it matches or groups by."""
    grouped = {
        label.strip()
        for found in _GROUPING.findall(expression)
        for label in found.split(",")
        if label.strip()
    }
    for name, matchers in _SELECTOR.findall(expression):
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', matchers)))
        yield name, matched | grouped


def unexplained(expression: str, exported: Mapping[str, set[str]]) -> list[str]:
    """What an expression names that is not exported: metrics, or labels of theirs."""
    wrong = []
    for name, labels in selected(expression):
        if name not in exported:
            wrong.append(name)
        else:
            wrong += [f"{name}{{{label}}}" for label in labels - exported[name] - FROM_PROMETHEUS]
    return wrong
