"""The units of five model families, their bindings and the exchange of blocks, piece for piece, as they were recorded.

A unit's key is a digest of its text. If a text changes, every builder compiles that unit again, and every store keeps it
twice. Texts follow from torch and transformers, too: those recorded are of `TOOLCHAIN`. Record them anew, on purpose, with
``python -m tests.golden.test_unit_texts``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aotgaudi.entries import DecodeEntry, DefragEntry, PromptEntry
from aotgaudi.graphs.trace import trace
from tests.integration.models import reference, spec_of

RECORDED = Path(__file__).parent / "data" / "unit-texts.json"
ARCHITECTURES = ("gemma3_text", "gpt_oss", "llama", "mixtral")
ENTRIES = (PromptEntry(1, 32, 0), PromptEntry(2, 16, 4), DecodeEntry(4, 1, 16), DefragEntry(8))
TOOLCHAIN = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


MODELS = (*ARCHITECTURES, "deepseek_v4")
V4_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}


def pieces_of(architecture: str) -> dict[str, list[dict[str, Any]]]:
    """The pieces of each entry in order: the sha256 of the text, the bindings and the outputs."""
    layers = V4_LAYERS if architecture == "deepseek_v4" else {}
    spec = spec_of(reference(architecture, **layers))
    return {
        entry.id: [
            {
                "text": hashlib.sha256(piece.text.encode()).hexdigest(),
                "inputs": list(piece.inputs),
                "outputs": list(piece.outputs),
            }
            for piece in trace(entry, spec.model, spec.limits).pieces
        ]
        for entry in (ENTRIES[1:] if layers else ENTRIES)
    }


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def test_the_record_is_of_the_pinned_toolchain(recorded: dict[str, Any]) -> None:
    assert recorded["toolchain"] == TOOLCHAIN


@pytest.mark.parametrize("name", MODELS)
def test_units_and_bindings_are_those_recorded(name: str, recorded: dict[str, Any]) -> None:
    assert pieces_of(name) == recorded["pieces"][name]


if __name__ == "__main__":
    found = {"toolchain": TOOLCHAIN, "pieces": {name: pieces_of(name) for name in MODELS}}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
