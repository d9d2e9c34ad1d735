"""Metrics without a client library: they read as Prometheus reads them, and as docs/metrics.md lists them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aotgaudi.wrap.http import FAMILIES, Metrics
from aotgaudi.wrap.verdict import Finding


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.expose().decode())
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_what_is_exposed_is_what_a_scraper_reads() -> None:
    metrics = Metrics()
    metrics.set("aotgaudi_guest_warm", True)
    metrics.set("aotgaudi_capture_info", 1, "id", 'C:\\"odd"\n', "7")
    metrics.count(
        [Finding("triton", "live", "x"), Finding("triton", "live", "y"), Finding("file", "cold", "z")]
    )
    metrics.count_files(3)

    found = samples(metrics)

    assert found["aotgaudi_guest_warm", ()] == 1
    assert found["aotgaudi_capture_info", ("id", 'C:\\"odd"\n', "7")] == 1
    assert found["aotgaudi_compilations_total", ("live", "triton")] == 2
    assert found["aotgaudi_compilations_total", ("load", "process")] == 0
    assert found["aotgaudi_cache_files_added_total", ()] == 3
    assert metrics.compilations() == {"live.triton": 2}


def test_a_metric_or_labels_that_are_not_listed_are_refused() -> None:
    with pytest.raises(KeyError):
        Metrics().set("aotgaudi_unheard_of", 1)
    with pytest.raises(ValueError, match="has the labels"):
        Metrics().set("aotgaudi_capture_info", 1, "id")


def test_every_metric_is_documented(pytestconfig: pytest.Config) -> None:
    documented = (pytestconfig.rootpath / "docs" / "metrics.md").read_text()

    assert [name for name in FAMILIES if f"`{name}`" not in documented] == []
