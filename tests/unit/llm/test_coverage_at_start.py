"""A manifest with holes: refused under ``--require-warm``, served with a warning without it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from aotgaudi.errors import CoverageError
from aotgaudi.llm.assemble import check_coverage
from aotgaudi.manifest.manifest import Manifest
from aotgaudi.spec.parse import spec_from_json

WHAT = (
    "no entry for 1 of 17 prompt cells; the smallest: a prompt chunk of 1 token after 113 tokens (8 blocks)"
)


def manifest_of(coverage: str) -> Manifest:
    spec: dict[str, Any] = {
        "schema": "aotgaudi.spec/1",
        "model": {
            "name": "tiny",
            "dtype": "float32",
            "config": {"model_type": "llama", "max_position_embeddings": 512},
        },
        "limits": {
            "max_num_seqs": 2,
            "max_num_batched_tokens": 32,
            "max_model_len": 128,
            "block_size": 16,
            "num_blocks": 24,
        },
        "bucketing": {"coverage": coverage},
    }
    return Manifest.of(spec_from_json(spec))


def test_a_manifest_with_holes_is_refused_under_require_warm() -> None:
    with pytest.raises(CoverageError) as caught:
        check_coverage(manifest_of("upstream"), require_warm=True)

    assert caught.value.exit_code == 7
    assert str(caught.value).startswith(f"manifest: {WHAT}")
    assert "aotgaudi coverage MANIFEST" in str(caught.value)


def test_without_require_warm_it_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_coverage(manifest_of("upstream"), require_warm=False)

    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith(WHAT)


def test_a_closed_manifest_passes_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    check_coverage(manifest_of("closed"), require_warm=True)

    assert caplog.messages == []
